"""Which blocks of which group serve a prefix of a given length; must never know keys' text, stores or devices.

A prefix of ``end`` tokens can be resumed from when every group can: full attention needs all blocks before ``end``, a
sliding window those that the window of the next token reaches, a recurrent state the one block that ends there. The
hit is the longest boundary that all groups can serve - not the shortest of the groups' own hits.

A draft model's KV at a token depends on the token behind it, which a block's hash doesn't know of its last token: so a
draft group's last block doesn't count, and it serves ``end`` only when it has the block behind ``end``, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind, PoolSetup
from vllm_ascend_ext.kv_pool.layout import IntArray

NULL_BLOCK = 0
"""vLLM's placeholder in the tables of groups that keep only some of a request's blocks."""


class AscendStoreCoordinator:
    def __init__(self, setup: PoolSetup) -> None:
        self._groups = setup.groups
        self._granularity = setup.granularity

    def hit(self, present: Sequence[npt.NDArray[np.bool_]], max_tokens: int) -> int:
        """The longest boundary of at most ``max_tokens`` that every group can serve; 0 if there is none.

        ``present[g][i]``: block i of group g can be had (it is in the pool, or on the device already).
        """
        ends = np.arange(self._granularity, max_tokens + 1, self._granularity, dtype=np.int64)
        served = np.ones(len(ends), dtype=np.bool_)
        for group, blocks in zip(self._groups, present, strict=True):
            served &= self._serves(group, blocks, ends)
        hits = ends[served]
        return int(hits[-1]) if hits.size else 0

    def load_blocks(self, group: int, start: int, end: int) -> IntArray:
        """Indices of the blocks that a load of tokens ``start`` to ``end`` needs, ``start`` being on the device."""
        spec = self._groups[group]
        last = -(-end // spec.block_size)
        return np.arange(max(self._first_needed(spec, end), start // spec.block_size), last, dtype=np.int64)

    def store_blocks(self, group: int, start: int, end: int, block_ids: IntArray) -> IntArray:
        """Indices of the full blocks between two boundaries that some later load could need.

        A group that keeps only some blocks shows the null block for the others: there is nothing to save there.
        """
        spec = self._groups[group]
        first = start // spec.block_size
        blocks = np.arange(first, min(end // spec.block_size, len(block_ids)), dtype=np.int64)
        if spec.kind is GroupKind.FULL:
            return blocks
        if spec.kind is GroupKind.STATE:
            blocks = blocks[(blocks + 1) * spec.block_size % self._granularity == 0]
        kept: IntArray = blocks[block_ids[blocks] != NULL_BLOCK]
        return kept

    @staticmethod
    def _first_needed(spec: CacheGroup, end: int) -> int:
        if spec.kind is GroupKind.FULL:
            return 0
        if spec.kind is GroupKind.STATE:
            return end // spec.block_size - 1
        return max(end - spec.window + 1, 0) // spec.block_size

    def _serves(self, spec: CacheGroup, present: npt.NDArray[np.bool_], ends: IntArray) -> npt.NDArray[np.bool_]:
        """Whether ``spec`` can resume at each of ``ends``."""
        missing = np.concatenate(([0], np.cumsum(~present)))  # missing[i]: how many of the first i blocks are absent
        last = ends // spec.block_size
        if spec.kind is GroupKind.FULL:
            first = np.zeros_like(last)
        elif spec.kind is GroupKind.STATE:
            first = last - 1
        else:
            first = np.maximum(ends - spec.window + 1, 0) // spec.block_size
        if spec.is_draft:
            last = last + 1
        known = last <= len(present)
        last, first = np.minimum(last, len(present)), np.minimum(first, len(present))
        served: npt.NDArray[np.bool_] = known & (missing[last] == missing[first])
        return served
