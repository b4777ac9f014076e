"""One rank's side of the pool: carries out a step's orders and says what failed.

It must never know vLLM, and no exception leaves the hooks that vLLM calls in a step: whatever goes wrong ends as failed
blocks, failed jobs, a counter and a log line, for that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ascend_ext import device
from vllm_ascend_ext.kv_pool.backend.base import Backend
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.hits import HitFinder
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.layerwise.path import LayerwisePath
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.lookup import LookupKeyServer, lookup_path
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.orders import Orders
from vllm_ascend_ext.kv_pool.outcomes import Outcomes
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, StoredBlock, WorkerReport
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming
from vllm_ascend_ext.kv_pool.transfer.whole import WholeBlockPath
from vllm_ascend_ext.kv_pool.transfer.worker_thread import Ticket

_HANDLER_SHARE = 0.8
"""Of the client's time-out: an overdue look-up is answered before the client takes the server for dead."""

_IDLE_STEP_SECONDS = 0.002
"""For which a step without work waits for a load: an engine polls in such steps as fast as it can, which takes the
loading thread its time; and this is how much later a request may begin that comes meanwhile."""


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
        self._client = StoreClient(
            backend, self.stats, checksum=setup.checksum, backoff=config.store_backoff, clock=clock
        )
        naming = Naming.of(config.use_layerwise, backend.has_gva)
        database = ChunkedTokenDatabase(setup, naming)
        self.hits = HitFinder(setup, self._client, self.stats, naming)
        self._outcomes = Outcomes(setup, database)
        path: type[LayerwisePath | WholeBlockPath] = LayerwisePath if config.use_layerwise else WholeBlockPath
        self._path = path(setup, self._client, Orders(setup, database), self._outcomes, self.stats, clock, new_event)
        self._lookups: LookupKeyServer | None = None
        self._loading: dict[int, Ticket] = {}  # asynchronous loads by job id
        self._sent: set[str] = set()

    def start(self) -> None:
        """Start the transfer threads and, on the first rank, the look-up server.

        Raises what kept one from starting, and leaves none behind then.
        """
        try:
            self._path.sending.start(self._setup.config.start_timeout)
            self._path.recving.start(self._setup.config.start_timeout)
            if self._setup.topology.is_first:
                self._serve_lookups()
        except BaseException:
            self.close()
            raise

    @property
    def topology(self) -> Topology:
        """This rank's place."""
        return self._setup.topology

    def register_kv_caches(
        self, layouts: Sequence[BlockLayout], places: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Where the caches are, one layout per group; ConfigError if their number is wrong.

        ``places``: (group, number in the group) of each layer in the order of the forward pass; the layers' hooks go by
        their numbers there. Without it one group follows the other.
        """
        if len(layouts) != len(self._setup.groups):
            raise ConfigError(f"layouts: {len(layouts)} given, {len(self._setup.groups)} KV-cache groups configured")
        self._path.register(tuple(layouts), places)
        self.hits.set_layers([layout.num_layers for layout in layouts])
        ranges = sorted({span for layout in layouts for span in layout.ranges()})
        self._client.backend.register_buffer([start for start, _ in ranges], [size for _, size in ranges])

    # -- a step, in vLLM's order ------------------------------------------------------------------------------------

    def handle_preemptions(self, meta: PoolMetadata) -> None:
        """Blocks of preempted requests are about to be handed on: end what still touches them."""
        for ticket in self._loading.values():
            if ticket.job.req_id in meta.preempted:
                ticket.cancel()

    def start_load_kv(self, meta: PoolMetadata) -> None:
        """Synchronous loads are done, or under way layer by layer; asynchronous ones are under way."""
        self._path.start_load(meta)
        deadline = Deadline.after(self._setup.config.load_timeout, self._clock)
        for request in meta.requests:
            if request.load is not None and request.load.is_async:
                self._loading[request.load.job_id] = self._path.submit_load(request, deadline)

    def wait_for_layer_load(self, meta: PoolMetadata, layer: int) -> None:
        """Attention of layer ``layer`` may begin: its blocks are there, or have failed and will be reported."""
        self._path.wait_for_layer_load(meta, layer)

    def save_kv_layer(self, meta: PoolMetadata, layer: int) -> None:
        """The computation of layer ``layer`` has been handed to the device."""
        self._path.save_kv_layer(meta, layer)

    def wait_for_save(self, meta: PoolMetadata) -> None:
        """What this step saves is in the store, or has failed, when this returns."""
        self._path.wait_for_save(meta)

    def get_finished(self, meta: PoolMetadata, finished_req_ids: Iterable[str] = ()) -> Transfers:
        """What ended since the last step. An aborted request's load is given up here, and named once."""
        ended = set(finished_req_ids)
        self._path.settle_loads()
        self._path.recving.expire()
        if meta.idle:
            self.wait_for_loads(_IDLE_STEP_SECONDS)
        transfers = Transfers(set(), set(), set())
        for job_id, ticket in list(self._loading.items()):
            aborted, by_itself = ticket.job.req_id in ended, ticket.ended
            if aborted:
                ticket.cancel()
            if not ticket.ended:
                continue
            del self._loading[job_id]
            transfers.finished_recving.add(ticket.job.req_id)
            if aborted:
                self._outcomes.given_up(ticket.job)
                if by_itself:
                    self._path.recving.settle(ticket)  # that it failed is news, though nobody wants its blocks any more
                continue
            result = self._path.recving.settle(ticket)
            self._outcomes.arrived_or_failed(result)
            if not result.ok and len(self._setup.groups) > 1:
                transfers.failed_recving.add(ticket.job.req_id)
        transfers.finished_sending = set(meta.delayed_free) - self._sent
        self._sent = set(meta.delayed_free)
        return transfers

    def wait_for_loads(self, timeout: float) -> None:
        """Return when one of the asynchronous loads has ended, or after ``timeout`` seconds; for owners that idle."""
        self._path.recving.wait_for_any(list(self._loading.values()), timeout)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive since the last call, each once. Empty with several groups: see ``Transfers``."""
        return self._outcomes.take_load_errors()

    def take_report(self) -> WorkerReport:
        """What became of this step's jobs."""
        return self._outcomes.take_report()

    def take_stored(self) -> list[StoredBlock]:
        """Blocks that this rank put into the pool since the last call, when KV events are on."""
        return self._outcomes.take_stored()

    def close(self) -> list[str]:
        """Idempotent. Returns what is still stuck in the store engine."""
        self._path.close()
        stuck = [
            label
            for thread in (self._path.sending, self._path.recving)
            for label in thread.close(self._setup.config.close_timeout)
        ]
        if self._lookups is not None:
            stuck += self._lookups.close()
        self._loading.clear()
        self._client.backend.close()
        if stuck:
            self.stats.failure("close_stuck", f"still stuck: {', '.join(stuck)}")
        return stuck

    def restart_lookups(self) -> None:
        """Replace a look-up server that has failed, or whose socket was lost."""
        if self._lookups is not None:
            self._lookups.close()
        self._serve_lookups()

    def _serve_lookups(self) -> None:
        config = self._setup.config
        path = lookup_path(config.rpc_base_path, config.lookup_rpc_port, self._setup.dp_rank)
        self._lookups = LookupKeyServer(
            path,
            lambda asked: self.hits.hit(asked.token_len, asked.hashes, asked.hbm_hit_tokens),
            handler_timeout_s=config.lookup_timeout * _HANDLER_SHARE,
            clock=self._clock,
            stats=self.stats,
            on_overdue=self._client.breaker.trip,  # a handler does nothing but ask the store
        )
        self._lookups.start(config.start_timeout)
