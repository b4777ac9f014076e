"""What a sweep of another project adds to a check: which kernels it launches, and a page for its authors."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import bound
from .check import Report
from .findings import KINDS, Finding, Severity
from .report import numbered
from .toolchain import Toolchain


@dataclass(frozen=True)
class Launched:
    """A definition of a kernel that a project launches: a ``@triton.jit`` function that no other one calls."""

    file: Path
    kernel: str
    #: Line of its ``@triton.jit``: a file may define a kernel several times, for versions of what it builds on.
    line: int = 0


def launched(root: Path) -> list[Launched]:
    """All kernels launched below ``root``, each definition once; files that aren't Python are passed over."""
    kernels: list[Launched] = []
    helpers: set[tuple[Path | None, str]] = set()
    for path in sorted(root.rglob("*.py")):
        functions = _kernels_in(path.read_text(errors="replace"))
        file = path.relative_to(root)
        here = {function.name for function, _ in functions}
        for function, line in functions:
            kernels.append(Launched(file, function.name, line))
            helpers |= {(file if name in here else None, name) for name in _called(function)}
    return [one for one in kernels if not {(one.file, one.kernel), (None, one.kernel)} & helpers]


def _kernels_in(text: str) -> list[tuple[ast.FunctionDef, int]]:
    """The kernels that a file defines, and the line of each one's ``jit``; none if it isn't Python."""
    if "jit" not in text:
        return []
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    lines = ((node, next((d.lineno for d in node.decorator_list if _is_triton_jit(d)), 0)) for node in nodes)
    return [(node, line) for node, line in lines if line]


def _is_triton_jit(decorator: ast.expr) -> bool:
    """Whether a decorator is ``triton.jit``; other libraries have a ``jit`` too."""
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name) == "triton.jit"


