"""The check without the compiler: symbolic counts, loading of kernel files, processes, cases, the command line."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_ext.kernels.lowering import __main__ as command_line
from vllm_ascend_ext.kernels.lowering import bound, compare, excerpt, pool, report, sweep, sweeps, toolchain
from vllm_ascend_ext.kernels.lowering.cases import A2, Case
from vllm_ascend_ext.kernels.lowering.check import Job, Report
from vllm_ascend_ext.kernels.lowering.compile import Setting
from vllm_ascend_ext.kernels.lowering.counts import Counts
from vllm_ascend_ext.kernels.lowering.findings import KINDS, Finding, Severity, allow
from vllm_ascend_ext.kernels.lowering.ir import Place
from vllm_ascend_ext.kernels.lowering.jobs import UsageError
from vllm_ascend_ext.kernels.lowering.loader import Loader, LoadError
from vllm_ascend_ext.kernels.lowering.symbolic import Count, Term, affine, build, loop_range, number, symbol
from vllm_ascend_ext.kernels.lowering.toolchain import Toolchain

# ---------------------------------------------------------------- symbolic


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 12), st.integers(0, 11))
def test_a_symbolic_loop_runs_as_often_as_python_s(n: int, block: int, grid: int, program: int) -> None:
    """The grid-stride loop over tiles, counted, against Python's own range."""
    low = build("*", symbol("program_id(0)"), number(block))
    step = build("*", symbol("grid"), number(block))
    count = Count([Term(2, (loop_range("i", low, symbol("n"), step),))])
    known = {"n": n, "grid": grid, "program_id(0)": program}
    assert count.value(known) == 2 * len(range(program * block, n, grid * block))


@given(st.integers(0, 30), st.integers(1, 5))
def test_an_inner_loop_that_depends_on_the_outer_one_is_counted_trip_by_trip(n: int, step: int) -> None:
    outer = loop_range("i", number(0), symbol("n"), number(step))
    inner = loop_range("j", symbol("i"), symbol("n"), number(1))
    expected = sum(n - i for i in range(0, n, step))
    assert Count([Term(1, (outer, inner))]).value({"n": n}) == expected


def test_known_loops_are_multiplied_out_and_unknown_ones_are_shown() -> None:
    known = loop_range("i", number(0), number(10), number(3))
    unknown = loop_range("j", number(0), symbol("n"), number(64))
    count = Count([Term(3, (known, unknown)), Term(1, (known,))])
    assert str(count) == "4 + 12 x [cdiv(n, 64)]"
    assert count.symbols() == {"n"}
    assert count.value({}) is None


def test_affine_maps_are_applied() -> None:
    text = "affine_map<(d0)[s0, s1] -> (d0 floordiv 4 + s0 * 2, (s1 mod 3) ceildiv 2)>"
    results = affine(text, [number(9), number(5), number(8)])
    assert [result.number for result in results] == [12, 1]
    with pytest.raises(ValueError, match="not an affine map"):
        affine("#map", [])


def test_a_bound_is_the_largest_of_its_parts() -> None:
    """One program that moves 1 MiB in transfers of 32 KiB, at 99 % of what one core reaches."""
    counts = Counts(certain_transfers={32_768.0: Count([Term(32)])}, certain_steps=Count([Term(10)]))
    found = bound.lower_bound([counts], {"grid": 1}, A2)
    assert found is not None
    assert found.us == pytest.approx((1 << 20) / (86.5e9 * 0.99) * 1e6)
    assert found.limit == "transfers of a core"
    assert bound.lower_bound([counts], {"grid": 1}, "Ascend910_9382") is None
    assert bound.lower_bound([counts], {}, A2) is None


# ---------------------------------------------------------------- loading


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


# ---------------------------------------------------------------- processes


def _work(piece: str, folder: Path, at_stage: Callable[[str], None]) -> str:
    at_stage(f"working on {piece}")
    if piece == "abort":
        print("last words", flush=True)
        os.abort()
    if piece == "hang":
        threading.Event().wait()
    if piece == "raise":
        raise ValueError("no luck")
    if piece == "exit":
        os._exit(7)
    (folder / "scratch").write_text(piece)
    return f"{piece} in {folder}"


def test_each_piece_ends_on_its_own() -> None:
    """A crash, an exit, an exception and a hang are told as such, and the other pieces bring their results."""
    pieces = ["good", "abort", "hang", "raise", "exit", "better"]
    outcomes: dict[int, Any] = dict(pool.run(_work, pieces, at_once=2, timeout=10.0))
    died = {pieces[i]: outcome for i, outcome in outcomes.items() if isinstance(outcome, pool.Died)}
    assert sorted(died) == ["abort", "exit", "hang", "raise"]
    assert (died["abort"].how, died["abort"].output) == ("killed by SIGABRT", "last words\n")
    assert died["exit"].how == "its process ended with exit code 7 and no result"
    assert died["raise"].how == "ValueError: no luck"
    assert [one for one in died if died[one].timed_out] == ["hang"]
    assert {one.stage for one in died.values()} == {f"working on {piece}" for piece in died}
    for index in (0, 5):
        text, _, folder = outcomes[index].partition(" in ")
        assert text == pieces[index]
        assert not Path(folder).exists()


