"""What is wrong with how a kernel was lowered, where, and what to write instead; it reads facts and no IR text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from . import causes
from .accesses import Access, Form
from .compile import Failure, Lowering
from .excerpt import snippet
from .hivm import Kernel
from .ir import Location, Place
from .loops import Loop, Pace
from .symbolic import Expr, shown
from .ttir import Source, Term, own_place


class Severity(Enum):
    """An error makes the check fail; a warning does only if it is told so; a note never does."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Kind:
    """One kind of finding: how grave it is, and what it means in a sentence or two."""

    severity: Severity
    meaning: str


KINDS: Mapping[str, Kind] = {
    "load": Kind(Severity.ERROR, "The file or the kernel in it can't be loaded."),
    "not-triton": Kind(Severity.ERROR, "The name is not a @triton.jit function."),
    "frontend": Kind(Severity.ERROR, "Triton refuses the kernel or the case."),
    "adapter": Kind(Severity.ERROR, "triton-adapter-opt can't bring the kernel from TTIR to linalg."),
    "compiler": Kind(Severity.ERROR, "bishengir-compile can't bring the kernel from linalg to HIVM."),
    "crash": Kind(Severity.ERROR, "A program of the compiler crashed; on a device the launch would fail likewise."),
    "time-out": Kind(Severity.ERROR, "The compiler did not end in the time it was given."),
    "overflow": Kind(Severity.ERROR, "The kernel's blocks don't fit the memory of a core."),
    "retried": Kind(
        Severity.ERROR,
        "The kernel didn't fit as asked; the compiler silently switched optimisations off (code motion, then "
        "multi-buffering) and fitted it then. It runs, slower than the source says.",
    ),
    "scalar-loop": Kind(
        Severity.ERROR,
        "An operation has no vector form for its type or addresses, so the compiler walks the block on the scalar "
        "unit, one element a trip, and the trips grow with the tile.",
    ),
    "fixed-scalar-loop": Kind(
        Severity.WARNING,
        "As scalar-loop, but the trips stay the same when the kernel's constants are halved: a cost per tile.",
    ),
    "scalar-walk": Kind(
        Severity.WARNING,
        "A loop of the kernel's own source handles one element a trip on the scalar unit and no block.",
    ),
    "transfer-per-element": Kind(
        Severity.ERROR,
        "A loop over single elements makes a transfer of its own for each: global memory is reached in pieces of less "
        "than 32 bytes.",
    ),
    "block-per-element": Kind(
        Severity.ERROR,
        "A loop that the compiler made over single elements runs a vector call over a whole block in every trip, "
        "mostly a copy that it saw no way around.",
    ),
    "unclamped-store": Kind(
        Severity.ERROR,
        "The mask isn't recognised as a bound, so the whole tile is read, selected and written back: past the end of "
        "the row the store rewrites what it read, and races with the core that owns it.",
    ),
    "unclamped-load": Kind(
        Severity.WARNING,
        "The mask isn't recognised as a bound, so the whole tile is read: past the end of the row, and of the tensor.",
    ),
    "unguarded-gather": Kind(
        Severity.WARNING,
        "A gather reads its masked-off lanes too, and their index isn't replaced by one that is surely valid.",
    ),
    "fp32-division": Kind(
        Severity.WARNING,
        "An i32 division goes through fp32, without a correction: quotients of values above 2^24 may be wrong.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One finding: its kind, what happens here, what to write instead, and the place in the kernel's source."""

    code: str
    message: str
    remedy: str
    #: How much, how often, and what made it so; may be empty.
    detail: str = ""
    place: Place | None = None
    #: Where the helper that holds the place was called, outwards; empty if the place is in the kernel itself.
    called_from: Location = ()
    #: The case's reason for allowing it; empty if it isn't allowed.
    allowed: str = ""
    #: Name of the source's operation, to find it in the line.
    operation: str = ""

    @property
    def severity(self) -> Severity:
        """Severity of the kind; what is allowed is only a note."""
        return Severity.NOTE if self.allowed else KINDS[self.code].severity


def allow(findings: Iterable[Finding], reasons: Mapping[str, str]) -> list[Finding]:
    """The findings, those of a code in ``reasons`` marked as allowed; ValueError if a code doesn't exist."""
    unknown = sorted(set(reasons) - set(KINDS))
    if unknown:
        raise ValueError(f"allow names {unknown}; the kinds of findings are {sorted(KINDS)}")
    return [replace(finding, allowed=reasons.get(finding.code, "")) for finding in findings]


def of_failure(failure: Failure, lowering: Lowering, kernel: Place | None) -> Finding:
    """Why a stage was not passed; at the kernel's own place where the compiler names none."""
    message, remedy = failure.message, _FAILURE_REMEDIES.get(failure.code, "")
    if failure.code == "overflow":
        if any("auto-multi-buffer" in note for note in lowering.retries):
            message += ", even after the compiler switched multi-buffering off"
        remedy = _FAILURE_REMEDIES["overflow" if failure.memory == "ub" else "compiler"]
    return Finding(failure.code, message, remedy, place=failure.place or kernel)


_FAILURE_REMEDIES = {
    "overflow": "take a smaller tile (`largest-tile` finds the largest that fits), or hold fewer blocks at once",
    "compiler": "the compiler's words are all there is to go by; cut the kernel down until it compiles",
    "adapter": "the compiler's words are all there is to go by; cut the kernel down until it compiles",
    "crash": "cut the kernel down until it compiles, and report the crash to the compiler's project",
}


def of_retries(lowering: Lowering, kernel: Place | None) -> Iterator[Finding]:
    """The compiler's silent second attempt, where that one succeeded."""
    if lowering.failure is None and lowering.retries:
        off = [name for name in ("code-motion", "auto-multi-buffer") if any(name in note for note in lowering.retries)]
        names = " and ".join(
            {"code-motion": "code motion", "auto-multi-buffer": "multi-buffering"}[name] for name in off
        )
        yield Finding(
            "retried",
            f"the Unified Buffer overflowed; the compiler switched {names} off without a word, and then it fitted",
            "take a smaller tile, or launch with multibuffer=False if that is meant (and declare the case so)",
            place=kernel,
        )


def of_accesses(accesses: Iterable[Access]) -> Iterator[Finding]:
    """Masked accesses that aren't clamped at their bound."""
    for access in accesses:
        if access.form is Form.UNCLAMPED:
            yield _unclamped(access)
        elif access.form is Form.UNGUARDED and not access.index_is_safe:
            yield _finding(
                access.location,
                access.op.name,
                "unguarded-gather",
                "the gather reads its masked-off lanes too, through whatever index they hold",
                "make the index valid in every lane first: `index = tl.where(mask, index, 0)`",
            )


def _unclamped(access: Access) -> Finding:
    data = any(term.kind == "data" for term in access.spoilers)
    if access.is_store:
        code, message = "unclamped-store", "the store reads and rewrites its whole tile, past its bound too"
        with_data = (
            "load the block with the bounds mask, choose with `tl.where`, and store with the bounds mask alone: "
            "`tl.store(p, tl.where(cond, new, old), mask=off < n)`"
        )
    else:
        code, message = "unclamped-load", "the load reads its whole tile, past its bound too"
        with_data = (
            "load with the bounds mask alone and choose afterwards: `tl.where(cond, tl.load(p, mask=off < n), 0)`"
        )
    with_form = (
        "write each bound as `off < n`, `off <= n - 1` or `off >= low` with `off = start + tl.arange(...)`, "
        "joined by `&` only"
    )
    detail = "; ".join(dict.fromkeys(map(_spoiler, access.spoilers))) or "the compiler doesn't see a bound in its mask"
    return _finding(access.location, access.op.name, code, message, with_data if data else with_form, detail)


def _spoiler(term: Term) -> str:
    if term.place is None:
        return f"the mask {term.reason}"
    text = snippet(term.place, term.operation)
    return (
        f"`{text}` at line {term.place.line} {term.reason}"
        if text
        else f"the mask at line {term.place.line} {term.reason}"
    )


def of_loops(loops: Iterable[Loop], source: Source, growth: Mapping[Location, str | None]) -> Iterator[Finding]:
    """Loops over single elements. ``growth`` says for a loop's location which constant its trips grow with.

    An empty name means none; None, or no entry, that it isn't known.
    """
    for loop in loops:
        if loop.pace is Pace.ELEMENT:
            yield _walk(loop) if loop.in_source else _made(loop, source, growth.get(loop.location))


def _walk(loop: Loop) -> Finding:
    return _finding(
        loop.location,
        "scf.for",
        "transfer-per-element" if loop.small_transfers else "scalar-walk",
        "this loop handles one element a trip on the scalar unit" + _with_each(loop),
        "handle a block a trip: load it, compute with tl.where and reductions, store it",
        _times(loop),
    )


def _made(loop: Loop, source: Source, grows: str | None) -> Finding:
    cause = causes.of(source.at.get(loop.location, []), [name.partition(".")[2] for name in loop.operations])
    if loop.small_transfers:
        code = "transfer-per-element"
    elif loop.vector_calls:
        code = "block-per-element"
    else:
        code = "fixed-scalar-loop" if grows == "" else "scalar-loop"
    growing = f", growing with {grows}" if grows else ", whatever the constants" if grows == "" else ""
    detail = f"{cause.operation}: {_times(loop)}{growing}"
    operation = cause.operation.partition(" ")[0]
    return _finding(loop.location, operation, code, cause.why + _with_each(loop), cause.remedy, detail)


def _with_each(loop: Loop) -> str:
    if loop.small_transfers:
        return f", each with a transfer of its own ({loop.small_transfers[0]})"
    name, elements = loop.largest_call
    return f", each with a vector call over {elements:,} elements ({name})" if name else ""


def _times(loop: Loop) -> str:
    around = "".join(f", inside a loop of {shown(outer.trips)} trips" for outer in loop.around)
    return f"{_number(loop.elements)} elements one by one on the scalar unit{around}"


def _number(expr: Expr) -> str:
    return f"{expr.number:,}" if expr.op == "number" else shown(expr)


def of_divisions(kernel: Kernel, source: Source) -> Iterator[Finding]:
    """i32 divisions that the compiler does in fp32."""
    seen: set[Location] = set()
    for op in kernel.ops:
        if not op.symbol.startswith("vdiv") or "float" not in op.symbol or op.location in seen:
            continue
        names = {source_op.name for source_op in source.at.get(op.location, [])}
        if "arith.divf" not in names and names & {"arith.divsi", "arith.divui", "arith.floordivsi", "arith.remsi"}:
            seen.add(op.location)
            yield _finding(
                op.location,
                "arith.divsi",
                "fp32-division",
                "this i32 division is computed in fp32 and cast back: above 2^24 the quotient may be wrong",
                "shift by a constant for a power of two, or keep both values below 2^24",
                _division(op.location),
            )


def _division(location: Location) -> str:
    place = own_place(location)
    text = snippet(place, "arith.divsi") if place is not None else ""
    return f"`{text}`" if text else ""


def _finding(location: Location, operation: str, code: str, message: str, remedy: str, detail: str = "") -> Finding:
    place = own_place(location)
    outer = location[location.index(place) + 1 :] if place in location else ()
    return Finding(code, message, remedy, detail, place, outer, operation=operation)
