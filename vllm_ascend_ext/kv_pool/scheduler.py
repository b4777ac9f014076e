"""The scheduler's side of the pool: hits, what each step loads and saves, what is known to be saved.

It must never know addresses, stores or threads, and nothing here raises for what a peer, a worker or a store did:
an exception out of a scheduler hook would end the engine for every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

import numpy as np

from vllm_ascend_ext.kv_pool.errors import BadAnswer
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.layout import IntArray
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.requests import (
    LoadSpec,
    PoolMetadata,
    ReqMeta,
    RequestTracker,
    RequestView,
    SaveSpec,
    ScheduledRequest,
    ScheduledStep,
    WorkerReport,
)
from vllm_ascend_ext.kv_pool.reuse import reuse_orders
from vllm_ascend_ext.kv_pool.trust import Trust


class Lookup(Protocol):
    """Asks the workers how much of a prompt is in the pool; answers 0 for whatever goes wrong."""

    def lookup(
        self,
        token_len: int,
        hashes: Sequence[bytes],
        group_ids: Sequence[int],
        hbm_hit_tokens: int,
        request_id: str,
    ) -> int: ...

    def close(self) -> list[str]: ...


class KVPoolScheduler:
    def __init__(
        self, setup: PoolSetup, lookup: Lookup, *, num_ranks: int | None = None, stats: Stats | None = None
    ) -> None:
        self.stats = stats or Stats()
        self._setup = setup
        self._lookup = lookup
        self._num_ranks = setup.topology.world_size if num_ranks is None else num_ranks
        self._group_ids = list(range(len(setup.groups)))
        self._trackers: dict[str, RequestTracker] = {}
        self._loads: list[ReqMeta] = []  # decided since the last step was built
        self._load_owner: dict[int, str] = {}
        self._save_owner: dict[int, str] = {}
        self._reported: dict[int, tuple[int, int]] = {}  # save jobs that some ranks have reported
        self._delayed_free: set[str] = set()
        self._late: dict[str, RequestTracker] = {}  # ended, with a save that was withheld
        self._unsettled: dict[int, set[int]] = {}  # blocks of synchronous loads that no report has named yet
        self._trust = Trust(setup.groups[0].block_size)
        self._job_ids = count(1)

    # -- hits -------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond ``num_computed_tokens`` the pool can supply, and whether the load is asynchronous.

        May be asked again and again for one request; opens nothing.
        """
        tracker = self._tracker(request)
        tracker.hit_tokens = tracker.cached_tokens = 0
        if not self._setup.config.loads or tracker.hit_failed:
            return 0, False
        wanted = self._askable_tokens(request)
        if wanted <= num_computed_tokens:
            return 0, False
        hashes = request.block_hashes[: wanted // self._setup.hash_unit]
        self.stats.count("lookups")
        try:
            hit = self._lookup.lookup(wanted, hashes, self._group_ids, num_computed_tokens, request.request_id)
            if hit % self._setup.granularity:
                raise BadAnswer(f"a hit of {hit} tokens ends inside a block")
        except Exception as cause:
            self.stats.failure("lookup_failed", "no hit is assumed", [request.request_id], cause)
            return 0, False
        hit = min(hit, wanted, request.num_tokens - 1)  # one token must be computed to sample from
        if hit <= num_computed_tokens:
            return 0, False
        self.stats.count("hit_tokens", hit - num_computed_tokens)
        tracker.hit_tokens, tracker.cached_tokens = hit, num_computed_tokens
        if num_computed_tokens == 0:  # otherwise nobody looked whether the first blocks are in the pool too
            tracker.saved_tokens = max(tracker.saved_tokens, self._setup.floor(hit))
        return hit - num_computed_tokens, self._setup.load_async

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Sequence[int], ...], num_external_tokens: int
    ) -> None:
        """The blocks are there; ``num_external_tokens`` (which may be fewer than offered) are to be loaded."""
        if num_external_tokens <= 0:
            return
        tracker = self._tracker(request)
        start = tracker.cached_tokens
        load = LoadSpec(next(self._job_ids), start, start + num_external_tokens, self._setup.load_async)
        if tracker.load_job is not None:  # of a life that has ended, or of blocks that were never used
            self._load_owner.pop(tracker.load_job, None)
            self._loads = [meta for meta in self._loads if meta.load and meta.load.job_id != tracker.load_job]
        self._own_load(tracker, load.job_id)
        self._loads.append(
            ReqMeta(
                request.request_id,
                _tables(block_ids),
                tuple(request.block_hashes[: -(-load.pool_cached_tokens // self._setup.hash_unit)]),
                load=load,
            )
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: ScheduledStep) -> PoolMetadata:
        """The orders of one step; called once for every step, empty ones included."""
        for req_id in step.preempted:
            if (tracker := self._trackers.get(req_id)) is not None:
                self._forget_jobs(tracker)
        metas = {meta.req_id: meta for meta in self._loads}
        self._loads = []
        for meta in metas.values():  # a request may be preempted and resumed within one step: it is its new life's load
            assert meta.load is not None
            if (tracker := self._trackers.get(meta.req_id)) is not None:
                self._own_load(tracker, meta.load.job_id)
            first = meta.load.vllm_cached_tokens // self._setup.groups[0].block_size
            self._trust.loading(meta.block_ids[0][first:].tolist())
            if self._num_ranks > 1 and not meta.load.is_async:
                self._unsettled[meta.load.job_id] = set(meta.block_ids[0].tolist())
        if self._setup.layer_reuse:
            metas = {meta.req_id: meta for meta in self._reuse_orders(step.requests, metas)}
        lost = self._trust.plan(step.requests)
        for save in [*self._late_saves(), *self._saves(step.requests)] if not self._setup.layer_reuse else ():
            metas[save.req_id] = _with_load(save, metas.get(save.req_id))
        return PoolMetadata(
            requests=list(metas.values()),
            computed_blocks=self._computed_blocks(step.requests),
            lost_blocks=lost,
            preempted=step.preempted,
            delayed_free=frozenset(self._delayed_free),
            idle=not step.requests,
        )

    def request_finished(self, req_id: str) -> bool:
        """The request ended, whatever way. True: keep its blocks until ``finished_sending`` names it.

        That is so while a save of it hasn't been reported. A load that is still under way is vLLM's own to wait for.
        """
        tracker = self._trackers.pop(req_id, None)
        if tracker is None:
            return False
        self._loads = [meta for meta in self._loads if meta.req_id != req_id or (meta.load and meta.load.is_async)]
        loading = self._setup.load_async and tracker.load_job is not None
        saving = bool(tracker.save_jobs) and not loading
        # Blocks that vLLM has taken away since the last step (it resets its cache so) are others' by now.
        withheld = tracker.withheld if tracker.request.num_computed_tokens else None
        self._forget_jobs(tracker)
        if withheld is not None and not saving:
            tracker.withheld = withheld
            self._late[req_id] = tracker
            return True
        if saving:
            self._delayed_free.add(req_id)
        return saving

    def update_connector_output(self, report: WorkerReport | None, finished_sending: Iterable[str] = ()) -> None:
        """What the workers say of a step."""
        self._delayed_free.difference_update(finished_sending)
        if report is None:
            return
        for job_id in report.failed_loads:
            self._load_failed(job_id)
            for req_id in [name for name, late in self._late.items() if job_id in late.beside_loads]:
                del self._late[req_id]
                self._delayed_free.add(req_id)
        for job_id in report.used_loads:
            self._unsettled.pop(job_id, None)
        for job_id, result in report.saved_until.items():
            self._save_reported(job_id, *result)

    def finish_loads(self, finished_recving: Iterable[str]) -> None:
        """Asynchronous loads that ended, well or not."""
        for req_id in finished_recving:
            tracker = self._trackers.get(req_id)
            if tracker is not None and tracker.load_job is not None:
                self._load_owner.pop(tracker.load_job, None)
                tracker.load_job = None

    def blocks_to_forget(self, invalid_block_ids: Iterable[int]) -> set[int]:
        """Blocks whose contents depend on blocks that failed to load (one group only): those and all behind them.

        vLLM leaves their hashes in its own prefix cache until they are recomputed; another request could hit them.
        """
        invalid, untrusted = set(invalid_block_ids), set()
        for tracker in self._trackers.values():
            table = list(tracker.block_ids[0]) if tracker.block_ids else []
            first = next((i for i, block in enumerate(table) if block in invalid), len(table))
            untrusted.update(table[first:])
        self._trust.lose(untrusted)
        return untrusted

    @property
    def holds_nothing(self) -> bool:
        """Nothing is remembered of any request."""
        return not (
            self._trackers
            or self._loads
            or self._load_owner
            or self._save_owner
            or self._reported
            or self._delayed_free
            or self._late
            or self._unsettled
        )

    def close(self) -> list[str]:
        """Idempotent. Returns what could not be ended."""
        return self._lookup.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tracker(self, request: RequestView) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            tracker = self._trackers[request.request_id] = RequestTracker(request)
        return tracker

    def _askable_tokens(self, request: RequestView) -> int:
        """The longest boundary with hashes that may be asked for.

        Full attention can resume inside the last block (at one token before the end); a window or a state can't.
        """
        end = request.num_tokens if self._setup.only_full_attention else request.num_tokens - 1
        return self._setup.floor(min(end, len(request.block_hashes) * self._setup.hash_unit))

    def _saves(self, requests: Sequence[ScheduledRequest]) -> Iterator[ReqMeta]:
        """What this step saves, request by request.

        With several ranks, a load that fails on one of them makes what all of them compute on it worthless, and only
        the scheduler hears of it. So what is computed beside a synchronous load is saved once the load is known to be
        well: a step later, or more where steps are planned before the outcome of the last one is there.
        """
        for scheduled in requests:
            tracker = self._trackers.get(scheduled.req_id)
            if tracker is None:
                continue
            tracker.block_ids = scheduled.block_ids
            if not self._setup.config.saves:
                continue
            table = scheduled.block_ids[0]
            tracker.beside_loads = frozenset(
                job_id for job_id, blocks in self._unsettled.items() if not blocks.isdisjoint(table)
            )
            tracker.withheld = scheduled if tracker.beside_loads else None
            save = self._save(tracker, scheduled) if tracker.withheld is None else None
            if save is not None:
                yield save

    def _reuse_orders(self, requests: Sequence[ScheduledRequest], hits: Mapping[str, ReqMeta]) -> Iterator[ReqMeta]:
        """What a step loads and saves where layers share buffers."""
        for scheduled in requests:
            tracker = self._trackers.get(scheduled.req_id)
            if tracker is None:
                continue
            tracker.block_ids = scheduled.block_ids
            hit = hits.get(scheduled.req_id)
            meta = reuse_orders(self._setup, tracker.request, scheduled, hit.load if hit else None, self._job_ids)
            assert meta.save is not None
            self._forget_saves(tracker)  # of a step that was never reported
            tracker.save_jobs = {meta.save.job_id: meta.save}
            self._save_owner[meta.save.job_id] = scheduled.req_id
            if meta.load is not None:
                self._load_owner.pop(tracker.load_job or 0, None)
                self._own_load(tracker, meta.load.job_id)
                blocks = -(-meta.load.pool_cached_tokens // self._setup.granularity)
                self._trust.loading(scheduled.block_ids[0][:blocks])
            yield meta

    def _late_saves(self) -> Iterator[ReqMeta]:
        """What was withheld of requests that have ended meanwhile; their blocks are being kept."""
        for req_id, tracker in list(self._late.items()):
            if tracker.beside_loads & self._unsettled.keys():
                continue
            del self._late[req_id]
            self._delayed_free.add(req_id)
            save = self._save(tracker, tracker.withheld) if tracker.withheld is not None else None
            if save is not None:
                yield save

    def _save(self, tracker: RequestTracker, scheduled: ScheduledRequest) -> ReqMeta | None:
        if self._setup.load_async and tracker.load_job is not None:
            return None  # its blocks are still being written by the load
        request = tracker.request
        end = self._savable_tokens(request, scheduled)
        if self._trust.is_lost(scheduled.block_ids[0][: end // self._setup.groups[0].block_size]):
            return None
        retry = tracker.save_failures <= self._setup.config.save_retries
        if end <= tracker.saved_tokens or tracker.save_jobs or (end <= tracker.offered_tokens and not retry):
            return None
        save = SaveSpec(next(self._job_ids), tracker.saved_tokens, end)
        tracker.save_jobs[save.job_id] = save
        tracker.offered_tokens = max(tracker.offered_tokens, end)
        self._save_owner[save.job_id] = scheduled.req_id
        token_ids = tuple(request.all_token_ids[save.start_token : end]) if self._setup.enable_kv_events else ()
        return ReqMeta(
            scheduled.req_id,
            _tables(scheduled.block_ids),
            tuple(request.block_hashes[: end // self._setup.hash_unit]),
            save=save,
            token_ids=token_ids,
        )

    def _savable_tokens(self, request: RequestView, scheduled: ScheduledRequest) -> int:
        """The last boundary whose tokens are computed when the step is over, verified, and have a hash."""
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        last = request.num_tokens if self._setup.config.save_decode_cache else request.num_prompt_tokens
        hashed = len(request.block_hashes) * self._setup.hash_unit
        return self._setup.floor(min(computed, last, request.num_tokens, hashed))

    def _computed_blocks(self, requests: Sequence[ScheduledRequest]) -> tuple[IntArray, ...]:
        blocks: list[list[int]] = [[] for _ in self._group_ids]
        for scheduled in requests:
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            for group, table in enumerate(scheduled.block_ids):
                size = self._setup.groups[group].block_size
                blocks[group].extend(table[-(-scheduled.num_computed_tokens // size) : -(-end // size)])
        return _tables(tuple(blocks))

    def _load_failed(self, job_id: int) -> None:
        req_id = self._load_owner.pop(job_id, None)
        tracker = self._trackers.get(req_id) if req_id is not None else None
        if tracker is None:
            return
        tracker.hit_failed = True
        tracker.saved_tokens = tracker.offered_tokens = 0
        if tracker.load_job == job_id and not self._setup.load_async:
            tracker.load_job = None

    def _save_reported(self, job_id: int, saved_until: int, ranks: int) -> None:
        """Add one report of a save job; when all ranks have reported, move the request's mark."""
        req_id = self._save_owner.get(job_id)
        if req_id is None:
            return
        before = self._reported.pop(job_id, None)
        if before is not None:
            saved_until, ranks = min(before[0], saved_until), before[1] + ranks
        if ranks < self._num_ranks:
            self._reported[job_id] = (saved_until, ranks)
            return
        del self._save_owner[job_id]
        tracker = self._trackers.get(req_id)
        save = tracker.save_jobs.pop(job_id, None) if tracker is not None else None
        if tracker is None or save is None:  # a late save, of a request that has ended; its id may have come again
            return
        complete = saved_until >= save.end_token
        tracker.save_failures = 0 if complete else tracker.save_failures + 1
        if save.start_token <= tracker.saved_tokens:  # otherwise a failed load has moved the mark back meanwhile
            tracker.saved_tokens = max(tracker.saved_tokens, self._setup.floor(saved_until))

    def _own_load(self, tracker: RequestTracker, job_id: int) -> None:
        tracker.load_job = job_id
        self._load_owner[job_id] = tracker.request.request_id

    def _forget_saves(self, tracker: RequestTracker) -> None:
        for job_id in tracker.save_jobs:
            self._save_owner.pop(job_id, None)
            self._reported.pop(job_id, None)

    def _forget_jobs(self, tracker: RequestTracker) -> None:
        self._forget_saves(tracker)
        if tracker.load_job is not None:
            self._load_owner.pop(tracker.load_job, None)
        tracker.forget_life()


def _tables(block_ids: tuple[Sequence[int], ...]) -> tuple[IntArray, ...]:
    return tuple(np.asarray(ids, dtype=np.int64) for ids in block_ids)


def _with_load(save: ReqMeta, load: ReqMeta | None) -> ReqMeta:
    """One entry for a request that both loads and saves in a step (synchronous loads only)."""
    if load is None:
        return save
    hashes = max(save.block_hashes, load.block_hashes, key=len)
    return ReqMeta(save.req_id, save.block_ids, hashes, load.load, save.save, save.token_ids)
