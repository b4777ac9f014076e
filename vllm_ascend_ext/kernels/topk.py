"""Scores of the sampled token, of the best tokens and of tokens a request asked for; must never know vllm.

``torch.topk`` finds the best tokens; their scores, and the sampled token's rank, come from one pass over the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from . import _checks, _launch, logprobs
from ._launch import Target
from ._triton import tl, triton
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
    programs_per_core: int


def _setting(target: Target) -> _Setting:
    if target.interpreted:
        return _Setting(4, 1)
    return _Setting(128, 1 if target.body == "npu" else 16)


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
        topk_ids = torch.topk(logits, num_logprobs, dim=-1).indices
        if requested is None:
            ids = lookup = torch.cat((sampled_token_ids.unsqueeze(-1), topk_ids), dim=1)
        else:
            ids, lookup = _fill_ids(sampled_token_ids, topk_ids, requested, num_columns, target)
        scores, ranks = logprobs.score(logits, lookup, target, lse=not logits_mode, rank=True)
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
