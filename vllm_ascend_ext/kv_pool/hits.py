"""How much of a prompt is in the pool, on every rank that owns a part of it; must never know sockets or who asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.coordinator import AscendStoreCoordinator
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.groups import GroupKind, PoolSetup
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming


class HitFinder:
    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, naming: Naming = Naming.BLOCK) -> None:
        self._setup = setup
        self._client = client
        self._stats = stats
        self._database = ChunkedTokenDatabase(setup, naming)
        self._coordinator = AscendStoreCoordinator(setup)

    def set_layers(self, counts: Sequence[int]) -> None:
        """How many layers this rank has in each group."""
        self._database.set_layers(counts)

    def hit(self, token_len: int, hashes: Sequence[bytes | str], hbm_hit_tokens: int) -> int:
        """The longest boundary of at most ``token_len`` tokens that all groups and all ranks can serve.

        The first ``hbm_hit_tokens`` are on the device already. One existence check for everything; if it failed for
        any key the answer is 0, for a partial answer would look like a shorter hit.
        """
        hashes = hashes[: token_len // self._setup.hash_unit]
        firsts = [self._first_asked(group, hbm_hit_tokens) for group in range(len(self._setup.groups))]
        owners = [self._database.owner_keys(group, hashes, first) for group, first in enumerate(firsts)]
        keys = [key for group in owners for owner in group for key in owner]
        answer = self._client.exists(keys)
        if any(status not in (Status.OK, Status.MISSING) for status in answer.statuses):
            self._stats.failure("lookup_exists_failed", f"{len(answer.failed())} of {len(keys)} keys", (), answer.cause)
            return 0
        found = np.asarray(answer.statuses, dtype=np.int64) == Status.OK
        present, at = [], 0
        for first, group in zip(firsts, owners, strict=True):
            size = len(group) * len(group[0])
            shards = found[at : at + size].reshape(len(group), len(group[0]))
            present.append(np.concatenate((np.ones(first, dtype=np.bool_), shards.all(axis=0))))
            at += size
        return self._coordinator.hit(present, token_len)

    def _first_asked(self, group: int, hbm_hit_tokens: int) -> int:
        """Full attention has its first blocks on the device; other groups may have dropped theirs."""
        spec = self._setup.groups[group]
        return hbm_hit_tokens // spec.block_size if spec.kind is GroupKind.FULL else 0
