"""The shapes that are timed, with inputs drawn from fixed seeds; must never know how an operation is implemented.

A workload is a list of argument tuples of one operation, all alike but on data of their own, and the bytes that the
operation can't do without. Figures of other implementations come from calling them with the same tuples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .measure import rotation

CUDA = torch.device("cuda")


@dataclass
class Workload:
    op: str
    name: str
    #: Bytes that any implementation reads or writes in memory, given these inputs.
    floor_bytes: int
    arguments: list[tuple[Any, ...]]
    #: Undoes what a run leaves behind that the next one must not find.
    reset: Callable[[], None] = lambda: None
    #: A figure to reach, as a share of the better of the others; None: none was set.
    target: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(device=CUDA).manual_seed(seed)


def _logits(rows: int, vocab_size: int, dtype: torch.dtype, sets: int) -> list[torch.Tensor]:
    return [torch.randn(rows, vocab_size, device=CUDA, generator=_generator(i)).to(dtype) for i in range(sets)]


def _ids(*shape: int, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, device=CUDA, generator=_generator(seed), dtype=dtype)


def _title(rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> str:
    return f"{rows} x {vocab_size:,} {str(dtype).removeprefix('torch.')}"


def logprobs(rows: int, vocab_size: int, dtype: torch.dtype, target: float | None, columns: int = 21) -> Workload:
    """Log-probabilities of 1 + 20 tokens, and the first one's rank."""
    size = rows * vocab_size * dtype.itemsize
    sets = rotation(size)
    arguments = [
        (logits, _ids(rows, columns, vocab_size=vocab_size, seed=i))
        for i, logits in enumerate(_logits(rows, vocab_size, dtype, sets))
    ]
    return Workload("compute_token_logprobs_and_ranks", _title(rows, vocab_size, dtype), size, arguments, target=target)


