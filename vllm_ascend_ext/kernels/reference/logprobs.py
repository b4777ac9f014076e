"""Log-probabilities and ranks of chosen tokens, by definition; must never know a kernel."""

from __future__ import annotations

import torch


def known(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Which of ``token_ids`` [n, k] are in the vocabulary."""
    return (token_ids >= 0) & (token_ids < logits.shape[1])


def picked(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits [n, k] of ``token_ids`` [n, k] in float64; an id outside the vocabulary counts as a logit of -inf."""
    here = known(logits, token_ids)
    values = logits.double().gather(1, torch.where(here, token_ids, 0).long())
    return torch.where(here, values, float("-inf"))


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """log softmax of each row at ``token_ids`` [n, k], float32 [n, k]; -inf for an id outside the vocabulary.

    log p(t) = x_t - log(sum_v exp(x_v)). A row that holds NaN or +inf, or nothing but -inf, has no distribution: NaN.
    """
    wide = logits.double()
    log_sum = torch.logsumexp(wide, dim=1, keepdim=True)
    undefined = wide.isnan().any(1, keepdim=True) | (wide == float("inf")).any(1, keepdim=True)
    undefined = undefined | (wide == float("-inf")).all(1, keepdim=True)
    logprobs = torch.where(undefined, float("nan"), picked(logits, token_ids) - log_sum)
    return torch.where(known(logits, token_ids), logprobs, float("-inf")).float()


def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """How many logits of each row are at least that of ``token_ids`` [n], int64 [n]: the best token has rank 1.

    Tokens that tie share the worse rank, NaN is never counted, and a chosen NaN has rank 0.
    """
    return (logits.double() >= picked(logits, token_ids.unsqueeze(1))).sum(1)