def test_processes_that_are_left_behind_are_ended() -> None:
    """Who stops listening leaves no child behind."""
    outcomes = pool.run(_work, ["good", "hang"], at_once=2, timeout=300.0)
    assert next(outcomes)[0] == 0
    outcomes.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_at_least_one_process_is_needed() -> None:
    with pytest.raises(ValueError, match="at_once is 0"):
        list(pool.run(_work, ["good"], at_once=0, timeout=1.0))


# ---------------------------------------------------------------- cases and findings

FLOATS = {"x_ptr": "*fp32", "n": "i32"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kernel": "not a name"}, "'not a name' is not the name of a function"),
        ({"signature": {"x": "float32"}}, "argument 'k\\(x\\)': unknown type 'float32'"),
        ({"constants": {"n": 1}}, "\\['n'\\] is both an argument and a constant"),
        ({"targets": ("A100",)}, "targets has 'A100'"),
        ({"targets": ()}, "must each name at least one"),
        ({"values": {"m": 1}}, "values names \\['m'\\]"),
        ({"definition": -1}, "definition is -1; allowed are 0, and 1 for the first"),
        ({"options": {"multibuffer": False}}, "options has 'multibuffer'; write it as multibuffer="),
        ({"allow": {"retried": " "}}, "allow\\['retried'\\] needs the reason"),
    ],
)
def test_a_wrong_case_names_the_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Case(**{"kernel": "k", "signature": FLOATS, **fields})


def test_values_may_name_pointers_lines_and_the_grid() -> None:
    Case(kernel="k", signature=FLOATS, values={"n": 1, "*x_ptr": 2, "*x_ptr@7": 3, "grid": 4})


def test_what_is_allowed_is_a_note_and_anything_else_is_not() -> None:
    findings = [Finding("overflow", "too large", "smaller"), Finding("scalar-loop", "slow", "faster")]
    allowed = allow(findings, {"scalar-loop": "it is meant so"})
    assert [one.severity for one in allowed] == [Severity.ERROR, Severity.NOTE]
    with pytest.raises(ValueError, match="allow names \\['slow'\\]"):
        allow(findings, {"slow": "because"})


def test_every_kind_of_finding_has_a_meaning() -> None:
    assert all(kind.meaning.endswith(".") for kind in KINDS.values())


# ---------------------------------------------------------------- reports

KERNEL_TEXT = """def k(x, s):
    y = load(x + s, mask=s < 4)
    return y >> (s & 31)
"""


@pytest.mark.parametrize(
    ("place", "operation", "underlined"),
    [
        ((3, 17), "arith.shrsi", "y >> (s & 31)"),
        ((3, 17), "arith.andi", "s & 31"),
        ((2, 13), "tt.load", "load(x + s, mask=s < 4)"),
        ((2, 30), "arith.cmpi", "s < 4"),
        ((2, 13), "tt.scan", "y = load(x + s, mask=s < 4)"),
    ],
)
def test_the_operation_is_underlined(tmp_path: Path, place: tuple[int, int], operation: str, underlined: str) -> None:
    path = tmp_path / "k.py"
    path.write_text(KERNEL_TEXT)
    found = excerpt.underlined(Place(str(path), *place), operation)
    assert found is not None
    line, carets = found
    assert "".join(a for a, b in zip(line, carets, strict=False) if b == "^") == underlined


def _report(tmp_path: Path, *findings: Finding, stage: str = "hivm", **case: Any) -> Report:
    job = Job(tmp_path / "k.py", Case(kernel="k", signature=FLOATS, **case), Setting(A2, True))
    return Report(job, stage=stage, required_bits=524_288, available_bits=1_572_864, findings=list(findings))


def test_a_finding_of_many_settings_is_shown_once_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(KERNEL_TEXT)
    finding = Finding(
        "scalar-loop", "slow", "faster", "64 elements", Place(str(tmp_path / "k.py"), 3, 17), operation="arith.shrsi"
    )
    texts = report.finding_texts([_report(tmp_path, finding), _report(tmp_path, finding)], report.Palette(False), False)
    assert texts == [
        f"error[scalar-loop]: slow\n --> {tmp_path}/k.py:3:18\n  |\n3 |     return y >> (s & 31)\n"
        "  |            ^^^^^^^^^^^^^\n  = 64 elements\n  = in k, 2 settings\n  = instead: faster"
    ]


def test_the_table_has_a_line_a_job(tmp_path: Path) -> None:
    reports = [_report(tmp_path), _report(tmp_path, Finding("overflow", "", ""), stage="linalg")]
    _, good, bad = report.table(reports, report.Palette(False)).splitlines()
    assert good.split() == ["ok", "k", "910B3", "on", "524,288", "(33", "%)", "0/0/0", "-", "-", "none"]
    assert bad.split()[0] == "FAIL"
    assert bad.endswith("1 error")


