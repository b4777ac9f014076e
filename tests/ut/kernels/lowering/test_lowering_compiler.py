"""The check on the real compiler, without an NPU: each kind of finding, its line, figures of the tested versions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_ext.kernels.lowering import __main__ as command_line
from vllm_ascend_ext.kernels.lowering import check, pool, toolchain
from vllm_ascend_ext.kernels.lowering.cases import A2, A3, Case, Constant
from vllm_ascend_ext.kernels.lowering.check import Job, Report
from vllm_ascend_ext.kernels.lowering.compile import Setting
from vllm_ascend_ext.kernels.lowering.findings import Severity
from vllm_ascend_ext.kernels.lowering.loops import Pace

pytestmark = pytest.mark.ascend

KERNELS = Path(__file__).with_name("sample_kernels.py")
FLOATS = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32"}
INTS = {"x_ptr": "*i32", "o_ptr": "*i32", "n": "i32"}
ADD = Case(kernel="add_tiles", signature={**FLOATS, "y_ptr": "*fp32"}, constants={"BLOCK": 8192})
TIMEOUT = 300.0


def line_of(text: str) -> int:
    """The line of the sample kernels that holds ``text``; exactly one does."""
    lines = [number for number, line in enumerate(KERNELS.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, f"{text!r} stands in lines {lines}"
    return lines[0]


def run(case: Case, target: str = A2, multibuffer: bool = True) -> Report:
    """One job, in a process of its own as always."""
    return run_all([Job(KERNELS, case, Setting(target, multibuffer))])[0]


def run_all(jobs: list[Job]) -> list[Report]:
    tools = toolchain.find()
    outcomes: dict[int, Any] = dict(
        pool.run(
            lambda job, folder, at_stage: check.run(job, tools, folder, at_stage), jobs, at_once=2, timeout=TIMEOUT
        )
    )
    assert all(isinstance(outcome, Report) for outcome in outcomes.values()), outcomes
    return [outcomes[index] for index in range(len(jobs))]


def with_constants(case: Case, **constants: Constant) -> Case:
    return replace(case, constants={**case.constants, **constants})


def operation(name: str, block: int = 1024) -> Case:
    return Case(kernel="one_operation", signature=INTS, constants={"OPERATION": name, "BLOCK": block})


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


# ---------------------------------------------------------------- fits, overflows, retries

# Three blocks of fp32, doubled for multi-buffering, fill the Unified Buffer of 192 KiB to the last bit at 8,192; the
# compiler then saves one block. Pinned for triton-ascend 3.2.0 and ascendnpu-ir 1.2.0.
FITS: list[tuple[int, bool, int | None, list[str]]] = [
    (8192, True, 1_572_864, []),
    (16_384, True, 1_048_576, ["retried"]),
    (32_768, True, 2_097_152, ["overflow"]),
    (16_384, False, 1_048_576, []),
    (32_768, False, 2_097_152, ["overflow"]),
]


@pytest.mark.parametrize("target", [A2, A3])
@pytest.mark.parametrize(("block", "multibuffer", "bits", "expected"), FITS)
def test_a_kernel_fits_strictly_or_says_what_it_needs(
    target: str, block: int, multibuffer: bool, bits: int, expected: list[str]
) -> None:
    report = run(with_constants(ADD, BLOCK=block), target, multibuffer)
    assert (report.required_bits, codes(report)) == (bits, expected)
    assert report.retried == (block > (8192 if multibuffer else 16_384))
    assert report.ok == (not expected)
    assert all(
        finding.place is not None and finding.place.line == line_of("def add_tiles") for finding in report.findings
    )


def test_a_retry_passes_only_where_the_case_allows_it() -> None:
    reason = "it is meant to run without multi-buffering"
    report = run(replace(with_constants(ADD, BLOCK=16_384), allow={"retried": reason}))
    assert [(finding.code, finding.severity, finding.allowed) for finding in report.findings] == [
        ("retried", Severity.NOTE, reason)
    ]
    assert report.ok


# ---------------------------------------------------------------- scalar loops

# Operation -> (finding, a line that its place is in, elements of one loop), or None if it stays on the vector unit.
OPERATIONS: Mapping[str, tuple[str, str, int] | None] = {
    "remainder": ("scalar-loop", "r = x % 7", 1024),
    "power of two": None,
    "shift by a constant": None,
    "scan": ("scalar-loop", "r = tl.cumsum(x, 0)", 1023),
    "scan over the first axis": None,
    "i64": ("scalar-loop", "r = (x.to(tl.int64) + 1)", 1024),
    "division": ("fp32-division", "r = x // 7", 0),
    "histogram": ("block-per-element", "r = tl.histogram(x, BLOCK)", 1024),
    "atomic or": ("transfer-per-element", "tl.atomic_or(", 1024),
    "32 lanes": ("fixed-scalar-loop", "bits = 1 << tl.arange(0, 32)", 32),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_on_the_vector_unit_or_named_with_its_line(name: str) -> None:
    report = run(operation(name))
    expected = OPERATIONS[name]
    if expected is None:
        assert codes(report) == []
        return
    code, text, elements = expected
    found = [finding for finding in report.findings if finding.code == code]
    assert [finding.place.line for finding in found if finding.place] == [line_of(text)] * len(found)
    assert found
    assert found[0].remedy
    trips = [loop.known_trips for loop in report.loops if loop.pace is Pace.ELEMENT]
    assert elements in trips if elements else trips == []


def test_a_scalar_loop_names_what_it_grows_with() -> None:
    """1,024 trips that follow the tile are an error and say so; 32 that don't are a warning."""
    grows, fixed = run_all([Job(KERNELS, operation(name), Setting(A2, True)) for name in ("remainder", "32 lanes")])
    assert "growing with BLOCK" in grows.findings[0].detail
    assert not grows.ok
    assert "whatever the constants" in fixed.findings[0].detail
    assert fixed.ok


