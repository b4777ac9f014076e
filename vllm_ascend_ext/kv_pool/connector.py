"""vLLM's connector class over the pool: translates vLLM's objects and decides nothing; the one module here with vllm.

    --kv-transfer-config '{"kv_connector": "AscendStoreConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "vllm_ascend_ext.kv_pool.connector",
                           "kv_connector_extra_config": {"backend": "local"}}'

For vLLM 0.32 and 0.33; what 0.33 added is optional there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from torch import distributed
from vllm.distributed.kv_events import BlockStored, KVCacheEvent, KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.request import RequestStatus

from vllm_ascend_ext import logs
from vllm_ascend_ext.kv_pool import metrics
from vllm_ascend_ext.kv_pool.engine_setup import CacheFacts, GroupSpec, Ranks, block_layouts, forward_order, pool_setup
from vllm_ascend_ext.kv_pool.factory import make_scheduler, make_worker
from vllm_ascend_ext.kv_pool.observe import logger
from vllm_ascend_ext.kv_pool.requests import (
    PoolMetadata,
    ReqMeta,
    ScheduledRequest,
    ScheduledStep,
    StoredBlock,
    WorkerReport,
)
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler
from vllm_ascend_ext.kv_pool.trust import EndedTables
from vllm_ascend_ext.kv_pool.worker import KVPoolWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class AscendStoreMetadata(KVConnectorMetadata):
    """A step's orders on their way to the workers."""

    orders: PoolMetadata


@dataclass
class AscendStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """What became of a step's jobs, on its way back; vLLM merges the ranks' reports."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> AscendStoreWorkerMetadata:
        assert isinstance(other, AscendStoreWorkerMetadata)
        return AscendStoreWorkerMetadata(self.report.merge(other.report))


@dataclass
class AscendStoreKVEvents(KVConnectorKVEvents):
    """Blocks that were stored in one step; ``counts`` says by how many ranks."""

    counts: dict[StoredBlock, int] = field(default_factory=dict)
    workers: int = 1

    def add_blocks(self, blocks: Iterable[StoredBlock]) -> None:
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1

    def add_events(self, events: list[Any]) -> None:
        self.add_blocks(events)

    def get_all_events(self) -> list[Any]:
        return [block for block, count in self.counts.items() for _ in range(count)]

    def aggregate(self) -> AscendStoreKVEvents:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.counts.clear()


class Announcer:
    """Turns stored blocks into vLLM's events: what the workers don't know, as its adapter's name, is the request's.

    The scheduler's side, and only while KV events are on. It remembers the requests of the saves that are under way.
    """

    def __init__(self, groups: Sequence[GroupSpec], hash_unit: int) -> None:
        self._groups = groups
        self._hash_unit = hash_unit
        self._requests: dict[str, Request] = {}
        self._saves: dict[int, tuple[Request, ReqMeta]] = {}  # by job id

    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def ordered(self, orders: PoolMetadata) -> None:
        for order in orders.requests:
            if order.save is not None and order.req_id in self._requests:
                self._saves[order.save.job_id] = self._requests[order.req_id], order

    def reported(self, report: WorkerReport) -> None:
        for job_id in report.saved_until:
            self._saves.pop(job_id, None)

    def end(self, request_id: str) -> None:
        """No save of the request is under way any more."""
        self._requests.pop(request_id, None)
        for job_id in [job for job, (_, order) in self._saves.items() if order.req_id == request_id]:
            del self._saves[job_id]

    @property
    def holds_nothing(self) -> bool:
        return not self._requests and not self._saves

    def events(self, blocks: Iterable[StoredBlock]) -> Iterator[BlockStored]:
        """Equal hashes mean equal adapters and extra keys, so that it doesn't matter whose of two saves it was."""
        places = {
            block_hash: (request, number)
            for request, order in self._saves.values()
            for number, block_hash in enumerate(order.block_hashes)
        }
        for block in blocks:
            yield self._event(block, *places.get(block.block_hash, (None, 0)))

    def _event(self, block: StoredBlock, request: Request | None, number: int) -> BlockStored:
        group = self._groups[block.group]
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(block.block_hash)],
            parent_block_hash=None if block.parent_hash is None else maybe_convert_block_hash(block.parent_hash),
            token_ids=list(block.token_ids),
            block_size=block.block_size,
            lora_id=None,
            medium="cpu",  # as vllm-ascend calls its pool
            lora_name=None,
            group_idx=block.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
        )
        if request is not None:
            end = (number + 1) * self._hash_unit  # the hash that names a block is that of its last unit
            keys, _ = generate_block_hash_extra_keys(request, end - block.block_size, end, 0)
            event.extra_keys = to_event_extra_keys([keys])
            event.session_id = request.session_id
            if request.lora_request is not None:
                event.lora_id, event.lora_name = request.lora_request.adapter_id, request.lora_request.name
        return event


