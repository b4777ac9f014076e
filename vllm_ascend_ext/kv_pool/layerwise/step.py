"""One step's transfers as one object: tasks, events, gates and what became of each block; must never know stores.

Whatever ends a step early (a failure, an abort, the next step) closes it as a whole: every wait ends at once, nothing
of it is seen by the next step, and results stay as they were when it was closed, whatever a stuck call does later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.device import Event
from vllm_ascend_ext.kv_pool.calls import Call
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, Status
from vllm_ascend_ext.kv_pool.jobs import JobResult, TransferJob, status_of
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.gate import AttentionComputeStartGate, Signal
from vllm_ascend_ext.kv_pool.layout import IntArray
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta

Mask = npt.NDArray[np.bool_]


class BlockRows:
    """One group's blocks of all requests of a transfer, one row each.

    ``statuses`` is OK until something goes wrong, and then the first thing that did; ``codes`` is the engine's code for
    it. ``done``: the bytes are where they belong. ``idle``: nothing is to be copied for this row.
    """

    def __init__(self, group: int, keys: list[str], block_ids: IntArray) -> None:
        self.group = group
        self.keys = keys
        self.block_ids = block_ids
        self.gvas: IntArray = np.zeros(len(keys), dtype=np.int64)
        self.statuses: IntArray = np.zeros(len(keys), dtype=np.int64)
        self.codes: IntArray = np.zeros(len(keys), dtype=np.int64)
        self.done: Mask = np.zeros(len(keys), dtype=np.bool_)
        self.resident: Mask = np.zeros(len(keys), dtype=np.bool_)  # but for layers that share a buffer
        self.partial: list[int] = []  # rows of blocks that aren't full
        self.twins: list[tuple[int, int]] = []  # rows of a save, and the row that writes the same key
        self.stored: Mask = np.zeros(len(keys), dtype=np.bool_)
        self.idle: Mask = np.zeros(len(keys), dtype=np.bool_)

    def to_copy(self, *, resident: bool = True) -> IntArray:
        """The rows that are still worth copying, with those that are ``resident`` or without."""
        wanted = (self.statuses == Status.OK) & ~self.idle
        return np.flatnonzero(wanted if resident else wanted & ~self.resident)


class LayerTransfer:
    """The blocks of several requests, in one direction; ends once, with a status for each block."""

    direction: ClassVar[str]

    def __init__(self, jobs: Sequence[TransferJob], plan: LayerPlan, condition: threading.Condition) -> None:
        self.jobs = tuple(jobs)
        self.plan = plan
        self.finished: Signal[None] = Signal(f"the end of {self.label}", condition)
        self.cause: BaseException | None = None
        self._lock = condition
        self._failed = False
        self._fixed = False
        groups = max((group for group, _ in plan.places), default=-1) + 1
        keys: list[list[str]] = [[] for _ in range(groups)]
        ids: list[list[IntArray]] = [[] for _ in range(groups)]
        self._spans: list[list[slice]] = []
        for job in self.jobs:
            spans = []
            for part in job.parts:
                start = len(keys[part.group])
                keys[part.group].extend(part.keys)
                ids[part.group].append(part.block_ids)
                spans.append(slice(start, start + len(part.keys)))
            self._spans.append(spans)
        self.rows = [
            BlockRows(group, keys[group], np.concatenate(ids[group]) if ids[group] else np.zeros(0, dtype=np.int64))
            for group in range(groups)
        ]
        for number, job in enumerate(self.jobs):
            for part, (rows, span) in zip(job.parts, self.parts(number), strict=True):
                rows.resident[span.start : span.start + part.resident] = True
                if part.partial:
                    rows.partial.append(span.stop - 1)

    @property
    def request_ids(self) -> list[str]:
        return sorted({job.req_id for job in self.jobs})

    @property
    def label(self) -> str:
        return f"layerwise {self.direction} of {', '.join(self.request_ids)}"

    @property
    def failed(self) -> bool:
        """Whether any block has failed so far."""
        return self._failed

    def parts(self, job: int) -> Iterator[tuple[BlockRows, slice]]:
        """The rows of each part of job number ``job``."""
        for part, span in zip(self.jobs[job].parts, self._spans[job], strict=True):
            yield self.rows[part.group], span

    def fail(
        self,
        rows: BlockRows,
        at: IntArray | slice,
        statuses: IntArray | Status,
        codes: IntArray | int = 0,
        cause: BaseException | None = None,
    ) -> None:
        """Rows ``at`` get ``statuses`` unless they had failed before (an OK among them changes nothing)."""
        with self._lock:
            if self._fixed:
                return
            before = rows.statuses[at]
            fresh = before == Status.OK
            rows.statuses[at] = np.where(fresh, statuses, before)
            rows.codes[at] = np.where(fresh, codes, rows.codes[at])
            self.cause = self.cause or cause
            self._failed = self._failed or bool((rows.statuses[at] != Status.OK).any())

    def drop(self, job: int, status: Status = Status.CANCELLED) -> None:
        """Give up all blocks of one job."""
        for rows, span in self.parts(job):
            self.fail(rows, span, status)

    def fix(self, cause: BaseException | None = None) -> None:
        """From here on results stay as they are: what isn't done by now has failed with ``cause``. Only the first call
        counts."""
        with self._lock:
            if self._fixed:
                return
            status = Status.FAILED if cause is None else status_of(cause)
            for rows in self.rows:
                lost = np.flatnonzero((rows.statuses == Status.OK) & ~rows.done)
                self.fail(rows, lost, status)
            self.cause = self.cause or cause
            self._fixed = True

    def end(self, cause: BaseException | None = None) -> None:
        """Fix the results and end every wait for them."""
        self.fix(cause)
        self.finished.set(None)

    def result(self, job: int) -> JobResult:
        """What has become of job number ``job`` so far."""
        with self._lock:
            spans = list(self.parts(job))
            statuses = [[Status(code) for code in rows.statuses[span].tolist()] for rows, span in spans]
            stored = [(rows.stored[span] & (rows.statuses[span] == Status.OK)).tolist() for rows, span in spans]
            failed = any(status is not Status.OK for part in statuses for status in part)
            return JobResult(self.jobs[job], statuses, stored, self.cause if failed else None)


class LayerLoad(LayerTransfer):
    """From the store to the device. ``loaded[l]``: layer l's blocks are there, or known to have failed.

    Layer l + ``depth`` is loaded once attention of layer l has begun, as ``gates[l]`` says; without ``depth`` no
    forward pass waits for the load, and it waits for none. ``as_one``: one block that fails makes the others useless.
    """

    direction = "load"

    def __init__(
        self,
        jobs: Sequence[TransferJob],
        plan: LayerPlan,
        condition: threading.Condition,
        *,
        depth: int | None = None,
        as_one: bool = False,
        wait_for_buffer: Callable[[int, Deadline], None] | None = None,
    ) -> None:
        super().__init__(jobs, plan, condition)
        if not plan.shares_buffers:
            for rows in self.rows:
                rows.idle |= rows.resident
                rows.done |= rows.resident
        self.wait_for_buffer = wait_for_buffer or (lambda layer, deadline: None)
        self.as_one = as_one
        self.loaded: list[Signal[None]] = [Signal(f"the load of layer {n}", condition) for n in range(len(plan))]
        self._depth = len(plan) if depth is None else depth
        self.gates = [
            AttentionComputeStartGate(f"the start of attention in layer {n}", condition)
            for n in range(max(len(plan) - self._depth, 0))
        ]

    def gate_of(self, layer: int) -> AttentionComputeStartGate | None:
        """What the load of ``layer`` stands before."""
        return self.gates[layer - self._depth] if layer >= self._depth else None

    @property
    def hopeless(self) -> bool:
        """Nothing that is still to come could be of use."""
        return (
            self.finished.ended or (self.as_one and self.failed) or not any(rows.to_copy().size for rows in self.rows)
        )

    def arrived(self) -> None:
        """All layers are copied: every block that hasn't failed is there. ``as_one``: none is, if any has failed."""
        with self._lock:
            for rows in self.rows:
                rows.done |= (rows.statuses == Status.OK) & (not (self.as_one and self.failed))
            self.end(Cancelled("another block of it has failed") if self.as_one and self.failed else None)

    def end(self, cause: BaseException | None = None) -> None:
        super().end(cause)
        for signal in self.loaded:
            signal.set(None)
        for gate in self.gates:
            gate.fail(cause or DONE)


