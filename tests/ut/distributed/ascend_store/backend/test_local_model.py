"""The local store against a dictionary: in stories of two clients, every answer must be the model's."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.clock import ManualClock
from vllm_ascend_ext.kv_pool.backend.arena import GRANULE
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend, destroy
from vllm_ascend_ext.kv_pool.backend.local_audit import faults
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import open_fence

PAGES = 6
CLIENTS = 2
NUMBERS = itertools.count()

keys = st.sampled_from([f"k{n}" for n in range(9)])
batches = st.lists(keys, min_size=1, max_size=5)
clients = st.integers(0, CLIENTS - 1)
fills = st.integers(1, 255)


@dataclass
class Lease:
    count: int
    until: float


@dataclass
class Model:
    """What a pool of PAGES values, one page each, must do. ``values`` is ordered, the least recently used first."""

    values: dict[str, int] = field(default_factory=dict)
    writers: dict[str, set[int]] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    leases: dict[tuple[int, str], Lease] = field(default_factory=dict)
    now: float = 1000.0

    def touch(self, batch: list[str]) -> None:
        for key in reversed([key for key in batch if key in self.values]):
            self.values[key] = self.values.pop(key)

    def leased(self, key: str) -> bool:
        return any(lease.until > self.now for (_, of), lease in self.leases.items() if of == key)

    def forget(self, key: str) -> None:
        del self.values[key]
        self.leases = {(client, of): lease for (client, of), lease in self.leases.items() if of != key}

    def make_room(self, wanted: int) -> int:
        """Evict as much as ``wanted`` values need, as far as possible; how many fit."""
        free = PAGES - len(self.values) - len(self.writers)
        for key in [key for key in self.values if not self.leased(key)]:
            if free >= wanted:
                break
            self.forget(key)
            free += 1
        return min(free, wanted)

    def put(self, batch: list[str], fill: int) -> list[Status]:
        distinct = list(dict.fromkeys(batch))
        self.touch(distinct)
        codes = {key: Status.OK if key in self.values else Status.REFUSED for key in distinct}
        new = [key for key in distinct if key not in self.values and key not in self.writers]
        fit = self.make_room(len(new))
        codes |= {key: Status.OK if n < fit else Status.FULL for n, key in enumerate(new)}
        self.values |= {key: fill + batch.index(key) for key in reversed(new[:fit])}
        return [codes[key] for key in batch]

    def alloc(self, client: int, batch: list[str]) -> list[bool]:
        new = [key for key in dict.fromkeys(batch) if key not in self.values and key not in self.writers]
        self.writers |= {key: set() for key in new[: self.make_room(len(new))]}
        for key in batch:
            if key in self.writers:
                self.writers[key].add(client)
        return [key in self.values or key in self.writers for key in batch]

    def finish(self, client: int, key: str, good: bool) -> Status:
        if key in self.values:
            return Status.OK
        if key not in self.writers:
            return Status.MISSING
        if client not in self.writers[key]:
            return Status.REFUSED
        self.writers[key].discard(client)
        if good:
            self.values[key] = self.written.get(key, -1)
        if good or not self.writers[key]:
            del self.writers[key]
            self.written.pop(key, None)
        return Status.OK

    def lease(self, client: int, key: str, seconds: float) -> Status:
        if key not in self.values:
            return Status.MISSING
        lease = self.leases.get((client, key))
        if lease is None or lease.until <= self.now:
            lease = self.leases[client, key] = Lease(0, 0)
        lease.count, lease.until = lease.count + 1, max(lease.until, self.now + seconds)
        return Status.OK

    def unlease(self, client: int, key: str) -> bool:
        lease = self.leases.get((client, key))
        if lease is None or lease.until <= self.now:
            return False
        lease.count -= 1
        if not lease.count:
            del self.leases[client, key]
        return True


class LocalStoreMachine(RuleBasedStateMachine):
    @initialize()
    def open(self):
        self.model, self.clock = Model(), ManualClock(1000.0)
        self.name = f"model-{os.getpid()}-{next(NUMBERS)}"
        self.clients = [self.connect() for _ in range(CLIENTS)]

    def connect(self):
        return LocalBackend(self.name, PAGES * GRANULE, clock=self.clock, keep=True)

    def teardown(self):
        for client in self.clients:
            client.close()
        assert destroy(self.name)

    @rule(client=clients, batch=batches, fill=fills)
    def put(self, client, batch, fill):
        memory = np.empty((len(batch), GRANULE // 2), np.uint16)
        memory[:] = fill + np.arange(len(batch))[:, None]
        assert self.clients[client].put(batch, *table(memory), open_fence()) == self.model.put(batch, fill)

    @rule(client=clients, batch=batches)
    def get(self, client, batch):
        memory = np.zeros((len(batch), GRANULE), np.uint8)
        codes = self.clients[client].get(batch, *table(memory), open_fence())
        expected = [self.model.values.get(key) for key in batch]
        assert codes == [Status.MISSING if value is None else Status.OK for value in expected]
        for row, value in zip(memory.view(np.uint16), expected, strict=True):
            assert value in (None, -1) or (row == value).all()
        self.model.touch(batch)

    @rule(client=clients, batch=batches)
    def exists(self, client, batch):
        assert self.clients[client].exists(batch) == [int(key in self.model.values) for key in batch]
        self.model.touch(batch)

    @rule(client=clients, batch=batches)
    def remove(self, client, batch):
        expected = []
        for key in batch:
            leased = self.model.leased(key)
            expected.append(Status.MISSING if key not in self.model.values else [Status.OK, Status.REFUSED][leased])
            if expected[-1] is Status.OK:
                self.model.forget(key)
        assert self.clients[client].remove(batch) == expected

    @rule(client=clients, batch=batches, fill=fills)
    def allocate_and_write(self, client, batch, fill):
        backend = self.clients[client]
        gvas = np.array(backend.batch_alloc(batch, [GRANULE] * len(batch)))
        assert (gvas > 0).tolist() == self.model.alloc(client, batch)
        got = [(key, gva) for key, gva in zip(batch, gvas.tolist(), strict=True) if gva > 0]
        memory = np.full((len(got), GRANULE // 2), fill, np.uint16)
        at, sizes = table(memory)
        code = backend.batch_copy(np.array([gva for _, gva in got]), at[:, 0], sizes[:, 0], 0, open_fence())
        assert code == Status.OK
        self.model.written |= {key: fill for key, _ in got if key in self.model.writers}

    @rule(client=clients, results=st.dictionaries(keys, st.sampled_from([0, 0, 1, -3102]), min_size=1))
    def finish(self, client, results):
        codes = self.clients[client].batch_write_finish(list(results), list(results.values()))
        before = set(self.model.values)
        assert codes == [self.model.finish(client, key, result == 0) for key, result in results.items()]
        self.model.touch([key for key in results if key not in before])

    @rule(client=clients, batch=batches, ttl_ms=st.sampled_from([1, 1000, 60_000]))
    def lease(self, client, batch, ttl_ms):
        codes = self.clients[client].batch_add_lease(batch, ttl_ms)
        assert codes == [self.model.lease(client, key, ttl_ms / 1000) for key in batch]
        self.model.touch(batch)

    @rule(client=clients, batch=batches)
    def unlease(self, client, batch):
        code = self.clients[client].batch_remove_lease(batch)
        given = [self.model.unlease(client, key) for key in batch]
        assert code == (Status.OK if all(given) else Status.REFUSED)

    @rule(client=clients, batch=batches)
    def read_at(self, client, batch):
        backend = self.clients[client]
        infos = backend.batch_get_key_info(batch)
        assert [info.size() for info in infos] == [GRANULE * (key in self.model.values) for key in batch]
        self.model.touch(batch)
        found = [(key, info.gva_list()[0]) for key, info in zip(batch, infos, strict=True) if info.size()]
        memory = np.zeros((len(found), GRANULE), np.uint8)
        at, sizes = table(memory)
        code = backend.batch_copy(np.array([gva for _, gva in found]), at[:, 0], sizes[:, 0], 1, open_fence())
        assert code == Status.OK
        for row, (key, _) in zip(memory.view(np.uint16), found, strict=True):
            assert self.model.values[key] == -1 or (row == self.model.values[key]).all()

    @rule(seconds=st.sampled_from([0.0005, 0.5, 30.0]))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)
        self.model.now = self.clock.now()

    @rule(client=clients)
    def reopen(self, client):
        self.clients[client].close()
        self.clients[client] = self.connect()
        for key in list(self.model.writers):
            if client in self.model.writers[key]:
                self.model.finish(client, key, False)
        self.model.leases = {at: lease for at, lease in self.model.leases.items() if at[0] != client}

    @invariant()
    def the_index_agrees_with_itself_and_with_the_model(self):
        for number, client in enumerate(self.clients):
            assert faults(client) == []
            leases = [lease for (of, _), lease in self.model.leases.items() if of == number]
            held = [lease.count for lease in leases if lease.until > self.model.now]
            opened = sum(number in writers for writers in self.model.writers.values())
            assert client.ledger() == {"open_writes": opened, "leases": sum(held), "pins": 0}
        stats = self.clients[0].stats()
        assert stats["keys"] == len(self.model.values)
        assert stats["used_bytes"] == GRANULE * (len(self.model.values) + len(self.model.writers))


def table(memory):
    at = memory.ctypes.data + np.arange(len(memory))[:, None] * GRANULE
    return at, np.full_like(at, GRANULE)


TestLocalStore = LocalStoreMachine.TestCase
TestLocalStore.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
