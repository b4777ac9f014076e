"""Scores of the sampled token, of the best tokens and of tokens a request asked for; must never know vllm.

The one pass over the logits that gives log-probabilities and ranks keeps maxima of groups of tokens anyway. The k best
tokens lie in the k groups with the best maxima, so on a GPU ``torch.topk`` looks at the groups and then at the tokens
of k groups, instead of at the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from . import _checks, _launch, logprobs
from ._launch import Target
from ._triton import tl, triton
from .logprobs import NO_KEY, Folding, ordered
from .reference import topk as reference


class LogprobsTensors(NamedTuple):
    """The fields that vLLM's class of this name has."""

    #: int64 [n, 1 + c]; column 0 is the sampled token.
    logprob_token_ids: torch.Tensor
    #: float32 [n, 1 + c].
    logprobs: torch.Tensor
    #: int64 [n]: rank of the sampled token.
    selected_token_ranks: torch.Tensor
    #: The caller's cu_num_logits, if it was a list ...
    cu_num_generated_tokens: list[int] | None = None
    #: ... or if it was a tensor.
    cu_num_generated_tokens_tensor: torch.Tensor | None = None


class OnDevice(Protocol):
    """A buffer with a copy on the device, as vLLM's buffers have it."""

    @property
    def gpu(self) -> torch.Tensor: ...


class LogprobTokenIdsState(Protocol):
    """What is used of vLLM's class of this name."""

    #: int32 [R]: for how many tokens each request asked.
    @property
    def num_token_ids(self) -> OnDevice: ...

    #: int32 [R, M]: the tokens.
    @property
    def token_ids(self) -> OnDevice: ...


@dataclass(frozen=True)
class _Setting:
    """Sizes of a launch; see docs/kernels.md for where they come from."""

    #: Columns filled together.
    columns: int
    #: Whether the best tokens are looked for by groups, and how many tokens of a group are taken together.
    by_groups: bool
    block: int
    programs_per_core: int


def _setting(target: Target) -> _Setting:
    if target.interpreted:
        return _Setting(columns=4, by_groups=target.body == "cuda", block=4, programs_per_core=1)
    return _Setting(
        columns=128,
        by_groups=target.body == "cuda",
        block=128,
        programs_per_core=1 if target.body == "npu" else 64,
    )


_SIZES = ["topk_stride", "num_topk", "requested_stride", "num_columns", "num_rows"]


@triton.jit(do_not_specialize=_SIZES)
def _fill_ids_kernel(
    ids_ptr,
    lookup_ptr,
    sampled_ptr,
    topk_ptr,
    topk_stride,
    num_topk,
    mapping_ptr,
    num_requested_ptr,
    requested_ptr,
    requested_stride,
    num_columns,
    num_rows,
    COLUMNS: tl.constexpr,
):
    """Write each row's token ids twice: as they are shown, and with -1 for a column that is left over."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        sampled = tl.load(sampled_ptr + row).to(tl.int64)
        row_ids_ptr = ids_ptr + row * (num_columns + 1).to(tl.int64)
        row_lookup_ptr = lookup_ptr + row * (num_columns + 1).to(tl.int64)
        tl.store(row_ids_ptr, sampled)
        tl.store(row_lookup_ptr, sampled)
        request = tl.load(mapping_ptr + row).to(tl.int64)
        asked = tl.load(num_requested_ptr + tl.where(request >= 0, request, 0))
        asked = tl.where(request >= 0, tl.minimum(asked, num_columns), 0)
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            if asked > 0:
                requested = requested_ptr + request * requested_stride + column
                token = tl.load(requested, mask=column < asked, other=-1)
            else:
                best = topk_ptr + row * topk_stride.to(tl.int64) + column
                token = tl.load(best, mask=column < num_topk, other=-1).to(tl.int32)
            used = column < tl.where(asked > 0, asked, num_topk)
            tl.store(row_ids_ptr + 1 + column, tl.where(used, token, 0).to(tl.int64), mask=column < num_columns)
            tl.store(row_lookup_ptr + 1 + column, token.to(tl.int64), mask=column < num_columns)


def _fill_ids(
    sampled_token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    requested: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_columns: int,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids to show, ids to look up) int64 [n, 1 + num_columns]; see ``_fill_ids_kernel``."""
    rows = sampled_token_ids.shape[0]
    ids = sampled_token_ids.new_empty((rows, 1 + num_columns), dtype=torch.int64)
    lookup = sampled_token_ids.new_empty((rows, 1 + num_columns), dtype=torch.int64)
    mapping, num_requested, tokens = requested
    setting = _setting(target)
    if rows > 0:
        _fill_ids_kernel[(min(rows, target.cores * setting.programs_per_core),)](
            ids,
            lookup,
            sampled_token_ids,
            topk_ids,
            topk_ids.stride(0),
            topk_ids.shape[1],
            mapping,
            num_requested,
            tokens,
            tokens.stride(0),
            num_columns,
            rows,
            COLUMNS=setting.columns,
            **target.options(num_warps=1),
        )
    return ids, lookup


