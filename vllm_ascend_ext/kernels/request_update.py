"""What a request's state becomes after a sampling step, in one launch; must never know how tokens were sampled.

Each address is written at most once: a token that was sampled several times adds its number of occurrences to its count
in one step, so that nothing reads back what the launch itself stored. On a GPU the threads of a warp take the tokens of
several rows; on Ascend a core goes through its rows with the scalar unit, one request after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _checks, _launch
from ._launch import Target, cdiv
from ._triton import tl, triton
from .reference import request_update as reference


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Rows taken together; 0: one after the other.
    rows: int
    #: Tokens of a row taken together.
    steps: int
    programs_per_core: int
    num_warps: int


def _setting(target: Target, width: int = 1) -> _Setting:
    if target.interpreted:
        return _Setting(rows=4 if target.body == "cuda" else 0, steps=2, programs_per_core=1, num_warps=1)
    if target.body == "npu":
        return _Setting(rows=0, steps=16, programs_per_core=1, num_warps=1)
    # Two forms: tokens that are taken together should be all of a row's, but each meets each.
    return _Setting(rows=1, steps=8 if width <= 8 else 16, programs_per_core=64, num_warps=1)


@triton.jit
def _update_row(
    row, slot, num_computed_ptr, last_ptr, counts_ptr, counts_stride, sampled_ptr, sampled_stride, num_sampled_ptr,
    num_rejected_ptr, query_start_ptr, all_tokens_ptr, all_tokens_stride, total_len_ptr, drafts_ptr, drafts_stride,
    drafts_out_ptr, drafts_out_stride, vocab_size, length, width, num_drafts, STEPS: tl.constexpr,
):  # fmt: skip
    """Update one request."""
    step = tl.arange(0, STEPS)
    if drafts_ptr is not None:
        for first in range(0, num_drafts, STEPS):
            source = drafts_ptr + row * drafts_stride.to(tl.int64) + first + step
            draft = tl.load(source, mask=first + step < num_drafts, other=0)
            tl.store(drafts_out_ptr + slot * drafts_out_stride + first + step, draft, mask=first + step < num_drafts)

    tokens_ptr = sampled_ptr + row * sampled_stride.to(tl.int64)
    count = tl.minimum(tl.load(num_sampled_ptr + row).to(tl.int32), width)
    if count > 0:
        start = tl.load(total_len_ptr + slot)
        tl.store(last_ptr + slot, tl.load(tokens_ptr + count - 1).to(last_ptr.dtype.element_ty))
        tl.store(total_len_ptr + slot, start + count)
        room = tl.minimum(count, length - start.to(tl.int32))
        append_ptr = all_tokens_ptr + slot * all_tokens_stride + start
        for first in range(0, room, STEPS):
            token = tl.load(tokens_ptr + first + step, mask=first + step < room, other=0).to(tl.int32)
            tl.store(append_ptr + first + step, token.to(append_ptr.dtype.element_ty), mask=first + step < room)

    if counts_ptr is not None:
        for i in range(0, count):
            mine = tl.load(tokens_ptr + i).to(tl.int32)
            times = 0
            before = 0
            for first in range(0, count, STEPS):
                token = tl.load(tokens_ptr + first + step, mask=first + step < count, other=-1).to(tl.int32)
                same = (token == mine).to(tl.int32)
                times += tl.sum(same, axis=0)
                before += tl.sum(tl.where(first + step < i, same, 0), axis=0)
            if (before == 0) & ((mine >= 0) & (mine < vocab_size)):
                count_ptr = counts_ptr + slot * counts_stride + mine
                tl.store(count_ptr, tl.load(count_ptr) + times)

    delta = -tl.load(num_rejected_ptr + row).to(tl.int32)
    if query_start_ptr is not None:
        delta += (tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row)).to(tl.int32)
    tl.store(num_computed_ptr + slot, tl.load(num_computed_ptr + slot) + delta)


@triton.jit
def _update_rows(
    first_row, idx_mapping_ptr, num_computed_ptr, last_ptr, counts_ptr, counts_stride, sampled_ptr, sampled_stride,
    num_sampled_ptr, num_rejected_ptr, query_start_ptr, all_tokens_ptr, all_tokens_stride, total_len_ptr, drafts_ptr,
    drafts_stride, drafts_out_ptr, drafts_out_stride, vocab_size, length, width, num_drafts, num_rows,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Update ROWS requests side by side. All loads of a kind are under way before the first is waited for."""
    row = first_row + tl.arange(0, ROWS)
    step = tl.arange(0, STEPS)
    inside = row < num_rows
    slot = tl.load(idx_mapping_ptr + row, mask=inside, other=-1).to(tl.int64)
    count = tl.load(num_sampled_ptr + row, mask=inside, other=0).to(tl.int32)
    delta = -tl.load(num_rejected_ptr + row, mask=inside, other=0).to(tl.int32)
    if query_start_ptr is not None:
        end = tl.load(query_start_ptr + row + 1, mask=inside, other=0)
        delta += (end - tl.load(query_start_ptr + row, mask=inside, other=0)).to(tl.int32)
    tokens_ptr = sampled_ptr + row[:, None] * sampled_stride.to(tl.int64)
    token = tl.load(tokens_ptr + step[None, :], mask=inside[:, None] & (step < width)[None, :], other=-1)

    live = slot >= 0
    start = tl.load(total_len_ptr + slot, mask=live, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=live, other=0)
    count = tl.minimum(count, width)
    for first in range(0, width, STEPS):
        at = (first + step)[None, :]
        valid = live[:, None] & (at < count[:, None])
        if counts_ptr is not None:
            counted = valid & ((token >= 0) & (token < vocab_size))
            count_ptr = counts_ptr + slot[:, None] * counts_stride + token
            old = tl.load(count_ptr, mask=counted, other=0)
            times = tl.zeros([ROWS, STEPS], tl.int32)
            before = tl.zeros([ROWS, STEPS], tl.int32)
            for other_first in range(0, width, STEPS):
                other_at = (other_first + step)[None, :]
                other = tl.load(tokens_ptr + other_at, mask=inside[:, None] & (other_at < width), other=-1)
                same = (token[:, :, None] == other[:, None, :]) & (other_at < count[:, None])[:, None, :]
                times += tl.sum(same.to(tl.int32), axis=2)
                before += tl.sum((same & (other_at[:, None, :] < at[:, :, None])).to(tl.int32), axis=2)
            tl.store(count_ptr, old + times, mask=counted & (before == 0))
        position = start[:, None] + at
        append_ptr = all_tokens_ptr + slot[:, None] * all_tokens_stride + position
        tl.store(append_ptr, token.to(append_ptr.dtype.element_ty), mask=valid & (position < length))
        last = tl.broadcast_to(last_ptr + slot[:, None], valid.shape)
        tl.store(last, token.to(last_ptr.dtype.element_ty), mask=valid & (at == count[:, None] - 1))
        token = tl.load(tokens_ptr + at + STEPS, mask=inside[:, None] & (at + STEPS < width), other=-1)
    tl.store(total_len_ptr + slot, start + count, mask=live & (count > 0))
    tl.store(num_computed_ptr + slot, computed + delta, mask=live)
    if drafts_ptr is not None:
        for first in range(0, num_drafts, STEPS):
            at = (first + step)[None, :]
            known = live[:, None] & (at < num_drafts)
            draft = tl.load(drafts_ptr + row[:, None] * drafts_stride.to(tl.int64) + at, mask=known, other=0)
            tl.store(drafts_out_ptr + slot[:, None] * drafts_out_stride + at, draft, mask=known)


