"""Triton sampler kernels for Ascend and NVIDIA, under the public names of vLLM's model runner V2; must never know vllm.

Importing this package imports neither torch nor Triton: the operations are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bitmask import apply_grammar_bitmask
    from .logprobs import compute_token_logprobs, compute_token_logprobs_and_ranks, compute_token_ranks
    from .penalties import apply_penalties
    from .request_update import post_update
    from .token_counts import bincount
    from .topk import LogprobsTensors, compute_topk_logprobs, compute_topk_scores

#: Public name -> the module that holds it.
_HOMES = {
    "LogprobsTensors": "topk",
    "apply_grammar_bitmask": "bitmask",
    "apply_penalties": "penalties",
    "bincount": "token_counts",
    "compute_token_logprobs": "logprobs",
    "compute_token_logprobs_and_ranks": "logprobs",
    "compute_token_ranks": "logprobs",
    "compute_topk_logprobs": "topk",
    "compute_topk_scores": "topk",
    "post_update": "request_update",
}

__all__ = [
    "LogprobsTensors",
    "apply_grammar_bitmask",
    "apply_penalties",
    "bincount",
    "compute_token_logprobs",
    "compute_token_logprobs_and_ranks",
    "compute_token_ranks",
    "compute_topk_logprobs",
    "compute_topk_scores",
    "post_update",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
