"""The prompt's token mask and the output's token counts, by definition; must never know a kernel."""

from __future__ import annotations

import torch


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
) -> None:
    """Rebuild, in place, the mask and the counts of every slot that the mapping names; other slots are not touched.

    Of a slot's first min(prefill_len, max_prefill_len) tokens those before prompt_len are the prompt and set bits, the
    others are output and are counted. Ids outside the vocabulary are left out.
    """
    vocab_size = output_bin_counts.shape[1]
    shifts = torch.arange(32, device=all_token_ids.device)
    for slot in expanded_idx_mapping.tolist():
        if slot < 0:
            continue
        end = min(int(prefill_len[slot]), max_prefill_len, all_token_ids.shape[1])
        split = min(int(prompt_len[slot]), end)
        tokens = all_token_ids[slot, :end].long()
        known = (tokens >= 0) & (tokens < vocab_size)
        prompt, output = tokens[:split][known[:split]], tokens[split:][known[split:]]
        seen = torch.zeros(prompt_bin_mask.shape[1] * 32, dtype=torch.int64, device=tokens.device)
        seen[prompt] = 1
        # Summed in 64 bits and cast, so that bit 31 becomes the sign.
        prompt_bin_mask[slot] = (seen.view(-1, 32) << shifts).sum(1).to(torch.int32)
        output_bin_counts[slot] = torch.bincount(output, minlength=vocab_size).to(torch.int32)
