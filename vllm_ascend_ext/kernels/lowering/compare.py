"""A table of two reports side by side, from their JSON: what each makes of the same operation. It judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import A2
from .jobs import UsageError


@dataclass(frozen=True)
class Pair:
    """One operation, and the cases that carry it out in either report: ``kernel`` or ``kernel [case]``."""

    operation: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


def read_pairs(lines: Iterable[str]) -> list[Pair]:
    """Pairs from lines ``operation | case + case | case + case``; ``#`` begins a comment. Else UsageError."""
    pairs = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = [part.strip() for part in text.split("|")]
        if len(parts) != 3:
            raise UsageError(f"line {number} of the pairs: {text!r} is not 'operation | ours | theirs'")
        pairs.append(Pair(parts[0], _cases(parts[1]), _cases(parts[2])))
    return pairs


def _cases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(" + "))


def _buffer(results: Sequence[Mapping[str, Any]]) -> float | None:
    return max(int(result["unified_buffer_bits"]["required"] or 0) for result in results)


def _errors(results: Sequence[Mapping[str, Any]]) -> float | None:
    return len([finding for result in results for finding in result["findings"] if finding["severity"] == "error"])


#: Columns of the table: heading -> how its figure comes out of the results of one side.
_COLUMNS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], float | None]] = {
    "UB bits": _buffer,
    "scalar trips": lambda results: _launch(results, "element_trips"),
    "transfers": lambda results: _launch(results, "transfers"),
    "DMA bytes": lambda results: _add(_launch(results, "bytes_in"), _launch(results, "bytes_out")),
    "errors": _errors,
}


def table(pairs: Sequence[Pair], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The table in Markdown, of A2 and the multi-buffering that ships; figures as "ours / theirs"."""
    lines = [f"| operation | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]
    for pair in pairs:
        sides = [
            [_find(report, case) for case in cases] for report, cases in ((ours, pair.ours), (theirs, pair.theirs))
        ]
        cells = [" / ".join(_shown(figure(side)) for side in sides) for figure in _COLUMNS.values()]
        lines.append(f"| {pair.operation} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _find(report: Mapping[str, Any], title: str) -> Mapping[str, Any]:
    """The result of a case on A2, with multi-buffering if it was compiled both ways."""
    kernel, _, case = title.partition(" [")
    found = [
        result
        for result in report["results"]
        if (result["kernel"], result["case"], result["target"]) == (kernel, case.removesuffix("]"), A2)
    ]
    if not found:
        raise UsageError(f"the report has no case {title!r} on {A2}")
    return max(found, key=lambda result: bool(result["multibuffer"]))


def _launch(results: Sequence[Mapping[str, Any]], count: str) -> float | None:
    total: float | None = 0.0
    for result in results:
        total = _add(total, result["counts"].get(count, {}).get("launch"))
    return total


def _add(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _shown(figure: float | None) -> str:
    return "?" if figure is None else f"{figure:,.0f}"
