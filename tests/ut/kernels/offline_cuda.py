"""Calls every operation with a CUDA driver that compiles for sm_90 and launches nothing; run as a program, prints JSON.

Triton's own just-in-time path decides what to compile, so what is counted here is what a GPU would see, on a machine
that has none. It must run in a process of its own: the driver stays active, and kernels must not be interpreted.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from vllm_ascend_ext import kernels
from vllm_ascend_ext.kernels import _launch, bitmask, logprobs, penalties, request_update, token_counts, topk

KERNELS = {
    "bitmask": bitmask._bitmask_kernel,
    "fold": logprobs._fold_kernel,
    "combine": logprobs._combine_kernel,
    "penalties": penalties._penalties_kernel,
    "post_update": request_update._post_update_kernel,
    "bincount": token_counts._bincount_kernel,
    "fill_ids": topk._fill_ids_kernel,
    "candidates": topk._candidates_kernel,
    "best_ids": topk._best_ids_kernel,
}


class _Utils:
    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}

    def load_binary(self, *_arguments: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads


class OfflineDriver(DriverBase):
    """An H200 as far as the compiler can tell."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = lambda _source, _metadata: lambda *_arguments: None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass(frozen=True)
class Buffer:
    gpu: torch.Tensor


@dataclass(frozen=True)
class State:
    num_token_ids: Buffer
    token_ids: Buffer


def compiled() -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of every specialisation so far."""
    for name, kernel in KERNELS.items():
        for caches in kernel.device_caches.values():
            for found in caches[0].values():
                yield name, found


def _int(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def scores(rows: int, vocab_size: int, columns: int) -> None:
    logits = torch.zeros(rows, vocab_size)
    kernels.compute_token_logprobs_and_ranks(logits, torch.zeros(rows, columns, dtype=torch.int64))


def best(rows: int, vocab_size: int, k: int) -> None:
    state = State(Buffer(_int(7)), Buffer(_int(7, 16)))
    kernels.compute_topk_scores(torch.zeros(rows, vocab_size), k, torch.zeros(rows, dtype=torch.int64))
    mapping = _int(rows)
    kernels.compute_topk_scores(torch.zeros(rows, vocab_size), k, mapping.long(), None, state, mapping, 9)


def masks(rows: int, vocab_size: int, stride: int) -> None:
    words = _int(rows, -(-vocab_size // 32))
    kernels.apply_grammar_bitmask(torch.zeros(rows, vocab_size), _int(rows), words, _int(rows + 1), stride)


def counts(rows: int, vocab_size: int, length: int) -> None:
    bins = (_int(rows, -(-vocab_size // 32)), _int(rows, vocab_size))
    kernels.bincount(_int(rows), _int(rows, length), _int(rows), _int(rows), *bins, length)


def penalised(rows: int, vocab_size: int, slots: int) -> None:
    factors = [torch.ones(slots) for _ in range(3)]
    bins = (_int(slots, -(-vocab_size // 32)), _int(slots, vocab_size))
    kernels.apply_penalties(torch.zeros(rows, vocab_size), _int(rows), _int(rows), _int(rows), *factors, *bins)


def updated(rows: int, vocab_size: int, steps: int) -> None:
    slots = rows + 3
    tokens, state = _int(rows, steps + 1).long(), (_int(slots, 64 * steps), _int(slots))
    last, drafts = _int(slots, 1).long(), (_int(rows, steps), _int(slots, steps))
    bins = _int(slots, vocab_size)
    kernels.post_update(
        _int(rows), _int(slots), last, bins, tokens, _int(rows), _int(rows), _int(rows + 1), *state, *drafts
    )


#: For each operation: calls after which everything is compiled, and calls that differ from them in sizes alone.
SIZES: dict[str, tuple[Callable[..., None], list[tuple[int, int, int]], list[tuple[int, int, int]]]] = {
    "scores": (
        scores,
        [(2, 4096, 3), (3000, 64, 3)],
        [(1, 128, 1), (1, 151_936, 16), (17, 32_000, 100), (5000, 8, 33)],
    ),
    "best": (best, [(2, 4096, 3)], [(1, 151_936, 1), (33, 32_000, 20)]),
    "masks": (masks, [(3, 4096, 2)], [(1, 128, 1), (64, 151_936, 16), (500, 32_000, 3)]),
    "counts": (counts, [(3, 4096, 20)], [(1, 128, 4), (16, 151_936, 1600), (40, 32_000, 36)]),
    "penalised": (penalised, [(3, 4096, 2)], [(1, 128, 1), (16, 151_936, 16), (100, 32_000, 7)]),
    "updated": (updated, [(3, 4096, 2), (3, 4096, 9)], [(1, 128, 1), (16, 32_000, 16), (300, 1000, 7)]),
}


def main() -> None:
    driver.set_active(OfflineDriver())
    target = _launch.Target("cuda", interpreted=False, cores=132)
    _launch.choose = lambda _tensor, _impl: target
    report: dict[str, Any] = {"first": {}, "more": {}}
    for name, (call, first, more) in SIZES.items():
        for sizes in first:
            call(*sizes)
        report["first"][name] = len(list(compiled()))
        for sizes in more:
            call(*sizes)
        report["more"][name] = len(list(compiled())) - report["first"][name]
    known = len(list(compiled()))
    scores(3, 4097, 3)  # rows that start anywhere
    report["more"]["scores, unaligned"] = len(list(compiled())) - known
    report["atomics"] = dict.fromkeys(KERNELS, 0)
    report["loads of 16 bytes"] = dict.fromkeys(KERNELS, 0)
    for name, kernel in compiled():
        wide = kernel.asm["ptx"].count("ld.global.v4.b32") + kernel.asm["ptx"].count("cp.async.cg")
        report["loads of 16 bytes"][name] = max(wide, report["loads of 16 bytes"][name])
        report["atomics"][name] += kernel.asm["ttir"].count("tt.atomic")
    print(json.dumps(report))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
