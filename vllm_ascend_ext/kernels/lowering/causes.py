"""Why an operation of a kernel falls to the scalar unit, and what to write instead.

Seen in the output of triton-ascend 3.2.0 and ascendnpu-ir 1.2.0; docs/lowering.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .ir import Op, parse_type

_TRIVIAL = (
    *("arith.constant", "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.addptr", "tt.reshape", "tt.make_range"),
    *("scf.yield", "tt.return", "tt.reduce.return", "tt.scan.return"),
)


@dataclass(frozen=True)
class Cause:
    """What in the source made a loop over single elements: the operation, why, and what to write instead."""

    operation: str
    why: str
    remedy: str


def element(op: Op) -> str:
    """Element type of what an operation works on: the widest of its block operands and results."""
    types = [shape for text in (*op.operand_types, *op.result_types) if (shape := parse_type(text)) is not None]
    types = [shape for shape in types if not shape.element.startswith("!tt.ptr")]
    return max(types, key=lambda shape: shape.bits).element if types else ""


def _is(*names: str) -> Callable[[Op], bool]:
    return lambda op: op.name in names


def _on_i64(op: Op) -> bool:
    return element(op) in ("i64", "ui64") and op.name.startswith(("arith.", "tt.reduce", "tt.scan", "math."))


#: First rule that fits an operation wins.
_RULES: Sequence[tuple[Callable[[Op], bool], str, str]] = (
    (
        _is("tt.atomic_rmw", "tt.atomic_cas"),
        "an atomic at computed addresses takes a transfer, and a lock where it isn't an add, for every element",
        "collect in the Unified Buffer and write whole blocks; a contiguous tl.atomic_add stays on the vector unit",
    ),
    (
        _is("tt.load"),
        "its addresses aren't `start + tl.arange(...)` (times a constant), so elements are gathered one at a time",
        "load a contiguous block and pick from it in the Unified Buffer (tl.gather of fp32, or tl.where and a "
        "reduction), or keep the gather to the few elements that need it",
    ),
    (
        _is("tt.store"),
        "its addresses aren't `start + tl.arange(...)` (times a constant), so elements are scattered one at a time",
        "arrange the block in the Unified Buffer and store it contiguously",
    ),
    (
        _is("tt.scan"),
        "a scan over a single dimension runs element by element",
        "reshape to two dimensions and scan over the first axis, which is one library call; then add the carries",
    ),
    (
        _is("tt.histogram"),
        "tl.histogram has no vector form",
        "count in place: a loop over the ids with get_element and insert_slice takes a few scalar steps and no copy",
    ),
    (
        _is("tt.mulhiui", "arith.mulsi_extended", "arith.mului_extended"),
        "the high half of a product (tl.umulhi, and with it tl.rand) has no vector form",
        "draw random numbers outside the kernel and load them",
    ),
    (
        _on_i64,
        "arithmetic and comparisons of i64 blocks have no vector form",
        "cast the block to i32 first (`.to(tl.int32)`) where its values fit, and keep i64 for scalars and pointers",
    ),
    (
        _is("arith.shli", "arith.shrsi", "arith.shrui"),
        "a shift by a block of amounts has no vector form",
        "shift by a constant: unroll the amounts with tl.static_range, or test bits with `&` against constant masks",
    ),
    (
        _is("arith.remsi", "arith.remui"),
        "`%` on a block has no vector form",
        "use `& (c - 1)` for a power of two, or work the remainder out of indices that you already have",
    ),
    (
        _is("arith.divsi", "arith.divui", "arith.floordivsi"),
        "this division has no vector form",
        "shift right by a constant for a power of two, or loop over the quotient instead of computing it",
    ),
    (
        _is("tt.reduce"),
        "this reduction has no vector form for its type",
        "reduce fp32 or i32: cast the block before the reduction",
    ),
)


def of(ops: Sequence[Op], steps: Sequence[str]) -> Cause:
    """The cause among the source's operations at a loop's place; ``steps`` names what the loop's body does."""
    candidates = [op for op in ops if op.name not in _TRIVIAL]
    for fits, why, remedy in _RULES:
        for op in candidates:
            if fits(op):
                return Cause(_describe(op), why, remedy)
    if candidates:
        described = _describe(candidates[0])
        return Cause(described, f"the compiler has no vector form for {described}", _GENERIC)
    body = ", ".join(steps) or "moving elements"
    return Cause(body, f"the compiler made a loop over single elements ({body}) of an operation here", _GENERIC)


_GENERIC = "write it with operations that stay on the vector unit (docs/lowering.md lists them)"


def _describe(op: Op) -> str:
    kind = element(op)
    return f"{op.name} on {kind}" if kind else op.name
