"""The Mooncake Store as an engine of the pool; must never know requests or vLLM.

Late data are staged (see ``staged``). What the engine does (0.3.13) and what is made of it here:

* It keeps Python's interpreter lock during ``setup`` and ``close``, so no deadline in this process can end them. They
  are bounded from inside: by the master's port being tried first, and by the engine's own limits, which are set here
  unless the environment sets them (``LIMITS``). Without them it is 20 attempts: at 4.4 s each when the master is
  gone, at 30 s each when it is stopped.
* ``close`` takes 1 to 2 s, 7 s when the master is stopped, 10 s when it is gone.
* A put of a key that somebody else has begun and not finished is answered with 0. So what was put is looked up once
  more; what isn't there is REFUSED. As any look-up does, that keeps the key from being evicted for the master's lease
  time (``--default_kv_lease_ttl``, 10 s): a store must be larger than what is saved in that time.
* A call after ``close`` ends the process: ``staging.Turnstile`` is what stands before it.
* Get answers with byte counts. Anything but the exact size is a failure, and nothing of it reaches a block.
* ``remove`` is forced: it is asked for values whose bytes turned out wrong, and the read that found out holds a lease.
* TCP clients listen on all addresses of the host, whatever they are told. Keep them in a network of their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from vllm_ascend_ext.kv_pool.backend.copier import Copier
from vllm_ascend_ext.kv_pool.backend.mooncake_config import MooncakeConfig, split_address
from vllm_ascend_ext.kv_pool.backend.staged import PlainEngine, StagedBackend
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import ConfigError, Status, as_int, check_length

LIMITS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # of 20
    "MC_RPC_TIMEOUT_MS": "3000",  # of 30,000; for each question to the master, in setup and close too
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
}
"""The engine's own variables, and what they are set to here if they aren't set."""

_PROBE_SECONDS = 3.0
_DEBIAN = "libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200"
_DEVICES = Path("/sys/class/infiniband")


class MooncakeBackend(StagedBackend):
    """One client of the store that ``config`` names; it gives ``global_segment_size`` bytes of its memory to the pool.

    Blocks must lie in memory that ``copier`` reaches; the default is for host memory. Raises ConfigError if the
    package, the master, the metadata server or the device can't be had.
    """

    engine: ClassVar[str] = "mooncake"

    def __init__(
        self,
        config: MooncakeConfig,
        *,
        slots: int = 4,
        slot_bytes: int = 64 << 20,
        slot_timeout: float = 10.0,
        copier: Copier | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._config = config
        super().__init__(slots=slots, slot_bytes=slot_bytes, slot_timeout=slot_timeout, copier=copier, clock=clock)

    def _connect(self) -> PlainEngine:
        return MooncakeEngine(self._config)


class MooncakeEngine:
    """The engine's own calls with the pool's answers; see ``PlainEngine``."""

    def __init__(self, config: MooncakeConfig) -> None:
        module = _import()
        local = _reach_servers(config)
        _check_device(config)
        for variable, limit in LIMITS.items():
            os.environ.setdefault(variable, limit)
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            local_hostname=local,
            metadata_server=config.metadata_server,
            global_segment_size=config.global_segment_size,
            local_buffer_size=config.local_buffer_size,
            protocol=config.protocol,
            rdma_devices=config.device_name,
            master_server_addr=config.master_server_address,
        )
        if code != 0:
            self._store.close()
            raise ConfigError(
                f"Mooncake's setup failed with {code}; it said why on the standard error. master_server_address="
                f"{config.master_server_address!r}, metadata_server={config.metadata_server!r}, "
                f"protocol={config.protocol!r}, local_hostname={local!r}, "
                f"global_segment_size={config.global_segment_size}: the master must be a mooncake_master of the same "
                "version that answers, the protocol one that the installed wheel was built for, the memory there"
            )
        self._replication = module.ReplicateConfig()
        if config.preferred_segment:  # alone: the engine does not look at it beside the other
            self._replication.preferred_segment = self._store.get_hostname()
        else:
            self._replication.prefer_alloc_in_same_node = config.prefer_alloc_in_same_node

    def register(self, address: int, length: int) -> None:
        code = self._store.register_buffer(address, length)
        if code != 0:
            raise ConfigError(f"Mooncake can't register {length} bytes of staging memory: {code}")

    def exists(self, keys: Sequence[str]) -> Any:
        return self._store.batch_is_exist(list(keys))

    def put(self, keys: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        names = list(keys)
        pieces, sizes = [[start] for start in starts], [[length] for length in lengths]
        codes = self._store.batch_put_from_multi_buffers(names, pieces, sizes, self._replication)
        codes = list(check_length(codes, len(names), "Mooncake's put"))
        said = [i for i, code in enumerate(codes) if as_int(code) == 0]
        there = check_length(self.exists([names[i] for i in said]), len(said), "Mooncake's exist") if said else ()
        for i, found in zip(said, there, strict=True):
            if as_int(found) != 1:
                codes[i] = Status.REFUSED.value
        return codes

    def get(self, keys: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
        pieces, sizes = [[start] for start in starts], [[length] for length in lengths]
        counts = self._store.batch_get_into_multi_buffers(list(keys), pieces, sizes)
        return [
            arrived(count, length)
            for count, length in zip(check_length(counts, len(keys), "Mooncake's get"), lengths, strict=True)
        ]

    def remove(self, keys: Sequence[str]) -> Any:
        return self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        self._store.close()


def arrived(count: Any, length: int) -> int:
    """The code of a get that answered ``count`` bytes, or an error, where ``length`` were due."""
    number = as_int(count)
    if number is None:
        return Status.FAILED.value
    if number < 0:
        return number
    return Status.OK.value if number == length else Status.REFUSED.value


def _import() -> Any:
    try:
        from mooncake import store
    except ImportError as cause:
        raise ConfigError(
            f"backend='mooncake': the engine's client can't be imported ({cause}); it is in the package "
            "mooncake-transfer-engine-npu (on an NPU) or mooncake-transfer-engine-non-cuda, and on Debian needs "
            f"{_DEBIAN}"
        ) from cause
    return store


def _reach_servers(config: MooncakeConfig) -> str:
    """Try the ports of the master and the metadata server; the name that this client goes by.

    That is ``local_hostname``, VLLM_HOST_IP, or the address from which this host reaches the master.
    """
    named = config.local_hostname or os.environ.get("VLLM_HOST_IP")
    if "://" in config.master_server_address:  # a name service: it knows where the master is
        if not named:
            raise ConfigError(
                f"local_hostname=None: with master_server_address={config.master_server_address!r} it must be set, or "
                "VLLM_HOST_IP, to the address at which the other clients reach this host"
            )
        return named
    master = config.master_server_address
    own = _probe("master_server_address", master, split_address(master), "a mooncake_master (see MOONCAKE_MASTER)")
    if config.metadata_server.startswith(("http://", "https://")):
        parts = urlsplit(config.metadata_server)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _probe("metadata_server", config.metadata_server, (parts.hostname or "", port), "a metadata server")
    return named or own


def _probe(field: str, value: str, address: tuple[str, int], what: str) -> str:
    """This host's address towards ``address``; ConfigError within a few seconds if nobody listens there."""
    try:
        with socket.create_connection(address, timeout=_PROBE_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError as cause:
        raise ConfigError(f"{field}={value!r}: {what} must listen there, and nobody does: {cause}") from cause


def _check_device(config: MooncakeConfig) -> None:
    """Without this, ``rdma`` on a host without such a device sets up well, and then no transfer succeeds."""
    if config.protocol != "rdma":
        return
    there = sorted(path.name for path in _DEVICES.iterdir()) if _DEVICES.is_dir() else []
    wanted = [name.strip() for name in config.device_name.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there and name != "auto-discovery"]
    if missing or not there:
        raise ConfigError(
            f"protocol='rdma', device_name={config.device_name!r}: RDMA devices of this host are {there or 'none'}"
        )
