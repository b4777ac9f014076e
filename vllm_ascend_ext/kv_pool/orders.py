"""From a step's orders to transfer jobs: which blocks of which group, under which keys; must never know addresses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_ascend_ext.kv_pool.coordinator import NULL_BLOCK, AscendStoreCoordinator
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, TransferJob
from vllm_ascend_ext.kv_pool.layout import IntArray
from vllm_ascend_ext.kv_pool.requests import ReqMeta
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase


class Orders:
    """Reads one rank's share out of what the scheduler ordered."""

    def __init__(self, setup: PoolSetup, database: ChunkedTokenDatabase) -> None:
        self._setup = setup
        self._database = database
        self._coordinator = AscendStoreCoordinator(setup)

    def load_job(self, request: ReqMeta) -> TransferJob:
        """The blocks that the request's load needs."""
        load = request.load
        assert load is not None
        if load.reload:
            return TransferJob(load.job_id, request.req_id, (self._reload(request),))
        parts: list[GroupBlocks] = []
        for group, table in enumerate(request.block_ids):
            indices = self._coordinator.load_blocks(group, load.vllm_cached_tokens, load.pool_cached_tokens)
            if (table[indices] == NULL_BLOCK).any():
                raise ValueError(f"group {group} of {request.req_id} has no blocks for what is to be loaded")
            parts += self._shards(request, group, indices)
        return TransferJob(load.job_id, request.req_id, tuple(parts))

    def whole_load(self, request: ReqMeta) -> TransferJob:
        """All blocks that the load could have meant, for orders that make no sense."""
        assert request.load is not None
        parts: list[GroupBlocks] = []
        for group, table in enumerate(request.block_ids):
            first = request.load.vllm_cached_tokens // self._setup.groups[group].block_size
            indices = np.arange(first, len(table), dtype=np.int64)
            parts.append(GroupBlocks(group, indices, table[indices], [""] * len(indices)))
        return TransferJob(request.load.job_id, request.req_id, tuple(parts))

    def save_job(self, request: ReqMeta) -> TransferJob:
        """The blocks that this rank saves for the request."""
        save = request.save
        assert save is not None
        parts: list[GroupBlocks] = []
        for group, table in enumerate(request.block_ids):
            indices = self._coordinator.store_blocks(group, save.start_token, save.end_token, table)
            shards = self._shards(request, group, self._database.own_share(indices, group))
            if save.tail > save.end_token:
                shards = [self._with_partial(shard, request, save.tail) for shard in shards]
            parts += shards
        return TransferJob(save.job_id, request.req_id, tuple(parts))

    def _reload(self, request: ReqMeta) -> GroupBlocks:
        """All that the request has computed, of the one group that there is where layers share buffers."""
        load = request.load
        assert load is not None
        size, end = self._setup.groups[0].block_size, load.pool_cached_tokens
        indices = np.arange(end // size, dtype=np.int64)
        resident = load.vllm_cached_tokens // size + (load.vllm_cached_tokens == end and end % size > 0)
        (part,) = self._shards(request, 0, indices)
        part = replace(part, resident=resident)
        return self._with_partial(part, request, end) if end % size else part

    def _shards(self, request: ReqMeta, group: int, indices: IntArray) -> list[GroupBlocks]:
        """The blocks at ``indices``, once for each part that this rank's share of them consists of."""
        blocks = request.block_ids[group][indices]
        return [
            GroupBlocks(group, indices, blocks, self._database.keys(group, request.block_hashes, indices, shard), shard)
            for shard in range(self._database.num_shards(group))
        ]

    def _with_partial(self, part: GroupBlocks, request: ReqMeta, end: int) -> GroupBlocks:
        """``part``, and behind it the block in which token ``end`` falls."""
        index = end // self._setup.groups[part.group].block_size
        key = self._database.partial_key(request.req_id, part.group, index, end)
        indices = np.append(part.indices, index)
        return replace(
            part,
            indices=indices,
            block_ids=request.block_ids[part.group][indices],
            keys=[*part.keys, key],
            partial=True,
        )
