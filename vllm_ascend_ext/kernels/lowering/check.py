"""One case, checked from its source file to its findings; knows nothing of other cases, and of processes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import accesses, bound, compile, counts, findings, hivm, ir, loops
from .accesses import Form
from .bound import Bound
from .cases import Case
from .compile import Lowering, Setting
from .counts import Counts
from .findings import Finding, Severity
from .hivm import Kernel
from .ir import Location, Place
from .loader import Loader, LoadError
from .loops import Loop, Pace
from .symbolic import Count, shown
from .toolchain import Toolchain
from .ttir import Source, own_place

#: Counts that a report shows: name of the field -> unit.
COUNTED = {
    "bytes_in": "bytes from global memory",
    "bytes_out": "bytes to global memory",
    "transfers": "transfers",
    "vector_elements": "vector element-operations",
    "vector_calls": "vector calls",
    "scalar_steps": "scalar operations",
    "element_trips": "trips of loops over single elements",
    "syncs": "synchronisations",
}
#: Constants tried when looking for what a scalar loop grows with, the largest first.
_PROBES = 8
#: A smaller constant is tried only if some loop has no more trips than that.
_LEAST_TILE = 16


@dataclass(frozen=True)
class Job:
    """One compilation to make: which kernel of which file, as which case, for which setting."""

    path: Path
    case: Case
    setting: Setting
    #: Further folders in which the file's imports are looked for.
    roots: tuple[Path, ...] = ()
    #: Whether to compile again with halved constants, to see what a scalar loop grows with.
    probe: bool = True

    def __str__(self) -> str:
        return f"{self.case.title} on {self.setting}"


@dataclass(frozen=True)
class Amount:
    """A count: per program as a formula, for the first program and for the whole launch as numbers, where known."""

    formula: str
    value: float | None
    launch: float | None


@dataclass(frozen=True)
class LoopRow:
    """One loop with scalar steps, for reports."""

    place: Place | None
    pace: Pace
    trips: str
    #: Trips where they are known without any value of the case; None otherwise.
    known_trips: int | None
    around: tuple[str, ...]
    in_source: bool
    transfers: tuple[str, ...]


@dataclass
class Report:
    """All that is known of one job."""

    job: Job
    #: Line of the kernel's ``@triton.jit``; 0 if it wasn't loaded.
    line: int = 0
    stage: str = "none"
    required_bits: int | None = None
    available_bits: int | None = None
    retried: bool = False
    findings: list[Finding] = field(default_factory=list)
    loops: list[LoopRow] = field(default_factory=list)
    amounts: dict[str, Amount] = field(default_factory=dict)
    bound: Bound | None = None
    #: Values that a bound would need and the case doesn't give.
    bound_needs: list[str] = field(default_factory=list)
    #: Transfers and vector calls whose size isn't known; the counts lack them.
    unsized: int = 0
    #: Masked loads and stores that weren't found again in the lowered module; nothing is known of them.
    unmatched: int = 0
    seconds: float = 0.0

    def count(self, severity: Severity) -> int:
        """How many findings have this severity."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return self.count(Severity.ERROR) == 0


def run(job: Job, tools: Toolchain, folder: Path, at_stage: Callable[[str], None] = lambda _: None) -> Report:
    """Check one job; intermediate IR goes into ``folder``. ``at_stage`` is told what begins."""
    report = Report(job)
    start = time.monotonic()
    at_stage("loading the kernel")
    try:
        kernel = _load(job)
        report.job = job = replace(job, case=compile.with_defaults(kernel, job.case))
        report.line = kernel.fn.__code__.co_firstlineno
        lowering = compile.lower(kernel, job.case, job.setting, tools, folder, at_stage)
    except _Refused as refused:
        report.findings = [refused.finding]
    else:
        at_stage("reading the IR")
        _read(report, job, lowering, lambda case: _lower_again(kernel, job, case, tools, folder))
    report.findings = findings.allow(_unique(report.findings), job.case.allow)
    report.seconds = time.monotonic() - start
    return report


class _Refused(Exception):
    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.finding = Finding(code, message, remedy)


def _load(job: Job) -> Any:
    loader = Loader(job.roots)
    try:
        kernel = loader.load(job.path, job.case.kernel, job.case.definition)
    except LoadError as error:
        raise _Refused("load", str(error), _others(loader, job.path)) from None
    if type(kernel).__name__ != "JITFunction":
        raise _Refused(
            "not-triton",
            f"{job.case.kernel} is a {type(kernel).__name__}, not a @triton.jit function",
            _others(loader, job.path),
        )
    missing = loader.missing(job.path, job.case.kernel)
    if missing:
        reasons = "; ".join(f"{name.name}: {name.reason}" for name in missing)
        raise _Refused(
            "load", f"{job.case.kernel} uses what can't be imported here: {reasons}", "give its folder by --path"
        )
    return kernel


def _others(loader: Loader, path: Path) -> str:
    """Which kernels a file has, as a remedy; nothing if it can't be read."""
    try:
        names = loader.kernels(path)
    except LoadError:
        return ""
    return f"name one of the file's kernels: {', '.join(names)}" if names else "name another file: it has no kernel"


def _lower_again(kernel: Any, job: Job, case: Case, tools: Toolchain, folder: Path) -> Lowering:
    again = folder / "probe"
    again.mkdir(exist_ok=True)
    for old in again.iterdir():
        old.unlink()
    return compile.lower(kernel, case, job.setting, tools, again)


