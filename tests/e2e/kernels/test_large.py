"""B01: tensors of more than 2^31 elements, on the device: 15,408 rows of 151,936, where row 14,134 passes the bound."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_ext.kernels import (
    apply_grammar_bitmask,
    apply_penalties,
    bincount,
    compute_token_logprobs_and_ranks,
    post_update,
)
from vllm_ascend_ext.kernels.reference import logprobs

from .kernel_checks import Impl, assert_close, assert_same

ROWS, VOCAB_SIZE = 963 * 16, 151_936
LAST = ROWS - 1
WORDS = VOCAB_SIZE // 32


@pytest.fixture(autouse=True)
def _on_a_device(impl: Impl) -> None:
    if not impl.on_device:
        pytest.skip("tensors of 9.4 GB are for devices; test_wide_offsets does without the memory")


def _full(impl: Impl, value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((ROWS, VOCAB_SIZE), value, dtype=dtype, device=impl.device)


def _int(impl: Impl, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=impl.device)


def _assert_untouched(tensor: torch.Tensor, value: float) -> None:
    """All rows but the last hold nothing but ``value``."""
    for rows in tensor[:-1].split(1024):
        assert bool((rows == value).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_and_ranks(impl: Impl, dtype: torch.dtype) -> None:
    values = torch.empty((ROWS, VOCAB_SIZE), dtype=dtype, device=impl.device).normal_()
    ids = torch.arange(ROWS, device=impl.device).unsqueeze(1) % VOCAB_SIZE
    found = compute_token_logprobs_and_ranks(values, ids, impl=impl.forced)
    for row in (0, 1, 14_133, 14_134, LAST):
        assert_close(found[0][row : row + 1], logprobs.token_logprobs(values[row : row + 1], ids[row : row + 1]))
        assert_same(found[1][row : row + 1], logprobs.token_ranks(values[row : row + 1], ids[row : row + 1, 0]))


def test_bitmask(impl: Impl) -> None:
    values = _full(impl, 1.0, torch.float32)
    words = torch.full((1, WORDS), 0x0F0F0F0F, dtype=torch.int32, device=impl.device)
    apply_grammar_bitmask(values, _int(impl, LAST), words, impl=impl.forced)
    allowed = torch.arange(VOCAB_SIZE, device=impl.device) % 8 < 4
    assert_same(values[LAST], torch.where(allowed, 1.0, float("-inf")).cpu())
    _assert_untouched(values, 1.0)


def test_penalties(impl: Impl) -> None:
    values = _full(impl, 2.0, torch.float32)
    mapping = torch.full((ROWS,), -1, dtype=torch.int32, device=impl.device)
    mapping[LAST] = 0
    counts = torch.arange(VOCAB_SIZE, dtype=torch.int32, device=impl.device).unsqueeze(0) % 3
    factors = [torch.tensor([factor], device=impl.device) for factor in (1.0, 0.5, 0.0)]
    rows = torch.zeros(ROWS, dtype=torch.int32, device=impl.device)
    mask = torch.zeros((1, WORDS), dtype=torch.int32, device=impl.device)
    apply_penalties(values, mapping, rows, rows, *factors, mask, counts, impl=impl.forced)
    assert_same(values[LAST], (2.0 - 0.5 * counts[0].float()).cpu())
    _assert_untouched(values, 2.0)


def test_bincount(impl: Impl) -> None:
    counts = _full(impl, 7, torch.int32)
    mask = torch.full((ROWS, WORDS), 7, dtype=torch.int32, device=impl.device)
    tokens = torch.zeros((ROWS, 6), dtype=torch.int32, device=impl.device)
    tokens[LAST] = _int(impl, 3, VOCAB_SIZE - 1, 0, 5, 5, VOCAB_SIZE - 1)
    lengths = torch.full((ROWS,), 6, dtype=torch.int32, device=impl.device)
    bincount(_int(impl, LAST), tokens, lengths // 2, lengths, mask, counts, 6, impl=impl.forced)
    assert counts[LAST].nonzero().flatten().tolist() == [5, VOCAB_SIZE - 1]
    assert counts[LAST, [5, VOCAB_SIZE - 1]].tolist() == [2, 1]
    assert mask[LAST].nonzero().flatten().tolist() == [0, WORDS - 1]
    assert mask[LAST, [0, WORDS - 1]].tolist() == [0b1001, -(2**31)]
    _assert_untouched(counts, 7)
    _assert_untouched(mask, 7)


def test_post_update(impl: Impl) -> None:
    counts = _full(impl, 7, torch.int32)
    state = torch.zeros(ROWS, dtype=torch.int32, device=impl.device)
    tokens = torch.full((ROWS, 4), 7, dtype=torch.int32, device=impl.device)
    sampled = _int(impl, 9, VOCAB_SIZE - 1, 9).long().unsqueeze(0)
    total_len = torch.ones(ROWS, dtype=torch.int32, device=impl.device)
    one = _int(impl, 3), _int(impl, 0)
    post_update(_int(impl, LAST), state, state.long(), counts, sampled, *one, None, tokens, total_len, impl=impl.forced)
    assert (counts[LAST] != 7).nonzero().flatten().tolist() == [9, VOCAB_SIZE - 1]
    assert counts[LAST, [9, VOCAB_SIZE - 1]].tolist() == [9, 8]
    assert tokens[LAST].tolist() == [7, 9, VOCAB_SIZE - 1, 9]
    _assert_untouched(counts, 7)
    _assert_untouched(tokens, 7)