def test_a_loop_that_a_smaller_constant_takes_away_does_not_grow_with_it() -> None:
    """Half the length is one block, which reads no tail: another branch, and no sign that the eight trips grow."""
    report = run(Case(kernel="tail", signature=INTS, constants={"LENGTH": 2048, "BLOCK": 1024}))
    (finding,) = report.findings
    assert (finding.code, finding.place and finding.place.line) == (
        "fixed-scalar-loop",
        line_of("# eight elements, if there are two blocks"),
    )
    assert "8 elements one by one" in finding.detail


def test_an_operation_in_a_helper_is_placed_in_the_helper_and_its_call() -> None:
    report = run(Case(kernel="unpack", signature=INTS, constants={"BLOCK": 1024}))
    (shift,) = [finding for finding in report.findings if "shift" in finding.message]
    assert shift.place is not None
    assert shift.place.line == line_of("# the place of the shift")
    assert [place.line for place in shift.called_from] == [line_of("# where bit_of is called")]


def test_loops_are_told_apart_by_pace() -> None:
    report = run(Case(kernel="paces", signature={**FLOATS, "rows": "i32"}, constants={"BLOCK": 1024}))
    lines = {loop.pace: loop.place.line for loop in report.loops if loop.place is not None}
    assert lines == {
        Pace.ROW: line_of("for row in range(rows)"),
        Pace.TILE: line_of("for start in range(0, n, BLOCK)"),
        Pace.ELEMENT: line_of("for i in range(n)"),
    }
    assert "transfer-per-element" in codes(report)


# ---------------------------------------------------------------- masks

RECOGNISED = ["off < n", "off <= n - 1", "both ends and a flag"]
NOT_RECOGNISED = {
    "n > off": "has the offset on its right side",
    "off > low": "is a lower bound by `>`",
    "off != n": "is no bound",
    "off - low < n": "bounds something else than `start + tl.arange(...)`",
    "or": "uses `|`",
    "data": "compares values that were loaded",
}


@pytest.mark.parametrize("access", ["load", "store"])
@pytest.mark.parametrize("mask", [*RECOGNISED, *NOT_RECOGNISED])
def test_an_access_is_clamped_or_its_mask_is_explained(mask: str, access: str) -> None:
    constants: dict[str, Constant] = {"MASK": mask, "ACCESS": access, "BLOCK": 1024}
    report = run(
        Case(kernel="masked", signature={**INTS, "d_ptr": "*i32", "low": "i32", "flag": "i32"}, constants=constants)
    )
    found = [finding for finding in report.findings if finding.code.startswith("unclamped")]
    if mask in RECOGNISED:
        assert found == []
        return
    (finding,) = found
    assert finding.code == f"unclamped-{access}"
    assert NOT_RECOGNISED[mask] in finding.detail
    assert finding.place is not None
    assert finding.place.line == line_of(
        "mask=m, other=0.0" if access == "load" else "tl.store(o_ptr + off, x, mask=m)"
    )


