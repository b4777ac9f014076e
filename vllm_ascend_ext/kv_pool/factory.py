"""Puts a pool together from its setup: the engine that the configuration names, the scheduler, a rank's worker.

Nothing is left half-started: whatever raises here has closed what it opened. Must never know vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_ascend_ext.kv_pool.backend.base import Backend
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, lookup_path
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler
from vllm_ascend_ext.kv_pool.worker import KVPoolWorker


def _local(config: PoolConfig) -> Backend:
    from vllm_ascend_ext.kv_pool.backend.local import LocalBackend

    return LocalBackend(config.local_pool_name, config.local_capacity_bytes, keep=config.local_keep)


def _mooncake(config: PoolConfig) -> Backend:
    from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend
    from vllm_ascend_ext.kv_pool.backend.mooncake_config import MooncakeConfig

    return MooncakeBackend(
        MooncakeConfig.from_environment(),
        slots=config.staging_slots,
        slot_bytes=config.staging_slot_bytes,
        slot_timeout=min(config.load_timeout, config.save_timeout) / 2,  # said before the job gives up
    )


BACKENDS: dict[str, Callable[[PoolConfig], Backend]] = {"local": _local, "mooncake": _mooncake}
"""One maker per engine; each imports its own client library, so that none needs another's."""


def make_backend(config: PoolConfig) -> Backend:
    """A client of the engine that ``config.backend`` names; ConfigError if it is not there or can't be opened."""
    maker = BACKENDS.get(config.backend)
    if maker is None:
        raise ConfigError(f"backend={config.backend!r}: not built yet; allowed are {', '.join(sorted(BACKENDS))}")
    return maker(config)


def make_worker(setup: PoolSetup, backend: Backend | None = None, clock: Clock = MONOTONIC) -> KVPoolWorker:
    """A started worker of one rank; the first rank also answers the scheduler's look-ups."""
    engine = make_backend(setup.config) if backend is None else backend
    try:
        worker = KVPoolWorker(setup, engine, clock=clock)
    except BaseException:
        engine.close()
        raise
    worker.start()
    return worker


def make_scheduler(setup: PoolSetup, clock: Clock = MONOTONIC) -> KVPoolScheduler:
    """The scheduler's side, with a client of the look-up server."""
    config = setup.config
    path = lookup_path(config.rpc_base_path, config.lookup_rpc_port, setup.dp_rank)
    stats = Stats()
    client = LookupKeyClient(path, config.lookup_timeout, config.lookup_backoff, clock, stats)
    return KVPoolScheduler(setup, client, stats=stats)
