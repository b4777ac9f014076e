"""What the operations of the compiler's final module (HIVM) mean: trips, transfers, vector calls, scalar steps.

The final module is plain control flow around calls of a vector library: ``load_gm_to_ubuf_1d_float`` is a transfer,
``vadd_1d_float`` a vector call, and an ``arith.addf`` or ``memref.load`` is one step of the scalar unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from . import symbolic
from .ir import Function, Op, Type
from .symbolic import ONE, ZERO, Expr, Range, build, number, symbol

#: Transfers between global memory and a core, by the start of the library function's name.
_TO_CORE = ("load_gm_to_", "nd2nz", "copy_gm_to_")
_FROM_CORE = ("store_ubuf_to_gm", "fixpipe", "store_cbuf_to_gm", "store_l0c_to_gm")
_SYNC = ("hivm.hir.set_flag", "hivm.hir.wait_flag", "hivm.hir.pipe_barrier")
_CROSS_CORE_SYNC = ("hivm.hir.sync_block_set", "hivm.hir.sync_block_wait", "hivm.hir.sync_block")
#: Operations through which a value is the same number.
_TRANSPARENT = ("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui", "arith.trunci")
_ARITH = {
    **{"arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.divsi": "//", "arith.divui": "//"},
    **{"arith.floordivsi": "//", "arith.ceildivsi": "cdiv", "arith.remsi": "%", "arith.remui": "%"},
    **{"arith.minsi": "min", "arith.maxsi": "max", "arith.minui": "min", "arith.maxui": "max"},
    **{"arith.andi": "&", "arith.ori": "|", "arith.xori": "^"},
}
#: ``arith.cmpi`` predicates, in the order of their numbers (MLIR, arith dialect).
_PREDICATES = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")
#: Operations that give another view of the same memory.
_VIEWS = (
    "memref.cast",
    "memref.subview",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.reinterpret_cast",
    "memref.memory_space_cast",
    "hivm.hir.bitcast",
)
_DEPTH = 24

LOOPS = ("scf.for", "scf.while")


@dataclass(frozen=True)
class Extent:
    """How much memory a value spans; ``clamped`` if its true size is known only at run time, and at most this."""

    elements: int
    bits: int
    space: str
    clamped: bool = False

    @property
    def bytes(self) -> float:
        """Size in bytes; of a clamped extent, that of the whole tile."""
        return self.elements * self.bits / 8


@dataclass(frozen=True)
class Transfer:
    """One transfer between global memory and a core; ``bytes`` is None where no operand shows its size."""

    to_core: bool
    bytes: float | None
    clamped: bool


class Kernel:
    """One function of the final module, with names for its arguments."""

    def __init__(self, function: Function, arguments: tuple[str, ...]) -> None:
        self.function = function
        self.name = function.name
        self._names = _argument_names(function, arguments)
        self._exprs: dict[str, Expr] = {}
        self._unknown_names: set[str] = set()

    @cached_property
    def ops(self) -> list[Op]:
        """All operations, in the order of the text."""
        return list(self.function.walk())

    def expr(self, value: str, depth: int = _DEPTH) -> Expr:
        """What an integer value is, in terms of the kernel's arguments."""
        if value not in self._exprs:
            self._exprs[value] = self._make_expr(value, depth)
        return self._exprs[value]

    def _make_expr(self, value: str, depth: int) -> Expr:
        if value in self._names:
            return symbol(self._names[value])
        if value in self._variables:
            return symbol(self._variables[value])
        op = self.function.definition(value)
        if op is None:
            owner = self.function.argument_of.get(value)
            return self._unknown(f"loop value{_at(owner)}" if owner else value)
        if op.name == "arith.constant":
            return _constant(op)
        if depth == 0:
            return self._unknown(f"value{_at(op)}")
        if op.name in _TRANSPARENT:
            return self.expr(op.operands[0], depth - 1)
        if op.name == "hivm.hir.get_block_idx":
            return symbol("block")
        if op.name in ("affine.apply", "affine.min", "affine.max"):
            return self._affine(op, depth)
        args = [self.expr(operand, depth - 1) for operand in op.operands] if _is_integer(op) else []
        if op.name in _ARITH and len(args) == 2:
            return _program_id(_ARITH[op.name], args) or build(_ARITH[op.name], *args)
        if op.name == "arith.cmpi":
            return build(_PREDICATES[_predicate(op)], *args)
        if op.name == "arith.select" and len(args) == 3:
            return build("select", *args)
        if op.name == "memref.load":
            source = self.base(op.operands[0])
            line = op.location[0].line if op.location else "?"
            return self._unknown(f"*{self._names.get(source, 'value')}@{line}")
        return self._unknown(f"value{_at(op)}")

    def _unknown(self, name: str) -> Expr:
        """A name of its own for a value that isn't known: two values from one place must not cancel out."""
        while name in self._unknown_names:
            name += "'"
        self._unknown_names.add(name)
        return symbol(name)

    def _affine(self, op: Op, depth: int) -> Expr:
        operands = [self.expr(operand, depth - 1) for operand in op.operands]
        results = symbolic.affine(op.attribute("map") or "", operands)
        if op.name == "affine.apply" or len(results) == 1:
            return results[0]
        combined = results[0]
        for result in results[1:]:
            combined = build("min" if op.name == "affine.min" else "max", combined, result)
        return combined

    def range(self, loop: Op) -> Range:
        """Trips of a loop, and the values of its variable; a ``while`` has unknown trips."""
        if loop.name != "scf.for":
            return symbolic.unknown_range(f"trips of the while loop{_at(loop)}")
        low, high, step = (self.expr(operand) for operand in loop.operands[:3])
        return symbolic.loop_range(self._variables.get(loop.arguments[0], ""), low, high, step)

    @cached_property
    def _variables(self) -> dict[str, str]:
        """Names for the loops' variables, by the line they stand on: ``i12``, and ``i12'`` for the next one there."""
        names: dict[str, str] = {}
        for op in self.ops:
            if op.name == "scf.for":
                name = f"i{op.location[0].line if op.location else ''}"
                while name in names.values():
                    name += "'"
                names[op.arguments[0]] = name
        return names

    def base(self, value: str) -> str:
        """The value that a chain of views starts from."""
        for _ in range(_DEPTH):
            op = self.function.definition(value)
            if op is None or op.name not in _VIEWS:
                break
            value = op.operands[0]
        return value

    def extent(self, value: str) -> Extent | None:
        """Extent of a memref value: its own static shape, or that of what it was cut from."""
        clamped = False
        for _ in range(_DEPTH):
            op = self.function.definition(value)
            if op is None:
                return None
            shape = op.result_type()
            if shape is None:
                return None
            if shape.elements is not None:
                return Extent(shape.elements, shape.bits, self._space(value, shape), clamped)
            if op.name not in _VIEWS:
                return None
            clamped = clamped or op.name == "memref.subview"
            value = op.operands[0]
        return None

    def _space(self, value: str, shape: Type) -> str:
        return shape.space or ("gm" if self.base(value) in self._names else "")

    def memrefs(self, call: Op) -> list[Extent]:
        """Extents of the memref operands of a call, as far as they are known."""
        shaped = (
            value for value, type_ in zip(call.operands, call.operand_types, strict=True) if type_.startswith("memref")
        )
        return [extent for extent in map(self.extent, shaped) if extent is not None]

    def transfer(self, op: Op) -> Transfer | None:
        """The transfer that an operation makes, if it is one."""
        if op.name != "func.call":
            return None
        to_core = op.symbol.startswith(_TO_CORE)
        if not to_core and not op.symbol.startswith(_FROM_CORE):
            return None
        sides = self.memrefs(op)[:2]
        smallest = min(sides, key=lambda side: side.bytes, default=None)
        return Transfer(to_core, smallest.bytes if smallest else None, any(side.clamped for side in sides))

    def is_vector_call(self, op: Op) -> bool:
        """Whether the operation is a call of the vector library that moves nothing to or from global memory."""
        return op.name == "func.call" and self.transfer(op) is None and not op.symbol.startswith(("sync_", "mma"))

    def elements(self, call: Op) -> int:
        """Elements that a vector call works on: the larger of its first two memory operands."""
        return max((extent.elements for extent in self.memrefs(call)[:2]), default=0)

    def bytes(self, call: Op) -> float:
        """Bytes that a vector call works on, as above; infinitely many where that isn't known."""
        return max((extent.bytes for extent in self.memrefs(call)[:2]), default=float("inf"))

    @cached_property
    def peak_bits(self) -> int:
        """Highest bit of the Unified Buffer that the final plan uses."""
        peak = 0
        for op in self.ops:
            shape = op.result_type()
            if op.name != "hivm.hir.pointer_cast" or shape is None or shape.space != "ub":
                continue
            size = (shape.elements or 0) * shape.bits
            offsets = (self.expr(operand) for operand in op.operands)
            peak = max([peak, *(offset.number * 8 + size for offset in offsets if offset.op == "number")])
        return peak


