"""Integer expressions over a kernel's arguments, and counts as sums of them; knows neither MLIR nor Triton."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Expr:
    """An integer that may be unknown until launch: a number, a named unknown, or an operation on others."""

    op: str
    args: tuple[Expr, ...] = ()
    number: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.op == "number":
            return str(self.number)
        if self.op == "symbol":
            return self.name
        if self.op in _INFIX:
            left, right = (f"({arg})" if arg.op in _INFIX else str(arg) for arg in self.args)
            return f"{left} {self.op} {right}"
        return f"{self.op}({', '.join(map(str, self.args))})"

    def value(self, known: Mapping[str, int]) -> int | None:
        """The number, given values of the unknowns; None if one that matters is missing."""
        if self.op == "number":
            return self.number
        if self.op == "symbol":
            # A value read from memory is named after its pointer and its line; one for the pointer serves all lines.
            return known.get(self.name, known.get(self.name.partition("@")[0]))
        values = [arg.value(known) for arg in self.args]
        if self.op == "select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if any(value is None for value in values):
            return None
        return _evaluate(self.op, [value for value in values if value is not None])

    def symbols(self) -> Iterator[str]:
        """Names of the unknowns, as often as they occur."""
        if self.op == "symbol":
            yield self.name
        for arg in self.args:
            yield from arg.symbols()


_INFIX: Mapping[str, Callable[[int, int], int | bool]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}


def _evaluate(op: str, values: Sequence[int]) -> int | None:
    if op == "min":
        return min(values)
    if op == "max":
        return max(values)
    left, right = values[:2]
    if op in ("//", "%", "cdiv") and right == 0:
        return None
    if op == "cdiv":
        return -(-left // right)
    return int(_INFIX[op](left, right))


def number(value: int) -> Expr:
    """A known integer."""
    return Expr("number", number=value)


def symbol(name: str) -> Expr:
    """An unknown: an argument, ``program_id(0)``, a value read from memory."""
    return Expr("symbol", name=name)


ZERO, ONE = number(0), number(1)


def build(op: str, *args: Expr) -> Expr:
    """An operation on expressions, folded where its result is plain."""
    if all(arg.op == "number" for arg in args):
        folded = Expr(op, args).value({})
        if folded is not None:
            return number(folded)
    if op == "select":
        return args[1] if args[1] == args[2] else Expr(op, args)
    left, right = args[0], args[1]
    if left == right and op in ("min", "max"):
        return left
    if left == right and op == "-":
        return ZERO
    if right == ZERO and op in ("+", "-"):
        return left
    if left == ZERO and op == "+":
        return right
    if right == ONE and op in ("*", "//", "cdiv"):
        return left
    if left == ONE and op == "*":
        return right
    if ZERO in (left, right) and op == "*":
        return ZERO
    return Expr(op, args)


_AST_OPS: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


def affine(map_text: str, operands: Sequence[Expr]) -> list[Expr]:
    """Results of ``affine_map<(d0)[s0] -> (...)>`` applied to operands: dimensions first, then symbols.

    Raises ValueError if the text is not an affine map (MLIR, "Affine Dialect").
    """
    inputs, arrow, outputs = map_text.removeprefix("affine_map<").removesuffix(">").partition("->")
    if not arrow:
        raise ValueError(f"not an affine map: {map_text!r}")
    names = inputs.replace("(", " ").replace(")", " ").replace("[", " ").replace("]", " ").replace(",", " ").split()
    known = dict(zip(names, operands, strict=False))
    python = outputs.replace("floordiv", "//").replace("ceildiv", "@").replace("mod", "%").strip()
    body = ast.parse(python, mode="eval").body
    results = body.elts if isinstance(body, ast.Tuple) else [body]
    return [_from_ast(node, known) for node in results]


def _from_ast(node: ast.expr, known: Mapping[str, Expr]) -> Expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return number(node.value)
    if isinstance(node, ast.Name):
        return known.get(node.id, symbol(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return build("*", number(-1), _from_ast(node.operand, known))
    if isinstance(node, ast.BinOp):
        name = "cdiv" if isinstance(node.op, ast.MatMult) else _AST_OPS[type(node.op)]
        return build(name, _from_ast(node.left, known), _from_ast(node.right, known))
    raise ValueError(f"not an affine expression: {ast.dump(node)}")


@dataclass(frozen=True)
class Range:
    """The values that a loop's variable takes: ``trips`` of them, from ``low`` on by ``step``."""

    variable: str
    low: Expr
    step: Expr
    trips: Expr

    def __str__(self) -> str:
        return shown(self.trips)


