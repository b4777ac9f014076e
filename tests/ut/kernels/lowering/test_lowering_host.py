"""The check without the compiler: symbolic counts, processes, cases, reports, pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_ext.kernels.lowering import __main__ as command_line
from vllm_ascend_ext.kernels.lowering import bound, compare, excerpt, pool, report, sweep, sweeps
from vllm_ascend_ext.kernels.lowering.cases import A2, Case
from vllm_ascend_ext.kernels.lowering.check import Job, Report
from vllm_ascend_ext.kernels.lowering.compile import Setting
from vllm_ascend_ext.kernels.lowering.counts import Counts
from vllm_ascend_ext.kernels.lowering.findings import KINDS, Finding, Severity, allow
from vllm_ascend_ext.kernels.lowering.ir import Place
from vllm_ascend_ext.kernels.lowering.loader import Loader
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


def test_what_is_declared_for_vllm_ascend_has_names_of_its_own() -> None:
    """Each case by its file and title, and those that our kernels are put beside among them."""
    folder = Path(sweeps.__file__).parent
    declared = [case for path in sorted(folder.glob("vllm_*.py")) for case in Loader().load(path, "LOWERING_CASES")]
    assert len({(case.file, case.definition, case.title) for case in declared}) == len(declared)
    titles = {case.title for case in declared}
    pairs = compare.read_pairs((folder / "vllm_ascend_pairs.txt").read_text().splitlines())
    assert {case for pair in pairs for case in pair.theirs} <= titles
