"""Scores of the sampled token, of the best tokens and of tokens a request asked for, by definition; knows no kernel."""

from __future__ import annotations

import torch

from .logprobs import picked, token_logprobs, token_ranks


def topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    requested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    num_columns: int,
    logits_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids int64 [n, 1 + c], scores float32 [n, 1 + c], ranks int64 [n]) with c = ``num_columns``.

    Column 0 is the sampled token. A row whose request asked for tokens shows those, every other row its
    ``num_logprobs`` best ones; columns that are left over hold id 0 and score -inf. ``requested`` is (request of each
    row [n], number of tokens asked for [R], the tokens [R, >= c]).
    """
    rows = logits.shape[0]
    ids = torch.full((rows, 1 + num_columns), -1, dtype=torch.int64, device=logits.device)
    ids[:, 0] = sampled_token_ids
    if num_logprobs > 0:
        ids[:, 1 : 1 + num_logprobs] = torch.topk(logits, num_logprobs, dim=-1).indices
    filled = torch.zeros_like(ids, dtype=torch.bool)
    filled[:, : 1 + num_logprobs] = True
    if requested is not None:
        mapping, counts, tokens = requested
        for row, request in enumerate(mapping.tolist()):
            count = min(int(counts[request]), num_columns) if request >= 0 else 0
            if count > 0:
                ids[row, 1 : 1 + count] = tokens[request, :count]
                filled[row, 1:] = torch.arange(num_columns, device=logits.device) < count
    ids = torch.where(filled, ids, 0)
    scores = picked(logits, ids).float() if logits_mode else token_logprobs(logits, ids)
    scores = torch.where(filled, scores, float("-inf"))
    return ids, scores, token_ranks(logits, sampled_token_ids)