def _read(report: Report, job: Job, lowering: Lowering, lower: Callable[[Case], Lowering]) -> None:
    """Fill the report from what the compiler made."""
    report.stage = lowering.stage
    report.retried = bool(lowering.retries)
    source = Source(ir.parse(lowering.ttir), job.case.kernel) if lowering.ttir else None
    place = own_place(source.function.op.location) if source else None
    if lowering.failure is not None:
        report.findings.append(findings.of_failure(lowering.failure, lowering, place))
        report.required_bits = lowering.failure.required_bits or None
    report.findings += findings.of_retries(lowering, place)
    if source is None or not lowering.linalg:
        return
    found_accesses = accesses.find(source, ir.parse(lowering.linalg))
    report.unmatched = sum(access.form is Form.UNKNOWN for access in found_accesses)
    report.findings += findings.of_accesses(found_accesses)
    if not lowering.hivm:
        return
    kernels = _kernels_of(lowering, job.case)
    report.available_bits = _available_bits(lowering)
    report.required_bits = max((kernel.peak_bits for kernel in kernels), default=0)
    found = [loop for kernel in kernels for loop in loops.find(kernel, source)]
    growth = _growth(job, found, lower) if job.probe else {}
    report.findings += findings.of_loops(found, source, growth)
    report.findings += (finding for kernel in kernels for finding in findings.of_divisions(kernel, source))
    report.loops = [_row(loop) for loop in found if loop.is_scalar]
    element_trips = Count(term for loop in found if loop.pace is Pace.ELEMENT for term in loop.total.terms)
    _read_counts(report, job, [counts.count(kernel) for kernel in kernels], element_trips)


def _kernels_of(lowering: Lowering, case: Case) -> list[Kernel]:
    functions = hivm.entries(ir.parse(lowering.hivm), case.kernel)
    return [Kernel(function, lowering.arguments) for function in functions]


def _available_bits(lowering: Lowering) -> int | None:
    match = re.search(r'"UB_SIZE", (\d+)', ir.module_attributes(lowering.hivm))
    return int(match[1]) if match else None


def _read_counts(report: Report, job: Job, counted: list[Counts], element_trips: Count) -> None:
    for name in COUNTED:
        per_kernel = [getattr(one, name) for one in counted] if name != "element_trips" else [element_trips]
        total = Count(term for one in per_kernel for term in one.terms)
        report.amounts[name] = Amount(str(total), total.value(bound.at(job.case.values)), _over_launch(total, job.case))
    report.unsized = sum(one.unsized for one in counted)
    report.bound = bound.lower_bound(counted, job.case.values, job.setting.target)
    report.bound_needs = bound.unknowns(counted, job.case.values) if report.bound is None else []


def _over_launch(count: Count, case: Case) -> float | None:
    """A count added up over the programs of a launch; None if their number or one of their counts isn't known."""
    grid = case.values.get("grid")
    if grid is None:
        return None
    if "program_id(0)" not in count.symbols():
        each = count.value(bound.at(case.values))
        return None if each is None else grid * each
    shares = [count.value(bound.at(case.values, program)) for program in range(grid)]
    known = [share for share in shares if share is not None]
    return sum(known) if len(known) == grid else None


def _row(loop: Loop) -> LoopRow:
    trips = loop.elements if not loop.in_source else loop.trips
    return LoopRow(
        place=own_place(loop.location),
        pace=loop.pace,
        trips=shown(trips),
        known_trips=trips.number if trips.op == "number" else None,
        around=tuple(shown(outer.trips) for outer in loop.around),
        in_source=loop.in_source,
        transfers=tuple(loop.small_transfers),
    )


def _growth(job: Job, found: list[Loop], lower: Callable[[Case], Lowering]) -> Mapping[Location, str | None]:
    """What the compiler's own element loops grow with: the constant whose halving changes their trips, "" if none does.

    A loop is left out where that isn't known: its trips aren't constant, or the kernel doesn't compile with a constant
    halved and no other constant changes them.
    """
    known = _element_trips(found)
    growth: dict[Location, str | None] = {}
    all_compiled = True
    for name, value in _halvable(job.case, min([_LEAST_TILE, *known.values()]))[:_PROBES]:
        if len(growth) == len(known):
            break
        half = lower(replace(job.case, constants={**job.case.constants, name: value // 2}))
        all_compiled = all_compiled and bool(half.hivm)
        if not half.hivm:
            continue
        source = Source(ir.parse(half.ttir), job.case.kernel)
        halved = _element_trips(loop for kernel in _kernels_of(half, job.case) for loop in loops.find(kernel, source))
        growth.update((at, name) for at, trips in known.items() if at not in growth and _grew(trips, halved.get(at)))
    if all_compiled:
        growth.update((at, "") for at in known if at not in growth)
    return growth


def _grew(trips: int, halved: int | None) -> bool:
    """Whether a loop's trips went with a constant. One that is gone shows another branch, unless one trip is left."""
    return halved != trips if halved is not None else trips <= 2


def _element_trips(found: Iterable[Loop]) -> dict[Location, int]:
    """Trips of the compiler's own element loops, with those of the loops around them as far as they are constant."""
    trips: dict[Location, int] = {}
    for loop in found:
        if loop.pace is Pace.ELEMENT and not loop.in_source and loop.elements.op == "number":
            around = [outer.trips.number for outer in loop.around if outer.trips.op == "number"]
            trips[loop.location] = trips.get(loop.location, 0) + math.prod(around, start=loop.elements.number)
    return trips


def _halvable(case: Case, least: int) -> list[tuple[str, int]]:
    sizes = [(name, v) for name, v in case.constants.items() if isinstance(v, int) and not isinstance(v, bool)]
    return sorted(((name, v) for name, v in sizes if v >= max(least, 2) and v % 2 == 0), key=lambda item: -item[1])


def _unique(found: list[Finding]) -> list[Finding]:
    return list(dict.fromkeys(found))
