"""What one program of a kernel does, as counts: bytes, transfers, vector elements, scalar steps, synchronisations.

Upper bounds in two respects: both branches of an ``if`` are added up, and a clamped transfer counts as its whole tile.
Trips that are known only at launch stay symbols.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .hivm import LOOPS, Kernel, Transfer, is_scalar_step, is_sync
from .ir import Op
from .symbolic import ONE, ZERO, Count, Range, Term, build


@dataclass
class Counts:
    """Counts of one function in one program."""

    bytes_in: Count = field(default_factory=Count)
    bytes_out: Count = field(default_factory=Count)
    transfers: Count = field(default_factory=Count)
    vector_elements: Count = field(default_factory=Count)
    vector_calls: Count = field(default_factory=Count)
    scalar_steps: Count = field(default_factory=Count)
    syncs: Count = field(default_factory=Count)
    #: Transfers that a program can't do without, by their bytes; see ``_is_certain``.
    certain_transfers: dict[float, Count] = field(default_factory=dict)
    #: Scalar steps that a program can't do without.
    certain_steps: Count = field(default_factory=Count)
    #: Transfers and vector calls whose size no operand shows; they are missing from the counts above.
    unsized: int = 0


def count(kernel: Kernel) -> Counts:
    """Count what one program of ``kernel`` does."""
    counts = Counts()
    ranges: dict[int, Range] = {id(op): kernel.range(op) for op in kernel.ops if op.name in LOOPS}
    for op in kernel.ops:
        around = [ranges[id(loop)] for loop in op.ancestors() if loop.name in LOOPS]
        _add(counts, kernel, op, tuple(reversed(around)))
    return counts


def _add(counts: Counts, kernel: Kernel, op: Op, around: tuple[Range, ...]) -> None:
    transfer = kernel.transfer(op)
    if transfer is not None:
        _add_transfer(counts, transfer, around, _is_certain(op))
    elif kernel.is_vector_call(op):
        elements = kernel.elements(op)
        counts.unsized += elements == 0
        counts.vector_calls.add(Term(1, around))
        counts.vector_elements.add(Term(elements, around))
    elif is_sync(op):
        counts.syncs.add(Term(1, around))
    elif is_scalar_step(op):
        counts.scalar_steps.add(Term(1, around))
        if _is_certain(op):
            counts.certain_steps.add(Term(1, around))
        if op.name in ("memref.load", "memref.store"):
            _add_element(counts, kernel, op, around)


def _add_transfer(counts: Counts, transfer: Transfer, around: tuple[Range, ...], certain: bool) -> None:
    counts.transfers.add(Term(1, around))
    if transfer.bytes is None:
        counts.unsized += 1
        return
    (counts.bytes_in if transfer.to_core else counts.bytes_out).add(Term(transfer.bytes, around))
    if certain and transfer.clamped:
        if not around:
            return
        # Of the trips of a loop over tiles, only the last one may move less than its tile.
        around = (*around[:-1], _without_last(around[-1]))
    if certain:
        counts.certain_transfers.setdefault(transfer.bytes, Count()).add(Term(1, around))


def _without_last(one: Range) -> Range:
    return replace(one, trips=build("max", build("-", one.trips, ONE), ZERO))


def _is_certain(op: Op) -> bool:
    """Whether a program does this, if every condition in the kernel holds: not in an ``else``, not filling a tail."""
    inner = op
    for outer in op.ancestors():
        if outer.name == "scf.if":
            in_else = len(outer.regions) > 1 and inner in outer.regions[1]
            if in_else or "unlikely_condition" in outer.attributes:
                return False
        inner = outer
    return True


def _add_element(counts: Counts, kernel: Kernel, op: Op, around: tuple[Range, ...]) -> None:
    """A load or store of one element of global memory moves bytes too, without a transfer."""
    loads = op.name == "memref.load"
    extent = kernel.extent(op.operands[0 if loads else 1])
    if extent is not None and extent.space == "gm":
        (counts.bytes_in if loads else counts.bytes_out).add(Term(extent.bits / 8, around))