@pytest.mark.parametrize("safe", [True, False])
def test_a_gather_is_found_out_if_its_masked_off_lanes_hold_any_index(safe: bool) -> None:
    signature = {"x_ptr": "*fp32", "i_ptr": "*i32", "o_ptr": "*fp32", "n": "i32"}
    report = run(Case(kernel="gather", signature=signature, constants={"SAFE": safe, "BLOCK": 1024}))
    assert ("unguarded-gather" in codes(report)) == (not safe)
    assert "scalar-loop" in codes(report)


# ---------------------------------------------------------------- counts and bounds


def test_counts_are_what_the_source_says() -> None:
    """Two loads and one store of 32 KiB a tile, and 151,936 elements are 19 tiles, for the first 19 programs of 40."""
    report = run(replace(ADD, values={"n": 151_936, "grid": 40}))
    tiles = 19
    assert report.amounts["bytes_in"].value == 2 * 4 * 8192
    assert report.amounts["bytes_in"].launch == tiles * 2 * 4 * 8192
    assert report.amounts["bytes_out"].launch == tiles * 4 * 8192
    assert report.amounts["transfers"].launch == tiles * 3
    assert report.amounts["element_trips"].launch == 0
    assert report.unsized == report.unmatched == 0


def test_a_bound_is_below_what_the_bytes_alone_would_take() -> None:
    """Large enough that bytes limit it: between the certain bytes and all bytes over the published bandwidth."""
    n, grid = 1 << 26, 40
    report = run(replace(ADD, values={"n": n, "grid": grid}))
    assert report.bound is not None
    assert report.bound.limit == "bytes of all cores"
    assert 0.99 * 3 * 4 * n / 1167e9 * 1e6 < report.bound.us <= 3 * 4 * n / 1167e9 * 1e6
    assert run(replace(ADD, values={"n": n})).bound_needs == ["grid"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (Case(kernel="plain", signature={"x_ptr": "*fp32"}), "not-triton", "is a function, not a @triton.jit function"),
        (Case(kernel="nowhere", signature={}), "load", "has no top-level 'nowhere'"),
        (
            Case(kernel="add_tiles", signature=FLOATS),
            "frontend",
            "parameters ['y_ptr', 'BLOCK'] of add_tiles have neither a type nor a constant: give each --arg NAME=TYPE",
        ),
        (replace(ADD, constants={"TILE": 1}), "frontend", "['TILE'] are not parameters of add_tiles"),
        (replace(ADD, options={"colour": 1}), "frontend", "options ['colour'] are not options of the Ascend backend"),
        (
            replace(ADD, options={"force_simt_only": True}),
            "frontend",
            "option force_simt_only=True takes the kernel another way (SIMT, or A5's)",
        ),
        (operation("wrong shape"), "frontend", "ncompatible"),
        (operation("sort"), "compiler", "bishengir-compile: "),
    ],
)
def test_what_does_not_compile_says_why(case: Case, code: str, words: str) -> None:
    report = run(case)
    assert codes(report) == [code]
    assert words in report.findings[0].message


def test_a_constant_that_is_left_out_has_the_kernel_s_default() -> None:
    """Known to the report too, and halved like any other when it is asked what a loop grows with."""
    report = run(Case(kernel="with_default", signature=INTS))
    assert report.job.case.constants == {"BLOCK": 2048}
    (finding,) = report.findings
    assert "2,048 elements one by one on the scalar unit, growing with BLOCK" in finding.detail


def test_a_refusal_by_the_frontend_has_its_line() -> None:
    (finding,) = run(operation("wrong shape")).findings
    assert finding.place is not None
    assert finding.place.line == line_of("r = x + tl.arange(0, 3)")


