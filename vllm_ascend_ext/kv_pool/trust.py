"""Which blocks of the device can't be built on, as the scheduler knows them; must never know requests' lives or stores.

After a failed load vLLM has only the first of the requests that share a block compute it anew. The others go on at
once, on whatever is there: while the first computes chunk by chunk, or for good when it is aborted. So blocks are
remembered as lost until a step computes them on sound ground, and a request that would build on one is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_ascend_ext.kv_pool.requests import ScheduledRequest


class Trust:
    """For one KV-cache group: several groups have no loads that a running request could build on too early."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._lost: dict[int, int] = {}  # how many of a block's first tokens are right all the same

    def lose(self, blocks: Iterable[int]) -> None:
        """A load of ``blocks`` failed, or they were computed on such blocks."""
        self._lost.update(dict.fromkeys(blocks, 0))

    def loading(self, blocks: Iterable[int]) -> None:
        """A load is about to overwrite ``blocks``; if it fails, that will be heard of."""
        for block in blocks:
            self._lost.pop(block, None)

    def plan(self, requests: Sequence[ScheduledRequest]) -> frozenset[int]:
        """A step is planned: the lost blocks that its requests take for computed, which have to be reported as such.

        Tokens count as computed anew only if the request that computes them builds on sound blocks itself.
        """
        if not self._lost:
            return frozenset()
        sound, unsound = list(requests), list[ScheduledRequest]()
        while True:
            lost = self._lost_after(sound, unsound)
            stopped = [request for request in sound if any(self._missing(request, lost))]
            if not stopped:
                break
            sound = [request for request in sound if request not in stopped]
            unsound += stopped
        self._lost = lost
        return frozenset(block for request in unsound for block in self._missing(request, lost))

    def is_lost(self, blocks: Sequence[int]) -> bool:
        """Whether one of ``blocks`` is lost."""
        return not self._lost.keys().isdisjoint(blocks)

    def _lost_after(self, sound: Sequence[ScheduledRequest], unsound: Sequence[ScheduledRequest]) -> dict[int, int]:
        lost = dict(self._lost)
        for request in sound:
            for block, first, end in self._computed(request):
                if lost.get(block, -1) >= first:
                    lost[block] = max(lost[block], end)
        for request in unsound:
            for block, first, _ in self._computed(request):
                lost[block] = min(lost.get(block, self._size), first)
        return {block: right for block, right in lost.items() if right < self._size}

    def _missing(self, request: ScheduledRequest, lost: dict[int, int]) -> Iterator[int]:
        """The blocks of which ``request`` takes more tokens for computed than are right."""
        before, table = request.num_computed_tokens, request.block_ids[0]
        for index, block in enumerate(table[: -(-before // self._size)]):
            if lost.get(block, self._size) < min(before - index * self._size, self._size):
                yield block

    def _computed(self, request: ScheduledRequest) -> Iterator[tuple[int, int, int]]:
        """(block, first token of it, end) of what the step computes."""
        before, table = request.num_computed_tokens, request.block_ids[0]
        end = before + request.num_scheduled_tokens
        for index in range(before // self._size, min(-(-end // self._size), len(table))):
            start = index * self._size
            yield table[index], max(before - start, 0), min(end - start, self._size)


class EndedTables:
    """Blocks of requests that ended while a step of theirs was under way, whose loads may turn out to have failed."""

    def __init__(self, steps_under_way: int) -> None:
        self._steps_under_way = steps_under_way
        self._planned = 0
        self._tables: list[tuple[int, Sequence[int]]] = []  # with the step that was planned last

    def next_step(self) -> None:
        """Another step is planned: all but the last few have been reported."""
        self._planned += 1
        reported = self._planned - self._steps_under_way
        self._tables = [(step, table) for step, table in self._tables if step > reported]

    def add(self, block_ids: Sequence[int]) -> None:
        self._tables.append((self._planned, block_ids))

    def behind(self, invalid: set[int]) -> set[int]:
        """In each table the first of the ``invalid`` blocks, and all that was computed on it."""
        firsts = (
            (table, next((i for i, block in enumerate(table) if block in invalid), None)) for _, table in self._tables
        )
        return {block for table, first in firsts if first is not None for block in table[first:]}
