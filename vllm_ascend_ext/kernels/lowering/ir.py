"""Reader for MLIR in its generic form: operations as a tree with types and source locations; knows no dialect.

Every MLIR tool prints the generic form when asked, and it has one shape for all dialects (MLIR Language Reference,
"Operations")::

    %3 = "arith.addi"(%1, %2) <{...}> : (i32, i32) -> i32 loc("kernel.py":12:22)
    "scf.for"(%lo, %hi, %step) ({
    ^bb0(%iv: index loc(unknown)):
      ...
    }) {attributes} : (index, index, index) -> () loc("kernel.py":11:4)

The text must be printed with ``PRINT_FLAGS``: one operation a line, SSA names unique in a function, locations inline.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: What a printing tool must be told, so that this reader understands its output.
PRINT_FLAGS = (
    "--mlir-print-op-generic",
    "--mlir-print-debuginfo",
    "--mlir-print-unique-ssa-ids",
    "--mlir-print-local-scope",
)

#: Bits of an element; anything else (pointers, handles) counts as 64.
ELEMENT_BITS = {
    **{"f64": 64, "i64": 64, "ui64": 64, "index": 64},
    **{"f32": 32, "i32": 32, "ui32": 32, "tf32": 32},
    **{"f16": 16, "bf16": 16, "i16": 16, "ui16": 16},
    **{"i8": 8, "ui8": 8, "f8E4M3FN": 8, "f8E5M2": 8, "i4": 4, "i1": 1},
}


class IRError(ValueError):
    """The text is not MLIR in generic form as ``PRINT_FLAGS`` prints it; the message gives the line."""


@dataclass(frozen=True)
class Place:
    """One position in a source file; lines and columns count from 1 and 0, as Python's do."""

    file: str
    line: int
    column: int


#: Where an operation comes from: the position itself, then that of each call it was inlined through, outwards.
Location = tuple[Place, ...]

_PLACE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_HEAD = re.compile(r'(?:(%\w+(?::\d+)?(?:, %\w+(?::\d+)?)*) = )?"([\w.$]+)"\(([^()]*)\)(?:\[[^\]]*\])?')
_BLOCK_ARGUMENT = re.compile(r"(%\w+): ")
_SHAPED = re.compile(r"(tensor|memref|vector)<((?:(?:\d+|\?)x)*)")
_SPACE = re.compile(r"address_space<(\w+)>")


def parse_location(text: str) -> Location:
    """Positions named by a ``loc(...)``, innermost first; those of the compiler's own making are left out."""
    places = (Place(m[1], int(m[2]), int(m[3])) for m in _PLACE.finditer(text))
    return tuple(place for place in places if place.line > 0)


@dataclass(frozen=True)
class Type:
    """A tensor or memref type: its dimensions (None where dynamic), element type and, for a memref, memory space."""

    dims: tuple[int | None, ...]
    element: str
    space: str = ""

    @property
    def elements(self) -> int | None:
        """Number of elements, or None if a dimension is dynamic."""
        count = 1
        for dim in self.dims:
            if dim is None:
                return None
            count *= dim
        return count

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return ELEMENT_BITS.get(self.element, 64)

    @property
    def shape(self) -> str:
        """The dimensions as MLIR writes them: ``1024``, ``8x?``."""
        return "x".join("?" if dim is None else str(dim) for dim in self.dims) or "scalar"


def parse_type(text: str) -> Type | None:
    """The shaped type that ``text`` names, or None for scalars, pointers and functions."""
    match = _SHAPED.match(text)
    if match is None:
        return None
    dims = tuple(None if dim == "?" else int(dim) for dim in match[2].split("x")[:-1])
    rest = text[match.end() :]
    element = split_top_level(rest[:-1])[0]
    space = _SPACE.search(rest)
    return Type(dims, element, space[1] if space else "")


@functools.lru_cache(maxsize=65_536)  # the types of a module's operations are few, and repeat
def split_top_level(text: str, separator: str = ",") -> tuple[str, ...]:
    """Split at ``separator`` outside brackets and strings; blanks around the parts are dropped."""
    parts, start, depth, index = [], 0, 0, 0
    while index < len(text):
        char = text[index]
        if char == '"':
            index = _end_of_string(text, index)
        elif char in "([{<":
            depth += 1
        elif char in ")]}" or (char == ">" and text[index - 1] != "-"):
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
        index += 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


def _end_of_string(text: str, start: int) -> int:
    end = text.index('"', start + 1)
    while text[end - 1] == "\\":
        end = text.index('"', end + 1)
    return end


