"""What a kernel's source says, read from its TTIR: where its loops are, what it loads and stores, under which masks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .ir import Function, Location, Op, Place

_LIBRARY = re.compile(r"[/\\]triton[/\\](language|runtime|compiler)[/\\]")
_PREDICATES = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")
#: Operations that only reshape a value or cast it.
_SHAPING = (
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
)


def own_place(location: Location) -> Place | None:
    """The innermost place outside Triton's own library; that of the library itself if there is no other."""
    return next((place for place in location if not _LIBRARY.search(place.file)), location[0] if location else None)


@dataclass(frozen=True)
class Term:
    """One part of a mask that keeps the compiler from seeing a bound in it: where it stands, and what it is."""

    place: Place | None
    operation: str
    kind: str
    reason: str


class Source:
    """One kernel's TTIR, found by source location."""

    def __init__(self, functions: list[Function], kernel: str) -> None:
        self.function = next((function for function in functions if function.name == kernel), functions[0])
        self.at: dict[Location, list[Op]] = defaultdict(list)
        self.loops: set[Place] = set()
        for function in functions:
            for op in function.walk():
                self.at[op.location].append(op)
                place = own_place(op.location)
                if op.name in ("scf.for", "scf.while") and place is not None:
                    self.loops.add(place)

    def is_loop(self, location: Location) -> bool:
        """Whether the kernel's source has a loop there; if not, the compiler made the loop."""
        return own_place(location) in self.loops

    @cached_property
    def masked(self) -> list[Op]:
        """Loads and stores of blocks under a mask."""
        return [op for op in self.function.walk() if self.mask(op) and self._is_block(op)]

    @staticmethod
    def _is_block(op: Op) -> bool:
        return op.operand_types[0].startswith("tensor<")

    @staticmethod
    def mask(op: Op) -> str | None:
        """The mask of a load or store; None if it has none."""
        first = {"tt.load": 1, "tt.store": 2}.get(op.name)
        return op.operands[first] if first is not None and len(op.operands) > first else None

    def unrecognised(self, mask: str) -> list[Term]:
        """The parts of a mask that the adapter doesn't recognise as a bound; one of them spoils the whole mask."""
        op = self.function.definition(mask)
        if op is None:
            return []
        if op.name == "arith.andi":
            return [term for operand in op.operands for term in self.unrecognised(operand)]
        if op.name in ("tt.broadcast", "tt.expand_dims"):
            return self.unrecognised(op.operands[0])
        if op.name in ("tt.splat", "arith.constant"):
            return []
        place = own_place(op.location)
        if op.name == "arith.cmpi":
            reason = self._comparison(op)
            return [Term(place, op.name, *reason)] if reason else []
        if self._reads_memory(mask):
            return [Term(place, op.name, "data", "depends on values that were loaded")]
        return [Term(place, op.name, "form", f"uses {_SPELLING.get(op.name, op.name)}")]

    def _comparison(self, op: Op) -> tuple[str, str] | None:
        """Kind and reason why a comparison isn't recognised as a bound; None if it is one."""
        left, right = op.operands[:2]
        predicate = _PREDICATES[int((op.attribute("predicate") or "0").split(" ")[0])]
        if self._reads_memory(left) or self._reads_memory(right):
            return "data", "compares values that were loaded"
        if predicate in ("==", "!="):
            return "form", f"is no bound, being a `{predicate}`"
        if self._is_scalar(left):
            return "form", "has the offset on its right side"
        if not self._is_scalar(right):
            return "form", "compares two blocks"
        if predicate == ">":
            return "form", "is a lower bound by `>`, which isn't recognised"
        if not self._is_start_plus_range(left):
            return "form", "bounds something else than `start + tl.arange(...)`"
        return None

    def _leaves(self, value: str, seen: set[str] | None = None) -> Iterator[Op]:
        """The operations that a block is computed from: ranges, loads, scalars that were spread, constants."""
        seen = set() if seen is None else seen
        op = self.function.definition(value)
        if op is None or value in seen:
            return
        seen.add(value)
        if op.name in ("tt.make_range", "tt.load", "tt.splat", "arith.constant", "tt.atomic_rmw") or not op.operands:
            yield op
        else:
            for operand in op.operands:
                yield from self._leaves(operand, seen)

    def _reads_memory(self, value: str) -> bool:
        return any(leaf.name in ("tt.load", "tt.atomic_rmw") for leaf in self._leaves(value))

    def _is_scalar(self, value: str) -> bool:
        """Whether all lanes of a block hold one value."""
        return all(leaf.name in ("tt.splat", "arith.constant") for leaf in self._leaves(value))

    def _is_start_plus_range(self, value: str) -> bool:
        op = self.function.definition(value)
        while op is not None and op.name in _SHAPING and op.name != "tt.splat":
            op = self.function.definition(op.operands[0])
        if op is None or op.name in ("tt.make_range", "tt.splat", "arith.constant"):
            return True
        return op.name == "arith.addi" and all(self._is_start_plus_range(operand) for operand in op.operands)

    def index_is_safe(self, access: Op) -> bool:
        """Whether a gather's index is valid in masked-off lanes too, as far as the source shows.

        It is where every part of the index was replaced in those lanes (``tl.where``, or a load with ``other``) or does
        not depend on what the mask bounds.
        """
        mask = self.mask(access)
        pointer = self.function.definition(access.operands[0])
        while pointer is not None and pointer.name in _SHAPING:
            pointer = self.function.definition(pointer.operands[0])
        if mask is None or pointer is None or pointer.name != "tt.addptr":
            return False
        bounded = {id(leaf) for leaf in self._leaves(mask) if leaf.name == "tt.make_range"}
        return all(self._is_safe_leaf(leaf, bounded) for leaf in self._index_leaves(pointer.operands[1]))

    def _index_leaves(self, value: str) -> Iterator[Op]:
        op = self.function.definition(value)
        if op is None:
            return
        if op.name in ("tt.make_range", "tt.load", "tt.splat", "arith.constant", "arith.select") or not op.operands:
            yield op
        else:
            for operand in op.operands:
                yield from self._index_leaves(operand)

    @staticmethod
    def _is_safe_leaf(leaf: Op, bounded: set[int]) -> bool:
        if leaf.name == "tt.load":
            return len(leaf.operands) in (1, 3)
        return id(leaf) not in bounded


_SPELLING = {
    "arith.ori": "`|`",
    "arith.xori": "`~` or `^`",
    "arith.select": "`tl.where`",
    "arith.cmpf": "a comparison of floats",
}
