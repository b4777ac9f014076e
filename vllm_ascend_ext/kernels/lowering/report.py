"""Reports for people and for programs: a table, findings with their line of source, details, and JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bound
from .check import COUNTED, Amount, Report
from .excerpt import underlined
from .findings import KINDS, Finding, Severity
from .ir import Place
from .largest import Search
from .loops import Pace
from .toolchain import Toolchain

#: Of the JSON; raised when a field changes its meaning.
FORMAT = 1


@dataclass(frozen=True)
class Palette:
    """Escape codes for a terminal, or nothing."""

    on: bool

    def __call__(self, text: str, style: str) -> str:
        """``text`` in a style: a severity's name, ``bold`` or ``dim``."""
        code = {"error": "1;31", "warning": "1;33", "note": "1;36", "ok": "32", "bold": "1", "dim": "2"}[style]
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text


def numbered(number: int, name: str) -> str:
    """A number of things: ``1 error``, ``2 errors``."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def shown_path(file: str) -> str:
    """A path as short as it gets: relative to the current folder if it lies inside."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def shown_place(place: Place) -> str:
    """``file:line:column``, which editors and terminals understand."""
    return f"{shown_path(place.file)}:{place.line}:{place.column + 1}"


# ---------------------------------------------------------------- findings


def finding_texts(reports: Sequence[Report], palette: Palette, with_notes: bool) -> list[str]:
    """Each distinct finding once, with its line of source and the settings that have it; the gravest first."""
    groups: dict[tuple[str, Place | None, str], list[tuple[Report, Finding]]] = {}
    for report in reports:
        for finding in report.findings:
            key = (finding.code, finding.place, "" if finding.place else finding.message + report.job.case.title)
            groups.setdefault(key, []).append((report, finding))
    order = list(Severity)
    ranked = sorted(groups.values(), key=lambda group: order.index(group[0][1].severity))
    return [_finding(group, palette) for group in ranked if with_notes or group[0][1].severity is not Severity.NOTE]


def _finding(group: Sequence[tuple[Report, Finding]], palette: Palette) -> str:
    finding = group[0][1]
    severity = finding.severity.value
    lines = [f"{palette(f'{severity}[{finding.code}]', severity)}: {palette(finding.message, 'bold')}"]
    margin = " " * (len(str(finding.place.line)) if finding.place else 2)
    if finding.place is not None:
        lines.append(f"{margin}{palette('-->', 'dim')} {shown_place(finding.place)}")
        excerpt = underlined(finding.place, finding.operation)
        if excerpt is not None:
            lines.append(f"{margin} {palette('|', 'dim')}")
            lines.append(f"{finding.place.line} {palette('|', 'dim')} {excerpt[0]}")
            lines.append(f"{margin} {palette('|', 'dim')} {palette(excerpt[1], severity)}")
        lines += [f"{margin} = called from {shown_place(place)}" for place in finding.called_from]
    if finding.detail:
        lines += _wrapped(f"{margin} = ", finding.detail)
    lines += _wrapped(f"{margin} = ", f"in {_where(group)}")
    if finding.allowed:
        lines += _wrapped(f"{margin} = ", f"allowed: {finding.allowed}")
    elif finding.remedy:
        lines += _wrapped(f"{margin} = ", f"instead: {finding.remedy}")
    return "\n".join(lines)


def _wrapped(margin: str, text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=margin, subsequent_indent=" " * len(margin), break_long_words=False)


def _where(group: Sequence[tuple[Report, Finding]]) -> str:
    titles = list(dict.fromkeys(report.job.case.title for report, _ in group))
    first = group[0][0].job
    if len(group) == 1:
        return f"{first.case.title} on {first.setting}"
    cases = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more cases"
    return f"{cases}, {len(group)} settings"


# ---------------------------------------------------------------- table


