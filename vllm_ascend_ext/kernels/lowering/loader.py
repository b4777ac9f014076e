"""Takes from a Python file just what its kernels need, so that a kernel loads where its project doesn't.

A kernel file imports the serving stack that launches it; the kernel itself needs Triton, a few constants and helper
functions. So only those top-level statements run that the wanted name leads to, in the order of the file. An import
that fails leaves a note in place of its names, and matters only if the kernel really uses one.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Names under which projects pass Triton on, and what they are here; a project's own switch would look for a device.
_TRITON_REEXPORTS = {"triton": "triton", "tl": "triton.language"}


class LoadError(ValueError):
    """The file or the name in it can't be loaded; the message is one line."""


@dataclass(frozen=True)
class Missing:
    """Stands for a name whose import or definition failed, and says why."""

    name: str
    reason: str


class Loader:
    """Loads names from files on demand; each file's statements run at most once.

    ``roots`` are folders in which modules are looked for besides the one that holds a file's own package.
    """

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        self.roots = tuple(roots)
        self._files: dict[Path, _File] = {}

    def load(self, path: Path, name: str, definition: int = 0) -> Any:
        """The object called ``name`` in the file; LoadError if there is none or its definition fails.

        ``definition`` says which, where the file defines a function of that name several times: 1 for the first one,
        whatever the conditions around it; 0 for the one that the file's own conditions choose.
        """
        file = self._file(path)
        if definition:
            file.choose(name, definition)
        value = file.get(name)
        if isinstance(value, Missing):
            raise LoadError(f"{path}: {name} can't be loaded: {value.reason}")
        return value

    def defines(self, path: Path, name: str) -> bool:
        """Whether a top-level statement of the file defines ``name``."""
        return name in self._file(path).definitions

    def kernels(self, path: Path) -> list[str]:
        """Names of the top-level functions of the file that are decorated with ``triton.jit``."""
        found = {
            node.name: None
            for statement in self._file(path).statements
            for node in _scope(statement)
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
        }
        return list(found)

    def parameters(self, path: Path, kernel: str) -> list[str]:
        """Parameters of a function of the file, as the source writes them."""
        for statement in self._file(path).statements:
            for node in _scope(statement):
                if isinstance(node, ast.FunctionDef) and node.name == kernel:
                    return [ast.unparse(argument) for argument in (*node.args.args, *node.args.kwonlyargs)]
        return []

    def missing(self, path: Path, name: str) -> list[Missing]:
        """What the function ``name`` uses that couldn't be loaded."""
        file = self._file(path)
        used = [n for i in file.definitions.get(name, []) for n in _names_used(file.statements[i], False)]
        return [value for n in dict.fromkeys(used) if isinstance(value := file.namespace.get(n), Missing)]

    def _file(self, path: Path) -> _File:
        path = path.resolve()
        if path not in self._files:
            self._files[path] = _File(path, self)
        return self._files[path]


