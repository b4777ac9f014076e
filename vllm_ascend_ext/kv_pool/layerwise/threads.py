"""The four threads that transfer layer by layer, by global address or by key; must never know who waits for them.

Each carries out one direction of a step: wait for a layer's turn, move its blocks, say so, and go on with the next.
Whatever ends that early (an exception, a dead thread) ends the transfer with its cause, so that nobody waits on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient
from vllm_ascend_ext.kv_pool.calls import Call
from vllm_ascend_ext.kv_pool.checksum import DIGEST_BYTES, Trailers
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, NotRunning, Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.jobs import JobResult, TransferJob
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerBatchBuilder, LayerPlan, Ranges
from vllm_ascend_ext.kv_pool.layerwise.copying import BlockCodes, LimitedCopier
from vllm_ascend_ext.kv_pool.layerwise.gva import LeaseBook, Leases, OpenWrites, WriteBook, prepare_load
from vllm_ascend_ext.kv_pool.layerwise.step import BlockRows, LayerLoad, LayerSave, LayerTransfer
from vllm_ascend_ext.kv_pool.layout import BlockLayout, IntArray
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming
from vllm_ascend_ext.kv_pool.transfer.worker_thread import KVCacheTransferThread, TransferThread


class LayerThread(TransferThread, ABC):
    """What all four have in common."""

    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, clock: Clock) -> None:
        super().__init__(client, stats, lanes=setup.config.lanes, clock=clock, set_device=client.backend.set_device)
        self._setup = setup
        self._config = setup.config
        self._clock = clock
        self.plan = LayerPlan()

    def set_plan(self, layouts: tuple[BlockLayout, ...], plan: LayerPlan) -> None:
        """Where the caches are, and the order of the layers."""
        self.set_layouts(layouts)
        self.plan = plan

    def carry_out(self, transfer: Any, deadline: Deadline) -> Call[None] | None:
        """Begin ``transfer``; one that nobody would serve ends at once, with the reason as its cause."""
        fence = Fence()

        def call() -> None:
            try:
                self._carry_out(transfer, fence)
            except Exception as cause:
                if not transfer.failed:  # its results were fixed before: nobody else will tell
                    self._stats.failure(f"{self.role}_failed_afterwards", transfer.label, transfer.request_ids, cause)
                raise

        try:
            return self._lanes.submit(transfer.label, call, deadline, fence)
        except (NotRunning, RuntimeError) as cause:
            transfer.end(cause)
            return None

    def _carry_out(self, transfer: LayerTransfer, fence: Fence) -> None:
        """On one of the lanes. Whatever ends this early ends the transfer."""
        try:
            for rows in transfer.rows:
                self._layouts[rows.group].check(rows.block_ids)
            self._handle_layers(transfer, fence)
        except BaseException as cause:
            transfer.end(cause)
            raise

    @abstractmethod
    def _handle_layers(self, transfer: Any, fence: Fence) -> None:
        """Carry ``transfer`` out, and end it before anything else is done that may take its time."""

    def _layer_deadline(self) -> Deadline:
        return Deadline.after(self._config.layer_timeout, self._clock)


class LayerRecvingThread(LayerThread, KVCacheTransferThread, ABC):
    """Loads. A step's load keeps pace with the forward pass; a job of its own waits for nothing."""

    role = "load"

    def _handle_request(self, job: TransferJob, fence: Fence) -> JobResult:
        """All layers of one request's blocks, beside the steps: what an asynchronous load is."""
        as_one = len(self._setup.groups) > 1
        load = LayerLoad([job], self.plan, threading.Condition(threading.RLock()), as_one=as_one)
        self._carry_out(load, fence)
        return load.result(0)

    def _each_layer(self, load: LayerLoad, transfer: Callable[[BlockRows, IntArray, int], None]) -> None:
        """``transfer(rows, which of them, number of the layer in its group)``, each layer in its turn."""
        for layer, (group, number) in enumerate(self.plan.places):
            if load.hopeless:
                return
            rows, shared = load.rows[group], self.plan.shared[layer]
            if rows.to_copy(resident=shared).size:
                gate = load.gate_of(layer)
                if gate is not None:
                    gate.wait(self._layer_deadline())
                load.wait_for_buffer(layer, self._layer_deadline())
                transfer(rows, self._staggered(rows.to_copy(resident=shared)), number)
            load.loaded[layer].set(None)

    def _staggered(self, at: IntArray) -> IntArray:
        """Ranks begin at different blocks, so that they don't all ask the same server for the same block at once."""
        topology = self._setup.topology
        return np.roll(at, -(topology.tp_rank * len(at) // topology.tp_size))


class GvaCopies:
    """Copies one layer of some rows to or from the store, with digests if the setup wants them."""

    def __init__(self, setup: PoolSetup, client: GvaClient, stats: Stats, layouts: tuple[BlockLayout, ...]) -> None:
        config = setup.config
        self._digests = setup.checksum
        self._stats = stats
        self._copier = LimitedCopier(client, config.layerwise_max_transfer_blocks, config.layerwise_max_transfer_bytes)
        self._builders = [LayerBatchBuilder(layout, digests=setup.checksum) for layout in layouts]

    @property
    def value_bytes(self) -> list[int]:
        """Bytes of a block's value, per group."""
        return [builder.value_bytes for builder in self._builders]

    def save(self, save: LayerSave, rows: BlockRows, at: IntArray, layer: int, fence: Fence) -> None:
        """Copy ``layer`` of rows ``at`` to the store; a row that fails is marked."""
        builder = self._builders[rows.group]
        ranges = builder.build(layer, rows.block_ids[at], rows.gvas[at])
        if self._digests:
            trailers = self._trailers(rows, at, layer)
            if not trailers.write(ranges.addrs.T, ranges.sizes().T, fence):
                save.fail(rows, at, Status.CANCELLED)
                return
            ranges = self._with_digests(builder, ranges, trailers, rows.gvas[at], layer)
        self._note(save, rows, at, self._copier.copy(ranges, LOCAL_TO_GLOBAL, fence))

    def load(self, load: LayerLoad, rows: BlockRows, at: IntArray, layer: int, fence: Fence) -> list[str]:
        """Copy ``layer`` of rows ``at`` from the store; returns keys whose bytes are not those that were saved."""
        builder = self._builders[rows.group]
        ranges = builder.build(layer, rows.block_ids[at], rows.gvas[at])
        if not self._digests:
            self._note(load, rows, at, self._copier.copy(ranges, GLOBAL_TO_LOCAL, fence))
            return []
        trailers = self._trailers(rows, at, layer)
        whole = self._with_digests(builder, ranges, trailers, rows.gvas[at], layer)
        codes = self._copier.copy(whole, GLOBAL_TO_LOCAL, fence)
        self._note(load, rows, at, codes)
        if not (codes.statuses == Status.OK).any():
            return []
        same = trailers.verify(ranges.addrs.T, ranges.sizes().T, fence)
        if same is None:
            load.fail(rows, at, Status.CANCELLED)
            return []
        corrupt = at[(codes.statuses == Status.OK) & ~same]
        load.fail(rows, corrupt, Status.CORRUPT)
        return [rows.keys[row] for row in corrupt.tolist()]

    def _note(self, transfer: LayerTransfer, rows: BlockRows, at: IntArray, codes: BlockCodes) -> None:
        if codes.refused:
            self._stats.failure("copy_refused", f"{codes.refused} batches of {transfer.label} were taken apart")
        transfer.fail(rows, at, codes.statuses, codes.codes, codes.cause)

    @staticmethod
    def _trailers(rows: BlockRows, at: IntArray, layer: int) -> Trailers:
        return Trailers([f"{rows.keys[row]}#{layer}" for row in at.tolist()])

    @staticmethod
    def _with_digests(
        builder: LayerBatchBuilder, ranges: Ranges, trailers: Trailers, gvas: IntArray, layer: int
    ) -> Ranges:
        return ranges.with_piece(builder.digest_gvas(layer, gvas), trailers.addresses(), DIGEST_BYTES)


class KVCacheStoreLayerRecvingThread(LayerRecvingThread):
    """Loads by global address, each block under a lease."""

    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, clock: Clock) -> None:
        super().__init__(setup, client, stats, clock)
        self._gva = GvaClient(client)
        config = setup.config
        self.leases = LeaseBook(self._gva, config.lease_ttl, config.load_timeout, clock, stats)

    def set_plan(self, layouts: tuple[BlockLayout, ...], plan: LayerPlan) -> None:
        super().set_plan(layouts, plan)
        self._copies = GvaCopies(self._setup, self._gva, self._stats, layouts)

    def close(self, timeout: float) -> list[str]:
        deadline = Deadline.after(timeout, self._clock)
        if self.leases.debts:
            with suppress(Exception):  # not running any more, or not in time: the leases run out by themselves
                self._lanes.run("giving leases back", self.leases.close, deadline)
        return super().close(deadline.remaining())

    def _handle_layers(self, transfer: LayerLoad, fence: Fence) -> None:
        corrupt: list[str] = []
        with self.leases.borrow() as leases:
            try:
                self._prepare_load_gvas(transfer, leases)
                self._each_layer(
                    transfer,
                    lambda rows, at, layer: corrupt.extend(self._load_layer(transfer, rows, at, layer, fence, leases)),
                )
                transfer.arrived()
            except BaseException as cause:
                transfer.end(cause)
                raise
        self._gva.forget(list(dict.fromkeys(corrupt)))
        self._drop_partial(transfer)

    def _drop_partial(self, load: LayerLoad) -> None:
        """Blocks that aren't full are saved anew by every step: what was loaded of them is of no more use."""
        rows = [(rows, row) for rows in load.rows for row in rows.partial]
        self._client.remove([rows.keys[row] for rows, row in rows if rows.statuses[row] == Status.OK])

    def _prepare_load_gvas(self, load: LayerLoad, leases: Leases) -> None:
        prepare_load(load, leases, self._gva, self._copies.value_bytes, confirm=not self._setup.checksum)

    def _load_layer(
        self, load: LayerLoad, rows: BlockRows, at: IntArray, layer: int, fence: Fence, leases: Leases
    ) -> list[str]:
        corrupt = self._copies.load(load, rows, at, layer, fence)
        if leases.expired:
            load.fail(rows, at, Status.REFUSED)
        return corrupt


class KVCacheStoreKeyLayerRecvingThread(LayerRecvingThread):
    """Loads by key, one key per block and layer."""

    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, clock: Clock) -> None:
        super().__init__(setup, client, stats, clock)
        self._database = ChunkedTokenDatabase(setup, Naming.LAYER)

    def set_plan(self, layouts: tuple[BlockLayout, ...], plan: LayerPlan) -> None:
        super().set_plan(layouts, plan)
        self._database.set_layers([layout.num_layers for layout in layouts])

    def _handle_layers(self, transfer: LayerLoad, fence: Fence) -> None:
        self._each_layer(transfer, lambda rows, at, layer: self._load_layer(transfer, rows, at, layer, fence))
        transfer.arrived()

    def _load_layer(self, load: LayerLoad, rows: BlockRows, at: IntArray, layer: int, fence: Fence) -> None:
        keys = self._database.layer_keys(rows.group, layer, [rows.keys[row] for row in at.tolist()])
        addrs, sizes = self._layouts[rows.group].layer_addresses(rows.block_ids[at], layer)
        answer = self._client.get(keys, addrs, sizes, fence)
        load.fail(rows, at, np.asarray(answer.statuses, dtype=np.int64), cause=answer.cause)