def table(reports: Sequence[Report], palette: Palette) -> str:
    """One line a job: result, Unified Buffer, scalar loops by pace, bytes, findings."""
    head = [
        "",
        "case",
        "chip",
        "mb",
        "Unified Buffer",
        "scalar loops: row/tile/element",
        "bytes in",
        "bytes out",
        "findings",
    ]
    rows = [head, *(_row(report) for report in reports)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if number == 0:
            lines.append(palette("  ".join(cells).rstrip(), "dim"))
        else:
            cells[0] = palette(cells[0], "ok" if reports[number - 1].ok else "error")
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(report: Report) -> list[str]:
    job = report.job
    paces = [sum(loop.pace is pace for loop in report.loops) for pace in (Pace.ROW, Pace.TILE, Pace.ELEMENT)]
    reached = report.stage == "hivm"
    return [
        "ok" if report.ok else "FAIL",
        job.case.title,
        job.setting.target.removeprefix("Ascend"),
        "on" if job.setting.multibuffer else "off",
        _buffer(report),
        "/".join(map(str, paces)) if reached else "-",
        _amount(report, "bytes_in") if reached else "-",
        _amount(report, "bytes_out") if reached else "-",
        _tally(report),
    ]


def _buffer(report: Report) -> str:
    if report.required_bits is None:
        return f"stopped after {report.stage}" if report.stage != "none" else "-"
    if report.available_bits is None:
        return f"{report.required_bits:,} bits"
    return f"{report.required_bits:,} ({100 * report.required_bits / report.available_bits:.0f} %)"


def _amount(report: Report, name: str) -> str:
    amount = report.amounts.get(name)
    if amount is None:
        return "-"
    return f"{amount.value:,.0f}" if amount.value is not None else "depends"


def _tally(report: Report) -> str:
    counts = [(report.count(severity), severity.value) for severity in Severity]
    return ", ".join(numbered(number, name) for number, name in counts if number) or "none"


# ---------------------------------------------------------------- details


def details(report: Report, palette: Palette) -> str:
    """All that is known of one job."""
    lines = [palette(f"{report.job.case.title} on {report.job.setting}", "bold") + f": reached {_reached(report)}"]
    if report.required_bits is not None and report.available_bits is not None:
        share = 100 * report.required_bits / report.available_bits
        lines.append(
            f"  Unified Buffer   {report.required_bits:,} of {report.available_bits:,} bits ({share:.1f} %)"
            + (", after a silent retry" if report.retried else "")
        )
    for number, (name, unit) in enumerate(COUNTED.items()):
        amount = report.amounts.get(name)
        if amount is not None:
            lines.append(f"  {'per program' if number == 0 else '':<15}  {unit}: {_shown(amount)}")
    if report.unsized:
        lines.append(f"  {'':<15}  (without {report.unsized} calls whose size the IR doesn't show)")
    if report.unmatched:
        lines.append(f"  {'':<15}  ({report.unmatched} masked accesses weren't found again in the lowered module)")
    for number, loop in enumerate(report.loops):
        around = "".join(f", inside a loop of [{trips}]" for trips in loop.around)
        origin = "the kernel's own loop" if loop.in_source else "made by the compiler"
        transfers = f", transfers {', '.join(loop.transfers)}" if loop.transfers else ""
        place = shown_place(loop.place) if loop.place else "?"
        head = "scalar loops" if number == 0 else ""
        lines.append(f"  {head:<15}  {loop.pace.value}, [{loop.trips}] trips at {place} ({origin}){around}{transfers}")
    if report.stage == "hivm":
        lines.append(f"  lower bound      {_bound(report)}")
    return "\n".join(lines)


def _reached(report: Report) -> str:
    return "no stage" if report.stage == "none" else report.stage


def _shown(amount: Amount) -> str:
    """A number if it is known, and the formula if that says more and isn't too long to read."""
    if amount.value is None:
        return amount.formula
    value = f"{amount.value:,.0f}"
    return value if value == amount.formula or len(amount.formula) > 100 else f"{value} = {amount.formula}"


def _bound(report: Report) -> str:
    if report.bound is None:
        if report.bound_needs:
            return f"needs values for {', '.join(report.bound_needs)} (--value NAME=NUMBER, or values= in the case)"
        return f"none: the published figures are for another chip than {report.job.setting.target}"
    grid = report.job.case.values["grid"]
    return (
        f"no launch of {grid:,} programs takes less than {report.bound.us:,.2f} us, limited by {report.bound.limit}; "
        f"a bound from published figures ({bound.SOURCE}), not a time"
    )


def largest_text(search: Search) -> str:
    """What the search for the largest value of a constant found."""
    head = f"{search.job.case.title} on {search.job.setting}: "
    if search.largest is None or search.best is None:
        last = search.limit or search.refused
        reason = last.findings[0].message if last and last.findings else "it never compiled"
        return f"{head}no {search.constant} fits; {reason}"
    text = f"{head}largest {search.constant} is {search.largest:,}, taking {_buffer(search.best)}"
    if search.limit is None:
        return f"{text}; it is the largest that was tried"
    reason = search.limit.findings[0].message if search.limit.findings else "it doesn't fit"
    return f"{text}; at {search.steps.value(search.too_large):,}: {reason}"


# ---------------------------------------------------------------- JSON


def as_json(reports: Iterable[Report], tools: Toolchain) -> dict[str, Any]:
    """Everything, as plain data. Counts are per program; sizes of memory are in bits, transfers in bytes."""
    return {
        "format": FORMAT,
        "versions": dict(tools.versions),
        "warnings": tools.warnings,
        "bound_source": bound.SOURCE,
        "results": [_result(report) for report in reports],
    }


def _result(report: Report) -> dict[str, Any]:
    job = report.job
    return {
        "file": shown_path(str(job.path)),
        "kernel": job.case.kernel,
        "case": job.case.name,
        "line": report.line,
        "signature": dict(job.case.signature),
        "constants": dict(job.case.constants),
        "options": dict(job.case.options),
        "target": job.setting.target,
        "multibuffer": job.setting.multibuffer,
        "ok": report.ok,
        "stage": report.stage,
        "unified_buffer_bits": {"required": report.required_bits, "available": report.available_bits},
        "retried": report.retried,
        "counts": {
            name: {"formula": amount.formula, "first_program": amount.value, "launch": amount.launch}
            for name, amount in report.amounts.items()
        },
        "unsized_calls": report.unsized,
        "unmatched_accesses": report.unmatched,
        "scalar_loops": [
            {
                "pace": loop.pace.value,
                "trips": loop.trips,
                "known_trips": loop.known_trips,
                "around": list(loop.around),
                "made_by": "kernel" if loop.in_source else "compiler",
                "small_transfers": list(loop.transfers),
                **_place(loop.place),
            }
            for loop in report.loops
        ],
        "lower_bound_us": report.bound
        and {"us": report.bound.us, "limit": report.bound.limit, **dict(report.bound.parts)},
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity.value,
                "meaning": KINDS[finding.code].meaning,
                "message": finding.message,
                "detail": finding.detail,
                "remedy": finding.remedy,
                "allowed": finding.allowed,
                **_place(finding.place),
            }
            for finding in report.findings
        ],
        "seconds": round(report.seconds, 3),
    }


def _place(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"file": None, "line": None, "column": None}
    return {"file": shown_path(str(Path(place.file))), "line": place.line, "column": place.column + 1}
