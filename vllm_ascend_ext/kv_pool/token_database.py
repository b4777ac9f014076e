"""From a request's block hashes to the keys of its blocks; must never know addresses, stores or threads."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.keys import Topology, block_keys, group_hashes
from vllm_ascend_ext.kv_pool.layout import IntArray
from vllm_ascend_ext.kv_pool.shards import Sharding


class Naming(Enum):
    """What a key names: a whole block, one layer of it, or a whole block that is written and read in pieces."""

    BLOCK = "block"
    LAYER = "layer"
    GVA = "gva"

    @classmethod
    def of(cls, layerwise: bool, has_gva: bool) -> Naming:
        if not layerwise:
            return cls.BLOCK
        return cls.GVA if has_gva else cls.LAYER


class ChunkedTokenDatabase:
    """Keys of one rank's blocks, and of every rank's for look-ups. Hashes may be raw bytes or hex text.

    With ``Naming.LAYER`` the key of a block is its hash alone; ``layer_keys`` makes the layers' keys of it.
    """

    def __init__(self, setup: PoolSetup, naming: Naming = Naming.BLOCK) -> None:
        self._setup = setup
        self._naming = naming
        self._groups = range(len(setup.groups))
        self._scales = [group.block_size // setup.hash_unit for group in setup.groups]
        self._shardings = [Sharding.of(setup, group) for group in self._groups]
        self._own = [
            [("", "") if naming is Naming.LAYER else self._affixes(shard.rank, group) for shard in sharding.own()]
            for group, sharding in enumerate(self._shardings)
        ]
        self._owners = [
            [self._affixes(owner, group) for owner in sharding.owners()]
            for group, sharding in enumerate(self._shardings)
        ]
        self._layers: list[list[str]] = []

    def set_layers(self, counts: Sequence[int]) -> None:
        """How many layers this rank has in each group; those of other pipeline stages are in the setup."""
        if self._naming is not Naming.LAYER:
            return
        scheme = self._setup.key_scheme
        stages = self._setup.layers_per_stage(counts)
        ranks = [sharding.topology for sharding in self._shardings]
        self._layers = [
            [scheme.layer_prefix(ranks[group], group, layer) for layer in range(counts[group])]
            for group in self._groups
        ]
        self._owners = [
            [
                (scheme.layer_prefix(owner, group, layer), "")
                for owner in self._shardings[group].owners()
                for layer in range(stages[owner.pp_rank][group])
            ]
            for group in self._groups
        ]

    def num_shards(self, group: int) -> int:
        """Of how many keys this rank's share of a block of ``group`` consists."""
        return len(self._own[group])

    def num_blocks(self, group: int, hashes: Sequence[bytes | str]) -> int:
        """How many full blocks of ``group`` have a hash."""
        return len(hashes) // self._scales[group]

    def keys(self, group: int, hashes: Sequence[bytes | str], indices: IntArray, shard: int = 0) -> list[str]:
        """This rank's keys of one part of the blocks at ``indices``; each must have its hash."""
        of_blocks = group_hashes(hashes, self._scales[group])
        prefix, suffix = self._own[group][shard]
        return block_keys(prefix, [of_blocks[index] for index in indices.tolist()], suffix)

    def names_of(self, group: int, block_hash: bytes) -> list[str]:
        """Everything that this rank has in the store of the block with this hash: one key per part, or per layer."""
        keys = [key for prefix, suffix in self._own[group] for key in block_keys(prefix, [block_hash], suffix)]
        if self._naming is not Naming.LAYER:
            return keys
        return [key for layer in range(len(self._layers[group])) for key in self.layer_keys(group, layer, keys)]

    def partial_key(self, req_id: str, group: int, index: int, end_token: int) -> str:
        """The key of a block that isn't full and belongs to one request alone."""
        return self._setup.key_scheme.partial_key(self._shardings[group].topology, req_id, group, index, end_token)

    def layer_keys(self, group: int, layer: int, keys: Sequence[str]) -> list[str]:
        """The keys of one layer of the blocks that ``keys`` name."""
        return block_keys(self._layers[group][layer], keys)

    def owner_keys(self, group: int, hashes: Sequence[bytes | str], first: int) -> list[list[str]]:
        """The keys of all full blocks from ``first`` on, for each part that a block consists of: each rank's, and with
        ``Naming.LAYER`` each layer's."""
        of_blocks = group_hashes(hashes, self._scales[group])[first:]
        return [block_keys(prefix, of_blocks, suffix) for prefix, suffix in self._owners[group]]

    def _affixes(self, rank: Topology, group: int) -> tuple[str, str]:
        scheme = self._setup.key_scheme
        return (
            (scheme.block_prefix(rank, group), "") if self._naming is Naming.BLOCK else scheme.gva_affixes(rank, group)
        )

    def own_share(self, indices: IntArray, group: int = 0) -> IntArray:
        """Those of ``indices`` that this rank saves: ranks with the same bytes take turns."""
        rank = self._shardings[group].topology
        if rank.replicas == 1:
            return indices
        share: IntArray = indices[indices % rank.replicas == rank.tp_rank % rank.put_step // rank.dcp_size]
        return share

    def hash_of(self, group: int, hashes: Sequence[bytes], index: int) -> bytes:
        """The hash that names block ``index`` of ``group``."""
        return hashes[(index + 1) * self._scales[group] - 1]


def as_indices(values: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(values, dtype=np.int64)
