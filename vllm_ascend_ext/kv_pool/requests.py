"""What the scheduler tells the worker about each request and hears back; must never know vLLM or a store.

Everything here crosses process boundaries (pickle), so it is plain data. Work is named by job ids, never by bare
request ids: a request that was preempted and resumed has a new life, which nothing of the old one may touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_ascend_ext.kv_pool.layout import IntArray


class RequestView(Protocol):
    """What the scheduler reads off an engine's request. Hashes: one per full ``hash_unit`` of verified tokens."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """0 from the moment on that its blocks are taken away."""

    @property
    def block_hashes(self) -> Sequence[bytes]: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class ScheduledRequest:
    """One request of a step: its state before the step and its whole current block table, one list per group."""

    req_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[Sequence[int], ...]


@dataclass(frozen=True)
class ScheduledStep:
    requests: Sequence[ScheduledRequest] = ()
    preempted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoadSpec:
    """Tokens ``vllm_cached_tokens`` to ``pool_cached_tokens`` come from the pool.

    ``reload``: in layers that share a device buffer, those before come from there, too.
    """

    job_id: int
    vllm_cached_tokens: int
    pool_cached_tokens: int
    is_async: bool
    reload: bool = False


@dataclass(frozen=True)
class SaveSpec:
    """Full blocks between two token boundaries go to the pool, and then what is there of a last one up to ``tail``."""

    job_id: int
    start_token: int
    end_token: int
    tail: int = 0


@dataclass(frozen=True)
class ReqMeta:
    """One request's part of a step. ``block_hashes`` reach from the first token to the last one concerned."""

    req_id: str
    block_ids: tuple[IntArray, ...]
    block_hashes: tuple[bytes, ...]
    load: LoadSpec | None = None
    save: SaveSpec | None = None
    token_ids: tuple[int, ...] = ()  # of the tokens to save, when KV events are on


@dataclass
class PoolMetadata:
    """One step's orders to every worker.

    ``computed_blocks``: ids, over all groups, of blocks that this step computes from their first token on; whatever was
    wrong with them is overwritten. ``lost_blocks``: failed to load in an earlier step, and a request of this one builds
    on them all the same: to be reported once more. ``delayed_free``: finished requests whose blocks vLLM keeps until
    the worker names them as sent. ``idle``: nothing is computed in this step.
    """

    requests: list[ReqMeta] = field(default_factory=list)
    computed_blocks: tuple[IntArray, ...] = ()
    lost_blocks: frozenset[int] = frozenset()
    preempted: frozenset[str] = frozenset()
    delayed_free: frozenset[str] = frozenset()
    idle: bool = False


@dataclass(frozen=True)
class StoredBlock:
    """A block that is in the pool since this step, for KV events."""

    group: int
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass
class WorkerReport:
    """What became of the jobs of a step on one rank, or merged over ranks.

    ``saved_until``: for each save job, the end of the unbroken run of saved tokens, and how many ranks said so.
    ``failed_loads``: job ids of loads of which any block did not arrive. ``used_loads``: job ids of loads that the
    step's forward pass used, well or not; all ranks name them in the same step.
    """

    saved_until: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed_loads: set[int] = field(default_factory=set)
    used_loads: set[int] = field(default_factory=set)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Both ranks' results; a job got as far as the rank that got least far."""
        merged = WorkerReport(
            dict(self.saved_until), self.failed_loads | other.failed_loads, self.used_loads | other.used_loads
        )
        for job, (until, ranks) in other.saved_until.items():
            mine = merged.saved_until.get(job)
            merged.saved_until[job] = (until, ranks) if mine is None else (min(mine[0], until), mine[1] + ranks)
        return merged


@dataclass
class RequestTracker:
    """The scheduler's memory of one live request; dropped when the request ends."""

    request: RequestView
    hit_tokens: int = 0  # what was offered last, counted from the first token
    cached_tokens: int = 0  # of these, on the device already
    hit_failed: bool = False  # a load failed: this request computes what it needs
    load_job: int | None = None  # a load that hasn't been reported
    saved_tokens: int = 0  # the unbroken run that is known to be in the pool
    offered_tokens: int = 0  # the furthest boundary that was ever offered for saving
    save_failures: int = 0  # in a row
    save_jobs: dict[int, SaveSpec] = field(default_factory=dict)  # not reported by all ranks yet
    block_ids: tuple[Sequence[int], ...] = ()  # the table of the last step
    withheld: ScheduledRequest | None = None  # the last step, if its save waits for the outcome of its loads
    beside_loads: frozenset[int] = frozenset()  # the jobs of these loads

    def forget_life(self) -> None:
        """Preempted: nothing that is still under way belongs to the request any more."""
        self.save_jobs.clear()
        self.load_job = None
        self.withheld = None
        self.block_ids = ()
        self.offered_tokens = self.saved_tokens
