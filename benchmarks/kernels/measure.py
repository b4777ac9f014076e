"""Device time of short calls, by replaying a graph of many of them; must never know an operation."""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

Call = Callable[[], Any]

#: Data that a graph goes through before it comes back to the same bytes: several times any L2 cache.
ROTATION_BYTES = 400 * 2**20


#: Cycles that the device is kept busy while calls that can't be captured are queued behind it.
QUEUE_CYCLES = 60_000_000


def replayed(calls: Sequence[Call], replays: int = 15, least_calls: int = 1) -> tuple[float, str]:
    """(median of the microseconds that one call takes on the device, how they were found: "graph" or "queue").

    ``calls`` do the same on data of their own; one graph holds them all, one after the other, so that each finds its
    data out of the caches, and as often over as gives at least ``least_calls``. Calls that copy from the host can't be
    captured: they are queued behind a kernel that keeps the device busy meanwhile, so that no launch is waited for.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    calls = list(calls) * -(-least_calls // len(calls))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        run, how, head = graph.replay, "graph", 0
    except RuntimeError:
        torch.cuda.synchronize()
        run, how, head = (lambda: [call() for call in calls]), "queue", QUEUE_CYCLES
    times = []
    for replay in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if head:
            torch.cuda._sleep(head)
        start.record()
        run()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1000 / len(calls))
    del graph
    return statistics.median(times), how


def rotation(bytes_of_one: int, least: int = 2, most: int = 128) -> int:
    """How many sets of inputs a graph goes through."""
    return max(least, min(most, -(-ROTATION_BYTES // max(1, bytes_of_one))))


def elementwise_bandwidth(elements: int) -> float:
    """Bytes a second of a += b on float32: two reads and a write of each element, as in penalties."""
    sets = rotation(8 * elements, 3)
    pairs = [(torch.rand(elements, device="cuda"), torch.rand(elements, device="cuda")) for _ in range(sets)]
    time, _ = replayed([lambda a=a, b=b: torch.add(a, b, out=a) for a, b in pairs])
    return 12 * elements / time * 1e6


def copy_bandwidth(elements: int) -> float:
    """Bytes a second of b = a on float32."""
    sets = rotation(8 * elements, 3)
    pairs = [(torch.rand(elements, device="cuda"), torch.empty(elements, device="cuda")) for _ in range(sets)]
    time, _ = replayed([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
    return 8 * elements / time * 1e6


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """End the command with one line where there is nothing to time on."""
    if not torch.cuda.is_available():
        parser.error("an NVIDIA GPU is needed, and torch sees none")


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
