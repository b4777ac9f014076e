"""Which tokens a prompt holds and how often the output holds each, rebuilt for some slots; must never know penalties.

A program owns a range of one slot's counters: words of the prompt's mask, or counts of the output. It builds them in
memory of its own, looking at every token of the prompt or of the output, and overwrites the range. So nothing is
cleared beforehand, nothing is added up in global memory, and a token costs one step for each range: on Ascend a scalar
step inside the Unified Buffer, with no transfer in it; on a GPU an atomic in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _checks, _launch
from ._launch import Target, cdiv
from ._triton import get_element, insert_slice, tl, triton
from .reference import token_counts as reference


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Counters of a program, of 4 bytes each.
    bins: int
    #: Token ids looked at together, of the prompt and of the output.
    prompt_tokens: int
    output_tokens: int
    #: Whether the counters lie in a GPU's shared memory, and how many are then written out together.
    shared: bool
    chunk: int
    programs_per_core: int
    num_warps: int


#: Counters of a program in shared memory: 32 KiB, of the 48 KiB that a kernel may declare.
_SHARED_BINS = 8192


def _setting(target: Target) -> _Setting:
    if target.interpreted:
        return _Setting(
            bins=64, prompt_tokens=16, output_tokens=16, shared=False, chunk=0, programs_per_core=2, num_warps=1
        )
    if target.body == "npu":
        return _Setting(
            bins=16384, prompt_tokens=1024, output_tokens=1024, shared=False, chunk=0, programs_per_core=1, num_warps=1
        )
    return _Setting(
        bins=_SHARED_BINS,
        prompt_tokens=8192,
        output_tokens=1024,
        shared=True,
        chunk=2048,
        programs_per_core=64,
        num_warps=16,
    )


@triton.jit
def _look_at(tokens_ptr, first, end, lo, vocab_size, BINS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr):
    """(counter of each token, 0 if it has none here; whether it has one; its bit's number in a word)."""
    position = first + tl.arange(0, TOKENS)
    token = tl.load(tokens_ptr + position, mask=position < end, other=-1).to(tl.int32)
    index = (token >> 5 if BITS else token) - lo
    mine = ((token >= 0) & (token < vocab_size)) & ((index >= 0) & (index < BINS))
    return tl.where(mine, index, 0), mine, token & 31


@triton.jit
def _rebuild(
    out_ptr, size, tokens_ptr, start, end, lo, vocab_size, BINS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr
):
    """Rebuild a range of words (``BITS``) or counts in a block of its own, one token after the other."""
    counters = tl.zeros([BINS], tl.int32)
    for first in range(start, end, TOKENS):
        index, mine, shift = _look_at(tokens_ptr, first, end, lo, vocab_size, BINS, TOKENS, BITS)
        one = tl.where(mine, 1, 0)
        for i in range(0, tl.minimum(end - first, TOKENS)):
            at = get_element(index, (i,))
            if BITS:
                value = get_element(counters, (at,)) | (get_element(one, (i,)) << get_element(shift, (i,)))
            else:
                value = get_element(counters, (at,)) + get_element(one, (i,))
            counters = insert_slice(counters, tl.full([1], 1, tl.int32) * value, [at], [1], [1])
    bin = tl.arange(0, BINS)
    tl.store(out_ptr + bin, counters, mask=bin < size)


# Shared memory, in PTX: Triton has no name for it. The block is declared once, before any loop, and its address is data
# from there on. Every barrier between two uses is spelled out.
_DECLARE = tl.constexpr(
    f".shared .align 16 .b32 vllm_ascend_ext_bins[{_SHARED_BINS}]; mov.u32 $0, vllm_ascend_ext_bins;"
)
_CLEAR_4 = tl.constexpr("{ .reg .b32 z; mov.u32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.u32 $0, 0; }")
_LOAD = tl.constexpr("ld.shared.b32 $0, [$1];")
_LOAD_4 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_ADD = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }")
_OR = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.or.b32 [$1], $2; mov.u32 $0, 0; }")
_FOUR_INT32 = tl.constexpr((tl.int32, tl.int32, tl.int32, tl.int32))