class LayerSendingThread(LayerThread, ABC):
    """Saves, layer by layer behind the forward pass."""

    role = "save"

    def _each_layer(self, save: LayerSave, transfer: Callable[[BlockRows, IntArray, int], None]) -> None:
        """``transfer(rows, which of them, number of the layer in its group)``, each layer once it is computed."""
        for layer, (group, number) in enumerate(self.plan.places):
            save.computed[layer].wait(self._layer_deadline()).synchronize()
            if save.finished.ended:
                raise Cancelled(save.label)
            rows = save.rows[group]
            if rows.to_copy().size:
                transfer(rows, rows.to_copy(), number)
            save.saved[layer].set(None)


class KVCacheStoreLayerSendingThread(LayerSendingThread):
    """Saves by global address: every block's write is open from before the first layer to after the last."""

    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, clock: Clock) -> None:
        super().__init__(setup, client, stats, clock)
        self._gva = GvaClient(client)
        self.writes = WriteBook(self._gva)

    def set_plan(self, layouts: tuple[BlockLayout, ...], plan: LayerPlan) -> None:
        super().set_plan(layouts, plan)
        self._copies = GvaCopies(self._setup, self._gva, self._stats, layouts)

    def _handle_layers(self, transfer: LayerSave, fence: Fence) -> None:
        with OpenWrites(self._gva, self.writes, self._stats) as writes:
            try:
                self._alloc_gvas_for_save(transfer, writes)
                if transfer.pending:
                    self._each_layer(
                        transfer, lambda rows, at, layer: self._copies.save(transfer, rows, at, layer, fence)
                    )
                    transfer.commit.wait(self._layer_deadline())
                    writes.publish(transfer)
                transfer.end()
            except BaseException as cause:
                transfer.end(cause)
                raise

    def close(self, timeout: float) -> list[str]:
        deadline = Deadline.after(timeout, self._clock)
        if self.writes.debts:
            with suppress(Exception):  # not running any more, or not in time: they go with this client
                self._lanes.run("dropping writes", self.writes.settle, deadline)
        return super().close(deadline.remaining())

    def _alloc_gvas_for_save(self, save: LayerSave, writes: OpenWrites) -> None:
        writes.open(save, self._copies.value_bytes)


