"""Penalties for tokens that a request has seen, in place; must never know how tokens are sampled.

On a GPU a group of neighbouring logits is moved only if one of its tokens was seen, since a token that wasn't keeps its
logit; the counts and the prompt's bits are read in full. On Ascend whole tiles are moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _checks, _launch
from ._bits import load_groups, single_bits, unpack_groups, unpack_words
from ._launch import Target, cdiv
from ._triton import tl, triton
from .reference import penalties as reference


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Logits of a tile.
    tile: int
    #: Logits that are skipped or moved together; 0: whole tiles.
    group: int
    #: Draft tokens looked at together, to see whether a tile holds any.
    drafts: int
    #: See ``_launch.plan``.
    tiles_per_piece: int
    programs_per_core: int
    num_warps: int


def _setting(target: Target, rows: int) -> _Setting:
    if target.interpreted:
        group, tiles_per_piece = (8, 2) if target.body == "cuda" else (0, 0)
        return _Setting(
            tile=64, group=group, drafts=4, tiles_per_piece=tiles_per_piece, programs_per_core=2, num_warps=1
        )
    if target.body == "npu":
        return _Setting(tile=4096, group=0, drafts=8, tiles_per_piece=0, programs_per_core=1, num_warps=1)
    # With enough rows to go round, longer pieces: fewer first tiles, which nothing was asked ahead for.
    tiles_per_piece = 3 if rows <= 256 else 6
    return _Setting(tile=512, group=4, drafts=16, tiles_per_piece=tiles_per_piece, programs_per_core=16, num_warps=4)


@triton.jit
def _add_drafts(counts, token, drafts_ptr, num_drafts, first, TILE: tl.constexpr, DRAFTS: tl.constexpr):
    """Add one to the count of each draft token of a tile; few tiles hold any, so look before going through them."""
    for start in range(0, num_drafts, DRAFTS):
        draft = start + tl.arange(0, DRAFTS)
        found = tl.load(drafts_ptr + draft, mask=draft < num_drafts, other=-1).to(tl.int32)
        if tl.max(((found >= first) & (found < first + TILE)).to(tl.int32), axis=0) != 0:
            for each in range(start, tl.minimum(start + DRAFTS, num_drafts)):
                counts += (token == tl.load(drafts_ptr + each).to(tl.int32)).to(tl.int32)
    return counts


@triton.jit
def _penalise(x, in_prompt, counts, repetition, frequency, presence):
    """The penalised logits, in float32."""
    x = x.to(tl.float32)
    # As float32, a count is compared in one step on Ascend, and no count is so large that it would be rounded.
    counts = counts.to(tl.float32)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where(in_prompt | (counts > 0), repeated, x)
    return tl.where(counts > 0, x - frequency * counts - presence, x)


@triton.jit
def _penalise_tile(
    row_ptr, words_ptr, counts_ptr, drafts_ptr, num_drafts, first, vocab_size, repetition, frequency, presence, single,
    TILE: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Penalise a whole tile."""
    token = first + tl.arange(0, TILE)
    word = first // 32 + tl.arange(0, TILE // 32)
    words = tl.load(words_ptr + word, mask=word < (vocab_size + 31) // 32, other=0)
    counts = tl.load(counts_ptr + token, mask=token < vocab_size, other=0)
    counts = _add_drafts(counts, token, drafts_ptr, num_drafts, first, TILE, DRAFTS)
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=0.0)
    penalised = _penalise(x, unpack_words(words, single, TILE // 32), counts, repetition, frequency, presence)
    tl.store(row_ptr + token, penalised.to(x.dtype), mask=token < vocab_size)


@triton.jit
def _penalise_groups(
    row_ptr, groups, counts, drafts_ptr, num_drafts, first, end, repetition, frequency, presence,
    TILE: tl.constexpr, GROUP: tl.constexpr, DRAFTS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Penalise those groups of a tile that hold a token that was seen; only a ``TAIL`` may reach past ``end``."""
    token = first + tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    counts = _add_drafts(counts, token, drafts_ptr, num_drafts, first, TILE, DRAFTS)
    # Without a repetition penalty the prompt changes nothing.
    groups = tl.where(repetition != 1.0, groups, 0)
    seen = ((tl.max(counts, axis=1) > 0) | (groups != 0))[:, None]
    seen = seen & (token < end) if TAIL else tl.broadcast_to(seen, token.shape)
    x = tl.load(row_ptr + token, mask=seen, other=0.0)
    penalised = _penalise(x, unpack_groups(groups, GROUP), counts, repetition, frequency, presence)
    tl.store(row_ptr + token, penalised.to(x.dtype), mask=seen)


@triton.jit
def _penalise_piece(
    row_ptr, words_ptr, counts_ptr, drafts_ptr, num_drafts, start, end, vocab_size, repetition, frequency, presence,
    TILE: tl.constexpr, GROUP: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Penalise a piece of a row by groups. Bits and counts are asked for a tile ahead: a tile waits for its logits."""
    num_words = (vocab_size + 31) // 32
    offset = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    whole_end = start + (end - start) // TILE * TILE
    if start < whole_end:
        groups = load_groups(words_ptr, num_words, start, TILE // GROUP, GROUP)
        counts = tl.load(counts_ptr + start + offset)
        for first in range(start, whole_end, TILE):
            # The last tile asks for itself once more.
            following = tl.minimum(first + TILE, whole_end - TILE)
            next_groups = load_groups(words_ptr, num_words, following, TILE // GROUP, GROUP)
            next_counts = tl.load(counts_ptr + following + offset)
            _penalise_groups(
                row_ptr, groups, counts, drafts_ptr, num_drafts, first, end, repetition, frequency, presence,
                TILE, GROUP, DRAFTS, False,
            )  # fmt: skip
            groups = next_groups
            counts = next_counts
    if whole_end < end:
        groups = load_groups(words_ptr, num_words, whole_end, TILE // GROUP, GROUP)
        counts = tl.load(counts_ptr + whole_end + offset, mask=whole_end + offset < end, other=0)
        _penalise_groups(
            row_ptr, groups, counts, drafts_ptr, num_drafts, whole_end, end, repetition, frequency, presence,
            TILE, GROUP, DRAFTS, True,
        )  # fmt: skip


_SIZES = [
    "logits_stride",
    "bin_mask_stride",
    "bin_counts_stride",
    "vocab_size",
    "num_rows",
    "pieces",
    "tiles_per_piece",
]


@triton.jit(do_not_specialize=_SIZES)
def _penalties_kernel(
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    token_ids_ptr,
    expanded_local_pos_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    bin_mask_ptr,
    bin_mask_stride,
    bin_counts_ptr,
    bin_counts_stride,
    vocab_size,
    num_rows,
    pieces,
    tiles_per_piece,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    DRAFTS: tl.constexpr,
    LOGITS_ALIGN: tl.constexpr,
    COUNTS_ALIGN: tl.constexpr,
):
    """Each item is a piece of one row."""
    single = single_bits()
    for item in range(tl.program_id(0), num_rows * pieces, tl.num_programs(0)):
        row = item // pieces
        start = (item - row * pieces) * tiles_per_piece * TILE
        end = tl.minimum(start + tiles_per_piece * TILE, vocab_size)
        slot = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
        num_drafts = tl.load(expanded_local_pos_ptr + row).to(tl.int32)
        if slot >= 0:
            repetition = tl.load(repetition_penalty_ptr + slot)
            frequency = tl.load(frequency_penalty_ptr + slot)
            presence = tl.load(presence_penalty_ptr + slot)
            # A row without penalties is not read.
            if ((repetition != 1.0) | (frequency != 0.0)) | (presence != 0.0):
                drafts_ptr = token_ids_ptr + (row - num_drafts + 1)
                row_ptr = logits_ptr + row * tl.multiple_of(logits_stride.to(tl.int64), LOGITS_ALIGN)
                words_ptr = bin_mask_ptr + slot * bin_mask_stride
                counts_ptr = bin_counts_ptr + slot * tl.multiple_of(bin_counts_stride.to(tl.int64), COUNTS_ALIGN)
                if GROUP == 0:
                    for first in range(start, end, TILE):
                        _penalise_tile(
                            row_ptr, words_ptr, counts_ptr, drafts_ptr, num_drafts, first, vocab_size,
                            repetition, frequency, presence, single, TILE, DRAFTS,
                        )  # fmt: skip
                else:
                    _penalise_piece(
                        row_ptr, words_ptr, counts_ptr, drafts_ptr, num_drafts, start, end, vocab_size,
                        repetition, frequency, presence, TILE, GROUP, DRAFTS,
                    )  # fmt: skip


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Apply repetition, frequency and presence penalties in place.

    A logit x of a token of the prompt or of the output becomes x / r if x > 0 and x * r if not; then, with the token's
    count c in the output, x - f * c, and x - p if c > 0. Row j of a request counts, on top of the output, the draft
    tokens at its positions 1..j. A token that wasn't seen keeps its logit bit for bit.

    Args:
        logits: float32, bfloat16 or float16 [n, V]; rows may be further apart than V.
        expanded_idx_mapping: int32 or int64 [n]: the slot of each row's request; a negative one skips the row.
        token_ids: int32 or int64 [n]: the token that each row's position was given.
        expanded_local_pos: int32 or int64 [n]: each row's position j in its request; rows of a request are neighbours.
        repetition_penalty, frequency_penalty, presence_penalty: float32 [R].
        prompt_bin_mask: int32 [R, ceil(V / 32)]: bit b of word w is 1 if token 32 * w + b is in the prompt.
        output_bin_counts: int32 [R, V].
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _checks.tensor("logits", logits, (_checks.ANY, _checks.ANY), _checks.FLOATS)
    rows, vocab_size = logits.shape
    _checks.tensor("expanded_idx_mapping", expanded_idx_mapping, (rows,), _checks.INTS, like=logits)
    _checks.tensor("token_ids", token_ids, (rows,), _checks.INTS, like=logits)
    _checks.tensor("expanded_local_pos", expanded_local_pos, (rows,), _checks.INTS, like=logits)
    _checks.tensor("output_bin_counts", output_bin_counts, (_checks.ANY, vocab_size), _checks.INT32, like=logits)
    slots = output_bin_counts.shape[0]
    _checks.tensor("prompt_bin_mask", prompt_bin_mask, (slots, cdiv(vocab_size, 32)), _checks.INT32, like=logits)
    for name, penalty in (
        ("repetition_penalty", repetition_penalty),
        ("frequency_penalty", frequency_penalty),
        ("presence_penalty", presence_penalty),
    ):
        _checks.tensor(name, penalty, (slots,), (torch.float32,), like=logits)
    arguments = (expanded_idx_mapping, token_ids, expanded_local_pos)
    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    target = _launch.choose(logits, impl)
    if target is None:
        reference.apply_penalties(logits, *arguments, *penalties, prompt_bin_mask, output_bin_counts)
        return
    if logits.numel() == 0:
        return
    setting = _setting(target, rows)
    programs = target.cores * setting.programs_per_core
    tiles = cdiv(vocab_size, setting.tile)
    pieces, grid = _launch.plan(rows, tiles, programs, setting.tiles_per_piece)
    _penalties_kernel[(grid,)](
        logits,
        logits.stride(0),
        *arguments,
        *penalties,
        prompt_bin_mask,
        prompt_bin_mask.stride(0),
        output_bin_counts,
        output_bin_counts.stride(0),
        vocab_size,
        rows,
        pieces,
        cdiv(tiles, pieces),
        TILE=setting.tile,
        GROUP=setting.group,
        DRAFTS=setting.drafts,
        LOGITS_ALIGN=_launch.vector_elements(logits.stride(0), logits.element_size()),
        COUNTS_ALIGN=_launch.vector_elements(output_bin_counts.stride(0), 4),
        **target.options(num_warps=setting.num_warps),
    )
