"""docs/faultinject.md tells the truth: its example is run as it stands, before and after the repair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import faultinject

PAGE = Path(__file__).parents[3] / "docs" / "faultinject.md"


def code(title: str) -> str:
    """The Python block whose first line is `# TITLE`."""
    (block,) = re.findall(rf"```python\n# {re.escape(title)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def block_with(text: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if text in block]
    return str(block)


@pytest.fixture
def broken(pytester: pytest.Pytester) -> str:
    others = "-p no:hypothesispytest -p no:asyncio -p no:timeout"  # each run would load them anew
    pytester.makeini(f"[pytest]\naddopts = {others}\nfilterwarnings = error\n")
    pytester.makepyfile(test_worker=code("test_worker.py"))
    return code("worker.py")


def test_the_example_finds_the_hangs(pytester: pytest.Pytester, broken: str) -> None:
    pytester.makepyfile(worker=broken)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    shown = re.findall(r"```text\n(.*?)\.\.\.\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in shown.splitlines()])


def test_the_repaired_example_passes(pytester: pytest.Pytester, broken: str) -> None:
    head, _, _ = broken.partition("    def serve(self):")
    pytester.makepyfile(worker=head + code("the end of worker.py, repaired"))
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["12 injections in 14 runs: 4 contained, 8 surfaced, 0 hang, *"])


def test_the_example_by_hand(pytester: pytest.Pytester) -> None:
    names = {"fi": faultinject, "pytest": pytest}
    exec(code("worker.py"), names)
    exec(block_with("fi.Session("), names)


def test_the_declaration_with_every_setting_is_accepted() -> None:
    exec(block_with("waivers="), {"fi": faultinject})


def test_every_public_name_is_documented_or_an_error() -> None:
    page = PAGE.read_text(encoding="utf-8")
    plumbing = {"DEFAULT_ACTIONS", "OUTCOMES", "Action", "Exploration", "Hit", "Injection", "Matrix", "Patch", "Plan"}
    plumbing |= {"Run", "Scenario", "Token", "Trigger", "Verdict", "patch", "replay"}
    names = {name for name in faultinject.__all__ if not issubclass_of_error(name)} - plumbing
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()


def issubclass_of_error(name: str) -> bool:
    value = getattr(faultinject, name)
    return isinstance(value, type) and issubclass(value, BaseException)