@dataclass
class AscendStoreStats(KVConnectorStats):
    """The pool's counters since the last step, as ``metrics`` describes them."""

    data: metrics.Payload = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> AscendStoreStats:
        metrics.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return metrics.summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class AscendStorePromMetrics(KVConnectorPromMetrics):
    """The pool's counters as Prometheus metrics, per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        operation = [*labelnames, "operation"]
        self._counters = {
            name: counter(f"vllm:ascend_store_{name}", text, labelnames) for name, text in metrics.COUNTERS.items()
        }
        self._operations = {
            name: counter(f"vllm:ascend_store_operation_{name}", text, operation)
            for name, text in metrics.OPERATION_COUNTERS.items()
        }
        self._seconds = histogram(
            "vllm:ascend_store_operation_time_seconds",
            "Duration of the calls of the store.",
            operation,
            buckets=metrics.SECONDS_BUCKETS,
        )
        self._faults = counter("vllm:ascend_store_faults", "Faults that the pool has seen.", [*labelnames, "fault"])
        for labels in per_engine_labelvalues.values():  # so that they are there, and 0, from the start
            for metric in self._counters.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            parts = metrics.operation_of(name)
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif parts and parts[1] in self._operations:
                self._operations[parts[1]].labels(*labels, parts[0]).inc(value)
            elif parts and isinstance(value, list):
                for seconds in value:
                    self._seconds.labels(*labels, parts[0]).observe(seconds)
        for name, value in metrics.faults(transfer_stats_data):
            self._faults.labels(*labels, name).inc(value)


class AscendStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. One instance in the scheduler, one in each worker; each has only its half of the pool."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logs.follow("vllm")
        in_worker = role == KVConnectorRole.WORKER
        facts, ranks = _cache_facts(vllm_config, kv_cache_config), Ranks()
        if in_worker:
            facts, ranks = replace(facts, stage_layers=_stage_layers(kv_cache_config)), _ranks()
        self._setup = pool_setup(vllm_config, facts, ranks)
        self._scheduler: KVPoolScheduler | None = None if in_worker else make_scheduler(self._setup)
        self._worker: KVPoolWorker | None = make_worker(self._setup) if in_worker else None
        self._owners = sum(1 for _ in self._setup.topology.owners())
        self._ended = EndedTables(vllm_config.max_concurrent_batches)
        self._events: list[KVCacheEvent] = []
        announces = self._setup.enable_kv_events and not in_worker
        self._announcer = Announcer(facts.groups, facts.hash_unit) if announces else None
        self._layers: dict[str, int] = {}  # place in the forward pass, by name

    @property
    def scheduler(self) -> KVPoolScheduler:
        assert self._scheduler is not None, "a hook of the scheduler was called in a worker"
        return self._scheduler

    @property
    def worker(self) -> KVPoolWorker:
        assert self._worker is not None, "a hook of a worker was called in the scheduler"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not saved is a later miss, nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """The layers' hooks can't be captured in a graph."""
        return bool(extra_config.get("use_layerwise", False))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the caches' addresses are taken once."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return AscendStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return AscendStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        part = self._scheduler or self._worker
        counts = part.stats.take() if part is not None else {}
        return AscendStoreStats(data=counts) if counts else None

    def shutdown(self) -> None:
        part = self._scheduler or self._worker
        if part is not None:
            for stuck in part.close():
                logger.error("still stuck at shutdown: %s", stuck)

    # -- the scheduler's hooks --------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self._announcer is not None:
            self._announcer.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AscendStoreMetadata:
        self._ended.next_step()
        orders = self.scheduler.build_connector_meta(_step(scheduler_output))
        if self._announcer is not None:
            self._announcer.ordered(orders)
        return AscendStoreMetadata(orders)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, AscendStoreWorkerMetadata) else None
        self.scheduler.update_connector_output(report, connector_output.finished_sending or ())
        self.scheduler.finish_loads(connector_output.finished_recving or ())
        self._forget_hashes(connector_output.invalid_block_ids)
        if self._announcer is not None:
            if isinstance(connector_output.kv_cache_events, AscendStoreKVEvents):
                self._events += self._announcer.events(self._complete(connector_output.kv_cache_events))
            self._announcer.reported(report or WorkerReport())
            for request_id in connector_output.finished_sending or ():
                self._announcer.end(request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ended.add(block_ids)
        saving = self.scheduler.request_finished(request.request_id)
        if self._announcer is not None and not saving:
            self._announcer.end(request.request_id)
        return saving, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.status == RequestStatus.FINISHED_ERROR and self._kv_cache_manager is not None:
            # Under policy ``fail`` vLLM takes the hashes of the blocks that failed, but not of those that another
            # request of the batch computed on them.
            self._evict(chain(*self._kv_cache_manager.get_block_ids(request.request_id)))
        return self.request_finished(request, block_ids[0])  # only with one group are blocks named that failed

    def take_events(self) -> Iterable[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool:
        """Refused: the pool is shared, and what is in it stays. After a change of weights, give a new ``model_id``."""
        logger.warning("the pool keeps its blocks: reset_cache() of one engine can't clear what others share")
        return False

    def _forget_hashes(self, invalid_block_ids: Iterable[int]) -> None:
        """Under policy ``recompute`` vLLM leaves blocks that failed to load, and those computed behind them, in its own
        prefix cache until they are recomputed; a request that comes in between would hit them. Under either it leaves
        those of a request that was aborted while the step ran."""
        if invalid_block_ids:
            untrusted = self.scheduler.blocks_to_forget(invalid_block_ids)
            self._evict(chain(untrusted, self._ended.behind(set(invalid_block_ids))))

    def _evict(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of vLLM's own prefix cache; whoever uses them keeps them."""
        if self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(set(block_ids))

    def _complete(self, events: AscendStoreKVEvents) -> list[StoredBlock]:
        """The blocks of which every rank that owns a part has stored it in this step."""
        return [block for block, count in events.counts.items() if count >= self._owners]

    # -- a worker's hooks -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        places = forward_order(names)
        self._layers = {name: number for number, name in enumerate(places)}
        config = self._kv_cache_config
        layouts = block_layouts(names, kv_caches, config.num_blocks, str(config.kv_cache_layout or ""))
        self.worker.register_kv_caches(layouts, list(places.values()))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, AscendStoreMetadata)
        self.worker.handle_preemptions(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_load_kv(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self._layers:
            self.worker.wait_for_layer_load(self._orders, self._layers[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if layer_name in self._layers:
            self.worker.save_kv_layer(self._orders, self._layers[layer_name])

    def wait_for_save(self) -> None:
        self.worker.wait_for_save(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self.worker.get_finished(self._orders, finished_req_ids)
        return KVConnectorTransferResults(ended.finished_sending, ended.finished_recving, ended.failed_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.get_block_ids_with_load_errors()

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        stored = self.worker.take_stored()
        if not stored:
            return None
        events = AscendStoreKVEvents()
        events.add_blocks(stored)
        return events

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.take_report()
        return AscendStoreWorkerMetadata(report) if report != WorkerReport() else None

    @property
    def _orders(self) -> PoolMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, AscendStoreMetadata)
        return metadata.orders


def _cache_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheFacts:
    groups = tuple(
        GroupSpec(
            spec=group.kv_cache_spec,
            kind=get_kv_cache_spec_kind(group.kv_cache_spec).value,
            window=get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            is_draft=group.is_eagle_group,
            transferable=group.enable_kv_transfer,
        )
        for group in kv_cache_config.kv_cache_groups
    )
    hash_unit = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
    return CacheFacts(groups, hash_unit, str(kv_cache_config.kv_cache_layout), current_platform.is_cpu())


def _ranks() -> Ranks:
    return Ranks(
        tp=get_tp_group().rank_in_group,
        pp=get_pp_group().rank_in_group,
        pcp=get_pcp_group().rank_in_group,
        dcp=get_dcp_group().rank_in_group,
    )


def _stage_layers(kv_cache_config: KVCacheConfig) -> tuple[tuple[int, ...], ...]:
    """Layers of each group on each pipeline stage. Only the stages themselves know: the number of hidden layers says
    nothing of draft layers, of layers without a cache, or of the groups that vLLM makes of the others."""
    stages = get_pp_group()
    if stages.world_size == 1:
        return ()
    counts: list[Any] = [None] * stages.world_size
    own = tuple(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    distributed.all_gather_object(counts, own, group=stages.cpu_group)
    return tuple(counts)


def _step(output: SchedulerOutput) -> ScheduledStep:
    """The requests of a step with their current block tables: the lists in ``output`` itself only tell what was added,
    and name blocks that a sliding window has let go meanwhile."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    tables = output.kv_connector_block_state
    assert tables is not None
    requests = [
        ScheduledRequest(req_id, computed[req_id], scheduled, tables.get_block_ids(req_id) or ())
        for req_id, scheduled in output.num_scheduled_tokens.items()
    ]
    return ScheduledStep(requests, frozenset(output.preempted_req_ids or ()))