def is_scalar_step(op: Op) -> bool:
    """Whether the operation is a step of the scalar unit: arithmetic on scalars, a load or store of one element."""
    if op.name in ("memref.load", "memref.store"):
        return True
    return op.name.startswith(("arith.", "math.")) and op.name not in ("arith.constant", *_TRANSPARENT[:2])


def is_sync(op: Op) -> bool:
    """Whether the operation synchronises the pipes of one core, or two cores."""
    return op.name in _SYNC or op.name in _CROSS_CORE_SYNC


def entries(functions: list[Function], kernel: str) -> list[Function]:
    """The kernel's own functions: one, or one for each kind of core where it uses both."""
    names = (kernel, f"{kernel}_mix_aic", f"{kernel}_mix_aiv")
    return [function for function in functions if function.name in names]


def _argument_names(function: Function, arguments: tuple[str, ...]) -> dict[str, str]:
    """Names for the function's arguments: hidden ones first, then the kernel's, then the three sizes of the grid."""
    attributes = function.op.attribute("arg_attrs") or ""
    hidden = len(re.findall(r"hacc\.arg_type<", attributes))
    names = [*arguments, "grid", "grid_y", "grid_z"]
    return dict(zip(function.arguments[hidden:], names, strict=False))


def _program_id(op: str, args: list[Expr]) -> Expr | None:
    """``block // (grid_y * grid_z) % grid``, which the compiler makes of ``tl.program_id(0)``; likewise for 1 and 2."""
    if op != "%" or args[1].op != "symbol" or args[1].name not in ("grid", "grid_y", "grid_z"):
        return None
    if "block" not in set(args[0].symbols()):
        return None
    return symbol(f"program_id({('grid', 'grid_y', 'grid_z').index(args[1].name)})")


def _constant(op: Op) -> Expr:
    match = re.match(r"(-?\d+) :|(true|false)\b", op.attribute("value") or "")
    if match is None:
        return symbol("a constant")
    return number(int(match[1])) if match[1] else (ONE if match[2] == "true" else ZERO)


def _predicate(op: Op) -> int:
    return int((op.attribute("predicate") or "0").split(" ")[0])


def _is_integer(op: Op) -> bool:
    return bool(op.result_types) and re.fullmatch(r"i\d+|index", op.result_types[0]) is not None


def _at(op: Op) -> str:
    return f" at line {op.location[0].line}" if op.location else ""
