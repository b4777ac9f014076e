"""What is loaded of a kernel's file, where its project isn't installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_ascend_ext.kernels.lowering.loader import Loader, LoadError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package whose kernel file imports what isn't installed, and whose kernels need little of it."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')\n")
    (package / "helpers.py").write_text("import not_there\n\nWIDTH = 32\n\n\ndef twice(x):\n    return x * WIDTH\n")
    (package / "kernels.py").write_text(
        "from __future__ import annotations\n"
        "import not_there\n"
        "from not_there.deep import thing, HAS_TRITON\n"
        "from pkg.helpers import twice\n"
        "from .helpers import WIDTH as W\n"
        "SIZES = []\n"
        "SIZES.append(W)\n"
        "BROKEN = not_there.value\n"
        "if not_there.version() > 1:\n    MODE = 'old'\nelse:\n    MODE = 'new'\n"
        "@not_there.tune\n@triton.jit\ndef tuned(x: not_there.Type):\n    return twice(x) + thing\n"
        "def plain(x: not_there.Type):\n    return twice(x), MODE, SIZES, HAS_TRITON\n"
        "def needy():\n    return BROKEN\n"
    )
    return package / "kernels.py"


def test_only_what_a_name_needs_is_run(project: Path) -> None:
    plain = Loader().load(project, "plain")
    assert plain(2) == (64, "new", [32], True)
    assert "pkg" not in sys.modules


def test_what_is_missing_matters_only_to_what_uses_it(project: Path) -> None:
    loader = Loader()
    assert [missing.name for missing in loader.missing(project, "plain")] == []
    needy = loader.load(project, "needy")
    assert needy().reason == "import of not_there fails: No module named 'not_there'"
    assert [missing.name for missing in loader.missing(project, "needy")] == ["BROKEN"]
    with pytest.raises(LoadError, match="BROKEN can't be loaded: import of not_there fails"):
        loader.load(project, "BROKEN")
    assert loader.kernels(project) == ["tuned"]
    assert loader.parameters(project, "plain") == ["x: not_there.Type"]


def test_imports_are_found_in_further_roots(project: Path, tmp_path: Path) -> None:
    further = tmp_path / "further"
    (further / "not_there").mkdir(parents=True)
    (further / "not_there" / "deep.py").write_text("thing = 5\n")
    loader = Loader([further])
    user = project.with_name("user.py")
    user.write_text("from not_there.deep import thing\n")
    assert loader.load(user, "thing") == 5


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """A file that defines a kernel for two versions of something, with a tuner around the newer one."""
    path = tmp_path / "twice.py"
    path.write_text(
        "class triton:\n"
        "    jit = staticmethod(lambda function: function)\n"
        "if not_there():\n"
        "    WIDTH = 1\n"
        "    @triton.jit\n"
        "    def kernel(x):\n"
        "        return x + WIDTH\n"
        "else:\n"
        "    WIDTH = 2\n"
        "    try:\n"
        "        FACTOR = 10\n"
        "        @needs_a_device()\n"
        "        @triton.jit\n"
        "        def kernel(x):\n"
        "            return x * FACTOR + WIDTH\n"
        "    except ImportError:\n"
        "        kernel = None\n"
    )
    return path


@pytest.mark.parametrize(("definition", "value"), [(1, 6), (2, 52), (0, 52)])
def test_a_case_chooses_among_definitions(twice: Path, definition: int, value: int) -> None:
    """Each with what its own branch defines; no tuner is left anywhere."""
    assert Loader().load(twice, "kernel", definition)(5) == value


def test_a_definition_that_is_not_there_is_refused(twice: Path) -> None:
    loader = Loader()
    with pytest.raises(LoadError, match="defines kernel 2 times; there is no definition 3"):
        loader.load(twice, "kernel", 3)
    assert loader.kernels(twice) == ["kernel"]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [(None, "x", "No such file"), ("def (", "x", "is not a Python file"), ("y = 1\n", "x", "has no top-level 'x'")],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, text: str | None, name: str, words: str) -> None:
    path = tmp_path / "file.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LoadError, match=words):
        Loader().load(path, name)
