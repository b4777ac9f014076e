"""How the compiler lowered each masked load and store: clamped at its bound, or over the whole tile.

Read at the linalg stage, where an access is still one copy: a recognised mask becomes a slice with a computed size; any
other becomes a copy of the whole tile and a select, and for a store a write of the whole tile back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .ir import Function, Location, Op
from .ttir import Source, Term

#: Attributes by which the adapter marks a loop over the elements of an access.
_ELEMENT_LOOP = ("ExtractedLoadOrStore", "DiscreteMemAccess")


class Form(Enum):
    """What became of a masked access."""

    CLAMPED = "clamped at its bound"
    WHOLE = "whole tile, its mask always true"
    UNCLAMPED = "whole tile, whatever its mask"
    GUARDED = "one element at a time, each under its mask"
    UNGUARDED = "one element at a time, masked-off lanes too"
    UNKNOWN = "not found in the lowered module"


@dataclass(frozen=True)
class Access:
    """One masked load or store of the kernel, and what became of it."""

    op: Op
    form: Form
    #: Parts of the mask that weren't recognised as a bound, where the form is UNCLAMPED.
    spoilers: tuple[Term, ...] = ()
    #: For UNGUARDED: whether the index is valid in masked-off lanes, as far as the source shows.
    index_is_safe: bool = True

    @property
    def is_store(self) -> bool:
        """Whether it is a store."""
        return self.op.name == "tt.store"

    @property
    def location(self) -> Location:
        """Where the source has it."""
        return self.op.location


def find(source: Source, linalg: Iterable[Function]) -> list[Access]:
    """Every masked block access of the kernel. Accesses unrolled from one place in the source count once."""
    at: dict[Location, list[Op]] = defaultdict(list)
    for function in linalg:
        for op in function.walk():
            at[op.location].append(op)
    result: dict[tuple[str, Location], Access] = {}
    for op in source.masked:
        access = _judge(source, op, at.get(op.location, []))
        seen = result.get((op.name, op.location))
        if seen is None or seen.form in (Form.CLAMPED, Form.WHOLE):
            result[op.name, op.location] = access
    return list(result.values())


def _judge(source: Source, op: Op, lowered: list[Op]) -> Access:
    forms = {form for form in (_form(op, part, lowered) for part in lowered) if form is not None}
    for form in (Form.UNCLAMPED, Form.UNGUARDED, Form.GUARDED, Form.CLAMPED, Form.WHOLE):
        if form in forms:
            break
    else:
        form = Form.UNKNOWN
    mask = source.mask(op) or ""
    spoilers = tuple(source.unrecognised(mask)) if form is Form.UNCLAMPED else ()
    return Access(op, form, spoilers, form is not Form.UNGUARDED or source.index_is_safe(op))


def _form(op: Op, part: Op, lowered: list[Op]) -> Form | None:
    """What one operation of the linalg stage, at an access's place, says of that access."""
    stores = op.name == "tt.store"
    by_element = any(
        outer.name == "scf.for" and any(mark in outer.attributes for mark in _ELEMENT_LOOP)
        for outer in part.ancestors()
    )
    if part.name == "bufferization.materialize_in_destination" and stores:
        if by_element:
            return Form.GUARDED if _is_guarded(part) else Form.UNGUARDED
        return Form.UNCLAMPED if _selects(lowered) and _copies_whole(lowered) else _slice_form(part.operand_types[1])
    if part.name == "memref.copy" and not stores:
        if by_element:
            return Form.GUARDED if _is_guarded(part) else Form.UNGUARDED
        return Form.UNCLAMPED if _selects(lowered) else _slice_form(part.operand_types[0])
    if part.name == ("memref.store" if stores else "memref.load") and by_element:
        return Form.GUARDED if _is_guarded(part) else Form.UNGUARDED
    return None


def _slice_form(type_text: str) -> Form:
    return Form.CLAMPED if "?x" in type_text.partition(",")[0] else Form.WHOLE


def _selects(lowered: list[Op]) -> bool:
    return any(op.name == "arith.select" and op.operand_types[0].startswith("tensor<") for op in lowered)


def _copies_whole(lowered: list[Op]) -> bool:
    return any(op.name == "memref.copy" and _slice_form(op.operand_types[0]) is Form.WHOLE for op in lowered)


def _is_guarded(part: Op) -> bool:
    for outer in part.ancestors():
        if outer.name == "scf.for":
            return False
        if outer.name == "scf.if":
            return True
    return False