class LayerSave(LayerTransfer):
    """From the device to the store. ``saved[l]``: nothing reads layer l's buffer any more, however that came about.

    ``computed[l]`` is the device's point at which layer l is computed; ``commit`` allows publishing what is complete.
    Of several requests with the same key, the first writes it, and the others share its fate.
    """

    direction = "save"

    def __init__(
        self,
        jobs: Sequence[TransferJob],
        plan: LayerPlan,
        condition: threading.Condition,
        computed: Sequence[Signal[Event]],
    ) -> None:
        super().__init__(jobs, plan, condition)
        for rows in self.rows:
            writers: dict[str, int] = {}
            rows.twins = [
                (row, first) for row, key in enumerate(rows.keys) if (first := writers.setdefault(key, row)) != row
            ]
            rows.idle[[row for row, _ in rows.twins]] = True
        self.computed = computed
        self.saved: list[Signal[None]] = [Signal(f"the save of layer {n}", condition) for n in range(len(plan))]
        self.commit: Signal[None] = Signal("the end of the forward pass", condition)

    @property
    def pending(self) -> bool:
        """Whether there is anything to copy, or a block that waits for another one's copy."""
        return any(rows.to_copy().size or rows.twins for rows in self.rows)

    def complete(self) -> None:
        """All layers are there: every block that hasn't failed is saved."""
        with self._lock:
            for rows in self.rows:
                rows.done |= (rows.statuses == Status.OK) & ~rows.idle
            self.end()

    def fix(self, cause: BaseException | None = None) -> None:
        with self._lock:
            for rows in self.rows:
                for row, writer in rows.twins:
                    rows.done[row] = rows.done[writer]
                    self.fail(rows, slice(row, row + 1), Status(int(rows.statuses[writer])))
            super().fix(cause)

    def end(self, cause: BaseException | None = None) -> None:
        super().end(cause)
        for signal in self.saved:
            signal.set(None)
        self.commit.fail(cause or DONE)


