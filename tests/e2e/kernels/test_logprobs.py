"""Laws of compute_token_logprobs, compute_token_ranks and the two in one pass.

Reference: log softmax and the count of logits at least the chosen one, in float64 from the definition.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import compute_token_logprobs, compute_token_logprobs_and_ranks, compute_token_ranks
from vllm_ascend_ext.kernels.reference import logprobs as reference

from .kernel_cases import ID_DTYPES, Logits, logits
from .kernel_checks import Impl, assert_close, assert_repeatable, assert_same, guarded


@given(drawn=logits(), columns=st.integers(0, 6), id_dtype=ID_DTYPES, gap=st.sampled_from([0, 1]))
def test_logprobs_are_those_of_the_definition(
    impl: Impl, drawn: Logits, columns: int, id_dtype: torch.dtype, gap: int
) -> None:
    ids = drawn.ids(drawn.rows, columns, dtype=id_dtype)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        result = compute_token_logprobs(placed, guard.place(ids, gap), impl=impl.forced)
    assert_close(result, reference.token_logprobs(drawn.values, ids))
    assert_same(placed, drawn.values)


@given(drawn=logits(), id_dtype=ID_DTYPES)
def test_a_rank_counts_the_logits_that_are_at_least_the_chosen_one(
    impl: Impl, drawn: Logits, id_dtype: torch.dtype
) -> None:
    ids = drawn.ids(drawn.rows, dtype=id_dtype)
    with guarded(impl) as guard:
        result = compute_token_ranks(guard.place(drawn.values, drawn.gap), guard.place(ids), impl=impl.forced)
    assert_same(result, reference.token_ranks(drawn.values, ids))


@given(drawn=logits(), columns=st.integers(1, 6), id_dtype=ID_DTYPES)
def test_one_pass_gives_both(impl: Impl, drawn: Logits, columns: int, id_dtype: torch.dtype) -> None:
    ids = drawn.ids(drawn.rows, columns, dtype=id_dtype)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        logprobs, ranks = compute_token_logprobs_and_ranks(placed, guard.place(ids), impl=impl.forced)
    assert_close(logprobs, reference.token_logprobs(drawn.values, ids))
    assert_same(ranks, reference.token_ranks(drawn.values, ids[:, 0]))


def _both(impl: Impl, values: torch.Tensor, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results on the CPU, from a guarded run."""
    with guarded(impl) as guard:
        placed = guard.place(values)
        found = compute_token_logprobs_and_ranks(placed, guard.place(torch.tensor(ids)), impl=impl.forced)
    return found[0].cpu(), found[1].cpu()


def test_tied_tokens_share_the_worse_rank(each: Impl) -> None:
    """B19: [2, 2, 2, 1] with token 1 chosen has rank 3."""
    assert _both(each, torch.tensor([[2.0, 2.0, 2.0, 1.0]]), [[1]])[1].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_has_rank_1_and_the_worst_the_vocabulary_size(each: Impl, dtype: torch.dtype) -> None:
    """B19: of distinct logits; strict counting gives 0 and one less."""
    values = torch.arange(9000, dtype=torch.float32) if dtype == torch.float32 else torch.arange(-128, 129).float()
    size = values.shape[0]
    found = _both(each, values.flip(0).repeat(2, 1).to(dtype), [[0], [size - 1]])[1]
    assert found.tolist() == [1, size]


def test_bfloat16_ties_are_ties(each: Impl) -> None:
    """B19: logits that differ in float32 and are equal in bfloat16 are compared in bfloat16."""
    values = torch.tensor([[1.0, 1.001, 0.999, 1.002]]).to(torch.bfloat16)
    assert _both(each, values, [[0]])[1].tolist() == [int((values >= values[0, 0]).sum())]


def test_a_chosen_masked_token_ranks_last_and_padding_is_not_counted(each: Impl) -> None:
    """B19: every logit is at least -inf, and there are V of them, whatever the tile."""
    values = torch.arange(100).float().unsqueeze(0)
    values[0, 7] = float("-inf")
    logprobs, ranks = _both(each, values, [[7]])
    assert ranks.tolist() == [100]
    assert logprobs.tolist() == [[float("-inf")]]


