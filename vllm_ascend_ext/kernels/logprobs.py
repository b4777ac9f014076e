"""Log-probabilities and ranks of chosen tokens in one pass over the logits; must never know how tokens are sampled.

A row is cut into pieces that are folded on different cores, so that one row keeps the whole chip busy. A piece holds
``LANES`` running triples (maximum, sum of exponentials over it, number of logits at least the chosen one); a tile is
folded into them lane by lane, which needs no exchange between threads, and half an exponential more at most. A second,
tiny kernel combines the pieces of each row and looks the columns up; rows that are not cut need no second kernel.

Single-pass softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _checks, _launch
from ._launch import Target, cdiv
from ._triton import tl, triton
from .reference import logprobs as reference


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Logits folded at a time, and the number of running triples they are folded into.
    tile: int
    lanes: int
    #: Tiles on their way at once; 1: the next is loaded when the last is folded.
    stages: int
    #: Columns looked up at a time; 1: one after the other, by the scalar unit.
    columns: int
    #: Most pieces of a row.
    pieces: int
    programs_per_core: int
    num_warps: int


def _setting(target: Target, element_bytes: int) -> _Setting:
    if target.interpreted:
        columns = 4 if target.body == "cuda" else 1
        return _Setting(tile=64, lanes=16, stages=1, columns=columns, pieces=8, programs_per_core=1, num_warps=1)
    if target.body == "npu":
        return _Setting(tile=8192, lanes=512, stages=1, columns=1, pieces=64, programs_per_core=1, num_warps=1)
    # Small tiles on many programs; every thread keeps as many lanes as it loads logits at once, 16 bytes.
    return _Setting(
        tile=4096 // element_bytes,
        lanes=2 * 32 * 16 // element_bytes,
        stages=3,
        columns=32,
        pieces=128,
        programs_per_core=8,
        num_warps=2,
    )


@triton.jit
def _exp(x, CUDA: tl.constexpr):
    """exp(x). On a GPU by exp2, which flushes denormals to 0 where exp pays four instructions to keep them."""
    if CUDA:
        return tl.exp2(x * 1.4426950408889634)
    else:
        return tl.exp(x)


@triton.jit
def _fold(
    x, chosen, top, total, count,
    TILE: tl.constexpr, LANES: tl.constexpr, CUDA: tl.constexpr, LSE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Fold a tile of float32 logits into the running triples."""
    x = tl.reshape(x, (TILE // LANES, LANES))
    if RANK:
        count += tl.sum((x >= chosen).to(tl.int32), axis=0)
    new_top = tl.maximum(top, tl.max(x, axis=0))
    if LSE:
        # A lane that has seen nothing but -inf has no maximum to scale by.
        scale = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * _exp(top - scale, CUDA) + tl.sum(_exp(x - scale[None, :], CUDA), axis=0)
    return new_top, total, count


@triton.jit
def _reduce(top, total):
    """(maximum, sum of exponentials over it) of many triples."""
    new_top = tl.max(top, axis=0)
    scale = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.sum(total * tl.exp(top - scale), axis=0)


#: Below the key of every float32.
NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def ordered(x):
    """int32 keys in the order of float32 values: -inf has the least, and NaN stands above +inf."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pick(row_ptr, token, vocab_size):
    """(the logit of a token in float32, whether it has one); an id outside the vocabulary is not read and has -inf."""
    known = (token >= 0) & (token < vocab_size)
    x = tl.load(row_ptr + tl.where(known, token, 0)).to(tl.float32)
    return tl.where(known, x, float("-inf")), known


@triton.jit
def _gather(row_ptr, ids_ptr, start, num_columns, vocab_size, COLUMNS: tl.constexpr):
    """(the logits of COLUMNS tokens, which of them have one)."""
    column = start + tl.arange(0, COLUMNS)
    token = tl.load(ids_ptr + column, mask=column < num_columns, other=-1)
    known = (token >= 0) & (token < vocab_size)
    return tl.load(row_ptr + token, mask=known, other=float("-inf")).to(tl.float32), known


@triton.jit
def _write(scores_ptr, start, num_columns, x, known, scale, log_total, COLUMNS: tl.constexpr, LSE: tl.constexpr):
    """Write the scores of gathered columns."""
    column = start + tl.arange(0, COLUMNS)
    if LSE:
        x = tl.where(known, (x - scale) - log_total, float("-inf"))
    tl.store(scores_ptr + column, x, mask=column < num_columns)


@triton.jit
def _look_up(
    scores_ptr, row_ptr, ids_ptr, num_columns, vocab_size, x, known, top, total,
    COLUMNS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write the scores of a row's columns, the first COLUMNS of which are gathered already."""
    scale = tl.where(top == float("-inf"), 0.0, top)
    log_total = 0.0
    if LSE:
        log_total = tl.log(total)
    if COLUMNS == 1:
        for column in range(0, num_columns):
            score, is_known = _pick(row_ptr, tl.load(ids_ptr + column), vocab_size)
            if LSE:
                score = tl.where(is_known, (score - scale) - log_total, float("-inf"))
            tl.store(scores_ptr + column, score)
    else:
        _write(scores_ptr, 0, num_columns, x, known, scale, log_total, COLUMNS, LSE)
        for start in range(COLUMNS, num_columns, COLUMNS):
            x, known = _gather(row_ptr, ids_ptr, start, num_columns, vocab_size, COLUMNS)
            _write(scores_ptr, start, num_columns, x, known, scale, log_total, COLUMNS, LSE)


_SIZES = ["logits_stride", "ids_stride", "num_columns", "vocab_size", "num_rows", "pieces", "tiles_per_piece"]


@triton.jit(do_not_specialize=_SIZES)
def _fold_kernel(
    scores_ptr,
    ranks_ptr,
    partials_ptr,
    counts_ptr,
    keys_ptr,
    logits_ptr,
    logits_stride,
    ids_ptr,
    ids_stride,
    num_columns,
    vocab_size,
    num_rows,
    pieces,
    tiles_per_piece,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    CUDA: tl.constexpr,
    STAGES: tl.constexpr,
    LSE: tl.constexpr,
    RANK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Fold the pieces of all rows; with ``WHOLE`` rows are not cut, and their results are written at once.

    ``keys_ptr``, if given, gets the key of each lane's maximum, int32 [num_rows, pieces, LANES].
    """
    items = num_rows * pieces
    offsets = tl.arange(0, TILE)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // pieces
        row_ptr = logits_ptr + row * tl.multiple_of(logits_stride.to(tl.int64), ALIGN)
        row_ids_ptr = ids_ptr + row * ids_stride.to(tl.int64)
        columns = 0.0
        known = 0
        if WHOLE and COLUMNS > 1:
            # Asked for before the row is read, not to be waited for after.
            columns, known = _gather(row_ptr, row_ids_ptr, 0, num_columns, vocab_size, COLUMNS)
        chosen = float("-inf")
        if RANK:
            chosen, _ = _pick(row_ptr, tl.load(row_ids_ptr), vocab_size)
        top = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        count = tl.zeros([LANES], tl.int32)

        start = (item - row * pieces) * tiles_per_piece * TILE
        end = tl.minimum(start + tiles_per_piece * TILE, vocab_size)
        if CUDA:
            # The last tile has code of its own, so that all others load without a mask.
            whole_end = start + (end - start) // TILE * TILE
            for first in tl.range(start, whole_end, TILE, num_stages=STAGES):
                x = tl.load(row_ptr + first + offsets).to(tl.float32)
                top, total, count = _fold(x, chosen, top, total, count, TILE, LANES, CUDA, LSE, RANK)
            if whole_end < end:
                x = tl.load(row_ptr + whole_end + offsets, mask=whole_end + offsets < end, other=float("-inf"))
                top, total, count = _fold(x.to(tl.float32), chosen, top, total, count, TILE, LANES, CUDA, LSE, RANK)
        else:
            for first in range(start, end, TILE):
                x = tl.load(row_ptr + first + offsets, mask=first + offsets < end, other=float("-inf"))
                top, total, count = _fold(x.to(tl.float32), chosen, top, total, count, TILE, LANES, CUDA, LSE, RANK)

        rank = tl.sum(count, axis=0)
        if RANK:
            # The places past the row's end were folded as -inf: they are at least a chosen -inf.
            padding = (end - start + TILE - 1) // TILE * TILE - (end - start)
            rank -= tl.where(chosen == float("-inf"), padding, 0)
        if keys_ptr is not None:
            lane = tl.arange(0, LANES)
            tl.store(keys_ptr + item * LANES + lane, tl.where(start + lane < end, ordered(top), NO_KEY))
        row_top, row_total = _reduce(top, total)
        if WHOLE:
            if RANK:
                tl.store(ranks_ptr + row, rank.to(tl.int64))
            row_scores_ptr = scores_ptr + row * num_columns.to(tl.int64)
            _look_up(
                row_scores_ptr, row_ptr, row_ids_ptr, num_columns, vocab_size, columns, known, row_top, row_total,
                COLUMNS, LSE,
            )  # fmt: skip
        else:
            if RANK:
                tl.store(counts_ptr + item, rank)
            if LSE:
                tl.store(partials_ptr + item, row_top)
                tl.store(partials_ptr + items + item, row_total)


@triton.jit(do_not_specialize=["logits_stride", "ids_stride", "num_columns", "vocab_size", "num_rows", "pieces"])
def _combine_kernel(
    scores_ptr,
    ranks_ptr,
    partials_ptr,
    counts_ptr,
    logits_ptr,
    logits_stride,
    ids_ptr,
    ids_stride,
    num_columns,
    vocab_size,
    num_rows,
    pieces,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LSE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Combine the pieces of each row, and write its rank and its columns."""
    piece = tl.arange(0, PIECES)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * logits_stride.to(tl.int64)
        row_ids_ptr = ids_ptr + row * ids_stride.to(tl.int64)
        row_scores_ptr = scores_ptr + row * num_columns.to(tl.int64)
        columns = 0.0
        known = 0
        if COLUMNS > 1:
            columns, known = _gather(row_ptr, row_ids_ptr, 0, num_columns, vocab_size, COLUMNS)
        first = row * pieces
        if RANK:
            count = tl.load(counts_ptr + first + piece, mask=piece < pieces, other=0)
            tl.store(ranks_ptr + row, tl.sum(count, axis=0).to(tl.int64))
        row_top = 0.0
        row_total = 1.0
        if LSE:
            top = tl.load(partials_ptr + first + piece, mask=piece < pieces, other=float("-inf"))
            total = tl.load(partials_ptr + num_rows * pieces + first + piece, mask=piece < pieces, other=0.0)
            row_top, row_total = _reduce(top, total)
        _look_up(
            row_scores_ptr, row_ptr, row_ids_ptr, num_columns, vocab_size, columns, known, row_top, row_total,
            COLUMNS, LSE,
        )  # fmt: skip


@dataclass(frozen=True)
class Folding:
    """Rows of checked logits on their way through the two kernels."""

    logits: torch.Tensor
    target: Target
    #: Whether scores are log-probabilities (else logits), and whether column 0 is ranked.
    lse: bool
    rank: bool
    setting: _Setting
    #: Pieces of a row, and tiles of a piece.
    pieces: int
    tiles_per_piece: int
    #: (maximum, sum of exponentials) float32 [2, n, pieces], and numbers of logits at least the chosen one.
    partials: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def cut(logits: torch.Tensor, target: Target, *, lse: bool, rank: bool) -> Folding:
        """Cut rows, of which there is at least one, into the pieces that a launch on ``target`` folds."""
        rows, vocab_size = logits.shape
        setting = _setting(target, logits.element_size())
        tiles = cdiv(vocab_size, setting.tile)
        pieces = _launch.split_rows(rows, tiles, target.cores * setting.programs_per_core, setting.pieces)
        partials = logits.new_empty((2, rows, pieces), dtype=torch.float32)
        counts = logits.new_empty((rows, pieces), dtype=torch.int32)
        return Folding(logits, target, lse, rank, setting, pieces, cdiv(tiles, pieces), partials, counts)

    @property
    def lanes(self) -> int:
        """Running maxima of a piece; lane l of a piece that starts at s holds tokens s + l, s + l + lanes, ..."""
        return self.setting.lanes

    @property
    def tokens_per_piece(self) -> int:
        return self.tiles_per_piece * self.setting.tile

    def fold(self, scores: torch.Tensor, ranks: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor | None) -> bool:
        """Fold all pieces; whether that was all, as rows that are in one piece need no ``combine``.

        Column 0 of ``ids`` is ranked. With ``keys``, which gets the lanes' maxima, rows are always combined.
        """
        whole = self.pieces == 1 and keys is None
        rows = self.logits.shape[0]
        programs = self.target.cores * self.setting.programs_per_core
        _fold_kernel[(min(rows * self.pieces, programs),)](
            scores,
            ranks,
            self.partials,
            self.counts,
            keys,
            self.logits,
            self.logits.stride(0),
            ids,
            ids.stride(0),
            ids.shape[1],
            self.logits.shape[1],
            rows,
            self.pieces,
            self.tiles_per_piece,
            TILE=self.setting.tile,
            LANES=self.setting.lanes,
            COLUMNS=self.setting.columns,
            ALIGN=_launch.vector_elements(self.logits.stride(0), self.logits.element_size()),
            CUDA=self.target.body == "cuda",
            STAGES=self.setting.stages,
            LSE=self.lse,
            RANK=self.rank,
            WHOLE=whole,
            **self.target.options(num_warps=self.setting.num_warps),
        )
        return whole

    def combine(self, scores: torch.Tensor, ranks: torch.Tensor, ids: torch.Tensor) -> None:
        """Write the scores of ``ids`` and the ranks, from what ``fold`` left."""
        rows = self.logits.shape[0]
        _combine_kernel[(min(rows, self.target.cores * self.setting.programs_per_core),)](
            scores,
            ranks,
            self.partials,
            self.counts,
            self.logits,
            self.logits.stride(0),
            ids,
            ids.stride(0),
            ids.shape[1],
            self.logits.shape[1],
            rows,
            self.pieces,
            PIECES=self.setting.pieces,
            COLUMNS=self.setting.columns,
            LSE=self.lse,
            RANK=self.rank,
            **self.target.options(num_warps=1),
        )


def score(
    logits: torch.Tensor, token_ids: torch.Tensor, target: Target, *, lse: bool, rank: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores float32 [n, k] of ``token_ids`` [n, k] and, with ``rank``, the ranks int64 [n] of column 0.

    Arguments are taken as checked; scores are log-probabilities with ``lse`` and else the logits.
    """
    rows, columns = token_ids.shape
    scores = logits.new_empty((rows, columns), dtype=torch.float32)
    ranks = logits.new_empty((rows if rank else 0,), dtype=torch.int64)
    if rows > 0 and (columns > 0 or rank):
        folding = Folding.cut(logits, target, lse=lse, rank=rank)
        if not folding.fold(scores, ranks, token_ids, None):
            folding.combine(scores, ranks, token_ids)
    return scores, ranks


def _check(logits: torch.Tensor, token_ids: torch.Tensor, dims: int) -> None:
    _checks.tensor("logits", logits, (_checks.ANY, _checks.ANY), _checks.FLOATS)
    _checks.at_least("logits", logits.shape[1], 1, "the vocabulary")
    shape = (logits.shape[0],) if dims == 1 else (logits.shape[0], _checks.ANY)
    _checks.tensor("token_ids", token_ids, shape, _checks.INTS, like=logits)


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Log-probabilities of some tokens of each row.

    Args:
        logits: float32, bfloat16 or float16 [n, V]; rows may be further apart than V.
        token_ids: int32 or int64 [n, k]. An id outside [0, V) is not read and gets -inf.
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Returns:
        float32 [n, k], natural logarithms. In a row that holds NaN or +inf, or nothing but -inf, they are NaN.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _check(logits, token_ids, 2)
    target = _launch.choose(logits, impl)
    if target is None:
        return reference.token_logprobs(logits, token_ids)
    return score(logits, token_ids, target, lse=True, rank=False)[0]


def compute_token_ranks(logits: torch.Tensor, token_ids: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Rank of one token of each row: the number of logits that are at least its own, so 1 for the best.

    ``token_ids`` is int32 or int64 [n]; everything else as in ``compute_token_logprobs``. An id outside [0, V) ranks as
    a logit of -inf would. NaN logits are not counted, and a chosen NaN has rank 0.

    Returns:
        int64 [n].
    """
    _check(logits, token_ids, 1)
    target = _launch.choose(logits, impl)
    if target is None:
        return reference.token_ranks(logits, token_ids)
    return score(logits, token_ids.unsqueeze(1), target, lse=False, rank=True)[1]


def compute_token_logprobs_and_ranks(
    logits: torch.Tensor, token_ids: torch.Tensor, *, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the above in one pass over the logits.

    ``token_ids`` is int32 or int64 [n, 1 + k]; column 0 holds the tokens to rank.

    Returns:
        (log-probabilities float32 [n, 1 + k], ranks int64 [n] of column 0).
    """
    _check(logits, token_ids, 2)
    _checks.at_least("token_ids", token_ids.shape[1], 1, "the number of columns")
    target = _launch.choose(logits, impl)
    if target is None:
        return reference.token_logprobs(logits, token_ids), reference.token_ranks(logits, token_ids[:, 0])
    return score(logits, token_ids, target, lse=True, rank=True)
