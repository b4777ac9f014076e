"""What a transfer thread is given and what it gives back; must never know threads or stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_ascend_ext.device import Event
from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, Status
from vllm_ascend_ext.kv_pool.layout import IntArray


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of one group: their places in the request, their ids on the device, their keys.

    ``shard``: which of the rank's parts (see ``shards``). ``resident``: how many of the first ones are on the device
    already, but for layers that share a buffer. ``partial``: the last one isn't full; its key is the request's own.
    """

    group: int
    indices: IntArray
    block_ids: IntArray
    keys: list[str]
    shard: int = 0
    resident: int = 0
    partial: bool = False


@dataclass(frozen=True)
class TransferJob:
    """One request's blocks of one step. ``ready``: the device event after which they may be read."""

    job_id: int
    req_id: str
    parts: tuple[GroupBlocks, ...]
    ready: Event | None = None

    @property
    def num_blocks(self) -> int:
        return sum(len(part.keys) for part in self.parts)


@dataclass
class JobResult:
    """One status per block, part by part. ``stored`` marks blocks that this very job put into the store."""

    job: TransferJob
    statuses: list[list[Status]]
    stored: list[list[bool]] = field(default_factory=list)
    cause: BaseException | None = None

    @classmethod
    def all_failed(cls, job: TransferJob, cause: BaseException) -> JobResult:
        status = status_of(cause)
        return cls(job, [[status] * len(part.keys) for part in job.parts], cause=cause)

    @property
    def ok(self) -> bool:
        return all(status is Status.OK for part in self.statuses for status in part)

    def failures(self) -> Iterator[tuple[GroupBlocks, int, Status]]:
        """(part, position in it, status) of each block that did not arrive."""
        for part, statuses in zip(self.job.parts, self.statuses, strict=True):
            for position, status in enumerate(statuses):
                if status is not Status.OK:
                    yield part, position, status

    def describe(self) -> str:
        """How many blocks failed, by status, for a log line."""
        counts: dict[str, int] = {}
        for _, _, status in self.failures():
            counts[status.name] = counts.get(status.name, 0) + 1
        return f"{sum(counts.values())} of {self.job.num_blocks} blocks: {counts}"


def status_of(cause: BaseException) -> Status:
    """The status of every block of a job that ended with ``cause``."""
    if isinstance(cause, DeadlineExceeded):
        return Status.TIMEOUT
    if isinstance(cause, (Cancelled, ClosedError)):
        return Status.CANCELLED
    return Status.FAILED
