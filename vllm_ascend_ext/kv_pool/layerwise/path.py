"""Layer by layer beside the forward pass: the other way to carry out a step; must never know vLLM or stores' calls.

A step is opened by whichever hook comes first (vLLM calls ``start_load_kv`` before the layers only when there is a
synchronous load) and ends in ``wait_for_save``. One that never gets there is closed as a whole by the next.
Asynchronous loads (always, with several KV-cache groups) run beside the steps, all layers of a request in one job: its
forward pass comes only after them, so there is nothing to keep pace with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_ascend_ext import device
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.calls import Call
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, Status
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.jobs import TransferJob
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.gate import StepEnded
from vllm_ascend_ext.kv_pool.layerwise.step import LayerLoad, LayerSave, LayerStep, LayerTransfer
from vllm_ascend_ext.kv_pool.layerwise.threads import (
    KVCacheStoreKeyLayerRecvingThread,
    KVCacheStoreKeyLayerSendingThread,
    KVCacheStoreLayerRecvingThread,
    KVCacheStoreLayerSendingThread,
    LayerRecvingThread,
    LayerSendingThread,
)
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.orders import Orders
from vllm_ascend_ext.kv_pool.outcomes import Outcomes
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta
from vllm_ascend_ext.kv_pool.transfer.worker_thread import Ticket


class LayerwisePath:
    """See ``transfer.whole.WholeBlockPath`` for the other way; a worker has one of the two."""

    sending: LayerSendingThread
    recving: LayerRecvingThread

    def __init__(
        self,
        setup: PoolSetup,
        client: StoreClient,
        orders: Orders,
        outcomes: Outcomes,
        stats: Stats,
        clock: Clock,
        new_event: Callable[[], device.Event],
    ) -> None:
        self._setup = setup
        self._config = setup.config
        self._client = client
        self._orders = orders
        self._outcomes = outcomes
        self._stats = stats
        self._clock = clock
        self._new_event = new_event
        if client.backend.has_gva:
            self.sending = KVCacheStoreLayerSendingThread(setup, client, stats, clock)
            self.recving = KVCacheStoreLayerRecvingThread(setup, client, stats, clock)
        else:
            self.sending = KVCacheStoreKeyLayerSendingThread(setup, client, stats, clock)
            self.recving = KVCacheStoreKeyLayerRecvingThread(setup, client, stats, clock)
        self.sending.on_fatal = self._sending_ended
        self.recving.on_fatal = self._recving_ended
        self._plan = LayerPlan()
        self._step: LayerStep | None = None
        self._tails: list[tuple[Call[None], Deadline]] = []  # of steps that are over: they give back what they opened

    def register(self, layouts: tuple[BlockLayout, ...], places: Sequence[tuple[int, int]] | None) -> None:
        """``places``: (group, number in it) of each layer, in the order of the forward pass."""
        self._plan = LayerPlan.of(layouts, places)
        self.sending.set_plan(layouts, self._plan)
        self.recving.set_plan(layouts, self._plan)

    def submit_load(self, request: ReqMeta, deadline: Deadline) -> Ticket:
        """Begin an asynchronous load."""
        try:
            return self.recving.submit(self._orders.load_job(request), deadline)
        except Exception as cause:  # orders that make no sense: all that they could have meant has failed
            return Ticket(self._orders.whole_load(request), None, cause)

    # -- a step -----------------------------------------------------------------------------------------------------

    def start_load(self, meta: PoolMetadata) -> None:
        """Synchronous loads are under way."""
        self._open(meta)

    def wait_for_layer_load(self, meta: PoolMetadata, layer: int) -> None:
        """Layer ``layer`` may be computed: what it needs is there, or known to be missing and marked as such."""
        step = self._open(meta)
        load, deadline = step.load, Deadline.after(self._config.layer_timeout, self._clock)
        if load is not None:
            self._wait(step, load, lambda: load.loaded[layer].wait(deadline))
            if load.failed:
                self._distrust(step, load)
        save, previous = step.save, self._plan.previous[layer]
        if save is not None and previous is not None:
            self._wait(step, save, lambda: save.saved[previous].wait(deadline))
        if load is not None and layer < len(load.gates):
            try:
                load.gates[layer].record(self._new_event())
            except Exception as cause:
                self._stats.failure("attention_gate_failed", f"layer {layer}", load.request_ids, cause)

    def save_kv_layer(self, meta: PoolMetadata, layer: int) -> None:
        """Layer ``layer`` is computed as soon as the device comes to this point."""
        step = self._open(meta)
        if step.save is None and not self._plan.shares_buffers:
            return
        self._computed(step, [layer])

    def settle_loads(self) -> None:
        """Every load of the step ends, and is accounted for."""
        step = self._step
        if step is None or step.load is None or step.settled:
            return
        load = step.load
        step.settled = True
        for gate in load.gates:
            gate.open()
        self._wait(step, load, lambda: load.finished.wait(Deadline.after(self._config.load_timeout, self._clock)))
        for job, request in enumerate(step.loading):
            result = load.result(job)
            if not result.ok:
                cause = step.senseless.get(job, result.cause)
                self._stats.failure("load_failed", result.describe(), [request.req_id], cause)
            self._outcomes.loaded(request, result)
        if load.failed:
            self._distrust(step, load)

    def wait_for_save(self, meta: PoolMetadata) -> None:
        """What this step saves is in the store, or has failed, when this returns; the step is over."""
        step = self._open(meta)
        self.settle_loads()
        if step.save is not None:
            save = step.save
            self._computed(step, range(len(self._plan)))  # layers that announced nothing are computed by now
            save.commit.set(None)
            self._wait(step, save, lambda: save.finished.wait(Deadline.after(self._config.save_timeout, self._clock)))
        self._account_for_saves(step)
        self._leave(step)

    def close(self) -> None:
        """End the step that is under way, if any."""
        self._abandon(ClosedError("the pool was closed"))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _open(self, meta: PoolMetadata) -> LayerStep:
        """The step of ``meta``; what was left of an earlier one is closed first."""
        if self._step is not None and self._step.meta is meta:
            return self._step
        self._abandon(Cancelled("the step was abandoned"))
        self._check_tails()
        self._outcomes.begin(meta)
        step = self._step = LayerStep(meta, self._plan)
        self._begin_loads(step)
        self._begin_saves(step)
        return step

    def _begin_loads(self, step: LayerStep) -> None:
        jobs: list[TransferJob] = []
        for request in step.meta.requests:
            if request.load is None or request.load.is_async:
                continue
            step.loading.append(request)
            try:
                jobs.append(self._orders.load_job(request))
            except Exception as cause:  # orders that make no sense: all that they could have meant has failed
                step.senseless[len(jobs)] = cause
                jobs.append(self._orders.whole_load(request))
        if not jobs:
            return
        step.load = LayerLoad(
            jobs,
            self._plan,
            step.condition,
            depth=self._config.layerwise_prefetch_layers,
            wait_for_buffer=step.wait_for_buffer,
        )
        for number in step.senseless:
            step.load.drop(number, Status.INVALID)
        if step.senseless:
            self._distrust(step, step.load)
        step.carried_out_by(step.load, self.recving.carry_out(step.load, self._backstop()))

    def _begin_saves(self, step: LayerStep) -> None:
        jobs = []
        for request in step.meta.requests:
            if request.save is None:
                continue
            if self._outcomes.is_tainted(request):
                self._stats.count("saves_skipped_after_failed_load")
                continue
            try:
                jobs.append(self._orders.save_job(request))
            except Exception as cause:
                self._stats.failure("save_failed", "its orders make no sense", [request.req_id], cause)
            else:
                step.saving.append(request)
        if jobs:
            step.save = LayerSave(jobs, self._plan, step.condition, step.computed)
            step.carried_out_by(step.save, self.sending.carry_out(step.save, self._backstop()))

    def _wait(self, step: LayerStep, transfer: LayerTransfer, wait: Callable[[], object]) -> None:
        """Wait for a part of ``transfer``; if it does not come in time, all of it is given up."""
        try:
            wait()
        except StepEnded:
            return
        except DeadlineExceeded as cause:
            self._stats.failure("layer_wait_timed_out", transfer.label, transfer.request_ids, cause)
            self._client.breaker.trip()
            step.give_up(transfer, cause)
        except Exception as cause:  # the device's
            step.give_up(transfer, cause)

    def _computed(self, step: LayerStep, layers: Sequence[int]) -> None:
        """The device is past ``layers`` when it comes to where it is now."""
        open_layers = [layer for layer in layers if not step.computed[layer].ended]
        if not open_layers:
            return
        try:
            event = self._new_event()
            event.record()
        except Exception as cause:
            self._stats.failure("layer_event_failed", f"layers {open_layers}", step.request_ids, cause)
            for layer in open_layers:
                step.computed[layer].fail(cause)
            return
        for layer in open_layers:
            step.computed[layer].set(event)

    def _distrust(self, step: LayerStep, load: LayerLoad) -> None:
        """Blocks have failed: nothing may be saved from what is computed on them, by whatever request."""
        for job, request in enumerate(step.loading):
            self._outcomes.taint(request, load.result(job))
        if step.save is None:
            return
        for job, request in enumerate(step.saving):
            if job not in step.dropped and self._outcomes.is_tainted(request):
                step.dropped.add(job)
                step.save.drop(job)
                self._stats.count("saves_skipped_after_failed_load")

    def _account_for_saves(self, step: LayerStep) -> None:
        for job, request in enumerate(step.saving):
            assert step.save is not None
            if job in step.dropped:
                continue
            result = step.save.result(job)
            if not result.ok:
                self._stats.failure("save_failed", result.describe(), [request.req_id], result.cause)
            self._outcomes.saved(request, result)
        for request in step.meta.requests:
            if request.save is not None:
                self._outcomes.saved_nothing(request)

    def _abandon(self, cause: Exception) -> None:
        """Close what is left of a step. What it hasn't loaded is reported as any failure is."""
        step, self._step = self._step, None
        if step is None:
            return
        step.close(cause)
        self._step = step
        self.settle_loads()
        self._account_for_saves(step)
        self._leave(step)

    def _leave(self, step: LayerStep) -> None:
        self._step = None
        deadline = Deadline.after(self._config.load_timeout, self._clock)
        self._tails += [(call, deadline) for call in step.calls_under_way()]

    def _check_tails(self) -> None:
        """Give up calls that can't give back what they opened: they would keep others from being served."""
        for call, deadline in self._tails:
            if not call.ended and deadline.expired:
                self._stats.failure("giving_back_overdue", call.label)
                call.cancel()
        self._tails = [(call, deadline) for call, deadline in self._tails if not call.ended]

    def _sending_ended(self, cause: BaseException) -> None:
        if (step := self._step) is not None:
            step.give_up(step.save, cause)

    def _recving_ended(self, cause: BaseException) -> None:
        if (step := self._step) is not None:
            step.give_up(step.load, cause)

    def _backstop(self) -> Deadline:
        """When even a step whose every wait took its whole time is over."""
        waits = (len(self._plan) + 2) * self._config.layer_timeout
        return Deadline.after(waits + self._config.load_timeout + self._config.save_timeout, self._clock)
