"""The loops of the compiler's final module, and which of them walk elements one at a time on the scalar unit."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum

from .hivm import LOOPS, Kernel, is_scalar_step
from .ir import Location, Op
from .symbolic import Count, Expr, Range, Term, build
from .ttir import Source

#: A transfer smaller than this moves single elements: the Unified Buffer is addressed in blocks of 32 bytes.
SMALL_TRANSFER_BYTES = 32


class Pace(Enum):
    """How often the scalar unit works in a loop."""

    NONE = "no scalar step on its own elements"
    ROW = "per row"
    TILE = "per tile"
    ELEMENT = "per element"


@dataclass
class Loop:
    """One loop of the final module."""

    location: Location
    range: Range
    #: Loops around this one, from the outside in.
    outer: tuple[Loop, ...]
    #: Whether the kernel's source has this loop; if not, the compiler made it of one operation.
    in_source: bool
    #: Loads and stores of single elements whose address changes with the trips, per trip.
    element_steps: int = 0
    #: Of these, in global memory.
    global_steps: int = 0
    #: Other steps of the scalar unit in its own body: operation -> how many.
    operations: Counter[str] = field(default_factory=Counter)
    #: Names of the transfers of less than ``SMALL_TRANSFER_BYTES`` in its own body, one a call.
    small_transfers: list[str] = field(default_factory=list)
    transfers: int = 0
    #: Vector calls on at least as much.
    vector_calls: int = 0
    #: The largest of them: its name and how many elements it works on.
    largest_call: tuple[str, int] = ("", 0)
    inner: list[Loop] = field(default_factory=list)

    @property
    def trips(self) -> Expr:
        """How often the body runs."""
        return self.range.trips

    @property
    def total(self) -> Count:
        """How often the body runs in one program, with the loops around it."""
        return Count([Term(1, (*(outer.range for outer in self.outer), self.range))])

    @property
    def is_scalar(self) -> bool:
        """Whether its own body moves single elements."""
        return self.element_steps > 0 or bool(self.small_transfers)

    @property
    def pace(self) -> Pace:
        """Per element if it only walks elements; per tile or row if it does block work, itself or in loops inside."""
        if not self.is_scalar:
            return Pace.NONE
        if not self.in_source:
            return Pace.ELEMENT
        if any(loop.in_source for loop in self.inner):
            return Pace.ROW
        block_work = self.vector_calls or self.transfers > len(self.small_transfers) or self.inner
        return Pace.TILE if block_work else Pace.ELEMENT

    @property
    def elements(self) -> Expr:
        """Trips of this loop and of the compiler's own loops right around it: those of one operation of the source."""
        total = self.trips
        if not self.in_source:
            for loop in reversed(self.outer):
                if loop.in_source:
                    break
                total = build("*", loop.trips, total)
        return total

    @property
    def around(self) -> tuple[Loop, ...]:
        """The loops of the source around this one, from the outside in."""
        return tuple(loop for loop in self.outer if loop.in_source)


def find(kernel: Kernel, source: Source) -> list[Loop]:
    """All loops of one function, in the order of the text."""
    loops: dict[int, Loop] = {}
    depends = _dependencies(kernel)
    for op in kernel.ops:
        outer = tuple(loops[id(o)] for o in reversed(list(op.ancestors())) if id(o) in loops)
        if op.name in LOOPS:
            loop = Loop(op.location, kernel.range(op), outer, source.is_loop(op.location))
            loops[id(op)] = loop
            for around in outer:
                around.inner.append(loop)
        elif outer:
            owner = next(o for o in op.ancestors() if id(o) in loops)
            _count(kernel, op, loops[id(owner)], id(owner) in depends(op))
    return list(loops.values())


class _dependencies:
    """Which loops the operands of an operation change with, called for operations in the order of the text."""

    def __init__(self, kernel: Kernel) -> None:
        self._of: dict[str, frozenset[int]] = defaultdict(frozenset)
        for op in kernel.ops:
            changing = frozenset[int]().union(*(self._of[o.partition("#")[0]] for o in op.operands))
            if op.name in LOOPS:
                self._of.update(dict.fromkeys(op.arguments, frozenset({id(op)})))
            self._of.update((result, self._of[result] | changing) for result in op.results)

    def __call__(self, op: Op) -> frozenset[int]:
        return frozenset[int]().union(*(self._of[operand.partition("#")[0]] for operand in op.operands))


def _count(kernel: Kernel, op: Op, loop: Loop, walks: bool) -> None:
    """Add one operation of a loop's own body to what is known of the loop."""
    transfer = kernel.transfer(op)
    if transfer is not None:
        loop.transfers += 1
        if transfer.bytes is not None and transfer.bytes < SMALL_TRANSFER_BYTES and walks:
            loop.small_transfers.append(op.symbol)
    elif kernel.is_vector_call(op):
        # A library call on less than a block of the Unified Buffer is a scalar's work by other means.
        if kernel.bytes(op) >= SMALL_TRANSFER_BYTES:
            loop.vector_calls += 1
            loop.largest_call = max(loop.largest_call, (op.symbol, kernel.elements(op)), key=lambda call: call[1])
    elif op.name in ("memref.load", "memref.store") and walks:
        loop.element_steps += 1
        memory = op.operands[0 if op.name == "memref.load" else 1]
        extent = kernel.extent(memory)
        loop.global_steps += extent is not None and extent.space == "gm"
    elif is_scalar_step(op) and op.name not in ("memref.load", "memref.store"):
        loop.operations[op.name] += 1
