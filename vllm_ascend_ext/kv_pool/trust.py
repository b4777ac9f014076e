"""Which blocks of the device can't be built on, as the scheduler knows them; must never know requests' lives or stores.

After a failed load vLLM has only the first of the requests that share a block compute it anew. The others go on at
once, on whatever is there: while the first computes chunk by chunk, or for good when it is aborted. So blocks are
remembered as lost until a step computes them on sound ground, and a request that would build on one is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ascend_ext.kv_pool.requests import ScheduledRequest


class Trust:
    """For one KV-cache group: several groups have no loads that a running request could build on too early."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._lost: set[int] = set()

    def lose(self, blocks: Iterable[int]) -> None:
        """A load of ``blocks`` failed, or they were computed on such blocks."""
        self._lost.update(blocks)

    def loading(self, blocks: Iterable[int]) -> None:
        """A load is about to overwrite ``blocks``; if it fails, that will be heard of."""
        self._lost.difference_update(blocks)

    def plan(self, requests: Sequence[ScheduledRequest]) -> frozenset[int]:
        """A step is planned: the lost blocks that its requests take for computed, which have to be reported as such.

        A block counts as computed anew only if the request that computes it builds on sound blocks itself.
        """
        if not self._lost:
            return frozenset()
        sound, unsound = list(requests), list[ScheduledRequest]()
        while True:
            lost = self._lost.difference(*map(self._computed, sound)).union(*map(self._computed, unsound))
            stopped = [request for request in sound if not lost.isdisjoint(self._ground(request))]
            if not stopped:
                break
            sound = [request for request in sound if request not in stopped]
            unsound += stopped
        self._lost = lost
        return frozenset(lost.intersection(set().union(*map(self._ground, unsound))))

    def is_lost(self, blocks: Sequence[int]) -> bool:
        """Whether one of ``blocks`` is lost."""
        return not self._lost.isdisjoint(blocks)

    def _ground(self, request: ScheduledRequest) -> Sequence[int]:
        """The blocks that hold the tokens computed before the step."""
        return request.block_ids[0][: -(-request.num_computed_tokens // self._size)]

    def _computed(self, request: ScheduledRequest) -> Sequence[int]:
        """The blocks that the step computes from their first token on."""
        end = request.num_computed_tokens + request.num_scheduled_tokens
        return request.block_ids[0][-(-request.num_computed_tokens // self._size) : -(-end // self._size)]