_SIZES = [
    "counts_stride",
    "sampled_stride",
    "all_tokens_stride",
    "drafts_stride",
    "drafts_out_stride",
    "vocab_size",
    "length",
    "width",
    "num_drafts",
    "num_rows",
]


@triton.jit(do_not_specialize=_SIZES)
def _post_update_kernel(
    idx_mapping_ptr,
    num_computed_ptr,
    last_ptr,
    counts_ptr,
    counts_stride,
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_ptr,
    all_tokens_ptr,
    all_tokens_stride,
    total_len_ptr,
    drafts_ptr,
    drafts_stride,
    drafts_out_ptr,
    drafts_out_stride,
    vocab_size,
    length,
    width,
    num_drafts,
    num_rows,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Each item is ROWS rows, or one."""
    if ROWS == 0:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
            if slot >= 0:
                _update_row(
                    row, slot, num_computed_ptr, last_ptr, counts_ptr, counts_stride, sampled_ptr, sampled_stride,
                    num_sampled_ptr, num_rejected_ptr, query_start_ptr, all_tokens_ptr, all_tokens_stride,
                    total_len_ptr, drafts_ptr, drafts_stride, drafts_out_ptr, drafts_out_stride, vocab_size, length,
                    width, num_drafts, STEPS,
                )  # fmt: skip
    else:
        for first_row in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
            _update_rows(
                first_row, idx_mapping_ptr, num_computed_ptr, last_ptr, counts_ptr, counts_stride, sampled_ptr,
                sampled_stride, num_sampled_ptr, num_rejected_ptr, query_start_ptr, all_tokens_ptr, all_tokens_stride,
                total_len_ptr, drafts_ptr, drafts_stride, drafts_out_ptr, drafts_out_stride, vocab_size, length,
                width, num_drafts, num_rows, ROWS, STEPS,
            )  # fmt: skip


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_tokens_out: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> None:
    """Append each row's sampled tokens to its request's slot and move the slot's counters, in place.

    Args:
        idx_mapping: int32 or int64 [n]: the slot of each row; a negative one skips the row. No slot twice.
        num_computed_tokens: int32 or int64 [R]: grows by the row's query length less num_rejected.
        last_sampled_tokens: int32 or int64 [R] or [R, 1]: becomes the last sampled token, if there is one.
        output_bin_counts: int32 [R, V] or None: grows by one for each sampled token inside [0, V).
        sampled_tokens: int32 or int64 [n, S + 1].
        num_sampled: int32 or int64 [n]: how many of a row's tokens are valid; taken as at most S + 1.
        num_rejected: int32 or int64 [n].
        query_start_loc: int32 or int64 [n + 1] or longer, or None for queries of length 0.
        all_token_ids: int32 or int64 [R, L]: the sampled tokens are stored from total_len on, none past L.
        total_len: int32 or int64 [R]: grows by num_sampled.
        draft_tokens: int32 or int64 [n, S], or None.
        draft_tokens_out: of the same dtype [R, S]: takes over draft_tokens; not touched if that is None.
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _checks.tensor("idx_mapping", idx_mapping, (_checks.ANY,), _checks.INTS)
    _checks.tensor("num_computed_tokens", num_computed_tokens, (_checks.ANY,), _checks.INTS, like=idx_mapping)
    rows, slots = idx_mapping.shape[0], num_computed_tokens.shape[0]
    flat = isinstance(last_sampled_tokens, torch.Tensor) and last_sampled_tokens.dim() == 1
    last_shape = (slots,) if flat else (slots, 1)
    _checks.tensor("last_sampled_tokens", last_sampled_tokens, last_shape, _checks.INTS, like=idx_mapping)
    vocab_size, counts_stride = 0, 0
    if output_bin_counts is not None:
        shape = (slots, _checks.ANY)
        _checks.tensor("output_bin_counts", output_bin_counts, shape, _checks.INT32, like=idx_mapping)
        vocab_size, counts_stride = output_bin_counts.shape[1], output_bin_counts.stride(0)
    _checks.tensor("sampled_tokens", sampled_tokens, (rows, _checks.ANY), _checks.INTS, like=idx_mapping)
    _checks.tensor("num_sampled", num_sampled, (rows,), _checks.INTS, like=idx_mapping)
    _checks.tensor("num_rejected", num_rejected, (rows,), _checks.INTS, like=idx_mapping)
    if query_start_loc is not None:
        _checks.tensor("query_start_loc", query_start_loc, (_checks.ANY,), _checks.INTS, like=idx_mapping)
        _checks.at_least("query_start_loc", query_start_loc.shape[0], rows + 1, "its length")
    _checks.tensor("all_token_ids", all_token_ids, (slots, _checks.ANY), _checks.INTS, like=idx_mapping)
    _checks.tensor("total_len", total_len, (slots,), _checks.INTS, like=idx_mapping)
    num_drafts, drafts_stride, drafts_out_stride = 0, 0, 0
    if draft_tokens is not None:
        _checks.tensor("draft_tokens", draft_tokens, (rows, _checks.ANY), _checks.INTS, like=idx_mapping)
        num_drafts = draft_tokens.shape[1]
        shape = (slots, num_drafts)
        _checks.tensor("draft_tokens_out", draft_tokens_out, shape, (draft_tokens.dtype,), like=idx_mapping)
        assert draft_tokens_out is not None
        drafts_stride, drafts_out_stride = draft_tokens.stride(0), draft_tokens_out.stride(0)
    target = _launch.choose(idx_mapping, impl)
    if target is None:
        reference.post_update(
            idx_mapping,
            num_computed_tokens,
            last_sampled_tokens,
            output_bin_counts,
            sampled_tokens,
            num_sampled,
            num_rejected,
            query_start_loc,
            all_token_ids,
            total_len,
            draft_tokens,
            draft_tokens_out,
        )
        return
    if rows == 0:
        return
    setting = _setting(target, sampled_tokens.shape[1])
    _post_update_kernel[(min(cdiv(rows, max(setting.rows, 1)), target.cores * setting.programs_per_core),)](
        idx_mapping,
        num_computed_tokens,
        last_sampled_tokens,
        output_bin_counts,
        counts_stride,
        sampled_tokens,
        sampled_tokens.stride(0),
        num_sampled,
        num_rejected,
        query_start_loc,
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        draft_tokens,
        drafts_stride,
        draft_tokens_out if draft_tokens is not None else None,
        drafts_out_stride,
        vocab_size,
        all_token_ids.shape[1],
        sampled_tokens.shape[1],
        num_drafts,
        rows,
        ROWS=setting.rows,
        STEPS=setting.steps,
        **target.options(num_warps=setting.num_warps),
    )
