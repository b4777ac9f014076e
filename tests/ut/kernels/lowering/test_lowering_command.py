"""The command line without the compiler: what it refuses and in which words, what it keeps, reports side by side."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_ext.kernels.lowering import __main__ as command_line
from vllm_ascend_ext.kernels.lowering import compare, toolchain
from vllm_ascend_ext.kernels.lowering.cases import A2, Case
from vllm_ascend_ext.kernels.lowering.check import Job, Report
from vllm_ascend_ext.kernels.lowering.compile import Setting
from vllm_ascend_ext.kernels.lowering.jobs import UsageError
from vllm_ascend_ext.kernels.lowering.toolchain import Toolchain

FLOATS = {"x_ptr": "*fp32", "n": "i32"}


def test_a_version_that_was_not_tested_is_warned_of() -> None:
    path = Path("anywhere")
    tested = Toolchain(path, path, path, tuple((name, versions[0]) for name, versions in toolchain.TESTED.items()))
    assert tested.warnings == []
    other = Toolchain(path, path, path, (("triton-ascend", "3.2.2"), ("ascendnpu-ir", "1.2.0")))
    assert len(other.warnings) == 1
    assert other.warnings[0].startswith("triton-ascend 3.2.2 was not tested (tested: 3.2.0)")


def test_an_unsupported_platform_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert command_line.main(["check", __file__]) == command_line.CANNOT_RUN
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "not for linux on riscv64" in printed


def test_a_missing_wheel_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toolchain, "TESTED", {"no-such-wheel": ("1",)})
    assert command_line.main(["check", __file__]) == command_line.CANNOT_RUN
    printed = capsys.readouterr().err
    assert printed == f"lowering: no-such-wheel is not installed in {sys.prefix}. {toolchain._HINT}\n"


def test_explain_tells_the_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", "retried"]) == command_line.OK
    assert "switched optimisations off" in " ".join(capsys.readouterr().out.split())
    assert command_line.main(["explain", "nothing"]) == command_line.USAGE


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolchain that is found and never run: a wrong command line is refused before."""
    path = Path("anywhere")
    monkeypatch.setattr(command_line, "_tools", lambda: Toolchain(path, path, path, ()))


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["{file}"], "has no case in LOWERING_CASES. Its kernels are: k. Name one as k.py:KERNEL"),
        (["{file}:k"], "Parameters of k: x_ptr, n, BLOCK: tl.constexpr."),
        (["{file}:other"], "has no kernel 'other'. Its kernels are: k."),
        (["{file}", "--arg", "x_ptr=*fp32"], "argument types belong to one kernel"),
        (["{file}:k", "--arg", "x_ptr=float"], "argument 'x_ptr': unknown type 'float'"),
        (["{file}:k", "--arg", "x_ptr"], "--arg 'x_ptr': write NAME=VALUE"),
        (["{file}:k", "--arg", "x_ptr=*fp32", "--value", "x_ptr=many"], "a run-time value is a whole number"),
        (["{file}:k", "--arg", "x_ptr=*fp32", "--target", "H100"], "target 'H100': allowed are A2"),
        (["{file}:k", "--arg", "x_ptr=*fp32", "--only", "zzz"], "no case has 'zzz' in its title"),
        (
            ["{file}:k", "--arg", "x_ptr=*fp32", "--allow", "slow=so be it"],
            "k allows ['slow']; the kinds of findings are",
        ),
        (["{folder}"], "declares LOWERING_CASES"),
        (["{plain}"], "plain.py has no kernel: no function in it is decorated with @triton.jit"),
        (["{plain}:f"], "plain.py has no kernel: no function"),
        (["{broken}"], "broken.py is not a Python file: '(' was never closed at line 1"),
        (["{broken}:k"], "broken.py is not a Python file"),
        (["{broken.parent}"], "broken.py is not a Python file"),
        (["{file}:k", "--arg", "n=i32", "--jobs", "0"], "--jobs 0: at least 1"),
        (["{file}:k", "--arg", "n=i32", "--timeout", "0"], "--timeout 0: a number of seconds above 0"),
        (["{file}:k", "--arg", "n=i32", "--const", "n=1"], "['n'] is both an argument and a constant"),
        (["{file}:k k", "--arg", "n=i32"], "'k k' is not the name of a function"),
        (["{file}:k", "--arg", "n=i32", "--value", "m=1"], "values names ['m']"),
        (["{file}:k", "--arg", "n=i32", "--option", "multibuffer=False"], "options has 'multibuffer'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k.py"
    path.write_text("import triton\n@triton.jit\ndef k(x_ptr, n, BLOCK: tl.constexpr):\n    pass\n")
    (tmp_path / "plain.py").write_text("def f():\n    pass\n")
    broken = tmp_path / "broken" / "broken.py"
    broken.parent.mkdir()
    broken.write_text("def k(x_ptr, n:\n    pass\n")
    paths = {"file": path, "folder": tmp_path, "plain": tmp_path / "plain.py", "broken": broken}
    given = [argument.format(**paths) for argument in arguments]
    assert command_line.main(["check", *given]) == command_line.USAGE
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


@pytest.mark.usefixtures("tools")
def test_a_declaration_that_is_no_case_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.py"
    path.write_text("LOWERING_CASES = lambda: ['k']\n")
    assert command_line.main(["check", str(path)]) == command_line.USAGE
    assert "LOWERING_CASES holds a str, and may hold Case objects only" in capsys.readouterr().err


@pytest.mark.usefixtures("tools")
def test_two_cases_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports, comparisons and kept files go by it."""
    path = tmp_path / "k.py"
    path.write_text(
        "from vllm_ascend_ext.kernels.lowering.cases import Case\n"
        "LOWERING_CASES = [Case(kernel='k', signature={}, constants={'B': b}) for b in (1, 2)]\n"
    )
    assert command_line.main(["check", str(path)]) == command_line.USAGE
    assert "k on Ascend910B3, multi-buffering on is asked for twice" in capsys.readouterr().err


def test_the_files_of_two_kernels_of_one_name_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for each file, below the folder that holds them all."""

    def leave(job: Job, tools: Toolchain, folder: Path, at_stage: Callable[[str], None]) -> Report:
        (folder / "left").write_text(job.path.parent.name)
        return Report(job)

    monkeypatch.setattr(command_line.check, "run", leave)
    files = [tmp_path / folder / "k.py" for folder in ("a", "b")]
    jobs = [Job(file, Case(kernel="k", signature=FLOATS), Setting(A2, True)) for file in files]
    options = argparse.Namespace(keep=tmp_path / "kept", jobs=1, timeout=60.0)
    command_line.run_all(jobs, Toolchain(tmp_path, tmp_path, tmp_path, ()), options)
    name = "k-Ascend910B3_multi-buffering_on/left"
    assert [(tmp_path / "kept" / folder / "k" / name).read_text() for folder in ("a", "b")] == ["a", "b"]


# ---------------------------------------------------------------- two reports side by side


def _result(kernel: str, bits: int, **launch: float | None) -> dict[str, Any]:
    counts = {name: {"formula": "", "first_program": None, "launch": value} for name, value in launch.items()}
    return {
        **{"kernel": kernel, "case": "", "target": A2, "multibuffer": True, "counts": counts},
        **{"unified_buffer_bits": {"required": bits}, "findings": [{"severity": "error"}, {"severity": "note"}]},
    }


def test_a_comparison_adds_up_the_kernels_of_an_operation() -> None:
    ours = {
        "results": [
            _result("fold", 1000, element_trips=0, transfers=19, bytes_in=64, bytes_out=8),
            _result("combine", 500, element_trips=21, transfers=3, bytes_in=8, bytes_out=None),
        ]
    }
    theirs = {"results": [_result("ranks", 2000, element_trips=32, transfers=2, bytes_in=6, bytes_out=1)]}
    pairs = compare.read_pairs(["# a comment", "", "both | fold + combine | ranks  # and another"])
    assert compare.table(pairs, ours, theirs).splitlines()[2] == (
        "| both | 1,000 / 2,000 | 21 / 32 | 22 / 2 | ? / 7 | 2 / 1 |"
    )
    with pytest.raises(UsageError, match="the report has no case 'scan'"):
        compare.table(compare.read_pairs(["both | scan | ranks"]), ours, theirs)
    with pytest.raises(UsageError, match="line 1 of the pairs: 'both' is not"):
        compare.read_pairs(["both"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "is no report of this tool in its format 1"),
        ("{}", "is no report"),
    ],
)
def test_a_comparison_says_what_is_wrong_with_a_file(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    assert command_line.main(["compare", str(path), str(path), "--pairs", str(path)]) == command_line.USAGE
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