def _called(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {name.id for name in calls if isinstance(name, ast.Name)}


@dataclass(frozen=True)
class Subject:
    """What was swept: the project's name, where its files lie, and which revision they are."""

    name: str
    root: Path
    revision: str


def page(subject: Subject, reports: Sequence[Report], tools: Toolchain, command: str) -> str:
    """A page in Markdown that the project's authors can act on: each kind of finding once, with kernels and lines."""
    found = launched(subject.root)
    checked = {_key(one) for one in reports}
    left_out = [one for one in found if (subject.root.resolve() / one.file, one.kernel, one.line) not in checked]
    versions = " and ".join(f"{name} {version}" for name, version in tools.versions)
    lines = [
        f"# What the Ascend compiler makes of {subject.name}'s Triton kernels",
        "",
        f"Revision {subject.revision}; {versions}, without an NPU:",
        "facts about the compiler's output, and no timings. Made by",
        "",
        f"    {command}",
        "",
        f"{numbered(len(found), 'kernel')} to launch; {len(checked)} compiled for A2, in "
        f"{numbered(len(reports), 'setting')}"
        + (f"; left out: {', '.join(f'`{one.kernel}`' for one in left_out)}." if left_out else "."),
        "",
        *_extent(reports),
        "",
        "Argument types and constants are those of the launches, or of a usual model where a launch leaves them open;",
        "other settings may fare differently. A kernel that is defined twice counts twice.",
    ]
    groups = _groups(reports)
    settings: dict[_Key, set[str]] = defaultdict(set)
    for one in reports:
        settings[_key(one)].add(one.job.case.name)
    for code in sorted(groups, key=lambda code: (list(Severity).index(KINDS[code].severity), list(KINDS).index(code))):
        lines += ["", f"## {code} ({KINDS[code].severity.value})", "", KINDS[code].meaning, ""]
        lines += _section(groups[code], subject.root, settings)
    lines += _allowed(reports)
    lines += ["", f"Lower bounds in the tool's other reports come from {bound.SOURCE}; this page uses none."]
    return "\n".join(lines) + "\n"


#: A kernel: its file, its name, and where it is defined.
_Key = tuple[Path, str, int]


def _key(report: Report) -> _Key:
    return report.job.path, report.job.case.kernel, report.line


#: What the compiler walks one element at a time; one of the kernel's own loops has the loop as its operation.
_WALKED = ("scalar-loop", "transfer-per-element", "block-per-element", "fixed-scalar-loop", "scalar-walk")
_LOOPS = ("scf.for", "scf.while")
_REFUSED = ("load", "not-triton", "frontend", "adapter", "compiler", "crash", "time-out")
#: What a reader looks for first: in words -> whether a finding counts.
_FIRST: Mapping[str, Callable[[Finding], bool]] = {
    "overflow in a setting": lambda one: one.code == "overflow",
    "fit only after the compiler silently tried again": lambda one: one.code == "retried",
    "crash the compiler, or are refused": lambda one: one.code in _REFUSED,
    "operations walked element by element, growing with the tile": lambda one: (
        one.code in _WALKED[:3] and one.operation not in _LOOPS
    ),
    "loops of the kernel's own over elements": lambda one: one.code in _WALKED and one.operation in _LOOPS,
    "stores not clamped at their bound": lambda one: one.code == "unclamped-store",
    "loads not clamped at their bound": lambda one: one.code == "unclamped-load",
    "gathers of masked-off lanes": lambda one: one.code == "unguarded-gather",
}


def _extent(reports: Sequence[Report]) -> list[str]:
    """A table: how many kernels, at how many places in their source, have what a reader looks for first."""
    everything = {_key(one) for one in reports}
    strict = everything - {_key(one) for one in reports if not _strict(one)}
    clean = everything - {_key(one) for one in reports if _counting(one)}
    lines = [
        "| | kernels | places |",
        "|---|---:|---:|",
        f"| compile strictly in every setting | {len(strict)} | |",
        f"| without any finding | {len(clean)} | |",
    ]
    for words, counts in _FIRST.items():
        some = [(report, one) for report in reports for one in _counting(report) if counts(one)]
        places = {(one.place, one.called_from) for _, one in some}
        lines.append(f"| {words} | {len({_key(report) for report, _ in some})} | {len(places)} |")
    lost = {_key(one) for one in reports if one.unmatched}
    return [*lines, f"| masked accesses that weren't found again once merged with others | {len(lost)} | |"]


def _counting(report: Report) -> list[Finding]:
    """The findings that no case allows."""
    return [finding for finding in report.findings if not finding.allowed]


def _strict(report: Report) -> bool:
    return report.stage == "hivm" and not any(finding.code == "retried" for finding in _counting(report))


def _allowed(reports: Iterable[Report]) -> list[str]:
    """What doesn't count, and why; empty if there is nothing."""
    allowed = {
        f"* `{report.job.case.kernel}`, {finding.code}: {finding.allowed}.": None
        for report in reports
        for finding in report.findings
        if finding.allowed
    }
    return ["", "## Not counted", "", *allowed] if allowed else []


_Where = tuple[Report, Finding]


def _groups(reports: Iterable[Report]) -> dict[str, list[_Where]]:
    groups: dict[str, list[_Where]] = defaultdict(list)
    for report in reports:
        for finding in _counting(report):
            groups[finding.code].append((report, finding))
    return groups


def _section(group: Sequence[_Where], root: Path, settings: Mapping[_Key, set[str]]) -> list[str]:
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


def _by_kernel(some: Sequence[_Where]) -> dict[_Key, list[_Where]]:
    kernels: dict[_Key, list[_Where]] = defaultdict(list)
    for report, finding in some:
        kernels[_key(report)].append((report, finding))
    return kernels


def _row(kernel: _Key, places: Sequence[_Where], root: Path, all_settings: set[str]) -> str:
    files: dict[str, dict[int, None]] = defaultdict(dict)
    for _, finding in places:
        if finding.place is not None:
            files[_relative(finding.place.file, root)][finding.place.line] = None
    where = "; ".join(f"{file}:{', '.join(map(str, sorted(numbers)))}" for file, numbers in files.items())
    having = {report.job.case.name: None for report, _ in places}
    # A lone setting that has a name has it for a reason that a reader should know.
    every = set(having) == all_settings and (len(all_settings) > 1 or "" in all_settings)
    names = "" if every else f" ({_named(list(having), len(all_settings))})"
    what = "; ".join(dict.fromkeys(_what(finding) for _, finding in places))
    return f"| `{kernel[1]}`{names} | {where or _relative(str(kernel[0]), root)} | {what} |".replace("\n", " ")


def _named(settings: Sequence[str], of: int) -> str:
    """Names of the settings that have a finding; of many, how many, and one of them."""
    shown = [name or "plain" for name in settings]
    return "; ".join(shown) if len(shown) <= _FEW else f"{len(shown)} of {of} settings, such as {shown[0]}"


#: Settings that are named one by one.
_FEW = 3


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