def test_json_has_everything_and_says_which_versions(tmp_path: Path) -> None:
    tools = Toolchain(tmp_path, tmp_path, tmp_path, (("triton-ascend", "9.9"), ("ascendnpu-ir", "1.2.0")))
    finding = Finding("retried", "twice", "smaller", place=Place("k.py", 3, 0))
    data = report.as_json([_report(tmp_path, finding)], tools)
    assert data["versions"] == {"triton-ascend": "9.9", "ascendnpu-ir": "1.2.0"}
    assert data["warnings"] == tools.warnings
    (result,) = data["results"]
    assert (result["ok"], result["unified_buffer_bits"]) == (False, {"required": 524_288, "available": 1_572_864})
    assert result["findings"][0]["line"] == 3


def test_an_allowance_that_nothing_needs_is_told(tmp_path: Path) -> None:
    reasons = {"retried": "it is meant so", "scalar-loop": "it once had one"}
    used = allow([Finding("retried", "", "")], reasons)
    assert command_line.unused_allowances([_report(tmp_path, *used, allow=reasons)]) == [
        "k allows scalar-loop, and has none"
    ]


def test_launched_kernels_are_those_that_no_other_calls(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import triton\n@triton.jit\ndef helper(x):\n    pass\n"
        "@triton.jit(do_not_specialize=['n'])\ndef outer(x, n):\n    helper(x)\ndef plain():\n    pass\n"
    )
    (tmp_path / "b.py").write_text(
        "import triton\nfrom a import imported\n"
        "if 1:\n    @tune\n    @triton.jit\n    def helper(x):\n        imported(x)\n"
        "else:\n    @triton.jit\n    def helper(x):\n        pass\n"
        "@numba.jit\ndef other(x):\n    pass\n"
    )
    (tmp_path / "c.py").write_text("import triton\n@triton.jit\ndef imported(x):\n    pass\n")
    (tmp_path / "d.py").write_text("@triton.jit\ndef (")
    found = [(str(one.file), one.kernel, one.line) for one in sweep.launched(tmp_path)]
    assert found == [("a.py", "outer", 5), ("b.py", "helper", 5), ("b.py", "helper", 9)]


def _swept(tmp_path: Path, setting: str, line: int, *findings: Finding) -> Report:
    one = _report(tmp_path, *findings, name=setting)
    one.line = line
    return one


def test_a_page_counts_definitions_and_names_only_what_helps(tmp_path: Path) -> None:
    """Of two definitions one was compiled, in five settings: four with a loop, one of them with an allowed retry."""
    kernel = "    @triton.jit\n    def k(x):\n        pass\n"
    (tmp_path / "k.py").write_text(f"import triton\nif 1:\n{kernel}else:\n{kernel}")
    place = Place(str(tmp_path / "k.py"), 5, 4)
    made = Finding("scalar-loop", "slow", "faster", "arith.addi on i64: 8 elements one by one", place)
    own = Finding("scalar-walk", "slow", "faster", "n elements one by one", place, operation="scf.for")
    retried = Finding("retried", "twice", "smaller", allowed="it is meant so")
    reports = [_swept(tmp_path, f"{n} rows", 3, made) for n in (1, 2, 3)]
    reports += [_swept(tmp_path, "4 rows", 3, made, retried), _swept(tmp_path, "5 rows", 3, own)]
    subject = sweep.Subject("a project", tmp_path, "one")
    text = sweep.page(subject, reports, Toolchain(tmp_path, tmp_path, tmp_path, ()), "command")
    assert "2 kernels to launch; 1 compiled for A2, in 5 settings; left out: `k`." in text
    assert "| compile strictly in every setting | 1 | |" in text
    assert "| operations walked element by element, growing with the tile | 1 | 1 |" in text
    assert "| loops of the kernel's own over elements | 1 | 1 |" in text
    assert "| fit only after the compiler silently tried again | 0 | 0 |" in text
    assert "| `k` (4 of 5 settings, such as 1 rows) | k.py:5 | arith.addi on i64, 8 elements |" in text
    assert "| `k` (5 rows) | k.py:5 | n elements |" in text
    assert "## Not counted\n\n* `k`, retried: it is meant so.\n" in text
    assert "## retried" not in text
    alone = sweep.page(subject, reports[-1:], Toolchain(tmp_path, tmp_path, tmp_path, ()), "command")
    assert "| `k` (5 rows) |" in alone


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


def test_what_is_declared_for_vllm_ascend_has_names_of_its_own() -> None:
    """Each case by its file and title, and those that our kernels are put beside among them."""
    folder = Path(sweeps.__file__).parent
    declared = [case for path in sorted(folder.glob("vllm_*.py")) for case in Loader().load(path, "LOWERING_CASES")]
    assert len({(case.file, case.definition, case.title) for case in declared}) == len(declared)
    titles = {case.title for case in declared}
    pairs = compare.read_pairs((folder / "vllm_ascend_pairs.txt").read_text().splitlines())
    assert {case for pair in pairs for case in pair.theirs} <= titles


# ---------------------------------------------------------------- the toolchain and the command line


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