def _random_words(rows: int, vocab_size: int, allowed: float, seed: int) -> torch.Tensor:
    """Every token is allowed with the same probability, on its own: the hardest mask to skip anything of."""
    generator = _generator(seed)
    bits = torch.rand(rows, -(-vocab_size // 32) * 32, device=CUDA, generator=generator) < allowed
    shifts = torch.arange(32, device=CUDA)
    return (bits.view(rows, -1, 32).long() << shifts).sum(2).to(torch.int32)


def bitmask(rows: int, vocab_size: int, dtype: torch.dtype, allowed: float, target: float | None) -> Workload:
    """One mask a row. The floor: every blocked logit is written, in whole 32-byte sectors, and the mask is read."""
    size = rows * vocab_size * dtype.itemsize
    per_sector = 32 // dtype.itemsize
    words = rows * -(-vocab_size // 32) * 4
    sectors = size * (1 - allowed**per_sector)
    mixed = size * (1 - allowed**per_sector - (1 - allowed) ** per_sector)
    indices = torch.arange(rows, dtype=torch.int32, device=CUDA)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=CUDA)
    arguments = [
        (logits, indices, _random_words(rows, vocab_size, allowed, i), starts)
        for i, logits in enumerate(_logits(rows, vocab_size, dtype, rotation(size)))
    ]
    return Workload(
        "apply_grammar_bitmask",
        f"{_title(rows, vocab_size, dtype)}, {allowed:.0%} allowed",
        int(sectors + mixed + words),
        arguments,
        target=target,
        notes={"written_bytes": int(sectors), "all_bytes_written": size},
    )


def bincount(rows: int, prompt: int, output: int, vocab_size: int, target: float | None) -> Workload:
    """Rows of equal length; the slots are spread over twice as many."""
    slots, length = 2 * rows, prompt + output
    sets = rotation(rows * vocab_size * 4)
    arguments = []
    for i in range(sets):
        mapping = torch.randperm(slots, device=CUDA, generator=_generator(i))[:rows]
        arguments.append(
            (
                mapping,
                _ids(slots, length, vocab_size=vocab_size, seed=i, dtype=torch.int32),
                torch.full((slots,), prompt, dtype=torch.int32, device=CUDA),
                torch.full((slots,), length, dtype=torch.int32, device=CUDA),
                torch.zeros(slots, -(-vocab_size // 32), dtype=torch.int32, device=CUDA),
                torch.zeros(slots, vocab_size, dtype=torch.int32, device=CUDA),
                length,
            )
        )
    floor = rows * (vocab_size * 4 + -(-vocab_size // 32) * 4 + length * 4)
    return Workload("bincount", f"{rows} x {length:,} tokens ({output:,} of output)", floor, arguments, target=target)


def penalties(
    requests: int, drafts: int, vocab_size: int, seen: str, target: float | None, dtype: torch.dtype = torch.float32
) -> Workload:
    """All three penalties on every row.

    ``seen`` "typical": 2,000 prompt and 500 output tokens a request; "every token": nothing can be skipped.
    """
    rows = requests * (drafts or 1)
    words = -(-vocab_size // 32)
    logits_bytes, bins_bytes = rows * vocab_size * dtype.itemsize, requests * (vocab_size * 4 + words * 4)
    arguments, sectors = [], 0
    for i, logits in enumerate(_logits(rows, vocab_size, dtype, rotation(logits_bytes + bins_bytes))):
        if seen == "typical":
            counts = torch.zeros(requests, vocab_size, dtype=torch.int32, device=CUDA)
            output = _ids(requests, 500, vocab_size=vocab_size, seed=i)
            counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
            mask = torch.zeros(requests, words * 32, dtype=torch.bool, device=CUDA)
            mask.scatter_(1, _ids(requests, 2000, vocab_size=vocab_size, seed=i + 1), True)
            prompt = (mask.view(requests, words, 32).long() << torch.arange(32, device=CUDA)).sum(2).to(torch.int32)
            per_sector = 32 // dtype.itemsize
            changed = mask[:, : vocab_size // per_sector * per_sector] | (counts > 0)
            sectors = int(changed.view(requests, -1, per_sector).any(2).sum()) * (drafts or 1)
        else:
            counts = 1 + _ids(requests, vocab_size, vocab_size=3, seed=i, dtype=torch.int32)
            prompt = _random_words(requests, vocab_size, 0.5, i)
        per_request = drafts or 1
        arguments.append(
            (
                logits,
                torch.arange(requests, dtype=torch.int32, device=CUDA).repeat_interleave(per_request),
                _ids(rows, vocab_size=vocab_size, seed=i, dtype=torch.int32),
                torch.arange(per_request, dtype=torch.int32, device=CUDA).repeat(requests),
                torch.full((requests,), 1.1, device=CUDA),
                torch.full((requests,), 0.1, device=CUDA),
                torch.full((requests,), 0.1, device=CUDA),
                prompt,
                counts,
            )
        )
    floor = bins_bytes + (2 * logits_bytes if seen == "every token" else 2 * 32 * sectors)
    name = f"{requests}{f' x {drafts} drafts' if drafts else ''} x {vocab_size:,} {str(dtype)[6:]}, {seen} seen"
    notes = {"all_bytes": bins_bytes + 2 * logits_bytes}
    return Workload("apply_penalties", name, floor, arguments, target=target, notes=notes)


def post_update(rows: int, steps: int, vocab_size: int) -> Workload:
    """Half of the speculative tokens accepted, on average; the buffers never fill up during a run."""
    slots, length = rows + 8, 8192
    arguments, lengths = [], []
    for i in range(8):
        generator = _generator(i)
        total_len = torch.full((slots,), 1000, dtype=torch.int32, device=CUDA)
        lengths.append(total_len)
        arguments.append(
            (
                torch.randperm(slots, device=CUDA, generator=generator)[:rows].to(torch.int32),
                torch.zeros(slots, dtype=torch.int32, device=CUDA),
                torch.zeros(slots, 1, dtype=torch.int64, device=CUDA),
                torch.zeros(slots, vocab_size, dtype=torch.int32, device=CUDA),
                _ids(rows, steps + 1, vocab_size=vocab_size, seed=i),
                torch.randint(1, steps + 2, (rows,), device=CUDA, generator=generator, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int32, device=CUDA),
                torch.arange(rows + 1, dtype=torch.int32, device=CUDA),
                torch.zeros(slots, length, dtype=torch.int32, device=CUDA),
                total_len,
            )
        )

    def reset() -> None:
        for total_len in lengths:
            total_len.fill_(1000)

    sampled = rows * (1 + steps / 2)
    name = f"{rows} requests, {steps} speculative tokens"
    return Workload("post_update", name, int(rows * 40 + sampled * 3 * 32), arguments, reset, target=1.0)


def topk(rows: int, vocab_size: int, k: int) -> Workload:
    """End to end: torch.topk, log-probabilities and ranks."""
    size = rows * vocab_size * 4
    arguments = [
        (logits, k, _ids(rows, vocab_size=vocab_size, seed=i))
        for i, logits in enumerate(_logits(rows, vocab_size, torch.float32, rotation(size)))
    ]
    return Workload("compute_topk_scores", f"{_title(rows, vocab_size)}, k = {k}", size, arguments, target=1.0)


def all_workloads(only: str | None = None) -> Iterator[Workload]:
    """Every workload of ``only`` one operation or of all, made when it is its turn."""
    f32, bf16 = torch.float32, torch.bfloat16
    makers: dict[str, list[Callable[[], Workload]]] = {
        "compute_token_logprobs_and_ranks": [
            lambda: logprobs(1, 151_936, f32, 1 / 15),
            lambda: logprobs(8, 151_936, f32, None),
            lambda: logprobs(32, 151_936, f32, 1 / 9),
            lambda: logprobs(64, 151_936, f32, None),
            lambda: logprobs(128, 151_936, f32, None),
            lambda: logprobs(256, 151_936, f32, 1 / 6),
            lambda: logprobs(1, 128_256, bf16, 1 / 4),
            lambda: logprobs(32, 128_256, bf16, 1 / 4),
            lambda: logprobs(256, 128_256, bf16, 1 / 4),
            lambda: logprobs(256, 151_665, f32, None),
        ],
        "apply_grammar_bitmask": [
            lambda: bitmask(256, 151_936, f32, 0.01, 0.5),
            lambda: bitmask(256, 151_936, f32, 0.5, None),
            lambda: bitmask(256, 151_936, f32, 0.9, 0.8),
            lambda: bitmask(256, 128_256, bf16, 0.01, None),
            lambda: bitmask(256, 128_256, bf16, 0.5, 0.35),
            lambda: bitmask(256, 128_256, bf16, 0.9, None),
            lambda: bitmask(32, 151_936, f32, 0.01, None),
        ],
        "bincount": [
            lambda: bincount(1, 4096, 64, 151_936, 0.5),
            lambda: bincount(64, 32_768, 1024, 151_936, 0.5),
            lambda: bincount(256, 2048, 512, 151_936, 0.5),
            lambda: bincount(64, 1024, 32_768, 151_936, None),
        ],
        "apply_penalties": [
            lambda: penalties(256, 0, 151_936, "typical", 0.95),
            lambda: penalties(256, 0, 151_936, "every token", 0.95),
            lambda: penalties(64, 8, 129_280, "typical", 0.95),
            lambda: penalties(64, 8, 129_280, "every token", 0.95),
            lambda: penalties(32, 0, 151_936, "typical", 0.95),
            lambda: penalties(1, 0, 151_936, "typical", 0.95),
            lambda: penalties(256, 0, 128_256, "every token", 0.95, bf16),
        ],
        "compute_topk_scores": [lambda: topk(256, 151_936, 20), lambda: topk(32, 151_936, 20)],
    }  # fmt: skip
    shapes = itertools.product((1, 16, 64, 256, 1024), (0, 1, 4, 8))
    makers["post_update"] = [partial(post_update, rows, steps, 32_000) for rows, steps in shapes]
    for op, made in makers.items():
        if only in (None, op):
            for make in made:
                yield make()
