"""The engines that the contract suite runs over, and the memory that their blocks lie in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fixtures.mooncake import MISSING, MooncakeMaster, mooncake_config
from vllm_ascend_ext.kv_pool.backend.arena import pool_folder
from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL, Backend
from vllm_ascend_ext.kv_pool.backend.copier import Copier
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend, destroy
from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import Status, from_native
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

_NUMBERS = itertools.count()


class HostMemory:
    """``blocks`` blocks of ``size`` bytes each in host memory, all filled with one byte at first."""

    def __init__(self, blocks: int, size: int, fill: int = 0xEE) -> None:
        self.array = np.full((blocks, size), fill, np.uint8)

    @property
    def addresses(self) -> list[int]:
        return [int(row.ctypes.data) for row in self.array]

    def write(self, rows: Sequence[bytes]) -> None:
        for block, row in zip(self.array, rows, strict=True):
            block[:] = np.frombuffer(row, np.uint8)

    def read(self) -> list[bytes]:
        return [row.tobytes() for row in self.array]


@dataclass
class EnginePool:
    """One fresh pool of an engine. Subclasses say how its clients are made and which memory they move."""

    capacity_bytes: int = 1 << 20
    clients: list[Backend] = field(default_factory=list)
    has_gva: ClassVar[bool] = True

    @classmethod
    def fresh(cls, request: pytest.FixtureRequest) -> EnginePool:
        """A new pool; ``request`` gives the servers that it needs."""
        return cls()

    def connect(self) -> Backend:
        raise NotImplementedError

    def open(self) -> Client:
        """One more client of the same pool, closed at the end of the test."""
        backend = self.connect()
        self.clients.append(backend)
        return Client(backend, self.memory)

    def memory(self, blocks: int, size: int, fill: int = 0xEE) -> HostMemory:
        return HostMemory(blocks, size, fill)

    def close(self) -> None:
        for client in self.clients:
            client.close()


@dataclass
class LocalPool(EnginePool):
    """The embedded store; what is set before a client is opened holds for that client."""

    name: str = field(default_factory=lambda: f"test-{os.getpid()}-{next(_NUMBERS)}")
    lock_timeout: float = 30.0
    keep: bool = False
    clock: Clock = MONOTONIC
    copier: Copier | None = None

    def connect(self) -> LocalBackend:
        return LocalBackend(
            self.name,
            self.capacity_bytes,
            lock_timeout=self.lock_timeout,
            keep=self.keep,
            clock=self.clock,
            copier=self.copier,
        )

    @property
    def folder(self) -> Path:
        return pool_folder(self.name)

    def close(self) -> None:
        super().close()
        destroy(self.name)


@dataclass
class MooncakePool(EnginePool):
    """The first client gives the memory, and takes all values with it when it closes."""

    capacity_bytes: int = 16 << 20
    master: MooncakeMaster = field(default_factory=MooncakeMaster)
    has_gva: ClassVar[bool] = False

    @classmethod
    def fresh(cls, request: pytest.FixtureRequest) -> EnginePool:
        return cls(master=request.getfixturevalue("mooncake_master"))

    def connect(self) -> MooncakeBackend:
        size = 0 if self.clients else self.capacity_bytes
        config = mooncake_config(self.master, global_segment_size=size)
        return MooncakeBackend(config, slots=2, slot_bytes=2 * self.capacity_bytes)


@dataclass(frozen=True)
class Client:
    """A backend's calls with bytes in place of addresses, and statuses in place of native codes."""

    backend: Backend
    memory: Callable[..., HostMemory]

    def statuses(self, codes: Sequence[int]) -> list[Status]:
        return [from_native(self.backend.engine, code) for code in codes]

    def put(self, values: dict[str, bytes], fence: Fence | None = None) -> list[Status]:
        """Save values of one length, one block each."""
        memory = self.memory(len(values), len(next(iter(values.values()))))
        memory.write(list(values.values()))
        return self.statuses(self.backend.put(list(values), *table(memory), fence or open_fence()))

    def get(self, keys: Sequence[str], size: int, fence: Fence | None = None) -> list[bytes | Status]:
        """Load values of ``size`` bytes; the status in place of a value that failed."""
        memory = self.memory(len(keys), size)
        statuses = self.statuses(self.backend.get(keys, *table(memory), fence or open_fence()))
        rows = zip(statuses, memory.read(), strict=True)
        return [row if status is Status.OK else status for status, row in rows]

    def exists(self, *keys: str) -> list[int]:
        return list(self.backend.exists(keys))

    def save_at(self, gvas: Sequence[int], rows: Sequence[bytes], fence: Fence | None = None) -> Status:
        return self._copy(gvas, rows, LOCAL_TO_GLOBAL, fence)[0]

    def load_at(self, gvas: Sequence[int], size: int, fence: Fence | None = None) -> tuple[Status, list[bytes]]:
        return self._copy(gvas, [b"\xee" * size] * len(gvas), GLOBAL_TO_LOCAL, fence)

    def _copy(
        self, gvas: Sequence[int], rows: Sequence[bytes], direction: int, fence: Fence | None
    ) -> tuple[Status, list[bytes]]:
        memory = self.memory(len(rows), len(rows[0]))
        memory.write(rows)
        sizes = np.array([len(row) for row in rows], np.int64)
        at, addresses = np.array(gvas, np.int64), np.array(memory.addresses, np.int64)
        code = self.backend.batch_copy(at, addresses, sizes, direction, fence or open_fence())
        return self.statuses([code])[0], memory.read()


def table(memory: HostMemory) -> tuple[np.ndarray, np.ndarray]:
    """(keys, 1) addresses and lengths of the blocks."""
    addresses = np.array(memory.addresses, np.int64)[:, None]
    return addresses, np.full_like(addresses, memory.array.shape[1])


ENGINES: dict[str, tuple[type[EnginePool], tuple[pytest.MarkDecorator, ...]]] = {
    "local": (LocalPool, ()),
    "mooncake": (MooncakePool, (pytest.mark.backend, pytest.mark.skipif(bool(MISSING), reason=MISSING))),
}
"""Engines that need an environment of their own carry the mark ``backend``."""


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in ENGINES.items()])
def engine_pool(request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    """A fresh, empty pool of one engine."""
    pool = ENGINES[request.param][0].fresh(request)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """A running mooncake_master, with leases that don't keep a pool full for long."""
    with MooncakeMaster(lease_ms=1000) as master:
        yield master


@pytest.fixture
def client(engine_pool: EnginePool) -> Client:
    return engine_pool.open()


@pytest.fixture
def local_pool() -> Iterator[LocalPool]:
    """A fresh pool of the embedded store, for what only that promises."""
    pool = LocalPool()
    yield pool
    pool.close()


@pytest.fixture
def gva_client(engine_pool: EnginePool) -> Client:
    if not engine_pool.has_gva:
        pytest.skip("this engine has no global addresses")
    return engine_pool.open()
