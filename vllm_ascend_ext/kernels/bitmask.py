"""Blocks the tokens that a grammar forbids, in place; must never know what a grammar is.

Only what changes is moved. A tile (on Ascend) or a group of neighbouring tokens (on a GPU) whose bits are all 1 is left
alone, one whose bits are all 0 is overwritten unread, and only a mixed one is loaded, selected from and stored. The
store is never masked by the data: on Ascend such a store is not clamped at the row's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _checks, _launch
from ._bits import load_groups, single_bits, unpack_groups, unpack_words
from ._launch import Target, cdiv
from ._triton import tl, triton
from .reference import bitmask as reference


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Logits of a tile.
    tile: int
    #: Logits that are skipped or moved together; 0: whole tiles.
    group: int
    #: See ``_launch.plan``.
    tiles_per_piece: int
    programs_per_core: int
    num_warps: int


def _setting(target: Target, element_bytes: int) -> _Setting:
    if target.interpreted:
        group, tiles_per_piece = (8, 2) if target.body == "cuda" else (0, 0)
        return _Setting(tile=64, group=group, tiles_per_piece=tiles_per_piece, programs_per_core=2, num_warps=1)
    if target.body == "npu":
        return _Setting(tile=16384 // element_bytes, group=0, tiles_per_piece=0, programs_per_core=1, num_warps=1)
    return _Setting(tile=512, group=16 // element_bytes, tiles_per_piece=2, programs_per_core=16, num_warps=1)


@triton.jit
def _mask_tile(row_ptr, words_ptr, num_words, first, vocab_size, single, TILE: tl.constexpr):
    """Mask a whole tile."""
    word = first // 32 + tl.arange(0, TILE // 32)
    words = tl.load(words_ptr + word, mask=word < num_words, other=0)
    some_blocked = tl.max((words != -1).to(tl.int32), axis=0)
    some_allowed = tl.max((words != 0).to(tl.int32), axis=0)
    token = first + tl.arange(0, TILE)
    if some_blocked != 0:
        if some_allowed != 0:
            x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
            x = tl.where(unpack_words(words, single, TILE // 32), x, float("-inf"))
            tl.store(row_ptr + token, x, mask=token < vocab_size)
        else:
            blocked = tl.full([TILE], float("-inf"), row_ptr.dtype.element_ty)
            tl.store(row_ptr + token, blocked, mask=token < vocab_size)


@triton.jit
def _mask_groups(row_ptr, groups, first, end, TILE: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr):
    """Mask the groups of a tile, each on its own; only a ``TAIL`` may reach past ``end``."""
    some_blocked = (groups != (1 << GROUP) - 1)[:, None]
    mixed = some_blocked & (groups != 0)[:, None]
    token = first + tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if TAIL:
        some_blocked = some_blocked & (token < end)
        mixed = mixed & (token < end)
    x = tl.load(row_ptr + token, mask=tl.broadcast_to(mixed, token.shape), other=float("-inf"))
    x = tl.where(unpack_groups(groups, GROUP), x, float("-inf"))
    tl.store(row_ptr + token, x, mask=tl.broadcast_to(some_blocked, token.shape))


_SIZES = [
    "logits_stride",
    "bitmask_stride",
    "num_words",
    "vocab_size",
    "num_masks",
    "mask_stride",
    "pieces",
    "tiles_per_piece",
]


@triton.jit(do_not_specialize=_SIZES)
def _bitmask_kernel(
    logits_ptr,
    logits_stride,
    logits_indices_ptr,
    cu_num_logits_ptr,
    bitmask_ptr,
    bitmask_stride,
    num_words,
    vocab_size,
    num_masks,
    mask_stride,
    pieces,
    tiles_per_piece,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Each item is a piece of one mask's row."""
    single = single_bits()
    for item in range(tl.program_id(0), num_masks * pieces, tl.num_programs(0)):
        mask = item // pieces
        start = (item - mask * pieces) * tiles_per_piece * TILE
        end = tl.minimum(start + tiles_per_piece * TILE, vocab_size)
        words_ptr = bitmask_ptr + mask * bitmask_stride.to(tl.int64)
        if GROUP != 0:
            # Asked for before the row is known, and always a tile ahead: a tile then waits for its logits alone.
            groups = load_groups(words_ptr, num_words, start, TILE // GROUP, GROUP)
        row = tl.load(logits_indices_ptr + mask).to(tl.int64)
        active = row >= 0
        if cu_num_logits_ptr is not None:
            request = tl.where(active, row, 0) // mask_stride
            position = row - request * mask_stride
            first_row = tl.load(cu_num_logits_ptr + request)
            active = active & (position < tl.load(cu_num_logits_ptr + request + 1) - first_row)
            row = first_row + position
        if active:
            row_ptr = logits_ptr + row * tl.multiple_of(logits_stride.to(tl.int64), ALIGN)
            if GROUP == 0:
                for first in range(start, end, TILE):
                    _mask_tile(row_ptr, words_ptr, num_words, first, vocab_size, single, TILE)
            else:
                whole_end = start + (end - start) // TILE * TILE
                for first in range(start, whole_end, TILE):
                    following = load_groups(words_ptr, num_words, first + TILE, TILE // GROUP, GROUP)
                    _mask_groups(row_ptr, groups, first, end, TILE, GROUP, False)
                    groups = following
                if whole_end < end:
                    _mask_groups(row_ptr, groups, whole_end, end, TILE, GROUP, True)


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_indices: torch.Tensor,
    bitmask: torch.Tensor,
    cu_num_logits: torch.Tensor | None = None,
    mask_stride: int = 1,
    *,
    impl: str | None = None,
) -> None:
    """Set to -inf, in place, every logit whose token is blocked.

    Args:
        logits: float32, bfloat16 or float16 [n, V]; rows may be further apart than V.
        logits_indices: int32 or int64 [m]: the logits row of each mask; a negative one skips the mask. No row twice.
        bitmask: int32 [m, W]: bit b of word w is 1 where token 32 * w + b is allowed. Tokens from 32 * W on are
            blocked; words past W, in a view of wider rows, are not used.
        cu_num_logits: int32 or int64 [r + 1], optional: the first logits row of each request. With it an index is
            request * mask_stride + position, and positions past the request's rows are skipped.
        mask_stride: masks of each request; only with cu_num_logits.
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _checks.tensor("logits", logits, (_checks.ANY, _checks.ANY), _checks.FLOATS)
    _checks.tensor("logits_indices", logits_indices, (_checks.ANY,), _checks.INTS, like=logits)
    masks = logits_indices.shape[0]
    _checks.tensor("bitmask", bitmask, (masks, _checks.ANY), _checks.INT32, like=logits)
    if cu_num_logits is not None:
        _checks.tensor("cu_num_logits", cu_num_logits, (_checks.ANY,), _checks.INTS, like=logits)
        _checks.at_least("cu_num_logits", cu_num_logits.shape[0], 1, "its length")
    _checks.at_least("mask_stride", mask_stride, 1, "it")
    target = _launch.choose(logits, impl)
    if target is None:
        reference.apply_grammar_bitmask(logits, logits_indices, bitmask, cu_num_logits, mask_stride)
        return
    vocab_size = logits.shape[1]
    if masks == 0 or logits.numel() == 0:
        return
    setting = _setting(target, logits.element_size())
    programs = target.cores * setting.programs_per_core
    tiles = cdiv(vocab_size, setting.tile)
    pieces, grid = _launch.plan(masks, tiles, programs, setting.tiles_per_piece)
    _bitmask_kernel[(grid,)](
        logits,
        logits.stride(0),
        logits_indices,
        cu_num_logits,
        bitmask,
        bitmask.stride(0),
        bitmask.shape[1],
        vocab_size,
        masks,
        mask_stride,
        pieces,
        cdiv(tiles, pieces),
        TILE=setting.tile,
        GROUP=setting.group,
        ALIGN=_launch.vector_elements(logits.stride(0), logits.element_size()),
        **target.options(num_warps=setting.num_warps),
    )
