"""Whole blocks, before and after the forward pass: one way to carry out a step; must never know layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_ascend_ext import device
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.orders import Orders
from vllm_ascend_ext.kv_pool.outcomes import Outcomes
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta
from vllm_ascend_ext.kv_pool.shards import Sharding
from vllm_ascend_ext.kv_pool.transfer.recving import KVCacheStoreRecvingThread
from vllm_ascend_ext.kv_pool.transfer.sending import KVCacheStoreSendingThread
from vllm_ascend_ext.kv_pool.transfer.worker_thread import Ticket


class WholeBlockPath:
    """See ``layerwise.path.LayerwisePath`` for the other way; a worker has one of the two."""

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
        self._orders = orders
        self._outcomes = outcomes
        self._stats = stats
        self._clock = clock
        self._new_event = new_event
        self.sending = KVCacheStoreSendingThread(
            client, stats, lanes=setup.config.lanes, clock=clock, set_device=client.backend.set_device
        )
        self.recving = KVCacheStoreRecvingThread(
            client, stats, lanes=setup.config.lanes, clock=clock, set_device=client.backend.set_device
        )
        self.recving.rotation = setup.topology.tp_rank

    def register(self, layouts: tuple[BlockLayout, ...], places: Sequence[tuple[int, int]] | None) -> None:
        shards = [
            Sharding.of(self._setup, group).layouts(layout, self._setup.groups[group].block_size)
            for group, layout in enumerate(layouts)
        ]
        self.sending.set_layouts(layouts, shards)
        self.recving.set_layouts(layouts, shards)

    def submit_load(self, request: ReqMeta, deadline: Deadline) -> Ticket:
        """Begin to load a request's blocks."""
        try:
            return self.recving.submit(self._orders.load_job(request), deadline)
        except Exception as cause:  # orders that make no sense: all that they could have meant has failed
            return Ticket(self._orders.whole_load(request), None, cause)

    def start_load(self, meta: PoolMetadata) -> None:
        """Synchronous loads are done, or have failed, when this returns."""
        self._outcomes.begin(meta)
        deadline = Deadline.after(self._config.load_timeout, self._clock)
        waiting = [
            (request, self.submit_load(request, deadline))
            for request in meta.requests
            if request.load is not None and not request.load.is_async
        ]
        for request, ticket in waiting:
            self._outcomes.loaded(request, self.recving.settle(ticket))

    def wait_for_layer_load(self, meta: PoolMetadata, layer: int) -> None:
        """Nothing: all layers were there before the forward pass."""

    def save_kv_layer(self, meta: PoolMetadata, layer: int) -> None:
        """Nothing: all layers are saved after the forward pass."""

    def settle_loads(self) -> None:
        """Nothing: loads were settled before the forward pass."""

    def wait_for_save(self, meta: PoolMetadata) -> None:
        """What this step saves is in the store, or has failed, when this returns."""
        saves = [request for request in meta.requests if request.save is not None]
        if not saves:
            return
        deadline = Deadline.after(self._config.save_timeout, self._clock)
        tickets: list[tuple[ReqMeta, Ticket]] = []
        try:
            event = self._new_event()
            event.record()
        except Exception as cause:
            self._stats.failure("save_failed", "no device event", [request.req_id for request in saves], cause)
        else:
            tickets = [(r, ticket) for r in saves if (ticket := self._submit_save(r, event, deadline)) is not None]
        for request, ticket in tickets:
            self._outcomes.saved(request, self.sending.settle(ticket))
        for request in saves:
            self._outcomes.saved_nothing(request)

    def _submit_save(self, request: ReqMeta, ready: device.Event, deadline: Deadline) -> Ticket | None:
        """Begin to save a request's blocks; None if they can't be trusted, or if the orders make no sense."""
        if self._outcomes.is_tainted(request):
            self._stats.count("saves_skipped_after_failed_load")
            return None
        try:
            return self.sending.submit(replace(self._orders.save_job(request), ready=ready), deadline)
        except Exception as cause:
            self._stats.failure("save_failed", "before it was handed on", [request.req_id], cause)
            return None

    def close(self) -> None:
        """Nothing but the threads outlives a step."""
