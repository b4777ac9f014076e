"""One rank's side of the pool: carries out a step's orders and says what failed.

It must never know vLLM, and no exception leaves the hooks that vLLM calls in a step: whatever goes wrong ends as failed
blocks, failed jobs, a counter and a log line, for that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ascend_ext import device
from vllm_ascend_ext.kv_pool.backend.base import Backend
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.coordinator import AscendStoreCoordinator
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.hits import HitFinder
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.lookup import LookupKeyServer, lookup_path
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta, StoredBlock, WorkerReport
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase
from vllm_ascend_ext.kv_pool.transfer.job import GroupBlocks, JobResult, TransferJob
from vllm_ascend_ext.kv_pool.transfer.recving import KVCacheStoreRecvingThread
from vllm_ascend_ext.kv_pool.transfer.sending import KVCacheStoreSendingThread
from vllm_ascend_ext.kv_pool.transfer.worker_thread import Ticket

_HANDLER_SHARE = 0.8
"""Of the client's time-out: an overdue look-up is answered before the client takes the server for dead."""


@dataclass
class Transfers:
    """Request ids whose transfers ended since the last step; ``failed_recving`` is a part of ``finished_recving``."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class KVPoolWorker:
    """``start`` before anything else, ``register_kv_caches`` before the first step, ``close`` at the end."""

    def __init__(
        self,
        setup: PoolSetup,
        backend: Backend,
        *,
        clock: Clock = MONOTONIC,
        new_event: Callable[[], device.Event] = device.new_event,
    ) -> None:
        config = setup.config
        self.stats = Stats()
        self._setup = setup
        self._clock = clock
        self._new_event = new_event
        self._client = StoreClient(
            backend, self.stats, checksum=setup.checksum, backoff=config.store_backoff, clock=clock
        )
        self._database = ChunkedTokenDatabase(setup)
        self._coordinator = AscendStoreCoordinator(setup)
        self.hits = HitFinder(setup, self._client, self.stats)
        self._sending = KVCacheStoreSendingThread(
            self._client, self.stats, lanes=config.lanes, clock=clock, set_device=backend.set_device
        )
        self._recving = KVCacheStoreRecvingThread(
            self._client, self.stats, lanes=config.lanes, clock=clock, set_device=backend.set_device
        )
        self._recving.rotation = setup.topology.tp_rank
        self._lookups: LookupKeyServer | None = None
        self._layouts: tuple[BlockLayout, ...] = ()
        self._loading: dict[int, Ticket] = {}  # asynchronous loads by job id
        self._tainted: list[set[int]] = [set() for _ in setup.groups]  # blocks with wrong bytes, until recomputed
        self._load_errors: set[int] = set()
        self._report = WorkerReport()
        self._stored: list[StoredBlock] = []
        self._sent: set[str] = set()

    def start(self) -> None:
        """Start the transfer threads and, on the first rank, the look-up server.

        Raises what kept one from starting, and leaves none behind then.
        """
        try:
            self._sending.start(self._setup.config.start_timeout)
            self._recving.start(self._setup.config.start_timeout)
            if self._setup.topology.is_first:
                self._serve_lookups()
        except BaseException:
            self.close()
            raise

    @property
    def head_rank(self) -> int:
        """Which shard of the KV heads this rank holds."""
        return self._setup.topology.head_rank

    def register_kv_caches(self, layouts: Sequence[BlockLayout]) -> None:
        """Where the caches are, one layout per group; raises ConfigError if their number is wrong."""
        if len(layouts) != len(self._setup.groups):
            raise ConfigError(f"layouts: {len(layouts)} given, {len(self._setup.groups)} KV-cache groups configured")
        self._layouts = tuple(layouts)
        self._sending.set_layouts(self._layouts)
        self._recving.set_layouts(self._layouts)
        ranges = sorted({span for layout in layouts for span in layout.ranges()})
        self._client.backend.register_buffer([start for start, _ in ranges], [size for _, size in ranges])

    # -- a step, in vLLM's order ------------------------------------------------------------------------------------

    def handle_preemptions(self, meta: PoolMetadata) -> None:
        """Blocks of preempted requests are about to be handed on: end what still touches them."""
        for ticket in self._loading.values():
            if ticket.job.req_id in meta.preempted:
                ticket.cancel()

    def start_load_kv(self, meta: PoolMetadata) -> None:
        """Synchronous loads are done, or have failed, when this returns; asynchronous ones are under way."""
        for group, blocks in enumerate(meta.computed_blocks):
            self._tainted[group].difference_update(blocks.tolist())
        deadline = Deadline.after(self._setup.config.load_timeout, self._clock)
        waiting: list[tuple[ReqMeta, Ticket]] = []
        for request in meta.requests:
            if request.load is None:
                continue
            ticket = self._submit_load(request, deadline)
            if request.load.is_async:
                self._loading[request.load.job_id] = ticket
            else:
                waiting.append((request, ticket))
        for request, ticket in waiting:
            self._loaded(request, self._recving.settle(ticket))

    def wait_for_save(self, meta: PoolMetadata) -> None:
        """What this step saves is in the store, or has failed, when this returns."""
        saves = [request for request in meta.requests if request.save is not None]
        if not saves:
            return
        deadline = Deadline.after(self._setup.config.save_timeout, self._clock)
        tickets: list[tuple[ReqMeta, Ticket]] = []
        try:
            event = self._new_event()
            event.record()
            for request in saves:
                if self._is_tainted(request):
                    self.stats.count("saves_skipped_after_failed_load")
                else:
                    tickets.append((request, self._sending.submit(self._save_job(request, event), deadline)))
        except Exception as cause:
            self.stats.failure("save_failed", "before it was handed on", [r.req_id for r in saves], cause)
        for request, ticket in tickets:
            self._saved(request, self._sending.settle(ticket))
        for request in saves:  # whatever was skipped or broke off saved nothing
            assert request.save is not None
            self._report.saved_until.setdefault(request.save.job_id, (request.save.start_token, 1))

    def get_finished(self, meta: PoolMetadata, finished_req_ids: Iterable[str] = ()) -> Transfers:
        """What ended since the last step. An aborted request's load is given up here, and named once."""
        ended = set(finished_req_ids)
        self._recving.expire()
        transfers = Transfers(set(), set(), set())
        for job_id, ticket in list(self._loading.items()):
            if ticket.job.req_id in ended:
                ticket.cancel()
            if not ticket.ended:
                continue
            del self._loading[job_id]
            result = self._recving.settle(ticket)
            transfers.finished_recving.add(ticket.job.req_id)
            if result.ok:
                self._load_arrived(result)
            else:
                self._report.failed_loads.add(job_id)
                self._load_failed(result)
                if len(self._setup.groups) > 1:
                    transfers.failed_recving.add(ticket.job.req_id)
        transfers.finished_sending = set(meta.delayed_free) - self._sent
        self._sent = set(meta.delayed_free)
        return transfers

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive since the last call, each once. Empty with several groups: see ``Transfers``."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_report(self) -> WorkerReport:
        """What became of this step's jobs."""
        report, self._report = self._report, WorkerReport()
        return report

    def take_stored(self) -> list[StoredBlock]:
        """Blocks that this rank put into the pool since the last call, when KV events are on."""
        stored, self._stored = self._stored, []
        return stored

    def close(self) -> list[str]:
        """Idempotent. Returns what is still stuck in the store engine."""
        stuck = [
            label
            for thread in (self._sending, self._recving)
            for label in thread.close(self._setup.config.close_timeout)
        ]
        if self._lookups is not None:
            stuck += self._lookups.close()
        self._loading.clear()
        self._client.backend.close()
        if stuck:
            self.stats.failure("close_stuck", f"still stuck: {', '.join(stuck)}")
        return stuck

    def _serve_lookups(self) -> None:
        config = self._setup.config
        path = lookup_path(config.rpc_base_path, config.lookup_rpc_port, self._setup.dp_rank)
        self._lookups = LookupKeyServer(
            path,
            lambda asked: self.hits.hit(asked.token_len, asked.hashes, asked.hbm_hit_tokens),
            handler_timeout_s=config.lookup_timeout * _HANDLER_SHARE,
            clock=self._clock,
            stats=self.stats,
        )
        self._lookups.start(config.start_timeout)

    # -- loads ------------------------------------------------------------------------------------------------------

    def _submit_load(self, request: ReqMeta, deadline: Deadline) -> Ticket:
        try:
            return self._recving.submit(self._load_job(request), deadline)
        except Exception as cause:  # orders that make no sense: all that they could have meant has failed
            return Ticket(self._whole_request(request), None, cause)

    def _whole_request(self, request: ReqMeta) -> TransferJob:
        assert request.load is not None
        parts = []
        for group, table in enumerate(request.block_ids):
            first = request.load.vllm_cached_tokens // self._setup.groups[group].block_size
            indices = np.arange(first, len(table), dtype=np.int64)
            parts.append(GroupBlocks(group, indices, table[indices], [""] * len(indices)))
        return TransferJob(request.load.job_id, request.req_id, tuple(parts))

    def _load_job(self, request: ReqMeta) -> TransferJob:
        load = request.load
        assert load is not None
        parts = []
        for group, table in enumerate(request.block_ids):
            indices = self._coordinator.load_blocks(group, load.vllm_cached_tokens, load.pool_cached_tokens)
            keys = self._database.keys(group, request.block_hashes, indices)
            parts.append(GroupBlocks(group, indices, table[indices], keys))
        return TransferJob(load.job_id, request.req_id, tuple(parts))

    def _loaded(self, request: ReqMeta, result: JobResult) -> None:
        """A synchronous load ended."""
        if result.ok:
            self._load_arrived(result)
            return
        self._report.failed_loads.add(result.job.job_id)
        self._load_failed(result)
        # What the step computes for this request, it computes on what did not arrive.
        for group, table in enumerate(request.block_ids):
            failed = [int(p.indices[i]) for p, i, _ in result.failures() if p.group == group]
            if failed:
                self._tainted[group].update(table[min(failed) :].tolist())

    def _load_arrived(self, result: JobResult) -> None:
        for part in result.job.parts:
            self._tainted[part.group].difference_update(part.block_ids.tolist())

    def _load_failed(self, result: JobResult) -> None:
        for part, position, _ in result.failures():
            block = int(part.block_ids[position])
            self._tainted[part.group].add(block)
            if len(self._setup.groups) == 1:
                self._load_errors.add(block)

    # -- saves ------------------------------------------------------------------------------------------------------

    def _save_job(self, request: ReqMeta, ready: device.Event) -> TransferJob:
        save = request.save
        assert save is not None
        parts = []
        for group, table in enumerate(request.block_ids):
            indices = self._coordinator.store_blocks(group, save.start_token, save.end_token, table)
            indices = self._database.own_share(indices)
            keys = self._database.keys(group, request.block_hashes, indices)
            parts.append(GroupBlocks(group, indices, table[indices], keys))
        return TransferJob(save.job_id, request.req_id, tuple(parts), ready)

    def _is_tainted(self, request: ReqMeta) -> bool:
        return any(
            not tainted.isdisjoint(table.tolist())
            for tainted, table in zip(self._tainted, request.block_ids, strict=True)
            if tainted
        )

    def _saved(self, request: ReqMeta, result: JobResult) -> None:
        save = request.save
        assert save is not None
        until = save.end_token
        for part, position, _ in result.failures():
            until = min(until, int(part.indices[position]) * self._setup.groups[part.group].block_size)
        self._report.saved_until[save.job_id] = (max(until, save.start_token), 1)
        if self._setup.enable_kv_events:
            self._note_stored(request, result)

    def _note_stored(self, request: ReqMeta, result: JobResult) -> None:
        save = request.save
        assert save is not None
        for part, stored in zip(result.job.parts, result.stored, strict=False):
            size = self._setup.groups[part.group].block_size
            for index in part.indices[np.asarray(stored, dtype=np.bool_)].tolist():
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
