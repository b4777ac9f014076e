"""The package's own declared cases: every kernel has one, with its parameters as they are, and little is allowed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_ascend_ext.kernels import lowering_cases
from vllm_ascend_ext.kernels.lowering import check, pool, sweep, toolchain
from vllm_ascend_ext.kernels.lowering.cases import A2, TARGETS, Case
from vllm_ascend_ext.kernels.lowering.check import Job, Report
from vllm_ascend_ext.kernels.lowering.compile import Setting
from vllm_ascend_ext.kernels.lowering.loops import Pace

KERNELS = Path(lowering_cases.__file__).parent
CASES = lowering_cases.LOWERING_CASES

CUDA_ONLY = lowering_cases.CUDA_ONLY
BYTES = {"*fp32": 4, "*bf16": 2}

#: Kernel -> what its cases may allow: costs per program or per token id, none that grows with tile or vocabulary.
ALLOWED = {
    "_bitmask_kernel": {"fixed-scalar-loop"},
    "_penalties_kernel": {"fixed-scalar-loop"},
    "_fold_kernel": {"transfer-per-element"},
    "_combine_kernel": {"transfer-per-element"},
    "_bincount_kernel": {"scalar-walk"},
}


def parameters(case: Case) -> tuple[set[str], set[str]]:
    """(all parameters of a case's kernel, those that are constexpr)."""
    tree = ast.parse((KERNELS / case.file).read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == case.kernel)
    names = {argument.arg for argument in function.args.args}
    constants = {a.arg for a in function.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
    return names, constants


def test_every_launched_kernel_has_a_case() -> None:
    """But for those that only a GPU runs, and what stands in for Triton's own operations in the interpreter."""
    kernels = {(str(one.file), one.kernel) for one in sweep.launched(KERNELS) if one.file.parent == Path(".")}
    launched = {(file, kernel) for file, kernel in kernels if file != "_triton.py" and kernel not in CUDA_ONLY}
    assert launched == {(case.file, case.kernel) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_case_gives_every_parameter_a_type_or_a_value(case: Case) -> None:
    names, constants = parameters(case)
    assert set(case.signature) | set(case.constants) == names
    assert constants <= set(case.constants)
    assert case.targets == (TARGETS if "vocabulary" not in case.name else (A2,))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """One report for each case of the shown vocabulary, on A2 with the multi-buffering that ships."""
    tools = toolchain.find()
    jobs = [
        Job(KERNELS / case.file, case, Setting(A2, case.multibuffer[0]), probe=False)
        for case in CASES
        if "vocabulary" not in case.name
    ]
    outcomes = pool.run(
        lambda job, folder, at_stage: check.run(job, tools, folder, at_stage), jobs, at_once=2, timeout=300.0
    )
    found = {jobs[index].case.title: outcome for index, outcome in outcomes}
    assert all(isinstance(outcome, Report) and outcome.stage == "hivm" for outcome in found.values()), found
    return {title: outcome for title, outcome in found.items() if isinstance(outcome, Report)}


@pytest.mark.ascend
def test_log_probabilities_and_ranks_read_each_logit_once(reports: dict[str, Report]) -> None:
    """What is read is the row in whole tiles, and a few bytes of ids."""
    folds = [one for one in reports.values() if one.job.case.kernel == "_fold_kernel"]
    assert len(folds) == 12
    for one in folds:
        case = one.job.case
        size, tile = BYTES[case.signature["logits_ptr"]], case.constants["TILE"]
        assert isinstance(tile, int)
        row = -(-lowering_cases.SHOWN_VOCABULARY // tile) * tile * size
        read = one.amounts["bytes_in"].launch
        assert read is not None
        assert row <= read <= row + 2048, case.title


@pytest.mark.ascend
def test_bincount_takes_scalar_steps_for_tokens_and_no_transfer_among_them(reports: dict[str, Report]) -> None:
    """Each piece goes once through its 2,048 token ids, element by element inside the Unified Buffer."""
    counts = [one for one in reports.values() if one.job.case.kernel == "_bincount_kernel"]
    assert len(counts) == 2
    for one in counts:
        walks = [loop for loop in one.loops if loop.pace is Pace.ELEMENT]
        assert walks
        assert all(loop.in_source and not loop.transfers for loop in walks)
        pieces = one.job.case.values["pieces"]
        # Both branches of a piece, words and counts, are added up.
        assert one.amounts["element_trips"].launch == pieces * 2 * 2048


@pytest.mark.ascend
def test_no_element_loop_but_the_single_bits_and_what_a_caller_names(reports: dict[str, Report]) -> None:
    for one in reports.values():
        made = [loop.known_trips for loop in one.loops if loop.pace is Pace.ELEMENT and not loop.in_source]
        assert made in ([], [32]), one.job.case.title


def test_cases_differ() -> None:
    assert len({(case.kernel, case.name) for case in CASES}) == len(CASES)


def test_operations_on_logits_have_cases_in_both_dtypes() -> None:
    for kernel in ("_bitmask_kernel", "_penalties_kernel", "_fold_kernel"):
        types = {case.signature["logits_ptr"] for case in CASES if case.kernel == kernel}
        assert types == {"*fp32", "*bf16"}, kernel


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_nothing_is_allowed_that_grows_or_is_a_hazard(case: Case) -> None:
    assert set(case.allow) <= ALLOWED.get(case.kernel, set())
