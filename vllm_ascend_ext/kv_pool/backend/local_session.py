"""One client's place in a local pool: signing in, the lock, debts, closing; must never know keys or bytes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from vllm_ascend_ext.kv_pool.backend.arena import GRANULE, MAX_CLIENTS, Segment, SegmentSpec, open_segment
from vllm_ascend_ext.kv_pool.backend.local_hash import Ints
from vllm_ascend_ext.kv_pool.backend.local_table import OPEN, PUBLISHED, RESERVED, H, Table, bits
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import ClosedError, ConfigError, DeadlineExceeded

Debt = Callable[[Table], object]
"""Something that must be done to the index as soon as its lock can be had."""


class Session:
    """Opens the pool and signs in; ConfigError or DeadlineExceeded, and nothing left open, if that fails."""

    def __init__(self, spec: SegmentSpec, lock_timeout: float, clock: Clock) -> None:
        self._lock_timeout = lock_timeout
        self._clock = clock
        self._debts: list[Debt] = []
        self._state = threading.Lock()
        self._calls = 0
        self._closed = False
        self._pid = os.getpid()
        self.segment, self.table, self.client = _enter(spec)
        self.bit = bits(np.array([self.client]))
        _SESSIONS.add(self)

    def now(self) -> int:
        """Nanoseconds of the clock that leases end by; the same for all processes of the host."""
        return int(self._clock.now() * 1e9)

    @contextmanager
    def call(self) -> Iterator[None]:
        """The length of one store call, during which the pool stays mapped. Raises ClosedError."""
        if self._pid != os.getpid():  # asked first: our locks may have been taken when the fork came
            raise ClosedError(
                f"this client of the local store belongs to process {self._pid}; after a fork open it again"
            )
        with self._state:
            if self._closed:
                raise ClosedError("this client of the local store is closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._state:
                self._calls -= 1
                over = self._is_over()
            if over:
                self._let_go()

    @contextmanager
    def locked(self) -> Iterator[Table]:
        """The index, whole, with this client's debts paid. Raises DeadlineExceeded."""
        with self.segment.lock(self._lock_timeout):
            self.table.settle()
            if self._debts:
                self.table.begin()
                while self._debts:
                    self._debts.pop()(self.table)
                self.table.commit()
            yield self.table

    @contextmanager
    def changing(self) -> Iterator[Table]:
        """The same for a change; if it is left half done, by an exception too, the next caller rebuilds the index."""
        with self.locked() as table:
            table.begin()
            yield table
            table.commit()

    def owe(self, debt: Debt) -> None:
        """Have it done later: whenever this client takes the lock next, or signs out."""
        self._debts.append(debt)

    @contextmanager
    def unpinning(self, slots: Ints) -> Iterator[None]:
        """Take the pins of ``slots`` away at the end, or owe it."""
        try:
            yield
        finally:
            self.owe(lambda table: table.unpin(self.client, slots))
            try:
                with self.locked():
                    pass
            except DeadlineExceeded:
                pass  # owed

    def stats(self) -> dict[str, int]:
        """Figures of the whole pool, and what all its clients hold together."""
        with self.call(), self.locked() as table:
            high = int(table.header[H.HIGH])
            state, active = table.state[:high], table.active()
            block = np.ix_(active, np.arange(high))
            leased = table.lease_until[block] > self.now()
            return {
                "capacity_bytes": self.segment.spec.capacity_bytes,
                "used_bytes": int(table.header[H.USED_PAGES]) * GRANULE,
                "keys": int((state == PUBLISHED).sum()),
                "open_writes": int(np.isin(state, (RESERVED, OPEN)).sum()),
                "leases": int(table.lease_count[block][leased].sum()),
                "pins": int(table.pins[block].sum()),
                "evictions": int(table.header[H.EVICTIONS]),
                "rebuilds": int(table.header[H.REBUILDS]),
                "clients": len(active),
            }

    def ledger(self) -> dict[str, int]:
        """What this client holds: open writes, leases in force, pins. All 0 once it is closed."""
        try:
            with self.call(), self.locked() as table:
                high = int(table.header[H.HIGH])
                leased = table.lease_until[self.client, :high] > self.now()
                return {
                    "open_writes": int(table.takes_part(np.arange(high), self.bit).sum()),
                    "leases": int(table.lease_count[self.client, :high][leased].sum()),
                    "pins": int(table.pins[self.client, :high].sum()),
                }
        except ClosedError:
            return {"open_writes": 0, "leases": 0, "pins": 0}

    def close(self) -> None:
        """Idempotent. A call that is still copying goes on, and lets go when it ends."""
        if self._pid != os.getpid():
            return
        with self._state:
            if self._closed:
                return
            self._closed = True
            over = self._is_over()
        if over:
            self._let_go()

    def _is_over(self) -> bool:
        return self._closed and not self._calls

    def _let_go(self) -> None:
        _SESSIONS.discard(self)
        try:
            with self.segment.lock(self._lock_timeout):
                self.segment.disclaim(self.client)  # in here: as soon as the lock is free, the id may be another's
                self.table.settle()
                self.table.begin()
                self.table.sign_out(self.client)
                self.table.commit()
        except DeadlineExceeded:
            self.segment.disclaim(self.client)  # the others take this client for dead now, and clear up behind it
        finally:
            self.segment.close()
            del self.table, self.segment


def _enter(spec: SegmentSpec) -> tuple[Segment, Table, int]:
    """A segment, its index and a client's id in it; a segment that its last user removes meanwhile is left again."""
    deadline = Deadline.after(spec.open_timeout)
    while True:
        segment = open_segment(spec, Table.initialise)
        try:
            with segment.kept(deadline.remaining()) as there:
                if there:
                    table = Table(segment)
                    return segment, table, _sign_in(segment, table, deadline)
        except BaseException:
            segment.close()
            raise
        segment.close()
        deadline.check(f"{spec.folder} is removed again and again")


def _sign_in(segment: Segment, table: Table, deadline: Deadline) -> int:
    with segment.lock(deadline.remaining()):
        table.settle()
        table.begin()
        client = table.sign_in()
        if client >= 0:
            segment.claim(client)
        table.commit()
    if client < 0:
        raise ConfigError(f"{segment.spec.folder} has {MAX_CLIENTS} clients; no more are allowed")
    return client


_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()
os.register_at_fork(after_in_child=_SESSIONS.clear)


@atexit.register
def _close_all() -> None:
    """An interpreter that ends in an orderly way signs its clients out, and so removes a pool that nobody uses."""
    for session in list(_SESSIONS):
        session.close()
