"""Times the embedded store against numpy on the same bytes in the same run; must never assert anything.

256 values of 128 KiB are put and got, once from and to blocks that lie in order ("row"), as a fresh prompt's mostly do,
and once from and to blocks scattered over a cache twice as large ("scattered"). numpy copies the same blocks: in one
piece where they lie in order, one by one where they don't. The pool is warm. "put" finds free room, "evict" is a put
into a full pool, which evicts as much as it brings. The rounds are interleaved; of the times the best counts, of the
ratios the median over the rounds.

Ratios are numpy's time over the store's, that is bandwidths with numpy's as 1. They are taken from the CPU time of the
one thread that does it all, so that a busy machine, which takes every thread off its core after 3 ms, doesn't spoil
them; ``*_wall_us`` says what passed on the clock.

    python benchmarks/pool_local.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.fence import open_fence

BLOCKS, BLOCK_BYTES = 256, 128 << 10
POOL_BYTES = 256 << 20
PREFIX = "model~0123456789ab@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@group:0@cache_role:kv@cache_family:default@"


def block_keys(number: int, count: int = BLOCKS) -> list[str]:
    """Keys as the pool makes them, other ones for every ``number``."""
    return [PREFIX + hashlib.sha256(b"%d.%d" % (number, block)).hexdigest() for block in range(count)]


class Blocks:
    """One layout of the blocks in a cache, and a copy of it for numpy to write into."""

    def __init__(self, order: npt.NDArray[np.int64], whole: bool) -> None:
        cache = torch.randint(0, 256, (int(order.max()) + 1, BLOCK_BYTES), dtype=torch.uint8).numpy()
        copy = torch.zeros((len(order), BLOCK_BYTES), dtype=torch.uint8).numpy()
        self.pairs = [(cache, copy)] if whole else [(cache[block], copy[n]) for n, block in enumerate(order)]
        self.addrs = (cache.ctypes.data + order * BLOCK_BYTES)[:, None]
        self.sizes = np.full_like(self.addrs, BLOCK_BYTES)

    def copy(self) -> list[int]:
        for source, target in self.pairs:
            np.copyto(target, source)
        return []


class Bench:
    def __init__(self, store: LocalBackend) -> None:
        self._store = store
        self._layouts = {
            "row": Blocks(np.arange(BLOCKS), whole=True),
            "scattered": Blocks(np.random.default_rng(0).permutation(2 * BLOCKS)[:BLOCKS], whole=False),
        }
        self._times: dict[str, list[float]] = {}

    def round(self, number: int) -> None:
        for place, (name, blocks) in enumerate(self._layouts.items()):
            old, keys = block_keys(4 * number + 2 * place), block_keys(4 * number + 2 * place + 1)
            rest = (blocks.addrs, blocks.sizes, open_fence())
            self._time(f"evict_{name}", lambda keys=old, rest=rest: self._store.put(keys, *rest))
            self._store.remove(old)
            self._time(f"numpy_{name}", blocks.copy)
            self._time(f"put_{name}", lambda keys=keys, rest=rest: self._store.put(keys, *rest))
            self._time(f"get_{name}", lambda keys=keys, rest=rest: self._store.get(keys, *rest))
        for count in (512, 1024):
            asked = (keys * 4)[: count // 2] + block_keys(-1 - number, count // 2)
            self._time(f"exists_{count}", lambda asked=asked: self._store.exists(asked), success=None)

    def _time(self, name: str, call: Callable[[], list[int]], success: int | None = 0) -> None:
        start, start_wall = time.thread_time(), time.perf_counter()
        answer = call()
        for key, passed in ((name, time.thread_time() - start), (f"{name}_wall", time.perf_counter() - start_wall)):
            self._times.setdefault(key, []).append(passed)
        if success is not None and any(code != success for code in answer):
            raise RuntimeError(f"{name} answered {set(answer)}")

    def _ratio(self, one: str, other: str, warm_up: int) -> float:
        """The median over the rounds: both sides of each round met the same weather."""
        return float(np.median(np.divide(self._times[one][warm_up:], self._times[other][warm_up:])))

    def figures(self, warm_up: int) -> dict[str, float]:
        seconds = {name: min(times[warm_up:]) for name, times in self._times.items()}
        return {
            **{f"{name}_us": round(best * 1e6, 1) for name, best in seconds.items()},
            **{
                f"{call}_{name}_over_numpy": round(self._ratio(f"numpy_{name}", f"{call}_{name}", warm_up), 3)
                for call in ("put", "get", "evict")
                for name in self._layouts
            },
        }


def overhead_per_block(store: LocalBackend, folder: str) -> float:
    """Bytes of the pool's files beyond its capacity, per cached block."""
    used = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
    stats = store.stats()
    return float(used - stats["capacity_bytes"]) / stats["keys"]


def measure(rounds: int = 60, warm_up: int = 20) -> dict[str, float]:
    """All figures of the embedded store: times in microseconds, ratios of bandwidths (1.0 is numpy's), bytes."""
    folder = f"/dev/shm/ascend-pool-bench-{os.getpid()}"
    store = LocalBackend(folder, POOL_BYTES)
    try:
        bench = Bench(store)
        for number in range(warm_up + rounds):
            bench.round(number)
        return {**bench.figures(warm_up), "overhead_bytes_per_block": round(overhead_per_block(store, folder), 1)}
    finally:
        store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    print(json.dumps({"pool_local": measure(parser.parse_args().rounds)}, indent=2))