# ---------------------------------------------------------------- the command line


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[dict[str, Any]]]]:
    """Runs a command; gives its exit code, what it printed, and the results in its JSON."""

    def run_command(*arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
        path = tmp_path / "report.json"
        code = command_line.main([*arguments, "--json", str(path)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err, json.loads(path.read_text())["results"] if path.exists() else []

    return run_command


def test_a_crash_and_a_hang_cost_only_their_own_case(command: Any) -> None:
    specs = [f"{KERNELS}:{kernel}" for kernel in ("hangs", "crashes", "add_tiles")]
    arguments = [
        "--arg",
        "x_ptr=*fp32",
        "--arg",
        "n=i32",
        "--const",
        "BLOCK=1024",
        "--target",
        "A2",
        "--multibuffer",
        "on",
    ]
    code, printed, results = command("check", *specs[:2], *arguments, "--timeout", "10")
    assert code == command_line.FOUND
    assert [(one["kernel"], one["findings"][0]["code"]) for one in results] == [
        ("hangs", "time-out"),
        ("crashes", "crash"),
    ]
    assert "killed by SIGABRT" in printed
    code, _, results = command("check", specs[2])
    assert (code, [one["ok"] for one in results]) == (command_line.OK, [True] * 4)


def test_a_file_that_cannot_be_read_costs_only_its_own_case(command: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    types = [part for name in ("x_ptr=*i32", "o_ptr=*i32", "n=i32") for part in ("--arg", name)]
    setting = ["--target", "A2", "--multibuffer", "on"]
    code, printed, results = command("check", f"{broken}:k", f"{KERNELS}:with_default", *types, *setting)
    assert code == command_line.FOUND
    assert [(one["kernel"], one["findings"][0]["code"]) for one in results] == [
        ("k", "load"),
        ("with_default", "scalar-loop"),
    ]
    assert "broken.py is not a Python file: " in printed


def test_declared_cases_are_checked_with_what_they_allow(command: Any) -> None:
    code, printed, results = command("check", str(KERNELS), "-v")
    assert code == command_line.OK
    assert [one["kernel"] for one in results] == ["add_tiles"] * 4 + ["unpack"]
    assert {finding["allowed"] for finding in results[-1]["findings"]} == {"the test wants it so"}
    assert "allowed: the test wants it so" in printed
    assert "no launch of 40 programs takes less than" in printed
    assert "not a time" in printed


def test_the_largest_tile_is_found_with_and_without_multi_buffering(command: Any) -> None:
    code, printed, _ = command("largest-tile", f"{KERNELS}:add_tiles", "--vary", "BLOCK", "--target", "A2")
    assert code == command_line.OK
    assert "multi-buffering on: largest BLOCK is 8,192, taking 1,572,864 (100 %)" in printed
    assert "multi-buffering off: largest BLOCK is 16,384, taking 1,048,576 (67 %)" in printed
    steps = ["--multiple-of", "1000", "--most", "30000", "--multibuffer", "off"]
    code, printed, _ = command("largest-tile", f"{KERNELS}:add_tiles", "--vary", "BLOCK", "--target", "A2", *steps)
    assert (code, "largest BLOCK is 24,000" in printed) == (command_line.OK, True)


def test_a_search_that_finds_no_tile_says_why(command: Any) -> None:
    types = [part for name in ("x_ptr=*fp32", "y_ptr=*fp32", "o_ptr=*fp32", "n=i32") for part in ("--arg", name)]
    setting = ["--target", "A2", "--multibuffer", "on"]
    code, printed, _ = command("largest-tile", f"{KERNELS}:add_tiles", "--vary", "TILE", *types, *setting)
    assert code == command_line.FOUND
    assert "no TILE fits; ['TILE'] are not parameters of add_tiles" in printed
    code, printed, _ = command("largest-tile", f"{KERNELS}:add_tiles", "--vary", "BLOCK", "--multiple-of", "0", *types)
    assert code == command_line.USAGE
    assert "multiples of 0 can't be tried" in printed


def test_a_sweep_lists_kernels_that_no_case_covers(command: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    arguments = ["--root", str(KERNELS.parent), "--name", "the samples", "--revision", "one", "--page", str(page)]
    code, _, _ = command("sweep", str(KERNELS), *arguments)
    text = page.read_text()
    assert code == command_line.OK
    assert "What the Ascend compiler makes of the samples's Triton kernels" in text
    assert "2 compiled for A2" in text
    assert "left out: `one_operation`, `with_default`, `masked`, `gather`, `tail`, `paces`, `crashes`, `hangs`" in text
    assert "* `unpack`, scalar-loop: the test wants it so." in text
    assert "| without any finding | 2 | |" in text


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "vllm_ascend_ext.kernels.lowering"]
    arguments = ["check", f"{KERNELS}:one_operation", "--arg", "x_ptr=*i32", "--arg", "o_ptr=*i32", "--arg", "n=i32"]
    constants = ["--const", "BLOCK=1024", "--const", "OPERATION=remainder", "--json", str(tmp_path / "report.json")]
    done = subprocess.run([*module, *arguments, *constants], capture_output=True, text=True, check=False)
    assert done.returncode == command_line.FOUND, done.stderr
    assert "^^^^^" in done.stdout
    assert "instead: use `& (c - 1)` for a power of two" in done.stdout
