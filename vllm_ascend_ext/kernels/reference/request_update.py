"""What a request's state becomes after a sampling step, by definition; must never know a kernel."""

from __future__ import annotations

import torch


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
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
) -> None:
    """Append each row's sampled tokens to its request's slot and move the slot's counters, in place.

    A negative slot skips the row. A token outside the vocabulary is appended but not counted; a position past the end
    of the token buffer is not written.
    """
    length = all_token_ids.shape[1]
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[slot] = draft_tokens[row]
        count = min(max(int(num_sampled[row]), 0), sampled_tokens.shape[1])
        tokens = sampled_tokens[row, :count]
        if count > 0:
            start = int(total_len[slot])
            end = min(start + count, length)
            all_token_ids[slot, start:end] = tokens[: max(end - start, 0)].to(all_token_ids.dtype)
            last_sampled_tokens[slot] = tokens[-1]
            total_len[slot] = start + count
        if output_bin_counts is not None:
            for token in tokens.tolist():
                if 0 <= token < output_bin_counts.shape[1]:
                    output_bin_counts[slot, token] += 1
        query_len = 0 if query_start_loc is None else int(query_start_loc[row + 1] - query_start_loc[row])
        num_computed_tokens[slot] += query_len - int(num_rejected[row])
