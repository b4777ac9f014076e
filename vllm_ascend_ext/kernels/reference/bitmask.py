"""The grammar bitmask on logits, by definition; must never know a kernel."""

from __future__ import annotations

import torch


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_indices: torch.Tensor,
    bitmask: torch.Tensor,
    cu_num_logits: torch.Tensor | None,
    mask_stride: int,
) -> None:
    """Set to -inf, in place, every logit whose bit is 0; bit b of word w belongs to token 32 * w + b.

    A token that the mask has no word for is blocked.
    """
    vocab_size = logits.shape[1]
    token = torch.arange(vocab_size, device=logits.device)
    word, bit = token // 32, token % 32
    for words, index in zip(bitmask, logits_indices.tolist(), strict=True):
        if index < 0:
            continue
        row = index
        if cu_num_logits is not None:
            request, position = divmod(index, mask_stride)
            first, end = int(cu_num_logits[request]), int(cu_num_logits[request + 1])
            if position >= end - first:
                continue
            row = first + position
        has_word = word < words.shape[0]
        value = words[torch.where(has_word, word, 0)] if words.shape[0] else torch.zeros_like(token)
        allowed = has_word & (((value >> bit) & 1) == 1)
        logits[row, ~allowed] = float("-inf")
