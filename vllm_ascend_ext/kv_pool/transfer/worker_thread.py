"""The contract that every transfer thread keeps, whatever it transfers; must never know requests' states or vLLM.

A job is submitted to a running thread or refused at once; it ends exactly once (done, failed, given up); an exception
fails that job alone; anything worse ends the thread, and whoever calls next is told. "The thread" is a few lanes, so
that one stuck call does not stall the other jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.calls import Call, Lanes, State
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded, NotRunning
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, JobResult, TransferJob
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.observe import Stats


class Ticket:
    """A submitted job; ``result`` always has one status per block, however the job ended."""

    def __init__(self, job: TransferJob, call: Call[JobResult] | None, refused: BaseException | None = None) -> None:
        self.job = job
        self._call = call
        self._refused = refused

    @property
    def ended(self) -> bool:
        return self._call is None or self._call.ended

    def cancel(self) -> None:
        """Give the job up; when this returns its blocks are not touched any more."""
        if self._call is not None:
            self._call.cancel()

    def result(self) -> JobResult:
        """Waits until the job ends, at the latest at its deadline."""
        if self._call is None:
            return JobResult.all_failed(self.job, self._refused or NotRunning("refused"))
        try:
            return self._call.result()
        except Exception as cause:
            return JobResult.all_failed(self.job, cause)


class TransferThread:
    """A few lanes under one name, and what every user of them needs."""

    role: ClassVar[str]
    """How its threads are called: ``kv-{role}-0``, ..."""

    def __init__(
        self,
        client: StoreClient,
        stats: Stats,
        *,
        lanes: int,
        clock: Clock,
        set_device: Callable[[], None] | None = None,
    ) -> None:
        self.on_fatal: Callable[[BaseException], None] | None = None  # told, once, what has ended the thread
        self._client = client
        self._stats = stats
        self._layouts: tuple[BlockLayout, ...] = ()
        self._shards: tuple[Sequence[BlockLayout], ...] = ()
        self._lanes = Lanes(f"kv-{self.role}", size=lanes, setup=set_device, on_fatal=self._report_fatal, clock=clock)

    @property
    def state(self) -> State:
        return self._lanes.state

    def start(self, timeout: float) -> None:
        """Return when the thread serves; raises what kept it from serving."""
        self._lanes.start(timeout)

    def set_layouts(
        self, layouts: tuple[BlockLayout, ...], shards: Sequence[Sequence[BlockLayout]] | None = None
    ) -> None:
        """Where the caches are, per group; and where the parts are that have keys of their own, if they have."""
        self._layouts = layouts
        self._shards = tuple(shards or [[layout] for layout in layouts])

    def _layout_of(self, part: GroupBlocks) -> BlockLayout:
        return self._shards[part.group][part.shard]

    def expire(self) -> None:
        """End the jobs whose deadline has passed."""
        self._lanes.expire()

    def close(self, timeout: float) -> list[str]:
        """Idempotent; ends every job, and says which are still stuck."""
        return self._lanes.close(timeout)

    def _report_fatal(self, cause: BaseException) -> None:
        self._stats.failure(f"{self.role}_thread_failed", f"thread kv-{self.role} ended", cause=cause)
        if self.on_fatal is not None:
            self.on_fatal(cause)


class KVCacheTransferThread(TransferThread, ABC):
    """Jobs in order, a few at once. Subclasses say in ``_handle_request`` what a job does."""

    def submit(self, job: TransferJob, deadline: Deadline) -> Ticket:
        """Queue ``job``; one that can't be served any more ends at once as failed, with the reason as its cause."""
        fence = Fence()
        try:
            call = self._lanes.submit(
                f"{self.role} of {job.req_id} (job {job.job_id})",
                lambda: self._handle_request(job, fence),
                deadline,
                fence,
            )
        except (NotRunning, RuntimeError) as cause:
            return Ticket(job, None, cause)
        return Ticket(job, call)

    def settle(self, ticket: Ticket) -> JobResult:
        """The ticket's result, with every failure counted and logged once."""
        result = ticket.result()
        if isinstance(result.cause, DeadlineExceeded):
            self._client.breaker.trip()
        if not result.ok:
            self._stats.failure(f"{self.role}_failed", result.describe(), [ticket.job.req_id], result.cause)
        return result

    def wait_for_any(self, tickets: Sequence[Ticket], timeout: float) -> None:
        """Return when one of ``tickets`` has ended, or after ``timeout`` seconds."""
        self._lanes.wait_until(lambda: not tickets or any(ticket.ended for ticket in tickets), timeout)

    @abstractmethod
    def _handle_request(self, job: TransferJob, fence: Fence) -> JobResult:
        """Do the job on one of the lanes."""
