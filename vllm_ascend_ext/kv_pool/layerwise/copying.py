"""Copies ranges between device and store within the limits of one call, and finds out which blocks it failed for.

A store refuses a whole batch for one bad address. So that one request's block doesn't fail everybody's, a refused batch
is halved until the bad blocks are alone. Must never know keys, layers or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.layerwise.batches import Ranges
from vllm_ascend_ext.kv_pool.layout import IntArray

_ABOUT_AN_ADDRESS = frozenset({Status.REFUSED, Status.INVALID, Status.MISSING})
"""Refusals that may be due to a part of the batch; with any other the whole call failed."""


@dataclass
class BlockCodes:
    """For each block of a copy: its status, the engine's code if it failed; and what was raised, if anything."""

    statuses: IntArray
    codes: IntArray
    cause: BaseException | None = None
    refused: int = 0  # batches that were refused and taken apart


class LimitedCopier:
    """``max_blocks``: blocks per call; ``max_bytes``: bytes per range of a call (None: no limit)."""

    def __init__(self, client: GvaClient, max_blocks: int | None, max_bytes: int | None) -> None:
        self._client = client
        self._max_blocks = max_blocks
        self._max_bytes = max_bytes

    def copy(self, ranges: Ranges, direction: int, fence: Fence) -> BlockCodes:
        """Copy all blocks; one status each."""
        count = ranges.blocks
        ranges = ranges if self._max_bytes is None else ranges.split(self._max_bytes)
        result = BlockCodes(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64))
        step = self._max_blocks or max(count, 1)
        todo = [(start, min(start + step, count)) for start in range(0, count, step)][::-1]
        while todo:
            start, stop = todo.pop()
            copied = None if fence.revoked else self._client.copy(*ranges.flat(start, stop), direction, fence)
            if copied is not None and copied.status is Status.OK:
                continue
            if copied is None or fence.revoked:  # given up in its middle, whatever the engine calls that
                result.statuses[start:stop] = Status.CANCELLED
                continue
            if copied.status in _ABOUT_AN_ADDRESS and stop - start > 1:
                result.refused += 1
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
                continue
            result.statuses[start:stop] = copied.status
            result.codes[start:stop] = copied.code
            result.cause = result.cause or copied.cause
        return result
