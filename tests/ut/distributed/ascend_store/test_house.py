"""The house's rules, read off the source: no wait without an end, and arrows between the rooms that run one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
POOL = ROOT / "vllm_ascend_ext" / "kv_pool"

BLOCKING = {"wait", "join", "get", "recv", "recv_multipart", "recv_string", "recv_pyobj", "acquire", "poll", "accept"}
"""Methods that wait for ever when they are called without an argument."""

ZMQ_RECEIVES = {"recv", "recv_multipart", "recv_string", "recv_pyobj"}

BOUNDED = {
    ("calls.py", "self.wait()"): "Call.wait ends at the call's own deadline",
}
"""(file, code): why it can't hang."""

FLOORS = {
    "errors": 1,
    "clock": 1,
    "fence": 1,
    "observe": 1,
    "keys": 1,
    "config": 2,
    "requests": 2,
    "lookup": 2,
    "backend": 2,
    "groups": 2,
    "calls": 2,
    "checksum": 2,
    "layout": 2,
    "coordinator": 3,
    "token_database": 3,
    "hits": 3,
    "jobs": 3,
    "orders": 3,
    "reuse": 3,
    "shards": 3,
    "trust": 3,
    "outcomes": 3,
    "transfer": 4,
    "scheduler": 4,
    "layerwise": 5,
    "worker": 6,
    "factory": 7,
    "engine_setup": 7,
    "connector": 7,
    "metrics": 7,
    "__main__": 7,
}
"""Modules and packages of kv_pool; the longest name that fits counts."""


def modules(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def unbounded_waits(source):
    """The code of each call in ``source`` that may wait for ever."""
    found = []
    tree = ast.parse(source)
    constants = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        code = ast.unparse(node)
        if code == "select.poll()":  # makes a poller
            continue
        arguments = [ast.unparse(argument) for argument in [*node.args, *(k.value for k in node.keywords)]]
        arguments = [constants.get(argument, argument) for argument in arguments]
        bare = not arguments or arguments == ["None"] or arguments == ["True"]
        if (
            (isinstance(node.func, ast.Attribute) and name in BLOCKING and bare)
            or (name in ZMQ_RECEIVES and arguments and not any("NOBLOCK" in a or "DONTWAIT" in a for a in arguments))
            or (name in ("flock", "lockf") and not any("LOCK_NB" in a or "LOCK_UN" in a for a in arguments))
            or (name == "select" and len(node.args) == 3 and not node.keywords)
            or (name == "wait_for" and len(arguments) < 2)
        ):
            found.append(code)
    return found


@pytest.mark.parametrize("path", modules(POOL), ids=lambda path: str(path.relative_to(POOL)))
def test_every_wait_in_the_pool_has_an_end(path):
    file = str(path.relative_to(POOL))
    waits = [code for code in unbounded_waits(path.read_text()) if (file, code) not in BOUNDED]
    assert not waits, f"{file}: {waits} may wait for ever"


@pytest.mark.parametrize(
    "code",
    [
        "event.wait()",
        "thread.join()",
        "queue.get()",
        "queue.get(True)",
        "queue.get(block=True)",
        "event.wait(timeout=None)",
        "event.wait(None)",
        "lock.acquire()",
        "socket.recv()",
        "socket.recv_multipart()",
        "socket.recv_multipart(copy=False)",
        "poller.poll()",
        "process.wait()",
        "condition.wait_for(lambda: done)",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "select.select([a], [], [])",
        "listener.accept()",
    ],
)
def test_the_rule_finds_what_may_wait_for_ever(code):
    assert unbounded_waits(f"def f():\n    while True:\n        x = [{code}]\n") == [code]


@pytest.mark.parametrize(
    "code",
    [
        "event.wait(1.0)",
        "','.join(names)",
        "counts.get('a')",
        "queue.get(timeout=1)",
        "queue.get(True, 1)",
        "lock.acquire(timeout=1)",
        "socket.recv_multipart(zmq.NOBLOCK)",
        "NOW = zmq.NOBLOCK\nsocket.recv(NOW, copy=False)",
        "poller.poll(10)",
        "deadline.wait_for(condition, lambda: done)",
        "condition.wait_for(lambda: done, 1)",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "select.select([a], [], [], 1)",
    ],
)
def test_the_rule_leaves_what_ends(code):
    assert unbounded_waits(code) == []


def test_no_exception_to_the_rule_is_out_of_date():
    for file, code in BOUNDED:
        assert code in unbounded_waits((POOL / file).read_text())


# -- floors ------------------------------------------------------------------------------------------------------------


def imports(path):
    """Every module that ``path`` imports, wherever in it, by its full name."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            inside = {f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}")}
            names |= inside
            if len(inside) < len(node.names):
                names.add(base)
    return names


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def room(name):
    """The entry of FLOORS for a module's full name; None outside kv_pool and for the package itself."""
    inside = name.removeprefix("vllm_ascend_ext.kv_pool.")
    if inside == name:
        return None
    parts = inside.split(".")
    fitting = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in FLOORS]
    assert fitting, f"{name} has no floor: say in FLOORS where it belongs"
    return fitting[0]


def full_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(POOL), ids=lambda path: str(path.relative_to(POOL)))
def test_nothing_imports_from_a_floor_above(path):
    own = room(full_name(path))
    if own is None:
        return
    above = [name for name in imports(path) if (other := room(name)) is not None and FLOORS[other] > FLOORS[own]]
    assert not above, f"{own} (floor {FLOORS[own]}) imports {above}"


def test_no_imports_go_in_a_circle():
    graph = {
        full_name(path): {name for name in imports(path) if is_module(name) and name != full_name(path)}
        for path in modules(POOL)
    }
    assert circles(graph) == []


def circles(graph):
    """Each circle of ``graph`` that a walk meets, as the names on the way."""
    found, done = [], set()

    def walk(name, way):
        if name in way:
            found.append([*way[way.index(name) :], name])
            return
        if name in done:
            return
        for other in sorted(graph.get(name, ())):
            walk(other, [*way, name])
        done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


FORBIDDEN = {
    "vllm_ascend_ext": {"faultinject", "fixtures", "tests"},
    "faultinject": {"vllm_ascend_ext", "fixtures", "tests", "vllm"},
    "fixtures": {"tests", "vllm"},
}


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_arrows_between_packages_run_one_way(package):
    wrong = {
        full_name(path): sorted(bad)
        for path in modules(ROOT / package)
        if (bad := {name for name in imports(path) if name.split(".")[0] in FORBIDDEN[package]})
    }
    assert not wrong


def test_only_the_connector_imports_vllm():
    who = {full_name(path) for path in modules(POOL) if any(name.split(".")[0] == "vllm" for name in imports(path))}
    assert who <= {"vllm_ascend_ext.kv_pool.connector"}


def test_the_pool_runs_without_vllm():
    """Whatever is installed, nothing that the pool imports brings vllm in."""
    rooms = [full_name(path) for path in modules(POOL) if path.name != "connector.py"]
    code = f"import sys, importlib\nfor m in {rooms}: importlib.import_module(m)\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("path", modules(POOL), ids=lambda path: str(path.relative_to(POOL)))
def test_a_module_says_first_what_it_is_for_and_is_no_longer_than_a_reader_can_hold(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.strip(" .")) > 20
    assert len(text.splitlines()) <= 520