def loop_range(variable: str, low: Expr, high: Expr, step: Expr) -> Range:
    """The range of ``for variable in range(low, high, step)``, step positive."""
    return Range(variable, low, step, build("max", build("cdiv", build("-", high, low), step), ZERO))


def unknown_range(name: str) -> Range:
    """The range of a loop that isn't a ``for``: so many trips, whatever ``name`` says."""
    return Range("", ZERO, ONE, symbol(name))


@dataclass(frozen=True)
class Term:
    """``number`` times the trips of the loops around what is counted, from the outside in."""

    number: float
    around: tuple[Range, ...] = ()


#: Loop trips that are gone through one by one before a count is given up as unknown.
_PATIENCE = 200_000


class Count:
    """How often something happens, or how many bytes it moves, in one program: a sum of terms."""

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        self._sum: dict[tuple[Range, ...], float] = {}
        for term in terms:
            self.add(term)

    def add(self, term: Term) -> None:
        """Add a term, those of its loops multiplied out that are known and that no loop inside depends on."""
        total = term.number
        kept: list[Range] = []
        for index, one in enumerate(term.around):
            if one.trips.op == "number" and not _depends(term.around[index + 1 :], one.variable):
                total *= one.trips.number
            else:
                kept.append(one)
        key = tuple(kept)
        self._sum[key] = self._sum.get(key, 0) + total

    @property
    def terms(self) -> list[Term]:
        """The terms with equal loops added up, the known part first."""
        return [Term(n, key) for key, n in sorted(self._sum.items(), key=lambda item: len(item[0])) if n]

    def value(self, known: Mapping[str, int]) -> float | None:
        """The total, given values of the unknowns; None if one is missing, or if it takes too many trips to tell."""
        total = 0.0
        patience = [_PATIENCE]
        for term in self.terms:
            times = _times(term.around, known, patience)
            if times is None:
                return None
            total += term.number * times
        return total

    def symbols(self) -> set[str]:
        """Names of the unknowns."""
        ranges = [one for term in self.terms for one in term.around]
        names = {name for one in ranges for part in (one.low, one.step, one.trips) for name in part.symbols()}
        return names - {one.variable for one in ranges}

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __str__(self) -> str:
        texts = []
        for term in self.terms:
            factor = f"{term.number:,.0f}" if term.number == int(term.number) else f"{term.number:,.1f}"
            texts.append(" x ".join([factor, *(f"[{one}]" for one in term.around)]))
        return " + ".join(texts) or "0"


def _depends(ranges: Iterable[Range], variable: str) -> bool:
    return any(variable in part.symbols() for one in ranges for part in (one.low, one.step, one.trips))


def _times(around: tuple[Range, ...], known: Mapping[str, int], patience: list[int]) -> int | None:
    """How often the body of nested loops runs; a loop that those inside depend on is gone through trip by trip."""
    if not around:
        return 1
    first, inner = around[0], around[1:]
    trips = first.trips.value(known)
    if trips is None or trips <= 0:
        return None if trips is None else 0
    if not _depends(inner, first.variable):
        times = _times(inner, known, patience)
        return None if times is None else trips * times
    low, step = first.low.value(known), first.step.value(known)
    patience[0] -= trips
    if low is None or step is None or patience[0] < 0:
        return None
    each = [_times(inner, {**known, first.variable: low + trip * step}, patience) for trip in range(trips)]
    known_each = [times for times in each if times is not None]
    return sum(known_each) if len(known_each) == trips else None


def shown(trips: Expr) -> str:
    """A trip count for reading: never negative, so ``max(x, 0)`` is shown as ``x``."""
    return str(trips.args[0] if trips.op == "max" and trips.args[1] == ZERO else trips)
