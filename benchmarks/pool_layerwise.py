"""What layerwise transfer costs before a byte is moved: addresses, splitting, handing over; must never assert anything.

vllm-ascend's figures for the same work (1,024 blocks, one layer, K and V apart) were 64 us for the addresses and 330 us
for handing them over with splitting.
"""

from __future__ import annotations

import threading
import timeit
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import LOCAL_TO_GLOBAL, Addresses, Backend
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerBatchBuilder, LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.copying import LimitedCopier
from vllm_ascend_ext.kv_pool.layerwise.gate import Signal
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.observe import Stats

BLOCKS, LAYERS, SEGMENT = 1024, 32, 64 << 10
GVA = 0x110000000000


class _Sink(Backend):
    """Takes everything and does nothing; ``as_lists`` makes Python lists first, as MemCache's binding needs them."""

    engine: ClassVar[str] = "memcache"
    late_data: ClassVar[Literal["fenced", "staged"]] = "fenced"
    has_gva: ClassVar[bool] = True

    def __init__(self, as_lists: bool) -> None:
        self._as_lists = as_lists

    def exists(self, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys)

    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        return [0] * len(keys)

    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        return [0] * len(keys)

    def remove(self, keys: Sequence[str]) -> list[int]:
        return [0] * len(keys)

    def batch_copy(self, gvas: Addresses, addrs: Addresses, sizes: Addresses, direction: int, fence: Fence) -> int:
        if self._as_lists:
            gvas.tolist(), addrs.tolist(), sizes.tolist()
        return 0

    def close(self) -> None:
        return None


def measure() -> dict[str, Any]:
    """Microseconds, the best of several rounds, and ratios to a bare baseline of the same run."""
    layout = BlockLayout(
        base=[GVA + number * BLOCKS * 4 * SEGMENT for number in range(2 * LAYERS)],
        length=[SEGMENT] * (2 * LAYERS),
        stride=[SEGMENT] * (2 * LAYERS),
        num_blocks=4 * BLOCKS,
        per_layer=2,
    )
    builder = LayerBatchBuilder(layout)
    rng = np.random.default_rng(0)
    ids = rng.permutation(4 * BLOCKS)[:BLOCKS].astype(np.int64)
    gvas = GVA + np.arange(BLOCKS, dtype=np.int64) * builder.value_bytes
    ranges = builder.build(7, ids, gvas)
    baseline = _best(lambda: ids + gvas)
    build = _best(lambda: builder.build(7, ids, gvas))
    figures: dict[str, Any] = {
        "one layer's addresses, 1024 blocks (us)": build,
        "... per addition of two such arrays": build / baseline,
        "... by a loop over the blocks (us)": _best(lambda: _loop(layout, ids, gvas), number=20),
    }
    limits: list[tuple[str, int | None, int | None]] = [
        ("in one call", None, None),
        ("in calls of 256 blocks", 256, None),
        ("in halves of a segment", None, SEGMENT // 2),
    ]
    for binding, as_lists in (("arrays", False), ("lists", True)):
        client = GvaClient(StoreClient(_Sink(as_lists), Stats()))
        for name, blocks, length in limits:
            copier, fence = LimitedCopier(client, blocks, length), Fence()
            figures[f"handed over as {binding}, {name} (us)"] = _best(
                lambda copier=copier, fence=fence: copier.copy(ranges, LOCAL_TO_GLOBAL, fence)  # type: ignore[misc]
            )
    figures["a step's signals, 32 layers (us)"] = _best(_signals)
    figures["the plan of 32 layers (us)"] = _best(lambda: LayerPlan.of([layout]), number=50)
    return figures


def _best(work: Callable[[], object], number: int = 200) -> float:
    return min(timeit.repeat(work, number=number, repeat=7)) / number * 1e6


def _loop(layout: BlockLayout, ids: Addresses, gvas: Addresses) -> list[tuple[int, int, int]]:
    base, length, stride = layout.base[14:16], layout.length[14:16], layout.stride[14:16]
    offset = layout.layer_offset(7)
    return [
        (gva + offset + part * length[0], base[part] + block * stride[part], length[part])
        for block, gva in zip(ids.tolist(), gvas.tolist(), strict=True)
        for part in range(2)
    ]


def _signals() -> None:
    condition = threading.Condition(threading.RLock())
    signals: list[Signal[int]] = [Signal("a layer", condition) for _ in range(4 * LAYERS)]
    deadline = Deadline.after(1.0)
    for signal in signals:
        signal.set(1)
        signal.wait(deadline)


if __name__ == "__main__":
    for figure, value in measure().items():
        print(f"{figure:<56} {value:.4g}")