class LayerStep:
    """Both directions of one step, and the calls that carry them out.

    ``computed[l]``: the device's point at which layer l is computed. ``loading`` and ``saving``: the requests of the
    jobs of ``load`` and ``save``; ``senseless``: why jobs of ``load`` could not be made, by their numbers; ``dropped``:
    numbers of jobs of ``save`` that were given up after a failed load.
    """

    def __init__(self, meta: PoolMetadata, plan: LayerPlan) -> None:
        self.meta = meta
        self.plan = plan
        self.condition = threading.Condition(threading.RLock())
        self.computed: list[Signal[Event]] = [
            Signal(f"the computation of layer {n}", self.condition) for n in range(len(plan))
        ]
        self.load: LayerLoad | None = None
        self.save: LayerSave | None = None
        self.loading: list[ReqMeta] = []
        self.saving: list[ReqMeta] = []
        self.senseless: dict[int, Exception] = {}
        self.dropped: set[int] = set()
        self.settled = False
        self._calls: dict[LayerTransfer, Call[None]] = {}

    @property
    def request_ids(self) -> list[str]:
        return sorted({request.req_id for request in [*self.loading, *self.saving]})

    def carried_out_by(self, transfer: LayerTransfer, call: Call[None] | None) -> None:
        """Remember ``call``, so that the transfer can be given up."""
        if call is not None:
            self._calls[transfer] = call

    def calls_under_way(self) -> list[Call[None]]:
        """Calls that are still giving back what they had opened."""
        return [call for call in self._calls.values() if not call.ended]

    def give_up(self, transfer: LayerTransfer | None, cause: BaseException) -> None:
        """End ``transfer`` with ``cause`` unless it has ended; nobody sees it ended before its blocks are safe."""
        if transfer is None or transfer.finished.ended:
            return
        transfer.fix(cause)
        call = self._calls.get(transfer)
        if call is not None:
            call.cancel()
        transfer.end(cause)

    def close(self, cause: BaseException) -> None:
        """End everything that hasn't ended. What was opened in the store is given back by those who opened it."""
        self.give_up(self.load, cause)
        self.give_up(self.save, cause)
        for signal in self.computed:
            signal.fail(cause)

    def wait_for_buffer(self, layer: int, deadline: Deadline) -> None:
        """Return when the buffer of ``layer`` may be written: the layer before it there is computed and saved."""
        previous = self.plan.previous[layer]
        if previous is None:
            return
        if self.save is not None:
            self.save.saved[previous].wait(deadline)
        self.computed[previous].wait(deadline).synchronize()


DONE = RuntimeError("it was done before")
"""Why nobody need wait any more for a part of a transfer that went well."""
