"""Repetition, frequency and presence penalties, by definition; must never know a kernel."""

from __future__ import annotations

import torch


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
) -> None:
    """Penalise, in place, the tokens that a row's request has seen.

    With c the count of a token in the output: x becomes x / r if x > 0 and x * r if not, for tokens of the prompt or of
    the output; then x - f * c; then x - p for tokens of the output. Row j of a request sees the output counts and, on
    top, the draft tokens at positions 1..j: ``token_ids`` of the j rows that end with its own.
    """
    vocab_size = logits.shape[1]
    token = torch.arange(vocab_size, device=logits.device)
    for row, (slot, position) in enumerate(
        zip(expanded_idx_mapping.tolist(), expanded_local_pos.tolist(), strict=True),
    ):
        if slot < 0:
            continue
        repetition = repetition_penalty[slot].double()
        frequency = frequency_penalty[slot].double()
        presence = presence_penalty[slot].double()
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        drafts = token_ids[row - position + 1 : row + 1].long()
        drafts = drafts[(drafts >= 0) & (drafts < vocab_size)]
        counts = output_bin_counts[slot].long() + torch.bincount(drafts, minlength=vocab_size)
        in_output = counts > 0
        in_prompt = ((prompt_bin_mask[slot][token // 32] >> (token % 32)) & 1) == 1
        x = logits[row].double()
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(in_prompt | in_output, repeated, x)
        x = torch.where(in_output, x - frequency * counts - presence, x)
        touched = in_prompt | in_output
        logits[row] = torch.where(touched, x.to(logits.dtype), logits[row])