class KVCacheStoreKeyLayerSendingThread(LayerSendingThread):
    """Saves by key, one key per block and layer; a block counts as saved when all its layers are."""

    def __init__(self, setup: PoolSetup, client: StoreClient, stats: Stats, clock: Clock) -> None:
        super().__init__(setup, client, stats, clock)
        self._database = ChunkedTokenDatabase(setup, Naming.LAYER)

    def set_plan(self, layouts: tuple[BlockLayout, ...], plan: LayerPlan) -> None:
        super().set_plan(layouts, plan)
        self._database.set_layers([layout.num_layers for layout in layouts])

    def _handle_layers(self, transfer: LayerSave, fence: Fence) -> None:
        self._each_layer(transfer, lambda rows, at, layer: self._save_layer(transfer, rows, at, layer, fence))
        transfer.commit.wait(self._layer_deadline())
        transfer.complete()

    def _save_layer(self, save: LayerSave, rows: BlockRows, at: IntArray, layer: int, fence: Fence) -> None:
        keys = self._database.layer_keys(rows.group, layer, [rows.keys[row] for row in at.tolist()])
        present = self._client.exists(keys)
        statuses = np.asarray(present.statuses, dtype=np.int64)
        missing = np.flatnonzero(statuses == Status.MISSING)
        cause = present.cause
        if missing.size:
            addrs, sizes = self._layouts[rows.group].layer_addresses(rows.block_ids[at[missing]], layer)
            answer = self._client.put([keys[i] for i in missing.tolist()], addrs, sizes, fence)
            put = np.asarray(answer.statuses, dtype=np.int64)
            statuses[missing] = np.where(put == Status.MISSING, Status.FAILED, put)
            rows.stored[at[missing[put == Status.OK]]] = True
            cause = cause or answer.cause
        save.fail(rows, at, statuses, cause=cause)
