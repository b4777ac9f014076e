"""Laws of the wrappers on a device: no host synchronisation, nothing compiled anew for other sizes, graph capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_ascend_ext import kernels

from .kernel_cases import random_words
from .kernel_checks import Impl, assert_same


@pytest.fixture(autouse=True)
def _on_a_device(impl: Impl) -> None:
    if not impl.on_device:
        pytest.skip("the CPU has no streams, and the interpreter compiles nothing")


@dataclass(frozen=True)
class Buffer:
    gpu: torch.Tensor


@dataclass(frozen=True)
class State:
    num_token_ids: Buffer
    token_ids: Buffer


Call = Callable[[], Any]


def _calls(impl: Impl, rows: int, vocab_size: int, steps: int) -> dict[str, Call]:
    """One call of every operation; inputs are made before, and the calls can be repeated."""
    generator = torch.Generator().manual_seed(rows)

    def ints(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(dtype).to(impl.device)

    logits = torch.randn(rows, vocab_size, generator=generator).to(impl.device)
    masked, penalised = logits.clone(), logits.clone()
    words = random_words(rows, -(-vocab_size // 32), generator=generator).to(impl.device)
    order = torch.arange(rows, dtype=torch.int32, device=impl.device)
    sampled, zeros = ints(vocab_size, rows, steps + 1, dtype=torch.int64), torch.zeros_like(order)
    state = State(Buffer(ints(5, rows)), Buffer(ints(vocab_size, rows, 8)))
    tokens, bins = ints(vocab_size, rows, 50 + steps), ints(3, rows, vocab_size)
    factors = [torch.full((rows,), factor, device=impl.device) for factor in (1.2, 0.1, 0.1)]
    lengths = torch.full_like(order, 50)
    k = min(20, vocab_size)
    forced = {"impl": impl.forced}

    def post_update() -> Any:
        counts, written, total_len = bins.clone(), tokens.clone(), lengths // 2
        kernels.post_update(
            order, zeros.clone(), sampled[:, :1].contiguous(), counts, sampled, zeros + steps + 1, zeros, None, written,
            total_len, **forced,
        )  # fmt: skip
        return counts, written, total_len

    def bincount() -> Any:
        mask, counts = words.clone(), bins.clone()
        kernels.bincount(order, tokens, lengths // 2, lengths, mask, counts, 50, **forced)
        return mask, counts

    return {
        "compute_token_logprobs": lambda: kernels.compute_token_logprobs(logits, sampled, **forced),
        "compute_token_ranks": lambda: kernels.compute_token_ranks(logits, sampled[:, 0].contiguous(), **forced),
        "compute_token_logprobs_and_ranks": lambda: kernels.compute_token_logprobs_and_ranks(logits, sampled, **forced),
        "compute_topk_scores": lambda: kernels.compute_topk_scores(logits, k, sampled[:, 0].contiguous(), **forced)[:3],
        "compute_topk_scores, requested": lambda: kernels.compute_topk_scores(
            logits, k, sampled[:, 0].contiguous(), None, state, order, 8, **forced
        )[:3],
        "apply_grammar_bitmask": lambda: kernels.apply_grammar_bitmask(masked, order, words, **forced) or masked,
        "apply_penalties": lambda: (
            kernels.apply_penalties(
                penalised.copy_(logits), order, tokens[:, 0].contiguous(), zeros, *factors, words, bins, **forced
            )
            or penalised
        ),
        "post_update": post_update,
        "bincount": bincount,
    }


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_wrapper_waits_for_the_device(impl: Impl) -> None:
    backend: ModuleType = getattr(torch, impl.device.type)
    if not hasattr(backend, "set_sync_debug_mode"):
        pytest.skip(f"torch.{impl.device.type} can't report synchronisations")
    calls = _calls(impl, 3, 5000, 4)
    for call in calls.values():
        call()
    backend.synchronize()
    backend.set_sync_debug_mode("error")
    try:
        for call in calls.values():
            call()
    finally:
        backend.set_sync_debug_mode("default")


def test_every_operation_can_be_captured_in_a_graph(impl: Impl) -> None:
    if impl.name != "cuda":
        pytest.skip("captured by hand on CUDA; on Ascend by the runner")
    for name, call in _calls(impl, 3, 5000, 4).items():
        expected = [value.clone() for value in _flat(call())]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _flat(call())
        for value in captured:
            value.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if name != "apply_grammar_bitmask":  # overwritten in place, and its input with it
            for a, b in zip(captured, expected, strict=True):
                assert_same(a, b.cpu())


def _flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _specialisations() -> int:
    """How many kernels have been compiled in this process."""
    from vllm_ascend_ext.kernels import bitmask, logprobs, penalties, request_update, token_counts, topk

    count = 0
    for module in (bitmask, logprobs, penalties, request_update, token_counts, topk):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                caches = getattr(kernel, "device_caches", None)
                count += sum(len(found[0]) for found in caches.values()) if caches is not None else 0
                count += sum(len(found) for found in kernel.cache.values()) if caches is None else 0
    return count


def test_other_sizes_compile_nothing_anew(impl: Impl) -> None:
    """Rows in pieces and whole rows, few tokens of a row and more are compiled first; all rows here are aligned."""
    for rows, vocab_size, steps in ((2, 40_000, 2), (3000, 64, 9)):
        for call in _calls(impl, rows, vocab_size, steps).values():
            call()
    before = _specialisations()
    assert before > 0
    for rows, vocab_size, steps in ((1, 151_936, 1), (16, 32_000, 16), (333, 10_000, 9), (4000, 128, 4)):
        for call in _calls(impl, rows, vocab_size, steps).values():
            call()
    assert _specialisations() == before
