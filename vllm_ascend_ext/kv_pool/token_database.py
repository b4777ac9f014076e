"""From a request's block hashes to the keys of its blocks; must never know addresses, stores or threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.keys import block_keys, group_hashes
from vllm_ascend_ext.kv_pool.layout import IntArray


class ChunkedTokenDatabase:
    """Keys of one rank's blocks, and of every rank's for look-ups. Hashes may be raw bytes or hex text."""

    def __init__(self, setup: PoolSetup) -> None:
        scheme = setup.key_scheme
        groups = range(len(setup.groups))
        self._scales = [group.block_size // setup.hash_unit for group in setup.groups]
        self._own = [scheme.block_prefix(setup.topology, group) for group in groups]
        self._owners = [[scheme.block_prefix(owner, group) for owner in setup.topology.owners()] for group in groups]
        self._step = setup.topology.replicas
        self._turn = setup.topology.tp_rank % setup.topology.put_step // setup.topology.dcp_size

    def num_blocks(self, group: int, hashes: Sequence[bytes | str]) -> int:
        """How many full blocks of ``group`` have a hash."""
        return len(hashes) // self._scales[group]

    def keys(self, group: int, hashes: Sequence[bytes | str], indices: IntArray) -> list[str]:
        """This rank's keys of the blocks at ``indices``; each must have its hash."""
        of_blocks = group_hashes(hashes, self._scales[group])
        return block_keys(self._own[group], [of_blocks[index] for index in indices.tolist()])

    def owner_keys(self, group: int, hashes: Sequence[bytes | str], first: int) -> list[list[str]]:
        """For each rank that owns a shard, the keys of all full blocks from ``first`` on."""
        of_blocks = group_hashes(hashes, self._scales[group])[first:]
        return [block_keys(prefix, of_blocks) for prefix in self._owners[group]]

    def own_share(self, indices: IntArray) -> IntArray:
        """Those of ``indices`` that this rank saves: ranks with the same bytes take turns."""
        if self._step == 1:
            return indices
        share: IntArray = indices[indices % self._step == self._turn]
        return share

    def hash_of(self, group: int, hashes: Sequence[bytes], index: int) -> bytes:
        """The hash that names block ``index`` of ``group``."""
        return hashes[(index + 1) * self._scales[group] - 1]


def as_indices(values: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(values, dtype=np.int64)