def _end_of_bracket(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``."""
    opening, closing = text[start], {"{": "}", "(": ")"}[text[start]]
    depth, index = 0, start
    while True:
        char = text[index]
        if char == '"':
            index = _end_of_string(text, index)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return index
        index += 1


@dataclass(eq=False)
class Op:
    """One operation: names of its results and operands, properties and attributes as text, and its regions."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    parent: Op | None
    properties: str = ""
    attributes: str = ""
    operand_types: tuple[str, ...] = ()
    result_types: tuple[str, ...] = ()
    location: Location = ()
    #: Block arguments of all regions, in order.
    arguments: tuple[str, ...] = ()
    regions: list[list[Op]] = field(default_factory=list)

    def walk(self) -> Iterator[Op]:
        """This operation and all inside it, in the order of the text."""
        yield self
        for region in self.regions:
            for op in region:
                yield from op.walk()

    def ancestors(self) -> Iterator[Op]:
        """The operations that enclose this one, from the inside out."""
        op = self.parent
        while op is not None:
            yield op
            op = op.parent

    def attribute(self, name: str) -> str | None:
        """Text of a property or attribute; None if the operation has none of that name."""
        for text in (self.properties, self.attributes):
            for part in split_top_level(text):
                key, equals, value = part.partition(" = ")
                if key.strip() == name:
                    return value if equals else ""
        return None

    @property
    def symbol(self) -> str:
        """Name of the function that this operation defines or calls, without its ``@``; empty if neither."""
        text = self.attribute("sym_name") or self.attribute("callee") or ""
        return text.strip('@"')

    def operand_type(self, index: int) -> Type | None:
        """Shaped type of an operand."""
        return parse_type(self.operand_types[index])

    def result_type(self, index: int = 0) -> Type | None:
        """Shaped type of a result."""
        return parse_type(self.result_types[index]) if index < len(self.result_types) else None


class Function:
    """One function: the operation that defines it, and which operation makes each of its values."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.name = op.symbol
        self.arguments: tuple[str, ...] = op.arguments
        self.defined_by: dict[str, Op] = {}
        self.argument_of: dict[str, Op] = {}
        for inner in op.walk():
            self.defined_by.update(dict.fromkeys(inner.results, inner))
            if inner is not op:
                self.argument_of.update(dict.fromkeys(inner.arguments, inner))

    def definition(self, value: str) -> Op | None:
        """The operation that has ``value`` as a result; None for arguments of the function and of blocks."""
        return self.defined_by.get(value.partition("#")[0])

    def walk(self) -> Iterator[Op]:
        """All operations inside the function."""
        for region in self.op.regions:
            for op in region:
                yield from op.walk()


def parse(text: str) -> list[Function]:
    """All functions with a body, in the order of the text; IRError if it isn't generic MLIR."""
    top = _parse_ops(text)
    ops = (op for root in top for op in root.walk())
    return [Function(op) for op in ops if op.name in ("func.func", "tt.func") and any(op.regions)]


def module_attributes(text: str) -> str:
    """Attributes of the outermost module, as text."""
    top = _parse_ops(text)
    return top[-1].attributes if top else ""


def _parse_ops(text: str) -> list[Op]:
    top: list[Op] = []
    stack: list[Op] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith(("//", "#", "{-#")):
            continue
        if line == "}, {":
            stack[-1].regions.append([])
        elif line.startswith("^"):
            names = _BLOCK_ARGUMENT.findall(line)
            stack[-1].arguments += tuple(names)
        elif line.startswith("})"):
            _read_tail(stack.pop(), line[2:])
        else:
            match = _HEAD.match(line)
            if match is None:
                raise IRError(f"line {number} is not an operation in MLIR's generic form: {line[:120]!r}")
            op = _new_op(match, stack[-1] if stack else None)
            (stack[-1].regions[-1] if stack else top).append(op)
            rest = line[match.end() :].lstrip()
            if rest.startswith("<{"):
                end = _end_of_bracket(rest, 1)
                op.properties = rest[2:end]
                rest = rest[end + 2 :].lstrip()
            if rest.endswith("({"):
                op.regions.append([])
                stack.append(op)
            else:
                _read_tail(op, rest)
    if stack:
        raise IRError(f"the text ends inside {stack[-1].name}")
    return top


def _new_op(match: re.Match[str], parent: Op | None) -> Op:
    results = tuple(name.partition(":")[0] for name in (match[1] or "").split(", ") if name)
    operands = tuple(name for name in match[3].split(", ") if name)
    return Op(match[2], results, operands, parent)


def _read_tail(op: Op, text: str) -> None:
    """Read ``{attributes} : (types) -> types loc(...)`` into ``op``."""
    rest = text.strip()
    if rest.startswith("{"):
        end = _end_of_bracket(rest, 0)
        op.attributes = rest[1:end]
        rest = rest[end + 1 :].lstrip()
    at = rest.rfind(" loc(")
    if at >= 0:
        op.location = parse_location(rest[at:])
        rest = rest[:at]
    rest = rest.removeprefix(":").lstrip()
    end = _end_of_bracket(rest, 0)
    op.operand_types = split_top_level(rest[1:end])
    after = rest[end + 1 :].strip().removeprefix("->").strip()
    op.result_types = split_top_level(after[1:-1] if after.startswith("(") else after)