class _File:
    """One source file: its top-level statements, what each defines, and the namespace in which they run."""

    def __init__(self, path: Path, loader: Loader) -> None:
        try:
            source = path.read_text()
            self.statements = ast.parse(source, str(path)).body
        except OSError as error:
            raise LoadError(f"{path}: {error.strerror}") from None
        except SyntaxError as error:
            raise LoadError(f"{path} is not a Python file: {error.msg} at line {error.lineno}") from None
        except ValueError as error:  # not text, or a null character in it
            raise LoadError(f"{path} is not a Python file: {error}") from None
        self._path, self._loader = path, loader
        self._flags = _future_flags(self.statements)
        self._root, self._package = _package_of(path)
        name = f"{self._package}.{path.stem}" if self._package else path.stem
        self.namespace: dict[str, Any] = {"__name__": name, "__file__": str(path), "__builtins__": builtins}
        self.definitions: dict[str, list[int]] = {}
        for index, statement in enumerate(self.statements):
            for defined in dict.fromkeys(_names_defined(statement)):
                self.definitions.setdefault(defined, []).append(index)
        self._done: set[int] = set()

    def get(self, name: str) -> Any:
        if name not in self.definitions:
            raise LoadError(f"{self._path} has no top-level {name!r}")
        for index in sorted(self._needed(name)):
            self._run(index, name)
        return self.namespace[name]

    def choose(self, name: str, definition: int) -> None:
        """Leave one definition of the function ``name``, the one of that number; LoadError if there are fewer."""
        found = [(index, node) for index in self.definitions.get(name, []) for node in self._functions(index, name)]
        if definition > len(found):
            raise LoadError(f"{self._path} defines {name} {len(found)} times; there is no definition {definition}")
        chosen, wanted = found[definition - 1]
        branch = ast.If(ast.Constant(True), _leading_to(self.statements[chosen], wanted), [])
        for index in {index for index, _ in found}:
            statement = branch if index == chosen else ast.Pass()
            self.statements[index] = ast.fix_missing_locations(ast.copy_location(statement, self.statements[index]))

    def _functions(self, index: int, name: str) -> list[ast.FunctionDef]:
        nodes = _scope(self.statements[index])
        return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]

    def _needed(self, name: str) -> set[int]:
        """Indexes of the statements that ``name`` leads to."""
        needed: set[int] = set()
        wanted = [name]
        while wanted:
            for index in self.definitions.get(wanted.pop(), []):
                if index not in needed:
                    needed.add(index)
                    wanted += self._uses(self.statements[index])
        return needed

    def _uses(self, statement: ast.stmt) -> list[str]:
        """Names that running a statement needs; annotations are not run where the file postpones them."""
        return _names_used(statement, with_annotations=not self._flags)

    def _run(self, index: int, wanted: str) -> None:
        if index in self._done:
            return
        self._done.add(index)
        statement = self.statements[index]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement)
            return
        try:
            self._execute(self._branch(statement) if isinstance(statement, ast.If) else [statement])
        except Exception as error:  # any project code may run here
            for name in _names_defined(statement):
                reason = f"line {statement.lineno} raises {type(error).__name__}: {error}"
                self.namespace.setdefault(name, Missing(name, self._blame(statement) or reason))

    def _execute(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            _remove_tuners(statement)
        module = ast.Module(statements, [])
        exec(compile(module, str(self._path), "exec", self._flags, dont_inherit=True), self.namespace)

    def _branch(self, statement: ast.If) -> list[ast.stmt]:
        """The branch taken; if the condition needs what is missing, the last one, where newer versions stand."""
        try:
            code = compile(ast.Expression(statement.test), str(self._path), "eval", self._flags, dont_inherit=True)
            test = eval(code, self.namespace)
        except Exception:  # any project code may run here
            test = not statement.orelse
        return statement.body if test else statement.orelse

    def _blame(self, node: ast.AST) -> str:
        """The failed import behind a failed statement, if there is one."""
        values = (self.namespace.get(name) for name in _names_used(node, not self._flags))
        return next((value.reason for value in values if isinstance(value, Missing)), "")

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                value = _module(alias.name if alias.asname else name, then=alias.name)
            else:
                name = alias.asname or alias.name
                value = self._from(statement, alias.name)
            self.namespace[name] = value

    def _from(self, statement: ast.ImportFrom, name: str) -> Any:
        """``from module import name``: an imported module, then a file beside this one, then an installed module."""
        module = statement.module or ""
        if statement.level:
            parts = self._package.split(".")[: len(self._package.split(".")) - statement.level + 1]
            module = ".".join([*parts, module] if module else parts)
        if name in _TRITON_REEXPORTS and not module.startswith("triton"):
            return importlib.import_module(_TRITON_REEXPORTS[name])
        if name == "HAS_TRITON":
            return True
        if module not in sys.modules:
            for path in self._beside(f"{module}.{name}".replace(".", "/"), module.replace(".", "/")):
                if self._loader.defines(path, name):
                    return self._loader._file(path).get(name)
        found = _module(module, then=module)
        if isinstance(found, Missing):
            return Missing(name, found.reason)
        try:
            return getattr(found, name)
        except AttributeError:
            return _module(f"{module}.{name}", then=f"{module}.{name}")

    def _beside(self, *modules: str) -> Iterator[Path]:
        for root in (self._root, *self._loader.roots):
            for module in modules:
                for path in (root / f"{module}.py", root / module / "__init__.py"):
                    if path.is_file():
                        yield path


def _module(name: str, then: str) -> Any:
    """The installed module ``name`` after importing ``then``, which may be one of its parts; Missing if that fails."""
    try:
        importlib.import_module(then)
    except Exception as error:  # an installed module may fail in any way where its device is missing
        return Missing(name, f"import of {then} fails: {error}")
    return sys.modules[name]


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder that holds the file's outermost package, and the dotted name of the package."""
    folder, parts = path.parent, []
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(parts))


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that belong to the scope it stands in, not to a function's or class's own."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from _scope(child)


def _names_defined(statement: ast.stmt) -> list[str]:
    names = []
    for node in _scope(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif root := _changed(node):
            names.append(root)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [
                a.asname or (a.name if isinstance(node, ast.ImportFrom) else a.name.partition(".")[0])
                for a in node.names
            ]
    return names


def _changed(node: ast.AST) -> str:
    """The name that ``name.attr = x``, ``name[key] = x`` or the statement ``name.method(x)`` changes; else ""."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        value: ast.expr = node
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        value = node.value.func
    else:
        return ""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _names_used(tree: ast.AST, with_annotations: bool) -> list[str]:
    names, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.append(node.id)
        for field, value in ast.iter_fields(node):
            if with_annotations or field not in ("annotation", "returns"):
                todo += [
                    child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
                ]
    return names


def _future_flags(statements: list[ast.stmt]) -> int:
    """Compiler flags that postpone the evaluation of annotations, if the file asks for that."""
    imports = (s for s in statements if isinstance(s, ast.ImportFrom) and s.module == "__future__")
    postponed = any(alias.name == "annotations" for statement in imports for alias in statement.names)
    return __future__.annotations.compiler_flag if postponed else 0


def _leading_to(statement: ast.stmt, wanted: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of the branch that holds ``wanted``, without the conditions around them."""
    if statement is wanted:
        return [statement]
    for block in _blocks(statement):
        if any(wanted in _scope(inner) for inner in block):
            return [s for inner in block for s in (_leading_to(inner, wanted) if wanted in _scope(inner) else [inner])]
    return [statement]


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement: its branches, what it tries, and what it does if that fails."""
    for holder in (statement, *getattr(statement, "handlers", [])):
        for name in ("body", "orelse", "finalbody"):
            yield getattr(holder, name, [])


def _remove_tuners(statement: ast.stmt) -> None:
    """Leave kernels without the decorators around ``triton.jit``: tuners ask a device; a case says what they choose."""
    for node in _scope(statement):
        if isinstance(node, ast.FunctionDef):
            jit = next((i for i, decorator in enumerate(node.decorator_list) if _is_jit(decorator)), 0)
            node.decorator_list = node.decorator_list[jit:]


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(called, ast.Attribute) and called.attr == "jit") or (
        isinstance(called, ast.Name) and called.id == "jit"
    )