@triton.jit
def _load_shared(base, SIZE: tl.constexpr):
    """The next SIZE counters, int32 [SIZE], 16 bytes a thread."""
    address = base + tl.arange(0, SIZE // 4) * 16
    a, b, c, d = tl.inline_asm_elementwise(_LOAD_4, "=r,=r,=r,=r,r", [address], _FOUR_INT32, is_pure=False, pack=1)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _rebuild_shared(
    base, out_ptr, size, tokens_ptr, start, end, lo, vocab_size,
    BINS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rebuild a range of words (``BITS``) or counts in shared memory at ``base``."""
    fours = base + tl.arange(0, BINS // 4) * 16
    tl.inline_asm_elementwise(_CLEAR_4, "=r,r", [fours], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    for first in range(start, end, TOKENS):
        index, mine, shift = _look_at(tokens_ptr, first, end, lo, vocab_size, BINS, TOKENS, BITS)
        counter = base + index * 4
        if BITS:
            value = tl.where(mine, 1 << shift, 0)
            tl.inline_asm_elementwise(_OR, "=r,r,r", [counter, value], tl.int32, is_pure=False, pack=1)
        else:
            value = tl.where(mine, 1, 0)
            tl.inline_asm_elementwise(_ADD, "=r,r,r", [counter, value], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    offset = tl.arange(0, CHUNK)
    if BITS:
        # Few, and rows of words often don't start on 16 bytes: one word a thread.
        for first in range(0, size, CHUNK):
            address = base + (first + offset) * 4
            words = tl.inline_asm_elementwise(_LOAD, "=r,r", [address], tl.int32, is_pure=False, pack=1)
            tl.store(out_ptr + first + offset, words, mask=first + offset < size)
    else:
        whole = size // CHUNK * CHUNK
        for first in range(0, whole, CHUNK):
            tl.store(out_ptr + first + offset, _load_shared(base + first * 4, CHUNK))
        if whole < size:
            tl.store(out_ptr + whole + offset, _load_shared(base + whole * 4, CHUNK), mask=whole + offset < size)
    tl.debug_barrier()


_SIZES = ["tokens_stride", "mask_stride", "counts_stride", "vocab_size", "num_rows", "max_len", "mask_pieces", "pieces"]


@triton.jit(do_not_specialize=_SIZES)
def _bincount_kernel(
    expanded_idx_mapping_ptr,
    tokens_ptr,
    tokens_stride,
    prompt_len_ptr,
    prefill_len_ptr,
    mask_ptr,
    mask_stride,
    counts_ptr,
    counts_stride,
    vocab_size,
    num_rows,
    max_len,
    mask_pieces,
    pieces,
    BINS: tl.constexpr,
    PROMPT_TOKENS: tl.constexpr,
    OUTPUT_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS_ALIGN: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Each item is a range of one slot's words, or of its counts; the words, whose prompts are long, come first."""
    if SHARED:
        base = tl.inline_asm_elementwise(_DECLARE, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    for item in range(tl.program_id(0), num_rows * pieces, tl.num_programs(0)):
        piece = item // num_rows
        slot = tl.load(expanded_idx_mapping_ptr + (item - piece * num_rows)).to(tl.int64)
        if slot >= 0:
            end = tl.minimum(tl.load(prefill_len_ptr + slot).to(tl.int32), max_len)
            split = tl.minimum(tl.load(prompt_len_ptr + slot).to(tl.int32), end)
            row_ptr = tokens_ptr + slot * tokens_stride
            if piece < mask_pieces:
                lo = piece * BINS
                out_ptr = mask_ptr + slot * mask_stride + lo
                size = tl.minimum((vocab_size + 31) // 32 - lo, BINS)
                if SHARED:
                    _rebuild_shared(
                        base, out_ptr, size, row_ptr, 0, split, lo, vocab_size, BINS, PROMPT_TOKENS, True, CHUNK
                    )
                else:
                    _rebuild(out_ptr, size, row_ptr, 0, split, lo, vocab_size, BINS, PROMPT_TOKENS, True)
            else:
                lo = (piece - mask_pieces) * BINS
                out_ptr = counts_ptr + slot * tl.multiple_of(counts_stride.to(tl.int64), COUNTS_ALIGN) + lo
                size = tl.minimum(vocab_size - lo, BINS)
                if SHARED:
                    _rebuild_shared(
                        base, out_ptr, size, row_ptr, split, end, lo, vocab_size, BINS, OUTPUT_TOKENS, False, CHUNK
                    )
                else:
                    _rebuild(out_ptr, size, row_ptr, split, end, lo, vocab_size, BINS, OUTPUT_TOKENS, False)


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
    *,
    impl: str | None = None,
) -> None:
    """Rebuild, in place, the prompt's mask and the output's counts of the slots that the mapping names.

    Of a slot's first prefill_len tokens those before prompt_len are the prompt, the others are output. What the rows
    held before is overwritten; rows that aren't named are neither read nor written.

    Args:
        expanded_idx_mapping: int32 or int64 [n]: slots; a negative one is skipped. No slot twice.
        all_token_ids: int32 or int64 [R, L]; ids outside [0, V) are left out.
        prompt_len: int32 or int64 [R].
        prefill_len: int32 or int64 [R].
        prompt_bin_mask: int32 [R, ceil(V / 32)]: bit b of word w becomes 1 if token 32 * w + b is in the prompt.
        output_bin_counts: int32 [R, V].
        max_prefill_len: tokens of a slot from here on are not read.
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _checks.tensor("all_token_ids", all_token_ids, (_checks.ANY, _checks.ANY), _checks.INTS)
    slots, length = all_token_ids.shape
    _checks.tensor("expanded_idx_mapping", expanded_idx_mapping, (_checks.ANY,), _checks.INTS, like=all_token_ids)
    _checks.tensor("prompt_len", prompt_len, (slots,), _checks.INTS, like=all_token_ids)
    _checks.tensor("prefill_len", prefill_len, (slots,), _checks.INTS, like=all_token_ids)
    _checks.tensor("output_bin_counts", output_bin_counts, (slots, _checks.ANY), _checks.INT32, like=all_token_ids)
    vocab_size = output_bin_counts.shape[1]
    words = cdiv(vocab_size, 32)
    _checks.tensor("prompt_bin_mask", prompt_bin_mask, (slots, words), _checks.INT32, like=all_token_ids)
    _checks.at_least("max_prefill_len", max_prefill_len, 0, "it")
    target = _launch.choose(all_token_ids, impl)
    inputs = (expanded_idx_mapping, all_token_ids, prompt_len, prefill_len)
    if target is None:
        reference.bincount(*inputs, prompt_bin_mask, output_bin_counts, max_prefill_len)
        return
    rows = expanded_idx_mapping.shape[0]
    if rows == 0 or vocab_size == 0:
        return
    setting = _setting(target)
    mask_pieces = cdiv(words, setting.bins)
    pieces = mask_pieces + cdiv(vocab_size, setting.bins)
    _bincount_kernel[(min(rows * pieces, target.cores * setting.programs_per_core),)](
        expanded_idx_mapping,
        all_token_ids,
        all_token_ids.stride(0),
        prompt_len,
        prefill_len,
        prompt_bin_mask,
        prompt_bin_mask.stride(0),
        output_bin_counts,
        output_bin_counts.stride(0),
        vocab_size,
        rows,
        min(max_prefill_len, length),
        mask_pieces,
        pieces,
        BINS=setting.bins,
        PROMPT_TOKENS=setting.prompt_tokens,
        OUTPUT_TOKENS=setting.output_tokens,
        CHUNK=setting.chunk,
        COUNTS_ALIGN=_launch.vector_elements(output_bin_counts.stride(0), 4),
        SHARED=setting.shared,
        **target.options(num_warps=setting.num_warps, multibuffer=False),
    )