@pytest.mark.parametrize("stranger", [-1, 300, 2**31 + 5, -(2**33)])
def test_an_id_outside_the_vocabulary_is_a_logit_of_minus_infinity(each: Impl, stranger: int) -> None:
    """B19: it reads nothing: the neighbours' places hold NaN, which would show."""
    values = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    logprobs, ranks = _both(each, values, [[stranger, 5]] * 3)
    assert ranks.tolist() == [300] * 3
    assert logprobs[:, 0].tolist() == [float("-inf")] * 3
    assert_close(logprobs[:, 1:], reference.token_logprobs(values, torch.tensor([[5]] * 3)))


def test_nan_spoils_its_row_and_no_other(each: Impl) -> None:
    """B10."""
    values = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    values[1, 77] = float("nan")
    logprobs, ranks = _both(each, values, [[5, 6]] * 3)
    assert logprobs[1].isnan().all()
    rest = values[[0, 2]]
    assert_close(logprobs[[0, 2]], reference.token_logprobs(rest, torch.tensor([[5, 6]] * 2)))
    assert ranks.tolist() == [int((row >= row[5]).sum()) for row in values]


def test_a_masked_first_tile_changes_nothing(each: Impl) -> None:
    """B11: also against torch's own log_softmax."""
    values = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(3))
    values[0, :16_384] = float("-inf")
    logprobs, _ = _both(each, values, [[16_390, 3, 19_999]])
    assert_close(logprobs, torch.log_softmax(values.double(), 1)[:, [16_390, 3, 19_999]].float())


def test_a_fully_masked_row_has_no_distribution(each: Impl) -> None:
    """B11: NaN, as torch gives; its rank is the vocabulary's size."""
    logprobs, ranks = _both(each, torch.full((1, 200), float("-inf")), [[3, 4]])
    assert logprobs.isnan().all()
    assert ranks.tolist() == [200]


def test_the_only_finite_token_has_logprob_0_and_rank_1(each: Impl) -> None:
    """B11."""
    values = torch.full((1, 200), float("-inf"))
    values[0, 150] = -3.25
    logprobs, ranks = _both(each, values, [[150]])
    assert logprobs.tolist() == [[0.0]]
    assert ranks.tolist() == [1]


def test_rows_further_apart_than_they_are_long(each: Impl) -> None:
    """B14: what lies between two rows belongs to neither."""
    big = torch.full((2, 101), float("nan"))
    big[:, :100] = torch.randn(2, 100, generator=torch.Generator().manual_seed(4))
    values = big.to(each.device)[:, :100]
    ids = torch.tensor([[1], [99]], device=each.device)
    logprobs, ranks = compute_token_logprobs_and_ranks(values, ids, impl=each.forced)
    assert_close(logprobs, reference.token_logprobs(big[:, :100], ids.cpu()))
    assert_same(ranks, reference.token_ranks(big[:, :100], ids[:, 0].cpu()))


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    generator = torch.Generator().manual_seed(5)
    rows, size = (7, 150_001) if impl.on_device else (2, 150)
    values = torch.randn(rows, size, generator=generator).to(impl.device)
    ids = torch.randint(0, size, (rows, 5), generator=generator).to(impl.device)
    assert_repeatable(lambda: compute_token_logprobs_and_ranks(values, ids, impl=impl.forced))


def test_permuting_the_rows_permutes_the_results(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(9, 333, generator=generator).to(impl.device)
    ids = torch.randint(0, 333, (9, 3), generator=generator).to(impl.device)
    order = torch.randperm(9, generator=generator).to(impl.device)
    straight = compute_token_logprobs_and_ranks(values, ids, impl=impl.forced)
    permuted = compute_token_logprobs_and_ranks(values[order], ids[order], impl=impl.forced)
    for a, b in zip(straight, permuted, strict=True):
        assert_same(b, a[order])


@pytest.mark.parametrize("rows", [1, 2, 7, 31, 257])
def test_every_way_of_cutting_rows_gives_the_same(impl: Impl, rows: int) -> None:
    """One row is spread over the cores, many rows are not cut at all; several vocabularies are cut unevenly."""
    if rows > 7 and not impl.on_device:
        pytest.skip("the interpreter's three cores have enough with seven rows")
    generator = torch.Generator().manual_seed(rows)
    for size in (151_936, 128_257, 4096, 5) if impl.on_device else (500, 65):
        values = torch.randn(rows, size, generator=generator)
        ids = torch.randint(0, size, (rows, 40 if impl.on_device else 6), generator=generator)
        found = compute_token_logprobs_and_ranks(values.to(impl.device), ids.to(impl.device), impl=impl.forced)
        assert_close(found[0], reference.token_logprobs(values, ids))
        assert_same(found[1], reference.token_ranks(values, ids[:, 0]))
