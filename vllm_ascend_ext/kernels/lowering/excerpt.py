"""Shows the line of source that a finding is about, with the operation underlined; knows nothing of findings."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from .ir import Place

#: Operation of the IR -> the operators or the called names that it comes from.
_OPERATORS: dict[str, tuple[type[ast.operator], ...]] = {
    **dict.fromkeys(("arith.shrsi", "arith.shrui"), (ast.RShift,)),
    "arith.shli": (ast.LShift,),
    **dict.fromkeys(("arith.remsi", "arith.remui"), (ast.Mod,)),
    **dict.fromkeys(("arith.divsi", "arith.divui", "arith.floordivsi"), (ast.FloorDiv, ast.Div, ast.Mod)),
    **dict.fromkeys(("arith.addi", "arith.addf"), (ast.Add,)),
    **dict.fromkeys(("arith.subi", "arith.subf"), (ast.Sub,)),
    **dict.fromkeys(("arith.muli", "arith.mulf"), (ast.Mult,)),
    "arith.andi": (ast.BitAnd,),
    "arith.ori": (ast.BitOr,),
}
_CALLS = {
    "tt.load": ("load",),
    "tt.store": ("store",),
    **dict.fromkeys(("tt.atomic_rmw", "tt.atomic_cas"), ("atomic_",)),
    "tt.scan": ("cumsum", "cumprod", "associative_scan"),
    "tt.reduce": ("sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum"),
    "tt.gather": ("gather",),
    "tt.histogram": ("histogram",),
    "arith.select": ("where",),
}


def underlined(place: Place, operation: str = "") -> tuple[str, str] | None:
    """The line at ``place`` and a line of ``^`` under what ``operation`` was made of; None if it can't be read."""
    lines = _lines(place.file)
    if not 1 <= place.line <= len(lines):
        return None
    line = lines[place.line - 1]
    start, end = _span(place, operation) or (len(line) - len(line.lstrip()), len(line.rstrip()))
    return line, " " * start + "^" * max(1, end - start)


def snippet(place: Place, operation: str) -> str:
    """The source text that ``operation`` was made of, as far as it is on its line; empty if it can't be told."""
    lines = _lines(place.file)
    span = _span(place, operation) if 1 <= place.line <= len(lines) else None
    return lines[place.line - 1][slice(*span)] if span else ""


@functools.lru_cache(maxsize=64)
def _lines(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return ()


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("\n".join(_lines(file)))
    except SyntaxError:
        return None


def _span(place: Place, operation: str) -> tuple[int, int] | None:
    """Columns of the smallest fitting expression that holds the place, as far as they are on its line."""
    spans = [span for node in _fitting(place, operation) if (span := _on_line(node, place)) is not None]
    return min(spans, key=lambda span: span[1] - span[0], default=None)


def _fitting(place: Place, operation: str) -> Iterator[ast.expr]:
    tree = _tree(place.file)
    for node in ast.walk(tree) if tree is not None else ():
        if _fits(node, operation) and isinstance(node, ast.expr):
            yield node


def _fits(node: ast.AST, operation: str) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS.get(operation, ()))
    if isinstance(node, ast.Compare):
        return operation in ("arith.cmpi", "arith.cmpf")
    if isinstance(node, ast.Call) and operation in _CALLS:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name.startswith(_CALLS[operation])
    return False


def _on_line(node: ast.expr, place: Place) -> tuple[int, int] | None:
    last_line, last_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    if not node.lineno <= place.line <= last_line:
        return None
    if node.lineno == place.line and node.col_offset > place.column:
        return None
    if last_line == place.line and last_column < place.column:
        return None
    line = _lines(place.file)[place.line - 1]
    start = node.col_offset if node.lineno == place.line else len(line) - len(line.lstrip())
    return start, last_column if last_line == place.line else len(line.rstrip())
