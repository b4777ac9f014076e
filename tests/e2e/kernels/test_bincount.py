"""Laws of bincount: a named slot holds its prompt's tokens and its output's counts, any other what it held before."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import bincount
from vllm_ascend_ext.kernels.reference import token_counts as reference

from .kernel_cases import GAPS, ID_DTYPES, SEEDS, VOCABULARIES, random_words
from .kernel_checks import Impl, assert_repeatable, assert_same, guarded


@given(
    vocab_size=VOCABULARIES,
    slots=st.integers(1, 5),
    length=st.sampled_from([1, 5, 16, 17, 40, 70]),
    data=st.data(),
    token_dtype=ID_DTYPES,
    len_dtype=ID_DTYPES,
    gap=GAPS,
    seed=SEEDS,
)
def test_named_slots_are_rebuilt_and_no_other_is_touched(
    impl: Impl,
    vocab_size: int,
    slots: int,
    length: int,
    data: st.DataObject,
    token_dtype: torch.dtype,
    len_dtype: torch.dtype,
    gap: int,
    seed: int,
) -> None:
    """Whatever stood in a named slot before; ids outside the vocabulary, and few tokens often, among the tokens."""
    generator = torch.Generator().manual_seed(seed)
    named = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(0, slots))]
    mapping = torch.tensor([data.draw(st.sampled_from([slot, slot, slot, -1])) for slot in named], dtype=len_dtype)
    high = data.draw(st.sampled_from([3, vocab_size + 3]))
    tokens = torch.randint(-2, high, (slots, length), generator=generator).to(token_dtype)
    prefill_len = torch.randint(0, length + 1, (slots,), generator=generator).to(len_dtype)
    prompt_len = (torch.rand(slots, generator=generator) * (prefill_len + 1)).to(len_dtype)
    longest = data.draw(st.sampled_from([length, length + 5, length // 2]))
    mask = random_words(slots, -(-vocab_size // 32), generator=generator)
    counts = random_words(slots, vocab_size, generator=generator)
    expected_mask, expected_counts = mask.clone(), counts.clone()
    reference.bincount(mapping, tokens, prompt_len, prefill_len, expected_mask, expected_counts, longest)
    with guarded(impl) as guard:
        placed_mask, placed_counts = guard.place(mask, gap), guard.place(counts, gap)
        inputs = [guard.place(mapping), guard.place(tokens, gap), guard.place(prompt_len), guard.place(prefill_len)]
        bincount(*inputs, placed_mask, placed_counts, longest, impl=impl.forced)
    assert_same(placed_mask, expected_mask)
    assert_same(placed_counts, expected_counts)


def _run(
    impl: Impl, tokens: list[list[int]], prompt_len: list[int], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and counts of all slots, on the CPU, from a guarded run."""
    slots, length = len(tokens), len(tokens[0])
    with guarded(impl) as guard:
        mask = guard.empty((slots, -(-vocab_size // 32)), torch.int32)
        counts = guard.empty((slots, vocab_size), torch.int32)
        bincount(
            guard.place(torch.arange(slots)),
            guard.place(torch.tensor(tokens, dtype=torch.int32)),
            guard.place(torch.tensor(prompt_len)),
            guard.place(torch.full((slots,), length)),
            mask,
            counts,
            length,
            impl=impl.forced,
        )
    return mask.cpu(), counts.cpu()


@pytest.mark.parametrize("vocab_size", [256, 128])
def test_ids_outside_the_vocabulary_set_no_bit_and_count_nothing(each: Impl, vocab_size: int) -> None:
    """B02: [5, V, -1] as a prompt sets bit 5 and nothing else, least of all in the next slot; as output it counts 5."""
    mask, counts = _run(each, [[5, vocab_size, -1], [5, vocab_size, -1]], [3, 0], vocab_size)
    assert mask[0].tolist() == [1 << 5] + [0] * (vocab_size // 32 - 1)
    assert not mask[1].any()
    assert not counts[0].any()
    assert counts[1].nonzero().tolist() == [[5]]
    assert counts[1, 5] == 1


def test_equal_tokens_add_up(each: Impl) -> None:
    """All output tokens are the same one; every lane of every tile hits one counter."""
    number = 3000 if each.on_device else 40
    _, counts = _run(each, [[9] * number], [0], 60)
    assert counts[0].nonzero().tolist() == [[9]]
    assert counts[0, 9] == number


def test_every_token_once_in_the_prompt_and_in_the_output(each: Impl) -> None:
    """Every bit of every word, bit 31 included, and the last token of a vocabulary that fills no word."""
    tokens = [*range(70), *range(70)]
    mask, counts = _run(each, [tokens], [70], 70)
    assert mask.tolist() == [[-1, -1, 0b111111]]
    assert counts.tolist() == [[1] * 70]


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    generator = torch.Generator().manual_seed(1)
    slots, size, length = (4, 150_001, 5000) if impl.on_device else (1, 70, 12)
    tokens = torch.randint(0, size, (slots, length), generator=generator).to(impl.device)
    lengths = torch.full((slots,), length, device=impl.device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.full((slots, -(-size // 32)), -1, dtype=torch.int32, device=impl.device)
        counts = torch.full((slots, size), 7, dtype=torch.int32, device=impl.device)
        order = torch.arange(slots, device=impl.device)
        bincount(order, tokens, lengths // 2, lengths, mask, counts, length, impl=impl.forced)
        return mask, counts

    assert_repeatable(run)


def test_permuting_the_slots_changes_nothing(impl: Impl) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 130, (5, 20), generator=generator).to(impl.device)
    lengths = torch.tensor([20, 0, 7, 13, 19], device=impl.device)
    results = []
    for mapping in (torch.arange(5), torch.tensor([3, 1, 4, 0, 2])):
        mask = torch.zeros(5, 5, dtype=torch.int32, device=impl.device)
        counts = torch.zeros(5, 130, dtype=torch.int32, device=impl.device)
        bincount(mapping.to(impl.device), tokens, lengths // 2, lengths, mask, counts, 20, impl=impl.forced)
        results.append((mask, counts))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])
