"""What a sweep of another project adds to a check: which kernels it launches, and a page for its authors."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import bound
from .check import Report
from .findings import KINDS, Finding, Severity
from .toolchain import Toolchain


@dataclass(frozen=True)
class Launched:
    """A kernel that a project launches: a ``@triton.jit`` function that no other one calls."""

    file: Path
    kernel: str


def launched(root: Path) -> list[Launched]:
    """All kernels launched below ``root``, by file and name; files that aren't Python are passed over."""
    kernels: dict[Launched, None] = {}
    called: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(errors="replace")
        if ".jit" not in text:
            continue
        try:
            functions = [
                node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and _is_kernel(node)
            ]
        except SyntaxError:
            continue
        for function in functions:
            kernels[Launched(path.relative_to(root), function.name)] = None
            called |= {
                node.func.id
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
    return [kernel for kernel in kernels if kernel.kernel not in called]


def _is_kernel(function: ast.FunctionDef) -> bool:
    names = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in function.decorator_list]
    return any(isinstance(n, ast.Attribute) and n.attr == "jit" and ast.unparse(n.value) == "triton" for n in names)


@dataclass(frozen=True)
class Subject:
    """What was swept: the project's name, where its files lie, and which revision they are."""

    name: str
    root: Path
    revision: str


def page(subject: Subject, reports: Sequence[Report], tools: Toolchain, command: str) -> str:
    """A page in Markdown that the project's authors can act on: each kind of finding once, with kernels and lines."""
    found = launched(subject.root)
    checked = {(one.job.path.relative_to(subject.root.resolve()), one.job.case.kernel) for one in reports}
    left_out = [one for one in found if (one.file, one.kernel) not in checked]
    failed = {_key(one) for one in reports if not _strict(one)}
    clean = {_key(one) for one in reports} - {_key(one) for one in reports if one.findings}
    versions = " and ".join(f"{name} {version}" for name, version in tools.versions)
    lines = [
        f"# What the Ascend compiler makes of {subject.name}'s Triton kernels",
        "",
        f"Revision {subject.revision}; {versions}, without an NPU:",
        "facts about the compiler's output, and no timings. Made by",
        "",
        f"    {command}",
        "",
        f"- {len(found)} kernels are launched; {len(checked)} were compiled for A2, in {len(reports)} settings"
        + (f"; left out: {', '.join(f'`{one.kernel}`' for one in left_out)}." if left_out else "."),
        f"- {len(checked) - len(failed)} compile strictly in every setting: they fit the Unified Buffer as asked.",
        f"- {len(clean)} have no finding at all.",
        "",
        "Argument types and constants are those of the launches, or of a usual model where a launch leaves them open;",
        "other settings may fare differently.",
    ]
    groups = _groups(reports)
    settings: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for one in reports:
        settings[_key(one)].add(one.job.case.name)
    for code in sorted(groups, key=lambda code: (list(Severity).index(KINDS[code].severity), list(KINDS).index(code))):
        lines += ["", f"## {code} ({KINDS[code].severity.value})", "", KINDS[code].meaning, ""]
        lines += _section(groups[code], subject.root, settings)
    lines += ["", f"Lower bounds in the tool's other reports come from {bound.SOURCE}; this page uses none."]
    return "\n".join(lines) + "\n"


def _key(report: Report) -> tuple[Path, str]:
    return report.job.path, report.job.case.kernel


def _strict(report: Report) -> bool:
    return report.stage == "hivm" and not report.retried


_Where = tuple[Report, Finding]


def _groups(reports: Iterable[Report]) -> dict[str, list[_Where]]:
    groups: dict[str, list[_Where]] = defaultdict(list)
    for report in reports:
        for finding in report.findings:
            groups[finding.code].append((report, finding))
    return groups


def _section(group: Sequence[_Where], root: Path, settings: Mapping[tuple[Path, str], set[str]]) -> list[str]:
    """Findings of one kind, those with one remedy together: the remedy, then kernel and lines."""
    by_remedy: dict[str, list[_Where]] = defaultdict(list)
    for report, finding in group:
        by_remedy[finding.remedy].append((report, finding))
    lines: list[str] = []
    for remedy, some in by_remedy.items():
        lines += [f"Instead: {remedy}.", "", "| kernel | where | what |", "|---|---|---|"]
        lines += [_row(kernel, places, root, settings[kernel]) for kernel, places in _by_kernel(some).items()]
        lines.append("")
    return lines[:-1]


def _by_kernel(some: Sequence[_Where]) -> dict[tuple[Path, str], list[_Where]]:
    kernels: dict[tuple[Path, str], list[_Where]] = defaultdict(list)
    for report, finding in some:
        kernels[_key(report)].append((report, finding))
    return kernels


def _row(kernel: tuple[Path, str], places: Sequence[_Where], root: Path, all_settings: set[str]) -> str:
    files: dict[str, dict[int, None]] = defaultdict(dict)
    for _, finding in places:
        if finding.place is not None:
            files[_relative(finding.place.file, root)][finding.place.line] = None
    where = "; ".join(f"{file}:{', '.join(map(str, sorted(numbers)))}" for file, numbers in files.items())
    having = {report.job.case.name: None for report, _ in places}
    names = "" if set(having) == all_settings else f" ({', '.join(name or 'plain' for name in having)})"
    what = "; ".join(dict.fromkeys(_what(finding) for _, finding in places))
    return f"| `{kernel[1]}`{names} | {where or _relative(str(kernel[0]), root)} | {what} |".replace("\n", " ")


def _what(finding: Finding) -> str:
    if " one by one" not in finding.detail:
        return finding.detail or finding.message
    operation, _, trips = finding.detail.partition(" elements one by one")[0].rpartition(": ")
    # A formula of arguments alone says something to a reader, if it is short.
    known = len(trips) <= _READABLE and not any(mark in trips for mark in ("@", "value at", "while"))
    elements = f"{trips} elements" if known else "as many elements as the data says"
    return f"{operation}, {elements}" if operation else elements


#: Characters of a formula that still says something.
_READABLE = 60


def _relative(file: str, root: Path) -> str:
    path = Path(file)
    resolved = root.resolve()
    return str(path.relative_to(resolved)) if path.is_relative_to(resolved) else path.name
