"""What became of a rank's transfers, and which blocks can't be trusted because of it; must never know how bytes move.

A block that did not arrive has wrong bytes until it is computed or loaded anew, and so has all that was computed on it.
Nothing is saved from a request whose table names such a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, JobResult, TransferJob
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta, StoredBlock, WorkerReport
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase


class Outcomes:
    """Collects results; each ``take_...`` gives what has come since the last one."""

    def __init__(self, setup: PoolSetup, database: ChunkedTokenDatabase) -> None:
        self._setup = setup
        self._database = database
        self._tainted: list[set[int]] = [set() for _ in setup.groups]
        self._load_errors: set[int] = set()
        self._report = WorkerReport()
        self._stored: list[StoredBlock] = []

    def begin(self, meta: PoolMetadata) -> None:
        """A step begins: what it computes from a block's first token on is right again."""
        for group, blocks in enumerate(meta.computed_blocks):
            self._tainted[group].difference_update(blocks.tolist())
        self._load_errors |= meta.lost_blocks

    # -- loads ------------------------------------------------------------------------------------------------------

    def loaded(self, request: ReqMeta, result: JobResult) -> None:
        """A load ended that this step's forward pass used."""
        self.taint(request, result)
        self.arrived_or_failed(result)
        self._report.used_loads.add(result.job.job_id)

    def arrived_or_failed(self, result: JobResult) -> None:
        """A load ended: its blocks are right, or those that failed are reported."""
        if result.ok:
            for part in result.job.parts:
                self._tainted[part.group].difference_update(part.block_ids.tolist())
            return
        self._report.failed_loads.add(result.job.job_id)
        for part, position, _ in result.failures():
            block = int(part.block_ids[position])
            self._tainted[part.group].add(block)
            if len(self._setup.groups) == 1:
                self._load_errors.add(block)

    def given_up(self, job: TransferJob) -> None:
        """A request ended before its load: nobody is there to hear how it went."""
        for part in job.parts:
            self._tainted[part.group].update(part.block_ids.tolist())

    def taint(self, request: ReqMeta, result: JobResult) -> None:
        """What the step computes for this request, it computes on what did not arrive."""
        for group, table in enumerate(request.block_ids):
            failed = [int(p.indices[i]) for p, i, _ in result.failures() if p.group == group]
            if failed:
                self._tainted[group].update(table[min(failed) :].tolist())

    def is_tainted(self, request: ReqMeta) -> bool:
        """Whether the request's table names a block with wrong bytes."""
        return any(
            not tainted.isdisjoint(table.tolist())
            for tainted, table in zip(self._tainted, request.block_ids, strict=True)
            if tainted
        )

    # -- saves ------------------------------------------------------------------------------------------------------

    def saved(self, request: ReqMeta, result: JobResult) -> None:
        """A save ended; it got as far as its first block that isn't in the store, or that the request doesn't have."""
        save = request.save
        assert save is not None
        sizes = [group.block_size for group in self._setup.groups]
        until = min(save.end_token, *(len(t) * size for t, size in zip(request.block_ids, sizes, strict=True)))
        for part, position, _ in result.failures():
            until = min(until, int(part.indices[position]) * sizes[part.group])
        self._report.saved_until[save.job_id] = (max(until, save.start_token), 1)
        if self._setup.enable_kv_events:
            self._note_stored(request, result)

    def saved_nothing(self, request: ReqMeta) -> None:
        """A save was skipped, or broke off before it began."""
        assert request.save is not None
        self._report.saved_until.setdefault(request.save.job_id, (request.save.start_token, 1))

    def _note_stored(self, request: ReqMeta, result: JobResult) -> None:
        save = request.save
        assert save is not None
        for part, stored in _whole_blocks(result):
            size = self._setup.groups[part.group].block_size
            for index in part.indices[stored].tolist():
                if (index + 1) * size > save.end_token:  # a block that isn't full is nobody else's
                    continue
                first = index * size - save.start_token
                self._stored.append(
                    StoredBlock(
                        part.group,
                        self._database.hash_of(part.group, request.block_hashes, index),
                        self._database.hash_of(part.group, request.block_hashes, index - 1) if index else None,
                        request.token_ids[max(first, 0) : first + size],
                        size,
                    )
                )

    # -- for the scheduler ------------------------------------------------------------------------------------------

    def take_load_errors(self) -> set[int]:
        """Blocks that did not arrive, each once; none with several groups, whose loads fail as a whole."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_report(self) -> WorkerReport:
        """What became of jobs."""
        report, self._report = self._report, WorkerReport()
        return report

    def take_stored(self) -> list[StoredBlock]:
        """Blocks that this rank put into the store, when KV events are on."""
        stored, self._stored = self._stored, []
        return stored


def _whole_blocks(result: JobResult) -> Iterator[tuple[GroupBlocks, npt.NDArray[np.bool_]]]:
    """One part of each group, and which of its blocks this job has put into the store, with all their shards."""
    stored: dict[int, tuple[GroupBlocks, npt.NDArray[np.bool_]]] = {}
    for part, flags in zip(result.job.parts, result.stored, strict=False):
        before = stored.get(part.group, (part, np.ones(len(flags), dtype=np.bool_)))
        stored[part.group] = before[0], before[1] & np.asarray(flags, dtype=np.bool_)
    yield from stored.values()
