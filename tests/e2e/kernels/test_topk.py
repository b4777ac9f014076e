"""Laws of compute_topk_scores: which columns a row shows, and that each score belongs to the token beside it."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import compute_topk_logprobs, compute_topk_scores
from vllm_ascend_ext.kernels.reference import logprobs as reference

from .kernel_cases import ID_DTYPES, Logits, logits
from .kernel_checks import Guard, Impl, assert_close, assert_repeatable, assert_same, guarded

#: torch.topk orders NaN as it likes.
ORDERED = st.sampled_from(["normal", "large", "ties", "few finite", "all masked", "one finite"])


@dataclass(frozen=True)
class Buffer:
    gpu: torch.Tensor


@dataclass(frozen=True)
class State:
    """As vLLM's LogprobTokenIdsState: the tokens that requests asked for."""

    num_token_ids: Buffer
    token_ids: Buffer

    def placed(self, guard: Guard) -> State:
        return State(Buffer(guard.place(self.num_token_ids.gpu)), Buffer(guard.place(self.token_ids.gpu)))


@given(drawn=logits(patterns=ORDERED), num_logprobs=st.integers(0, 6), id_dtype=ID_DTYPES, raw=st.booleans())
def test_without_requested_tokens(
    impl: Impl, drawn: Logits, num_logprobs: int, id_dtype: torch.dtype, raw: bool
) -> None:
    """The sampled token, then the best ones from the best down."""
    num_logprobs = min(num_logprobs, drawn.vocab_size)
    sampled = drawn.ids(drawn.rows, dtype=id_dtype, strangers=False)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        found = compute_topk_scores(
            placed, num_logprobs, guard.place(sampled), [0, 3], logits_mode=raw, impl=impl.forced
        )
    ids = found.logprob_token_ids.cpu()
    assert ids.dtype == torch.int64
    assert ids[:, 0].tolist() == sampled.tolist()
    best = torch.topk(drawn.values, num_logprobs, dim=1).values
    assert_same(drawn.values.gather(1, ids[:, 1:]), best)
    assert all(len(set(row)) == num_logprobs for row in ids[:, 1:].tolist())
    _check_scores(drawn, ids, found.logprobs, raw)
    assert_same(found.selected_token_ranks, reference.token_ranks(drawn.values, sampled))
    assert found.cu_num_generated_tokens == [0, 3]
    assert found.cu_num_generated_tokens_tensor is None


def _check_scores(drawn: Logits, ids: torch.Tensor, scores: torch.Tensor, raw: bool) -> None:
    if raw:
        assert_same(scores, drawn.values.gather(1, ids).float())
    else:
        assert_close(scores, reference.token_logprobs(drawn.values, ids))


@given(drawn=logits(patterns=ORDERED), data=st.data(), raw=st.booleans(), id_dtype=ID_DTYPES)
def test_requested_tokens_take_the_place_of_the_best(
    impl: Impl, drawn: Logits, data: st.DataObject, raw: bool, id_dtype: torch.dtype
) -> None:
    """A request that asked for tokens shows them and no others; columns left over show id 0 and -inf."""
    num_logprobs = data.draw(st.integers(0, min(6, drawn.vocab_size)))
    requests = 3
    counts = torch.tensor([data.draw(st.integers(0, 7)) for _ in range(requests)], dtype=torch.int32)
    most = max(1, int(counts.max()))
    state = State(Buffer(counts), Buffer(drawn.ids(requests, 9, dtype=torch.int32)))
    mapping = torch.randint(0, requests, (drawn.rows,), generator=drawn.generator).to(id_dtype)
    sampled = drawn.ids(drawn.rows, dtype=id_dtype, strangers=False)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        placed_state, placed_mapping = state.placed(guard), guard.place(mapping)
        found = compute_topk_scores(
            placed, num_logprobs, guard.place(sampled), None, placed_state, placed_mapping, most, raw, impl=impl.forced
        )
    ids, scores = found.logprob_token_ids.cpu(), found.logprobs.cpu()
    columns = max(num_logprobs, most)
    assert ids.shape == scores.shape == (drawn.rows, 1 + columns)
    for row, request in enumerate(mapping.tolist()):
        asked = int(counts[request])
        used = asked or num_logprobs
        if asked:
            assert ids[row, 1 : 1 + asked].tolist() == state.token_ids.gpu[request, :asked].tolist()
        else:
            best = torch.topk(drawn.values[row], num_logprobs).values
            assert_same(drawn.values[row].gather(0, ids[row, 1 : 1 + used]), best)
        assert ids[row, 1 + used :].tolist() == [0] * (columns - used)
        assert scores[row, 1 + used :].tolist() == [float("-inf")] * (columns - used)
        expected = reference.picked(drawn.values[row : row + 1], ids[row : row + 1, : 1 + used]).float()
        if not raw:
            expected = reference.token_logprobs(drawn.values[row : row + 1], ids[row : row + 1, : 1 + used])
        assert_close(scores[row : row + 1, : 1 + used], expected)
    assert_same(found.selected_token_ranks, reference.token_ranks(drawn.values, sampled))


def test_worked_example(each: Impl) -> None:
    """Two best of [1, 3, 2, 0] with token 0 sampled; request 1 asked for tokens 3 and 2."""
    values = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 2, device=each.device)
    counts = torch.tensor([0, 2], dtype=torch.int32, device=each.device)
    state = State(Buffer(counts), Buffer(torch.tensor([[9, 9, 9], [3, 2, 9]], dtype=torch.int32, device=each.device)))
    sampled, mapping = torch.tensor([0, 0], device=each.device), torch.tensor([0, 1], device=each.device)
    found = compute_topk_scores(values, 3, sampled, None, state, mapping, 2, True, impl=each.forced)
    assert found.logprob_token_ids.tolist() == [[0, 1, 2, 0], [0, 3, 2, 0]]
    assert found.logprobs.tolist() == [[1.0, 3.0, 2.0, 1.0], [1.0, 0.0, 2.0, float("-inf")]]
    assert found.selected_token_ranks.tolist() == [3, 3]


def test_the_older_name_gives_logprobs(each: Impl) -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 0.0]], device=each.device)
    starts = torch.tensor([0, 1], device=each.device)
    found = compute_topk_logprobs(values, 1, torch.tensor([0], device=each.device), starts, impl=each.forced)
    assert found.logprob_token_ids.tolist() == [[0, 1]]
    assert_close(found.logprobs, torch.log_softmax(values.double(), 1)[:, [0, 1]].float())
    assert found.cu_num_generated_tokens is None
    assert found.cu_num_generated_tokens_tensor is starts


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    generator = torch.Generator().manual_seed(1)
    rows, size, k = (5, 150_001, 20) if impl.on_device else (2, 150, 3)
    values = torch.randn(rows, size, generator=generator).to(impl.device)
    sampled = torch.arange(rows, device=impl.device)
    assert_repeatable(lambda: compute_topk_scores(values, k, sampled, impl=impl.forced)[:3])
