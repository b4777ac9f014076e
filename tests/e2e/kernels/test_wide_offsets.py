"""B01: offsets of rows x width above 2^31 elements, in the interpreter and on the device.

With four rows 2^30 elements apart, row 2 starts at 2^31: a row number times a stride, each of 32 bits, is wrong from
there on unless it is widened before the multiplication. On the CPU the buffers are never written between the rows, so
that they take address space and no memory; the interpreter's numpy integers are as wide as the kernel's.
"""

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
from vllm_ascend_ext.kernels.reference import logprobs, penalties

from .kernel_checks import Impl, assert_close, assert_same

STRIDE = 2**30
ROWS = 4
SIZE = 200


def _far_apart(impl: Impl, values: torch.Tensor) -> torch.Tensor:
    """``values`` [4, n] in rows 2^30 elements apart."""
    buffer = torch.empty((ROWS - 1) * STRIDE + values.shape[1], dtype=values.dtype, device=impl.device)
    placed = buffer.as_strided(tuple(values.shape), (STRIDE, 1))
    return placed.copy_(values)


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_logprobs_and_ranks(impl: Impl, values: torch.Tensor) -> None:
    ids = torch.tensor([[5, 7]] * ROWS)
    found = compute_token_logprobs_and_ranks(_far_apart(impl, values), ids.to(impl.device), impl=impl.forced)
    assert_close(found[0], logprobs.token_logprobs(values, ids))
    assert_same(found[1], logprobs.token_ranks(values, ids[:, 0]))


def test_token_ids_far_apart(impl: Impl, values: torch.Tensor) -> None:
    ids = torch.arange(2 * ROWS, dtype=torch.int32).view(ROWS, 2)
    found = compute_token_logprobs_and_ranks(values.to(impl.device), _far_apart(impl, ids), impl=impl.forced)
    assert_close(found[0], logprobs.token_logprobs(values, ids))


def test_bitmask(impl: Impl, values: torch.Tensor) -> None:
    words = torch.tensor([[0, -1, 0, 0, 0, 0, -1]] * ROWS, dtype=torch.int32)
    placed = _far_apart(impl, values)
    apply_grammar_bitmask(placed, torch.arange(ROWS, device=impl.device), _far_apart(impl, words), impl=impl.forced)
    expected = torch.full_like(values, float("-inf"))
    expected[:, 32:64], expected[:, 192:] = values[:, 32:64], values[:, 192:]
    assert_same(placed, expected)


def test_penalties(impl: Impl, values: torch.Tensor) -> None:
    counts = torch.arange(ROWS * SIZE, dtype=torch.int32).view(ROWS, SIZE) % 3
    words = torch.tensor([[5, -1, 0, 0, 0, 0, -1]] * ROWS, dtype=torch.int32)
    arguments = [torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)]
    arguments += [torch.full((ROWS,), penalty) for penalty in (1.5, 0.5, 0.25)]
    expected = values.clone()
    penalties.apply_penalties(expected, *arguments, words, counts)
    placed = _far_apart(impl, values)
    bins = (_far_apart(impl, words), _far_apart(impl, counts))
    apply_penalties(placed, *(argument.to(impl.device) for argument in arguments), *bins, impl=impl.forced)
    assert_close(placed, expected)


def test_bincount(impl: Impl) -> None:
    tokens = torch.tensor([[1, 2, 3, 3]] * ROWS, dtype=torch.int32)
    lengths = torch.full((ROWS,), 4, device=impl.device)
    mask = _far_apart(impl, torch.full((ROWS, 2), -1, dtype=torch.int32))
    counts = _far_apart(impl, torch.full((ROWS, 40), 7, dtype=torch.int32))
    slots = torch.arange(ROWS, device=impl.device)
    bincount(slots, _far_apart(impl, tokens), lengths // 2, lengths, mask, counts, 4, impl=impl.forced)
    assert mask.tolist() == [[0b110, 0]] * ROWS
    assert counts.tolist() == [[0, 0, 0, 2, *[0] * 36]] * ROWS


def test_post_update(impl: Impl) -> None:
    def every(*row: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([row] * ROWS, dtype=dtype)

    counts, tokens, drafts = (_far_apart(impl, every(0, 0, 0, 0)) for _ in range(3))
    total_len = torch.ones(ROWS, dtype=torch.int32, device=impl.device)
    post_update(
        torch.arange(ROWS, device=impl.device),
        torch.zeros(ROWS, dtype=torch.int32, device=impl.device),
        torch.zeros(ROWS, 1, dtype=torch.int64, device=impl.device),
        counts,
        _far_apart(impl, every(3, 3)),
        torch.full((ROWS,), 2, device=impl.device),
        torch.zeros(ROWS, dtype=torch.int32, device=impl.device),
        None,
        tokens,
        total_len,
        _far_apart(impl, every(6, 7, 8, 9)),
        drafts,
        impl=impl.forced,
    )
    assert counts.tolist() == [[0, 0, 0, 2]] * ROWS
    assert tokens.tolist() == [[0, 3, 3, 0]] * ROWS
    assert drafts.tolist() == [[6, 7, 8, 9]] * ROWS
    assert total_len.tolist() == [3] * ROWS