@triton.jit
def _token_of(group, index, tokens_per_piece, LANES: tl.constexpr):
    """(the token at ``index`` of a group, the end of its piece); a group is a lane of a piece, see ``Folding``."""
    piece = group // LANES
    start = piece * tokens_per_piece
    return start + (group - piece * LANES) + index * LANES, start + tokens_per_piece


@triton.jit(
    do_not_specialize=["logits_stride", "vocab_size", "tokens_per_piece", "num_groups", "group_size", "num_rows"]
)
def _candidates_kernel(
    keys_ptr,
    groups_ptr,
    logits_ptr,
    logits_stride,
    vocab_size,
    tokens_per_piece,
    num_groups,
    group_size,
    num_rows,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each item is one of a row's groups: write the keys of its tokens, int32 [num_rows, num_groups, group_size]."""
    for item in range(tl.program_id(0), num_rows * num_groups, tl.num_programs(0)):
        group = tl.load(groups_ptr + item).to(tl.int32)
        row_ptr = logits_ptr + (item // num_groups) * logits_stride.to(tl.int64)
        group_keys_ptr = keys_ptr + item * group_size.to(tl.int64)
        for first in range(0, group_size, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token, end = _token_of(group, index, tokens_per_piece, LANES)
            live = token < tl.minimum(end, vocab_size)
            x = tl.load(row_ptr + token, mask=live, other=0.0).to(tl.float32)
            tl.store(group_keys_ptr + index, tl.where(live, ordered(x), NO_KEY), mask=index < group_size)


@triton.jit(do_not_specialize=["tokens_per_piece", "num_groups", "group_size", "num_best", "num_rows"])
def _best_ids_kernel(
    ids_ptr,
    positions_ptr,
    groups_ptr,
    tokens_per_piece,
    num_groups,
    group_size,
    num_best,
    num_rows,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the tokens int64 [num_rows, num_best] that are at some positions among the candidates."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for first in range(0, num_best, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            live = column < num_best
            position = tl.load(positions_ptr + row * num_best + column, mask=live, other=0).to(tl.int32)
            place = position // group_size
            group = tl.load(groups_ptr + row * num_groups + place, mask=live, other=0).to(tl.int32)
            token, _ = _token_of(group, position - place * group_size, tokens_per_piece, LANES)
            tl.store(ids_ptr + row * num_best + column, token.to(tl.int64), mask=live)


def _best_of_groups(folding: Folding, keys: torch.Tensor, num_best: int) -> torch.Tensor:
    """The best tokens int64 [n, num_best] of each row, from the best down, given the keys of all lanes [n, lanes]."""
    logits, target, rows = folding.logits, folding.target, folding.logits.shape[0]
    setting = _setting(target)
    groups = torch.topk(keys, min(num_best, keys.shape[1]), dim=-1, sorted=False).indices
    num_groups, group_size = groups.shape[1], folding.tokens_per_piece // folding.lanes
    candidates = logits.new_empty((rows, num_groups * group_size), dtype=torch.int32)
    programs = target.cores * setting.programs_per_core
    _candidates_kernel[(min(rows * num_groups, programs),)](
        candidates,
        groups,
        logits,
        logits.stride(0),
        logits.shape[1],
        folding.tokens_per_piece,
        num_groups,
        group_size,
        rows,
        LANES=folding.lanes,
        BLOCK=setting.block,
        **target.options(num_warps=1),
    )
    positions = torch.topk(candidates, num_best, dim=-1).indices
    ids = logits.new_empty((rows, num_best), dtype=torch.int64)
    _best_ids_kernel[(min(rows, programs),)](
        ids,
        positions,
        groups,
        folding.tokens_per_piece,
        num_groups,
        group_size,
        num_best,
        rows,
        LANES=folding.lanes,
        COLUMNS=setting.columns,
        **target.options(num_warps=1),
    )
    return ids


@dataclass(frozen=True)
class _Question:
    """Checked arguments of ``compute_topk_scores``."""

    logits: torch.Tensor
    num_logprobs: int
    sampled_token_ids: torch.Tensor
    #: (request of each row, number of tokens it asked for, the tokens), if any request asked for some.
    requested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    num_columns: int
    logits_mode: bool

    def ids(self, best: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids to show, ids to look up) int64 [n, 1 + num_columns]."""
        if self.requested is None:
            ids = torch.cat((self.sampled_token_ids.unsqueeze(-1), best), dim=1)
            return ids, ids
        return _fill_ids(self.sampled_token_ids, best, self.requested, self.num_columns, target)

    def answer(self, target: Target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, scores, ranks)."""
        rows = self.logits.shape[0]
        if rows > 0 and _setting(target).by_groups and self.num_logprobs > 0:
            folding = Folding.cut(self.logits, target, lse=not self.logits_mode, rank=True)
            candidates = self.num_logprobs * folding.tokens_per_piece // folding.lanes
            # With few tokens, or many to be found, most of the vocabulary would be a candidate.
            if 2 * candidates <= self.logits.shape[1]:
                return self._answer_by_groups(folding)
        best = torch.topk(self.logits, self.num_logprobs, dim=-1).indices
        ids, lookup = self.ids(best, target)
        return ids, *logprobs.score(self.logits, lookup, target, lse=not self.logits_mode, rank=True)

    def _answer_by_groups(self, folding: Folding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self.logits.shape[0]
        keys = self.logits.new_empty((rows, folding.pieces * folding.lanes), dtype=torch.int32)
        scores = self.logits.new_empty((rows, 1 + self.num_columns), dtype=torch.float32)
        ranks = self.logits.new_empty((rows,), dtype=torch.int64)
        folding.fold(scores, ranks, self.sampled_token_ids.unsqueeze(-1), keys)
        best = _best_of_groups(folding, keys, self.num_logprobs)
        ids, lookup = self.ids(best, folding.target)
        folding.combine(scores, ranks, lookup)
        return ids, scores, ranks


def _check_requested(
    state: LogprobTokenIdsState | None,
    mapping: torch.Tensor | None,
    max_per_req_token_ids: int,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(request of each row, number of tokens it asked for, the tokens), or None if no request asked for any."""
    if max_per_req_token_ids == 0:
        return None
    _checks.at_least("max_per_req_token_ids", max_per_req_token_ids, 0, "it")
    if state is None:
        raise ValueError("logprob_token_ids_state: None; it is needed if max_per_req_token_ids isn't 0")
    if mapping is None:
        raise ValueError("expanded_idx_mapping: None; it is needed if max_per_req_token_ids isn't 0")
    _checks.tensor("expanded_idx_mapping", mapping, (logits.shape[0],), _checks.INTS, like=logits)
    counts, tokens = state.num_token_ids.gpu, state.token_ids.gpu
    _checks.tensor("logprob_token_ids_state.num_token_ids", counts, (_checks.ANY,), _checks.INT32)
    shape = (counts.shape[0], _checks.ANY)
    _checks.tensor("logprob_token_ids_state.token_ids", tokens, shape, _checks.INT32, like=logits)
    _checks.at_least("logprob_token_ids_state.token_ids", tokens.shape[1], max_per_req_token_ids, "its width")
    return mapping, counts, tokens


def compute_topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    logprob_token_ids_state: LogprobTokenIdsState | None = None,
    expanded_idx_mapping: torch.Tensor | None = None,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
    *,
    impl: str | None = None,
) -> LogprobsTensors:
    """Scores of each row's sampled token, of its best tokens or of the tokens its request asked for, and the rank.

    A row whose request asked for tokens shows those and no others; columns that are left over show id 0 and -inf.

    Args:
        logits: float32, bfloat16 or float16 [n, V]; rows may be further apart than V.
        num_logprobs: how many of the best tokens to show, 0 to V.
        sampled_token_ids: int32 or int64 [n].
        cu_num_logits: handed on to the result.
        logprob_token_ids_state: the tokens that requests asked for; needed if max_per_req_token_ids isn't 0.
        expanded_idx_mapping: int32 or int64 [n]: the request of each row; needed likewise.
        max_per_req_token_ids: the most tokens that a request of this batch asked for.
        logits_mode: the scores are the logits, instead of the log-probabilities.
        impl: "reference", "interpret" or "triton"; by default the tensors' device decides.

    Returns:
        1 + max(num_logprobs, max_per_req_token_ids) columns; see ``LogprobsTensors``.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, stride or device.
        RuntimeError: the implementation asked for can't run here.
    """
    _checks.tensor("logits", logits, (_checks.ANY, _checks.ANY), _checks.FLOATS)
    _checks.at_least("logits", logits.shape[1], 1, "the vocabulary")
    _checks.tensor("sampled_token_ids", sampled_token_ids, (logits.shape[0],), _checks.INTS, like=logits)
    _checks.at_least("num_logprobs", num_logprobs, 0, "it")
    if num_logprobs > logits.shape[1]:
        raise ValueError(f"num_logprobs: {num_logprobs}; the vocabulary has {logits.shape[1]} tokens")
    requested = _check_requested(logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids, logits)
    num_columns = max(num_logprobs, max_per_req_token_ids)
    target = _launch.choose(logits, impl)
    if target is None:
        ids, scores, ranks = reference.topk_scores(
            logits, num_logprobs, sampled_token_ids, requested, num_columns, logits_mode
        )
    else:
        question = _Question(logits, num_logprobs, sampled_token_ids, requested, num_columns, logits_mode)
        ids, scores, ranks = question.answer(target)
    if isinstance(cu_num_logits, torch.Tensor):
        return LogprobsTensors(ids, scores, ranks, cu_num_generated_tokens_tensor=cu_num_logits)
    return LogprobsTensors(ids, scores, ranks, cu_num_generated_tokens=cu_num_logits)


def compute_topk_logprobs(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    logprob_token_ids_state: LogprobTokenIdsState | None = None,
    expanded_idx_mapping: torch.Tensor | None = None,
    max_per_req_token_ids: int = 0,
    *,
    impl: str | None = None,
) -> LogprobsTensors:
    """``compute_topk_scores`` under the name it had before vLLM 0.33, when all scores were log-probabilities."""
    return compute_topk_scores(
        logits,
        num_logprobs,
        sampled_token_ids,
        cu_num_logits,
        logprob_token_ids_state,
        expanded_idx_mapping,
        max_per_req_token_ids,
        impl=impl,
    )
