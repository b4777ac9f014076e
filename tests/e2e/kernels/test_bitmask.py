"""Laws of apply_grammar_bitmask: a blocked token's logit is -inf, and every other bit of the logits is as it was."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import apply_grammar_bitmask
from vllm_ascend_ext.kernels.reference import bitmask as reference

from .kernel_cases import ID_DTYPES, Logits, logits, random_words
from .kernel_checks import Impl, assert_repeatable, assert_same, guarded


def _words(drawn: Logits, masks: int, width: int, fill: str) -> torch.Tensor:
    """Masks whose words are mixed, or mostly all ones or all zeros, as grammars' are."""
    words = random_words(masks, width, generator=drawn.generator)
    if fill != "mixed" and words.numel():
        plain = torch.rand(words.shape, generator=drawn.generator) < 0.8
        words[plain] = -1 if fill == "mostly allowed" else 0
    return words


FILLS = st.sampled_from(["mixed", "mostly allowed", "mostly blocked"])


@given(drawn=logits(), data=st.data(), fill=FILLS, id_dtype=ID_DTYPES, gap=st.sampled_from([0, 1, 4]))
def test_masks_by_row_index(
    impl: Impl, drawn: Logits, data: st.DataObject, fill: str, id_dtype: torch.dtype, gap: int
) -> None:
    """Rows that no mask names, and masks with a negative index, change nothing; a narrow mask blocks the rest."""
    rows = data.draw(st.permutations(range(drawn.rows)))[: data.draw(st.integers(0, drawn.rows))]
    indices = torch.tensor([data.draw(st.sampled_from([row, row, -1])) for row in rows], dtype=id_dtype)
    width = data.draw(st.integers(0, -(-drawn.vocab_size // 32) + 1))
    words = _words(drawn, len(rows), width, fill)
    expected = drawn.values.clone()
    reference.apply_grammar_bitmask(expected, indices, words, None, 1)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        apply_grammar_bitmask(placed, guard.place(indices), guard.place(words, gap), impl=impl.forced)
    assert_same(placed, expected)


@given(drawn=logits(max_rows=8), data=st.data(), fill=FILLS, id_dtype=ID_DTYPES)
def test_masks_by_request_and_position(
    impl: Impl, drawn: Logits, data: st.DataObject, fill: str, id_dtype: torch.dtype
) -> None:
    """With cu_num_logits, positions past a request's rows are skipped."""
    cuts = sorted(data.draw(st.lists(st.integers(0, drawn.rows), max_size=3)))
    starts = torch.tensor([0, *cuts, drawn.rows], dtype=id_dtype)
    mask_stride = data.draw(st.integers(1, 5))
    requests = data.draw(st.permutations(range(len(cuts) + 1)))[: data.draw(st.integers(0, len(cuts) + 1))]
    indices = [request * mask_stride + position for request in requests for position in range(mask_stride)]
    indices = [data.draw(st.sampled_from([index, index, -1])) for index in indices]
    words = _words(drawn, len(indices), -(-drawn.vocab_size // 32), fill)
    placed_indices = torch.tensor(indices, dtype=id_dtype)
    expected = drawn.values.clone()
    reference.apply_grammar_bitmask(expected, placed_indices, words, starts, mask_stride)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        apply_grammar_bitmask(
            placed, guard.place(placed_indices), guard.place(words), guard.place(starts), mask_stride, impl=impl.forced
        )
    assert_same(placed, expected)


def test_a_row_stride_that_differs_from_the_width(each: Impl) -> None:
    """B14: row 0 blocks the even tokens, row 1 the odd ones; column 100, between the rows, keeps its value."""
    big = torch.randn(2, 101, generator=torch.Generator().manual_seed(1))
    odd = torch.arange(100) % 2 == 1
    expected = big.clone()
    expected[0, :100] = torch.where(odd, big[0, :100], float("-inf"))
    expected[1, :100] = torch.where(odd, float("-inf"), big[1, :100])
    words = torch.tensor([[0x55555555 << 1] * 4, [0x55555555] * 4]).to(torch.int32)
    placed = big.to(each.device)
    indices = torch.tensor([0, 1], device=each.device)
    apply_grammar_bitmask(placed[:, :100], indices, words.to(each.device), impl=each.forced)
    assert_same(placed, expected)


def test_tokens_that_a_narrow_mask_has_no_word_for_are_blocked(each: Impl) -> None:
    """B15: logits for 2,000 tokens and a mask for 1,733; the wider rows behind the mask's view are not used."""
    width = -(-1733 // 32)
    wide = torch.full((1, width + 9), -1, dtype=torch.int32)
    wide[0, :width] = 0
    placed = torch.randn(1, 2000, generator=torch.Generator().manual_seed(2)).to(each.device)
    words = wide.to(each.device)[:, :width]
    apply_grammar_bitmask(placed, torch.tensor([0], device=each.device), words, impl=each.forced)
    assert not torch.isfinite(placed).any()


def test_a_vocabulary_that_is_no_multiple_of_32(each: Impl) -> None:
    """B15: bits past the vocabulary's end belong to no token."""
    values = torch.randn(1, 1665, generator=torch.Generator().manual_seed(3))
    words = torch.full((1, 53), -1, dtype=torch.int32)
    words[0, 52] = 0
    expected = values.clone()
    expected[0, 1664] = float("-inf")
    with guarded(each) as guard:
        placed = guard.place(values)
        apply_grammar_bitmask(placed, guard.place(torch.tensor([0])), guard.place(words), impl=each.forced)
    assert_same(placed, expected)


def test_an_allowed_nan_stays_and_a_blocked_one_goes(each: Impl) -> None:
    values = torch.full((1, 64), float("nan"))
    words = torch.tensor([[1, 0]], dtype=torch.int32, device=each.device)
    placed = values.to(each.device)
    apply_grammar_bitmask(placed, torch.tensor([0], device=each.device), words, impl=each.forced)
    assert placed[0, 0].isnan()
    assert (placed[0, 1:] == float("-inf")).all()


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    generator = torch.Generator().manual_seed(4)
    rows, size = (7, 150_001) if impl.on_device else (2, 130)
    values = torch.randn(rows, size, generator=generator).to(impl.device)
    words = random_words(rows, -(-size // 32), generator=generator).to(impl.device)
    indices = torch.arange(rows, device=impl.device)

    def run() -> torch.Tensor:
        result = values.clone()
        apply_grammar_bitmask(result, indices, words, impl=impl.forced)
        return result

    assert_repeatable(run)


def test_permuting_the_masks_changes_nothing(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(9, 333, generator=generator).to(impl.device)
    words = random_words(9, 11, generator=generator).to(impl.device)
    indices, order = torch.arange(9, device=impl.device), torch.randperm(9, generator=generator).to(impl.device)
    straight, permuted = values.clone(), values.clone()
    apply_grammar_bitmask(straight, indices, words, impl=impl.forced)
    apply_grammar_bitmask(permuted, indices[order], words[order], impl=impl.forced)
    assert_same(permuted, straight)
