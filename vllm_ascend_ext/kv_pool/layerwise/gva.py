"""Leases and open writes: each is taken in one place and given back in the same; must never know layers or devices.

Both are context managers. Whatever happens inside, on leaving it every lease is given back once, and every key that was
allocated is finished once: with 0 if its bytes are there and it may be published, else with the first code that it
failed with. Nothing is remembered of a key afterwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from vllm_ascend_ext.kv_pool.backend.gva_client import UNKNOWN_CODE, GvaClient
from vllm_ascend_ext.kv_pool.clock import Clock
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.layerwise.step import BlockRows, LayerLoad, LayerSave
from vllm_ascend_ext.kv_pool.layout import IntArray
from vllm_ascend_ext.kv_pool.observe import Stats

_ATTEMPTS = 8


@dataclass
class _Held:
    holders: int = 0
    taken: int = 0  # leases taken from the store for it
    until: float = 0.0


class LeaseBook:
    """The leases of one rank. Loads that share a key share its lease, and none takes it away from another.

    ``acquired`` and ``released`` count leases since the start, those included that the store may have given although
    its answer can't be read; ``held`` are those between, key by key. When nothing is being loaded there are none, and
    nothing is remembered of any key but for the leases that the store did not take back, until they have run out.
    """

    def __init__(self, client: GvaClient, ttl: float, needed: float, clock: Clock, stats: Stats) -> None:
        """``ttl``: seconds of a lease; one with less than ``needed`` seconds left is taken anew."""
        self.acquired = 0
        self.released = 0
        self._client = client
        self._ttl = ttl
        self._needed = needed
        self._clock = clock
        self._stats = stats
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._returning: Counter[str] = Counter()  # the store has not answered yet
        self._debts: list[tuple[float, list[str]]] = []  # leases that the store didn't take back, and when they run out

    @property
    def held(self) -> Counter[str]:
        with self._lock:
            return +Counter({key: held.taken for key, held in self._held.items()}) + self._returning

    @property
    def debts(self) -> list[str]:
        """Leases that the store did not take back, and that have not run out yet."""
        with self._lock:
            return self._due()

    def borrow(self) -> Leases:
        """Leases for one load, given back when it is left."""
        return Leases(self)

    def now(self) -> float:
        return self._clock.now()

    def take(self, keys: Sequence[str]) -> list[tuple[Status, float]]:
        """Hold each of the (distinct) ``keys``: its status, and until when the lease is good."""
        now = self.now()
        with self._lock:
            for key in keys:
                self._held.setdefault(key, _Held()).holders += 1
            fresh = [key for key in keys if self._held[key].until < now + self._needed]
        try:
            answer = self._client.add_lease(fresh, self._ttl)
        except BaseException:  # the thread ends here; what the store may have given is given back
            self._note(fresh, now)
            self.give_back(keys)
            raise
        taken = dict(zip(fresh, answer.statuses, strict=True))
        self._note([key for key, status in taken.items() if status is Status.OK], now + self._ttl)
        self._note([key for key, unsure in zip(fresh, answer.unsure, strict=True) if unsure], now)
        with self._lock:
            until = {key: self._held[key].until for key in keys}
        self.give_back(key for key, status in taken.items() if status is not Status.OK)
        return [(taken.get(key, Status.OK), until[key]) for key in keys]

    def give_back(self, keys: Iterable[str]) -> None:
        """Let go of each of ``keys``; the last holder gives its leases back to the store."""
        gone: list[str] = []
        with self._lock:
            for key in keys:
                held = self._held[key]
                held.holders -= 1
                if not held.holders:
                    gone += [key] * held.taken
                    del self._held[key]
            self._returning.update(gone)
        try:
            self._remove(gone)
        finally:
            with self._lock:
                self._returning.subtract(gone)
                self._returning = +self._returning
                self.released += len(gone)

    def close(self) -> None:
        """Try once more to give back what the store didn't take. (Never earlier: it could be taken from somebody who
        holds a lease by now. Until then they run out by themselves.)"""
        with self._lock:
            debts, self._debts = self._due(), []
        self._remove(debts)

    def _note(self, keys: Sequence[str], until: float) -> None:
        """The store has given a lease for each of ``keys``, or may have."""
        with self._lock:
            for key in keys:
                held = self._held[key]
                held.taken += 1
                held.until = max(held.until, until)
                self.acquired += 1

    def _remove(self, keys: list[str]) -> None:
        try:
            answer = self._client.remove_lease(keys)
        except BaseException:
            self._owe(keys)
            raise
        if not answer.ok:
            self._owe(keys)
            self._stats.failure("lease_release_failed", f"{len(keys)} leases run out by themselves", (), answer.cause)

    def _owe(self, keys: list[str]) -> None:
        now = self.now()
        with self._lock:
            self._debts = [debt for debt in self._debts if debt[0] > now]
            self._debts.append((now + self._ttl, keys))

    def _due(self) -> list[str]:
        """Called with the lock held."""
        now = self.now()
        return [key for until, keys in self._debts if until > now for key in keys]


class Leases:
    """The leases of one load."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._keys: set[str] = set()
        self._until = float("inf")

    @property
    def expired(self) -> bool:
        """Some lease may have run out: what was read since can't be trusted."""
        return self._book.now() >= self._until

    def take(self, keys: Sequence[str]) -> list[Status]:
        """A lease for each key; one that this load holds already is OK."""
        fresh = list(dict.fromkeys(key for key in keys if key not in self._keys))
        taken: dict[str, Status] = {}
        for key, (status, until) in zip(fresh, self._book.take(fresh) if fresh else (), strict=True):
            taken[key] = status
            if status is Status.OK:
                self._keys.add(key)
                self._until = min(self._until, until)
        return [taken.get(key, Status.OK) for key in keys]

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        keys, self._keys = self._keys, set()
        if keys:
            self._book.give_back(keys)


def prepare_load(load: LayerLoad, leases: Leases, client: GvaClient, sizes: Sequence[int], *, confirm: bool) -> None:
    """Find each block's address under a lease, request by request; a block without one has failed.

    ``sizes``: bytes of a value, per group. ``confirm``: ask again once the lease is held, for before it the value may
    have been evicted and saved anew somewhere else (needless where digests tell wrong bytes from right ones).
    """
    for job in range(len(load.jobs)):
        for rows, span in load.parts(job):
            if load.as_one and load.failed:
                return
            asked = _good(rows, span)
            found = client.locate(_keys(rows, asked), sizes[rows.group])
            _fail(load, rows, asked, found.statuses, found.cause)
            rows.gvas[asked] = found.gvas
            good = _good(rows, span)
            _fail(load, rows, good, leases.take(_keys(rows, good)), None)
            good = _good(rows, span)
            if confirm and good.size:
                again = client.locate(_keys(rows, good), sizes[rows.group])
                moved = (again.gvas != rows.gvas[good]) & (np.asarray(again.statuses) == Status.OK)
                statuses = [
                    Status.MISSING if lost else status for lost, status in zip(moved, again.statuses, strict=True)
                ]
                _fail(load, rows, good, statuses, again.cause)


def _keys(rows: BlockRows, at: IntArray) -> list[str]:
    return [rows.keys[row] for row in at.tolist()]


def _good(rows: BlockRows, span: slice) -> IntArray:
    """The rows of ``span`` that have to be copied and have not failed."""
    wanted = (rows.statuses[span] == Status.OK) & ~rows.idle[span]
    good: IntArray = np.flatnonzero(wanted) + span.start
    return good


def _fail(
    load: LayerLoad | LayerSave,
    rows: BlockRows,
    at: IntArray | slice,
    statuses: Sequence[Status],
    cause: BaseException | None,
) -> None:
    load.fail(rows, at, np.asarray(statuses, dtype=np.int64), cause=cause)


class WriteBook:
    """Keys whose writes this rank has open, so that a step never opens what a stuck one hasn't given up yet.

    Also those that the store did not take back: they would be open for ever, so they are dropped later, when the store
    does as it is told again. A key for which it does not even then is given up after a few attempts.
    """

    def __init__(self, client: GvaClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._debts: dict[str, int] = {}  # how many more attempts

    def claim(self, key: str) -> bool:
        """Whether ``key`` was free; it is not any more then."""
        with self._lock:
            if key in self._open:
                return False
            self._open.add(key)
            return True

    def release(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._open.difference_update(keys)

    @property
    def is_empty(self) -> bool:
        return not self._open

    @property
    def debts(self) -> list[str]:
        """Keys that may be open in the store although nobody writes them any more."""
        with self._lock:
            return list(self._debts)

    def drop(self, keys: list[str]) -> None:
        """Drop those of ``keys``, all claimed by the caller, that the store has not published; owe what it keeps."""
        with self._lock:
            self._debts |= dict.fromkeys(keys, _ATTEMPTS)
        present = self._client.exists(keys, always=True)
        gone = {key for key, status in zip(keys, present.statuses, strict=True) if status is Status.OK}
        open_still = [key for key, status in zip(keys, present.statuses, strict=True) if status is Status.MISSING]
        dropped = self._client.finish(open_still, [UNKNOWN_CODE] * len(open_still))
        gone |= {
            key
            for key, status in zip(open_still, dropped.statuses, strict=True)
            if status in (Status.OK, Status.MISSING)
        }
        self.finished(gone)

    def finished(self, keys: Iterable[str]) -> None:
        """The store has done as it was told with these, so nothing is owed of them."""
        with self._lock:
            for key in keys:
                self._debts.pop(key, None)

    def settle(self) -> None:
        """Drop what is owed and nobody writes again by now; for when the store does as it is told."""
        with self._lock:
            attempts = {key: left - 1 for key, left in self._debts.items() if key not in self._open}
            self._open |= attempts.keys()
        try:
            if attempts:
                self.drop(list(attempts))
                with self._lock:
                    self._debts |= {key: left for key, left in attempts.items() if key in self._debts}
                self.finished([key for key, left in attempts.items() if not left])
        finally:
            self.release(attempts)


class OpenWrites:
    """The writes that one save has open, request by request."""

    def __init__(self, client: GvaClient, book: WriteBook, stats: Stats) -> None:
        self._client = client
        self._book = book
        self._stats = stats
        self._writer: dict[str, tuple[BlockRows, int]] = {}  # of each key, the row that writes it
        self._per_job: list[list[str]] = []
        self._all_taken = False  # the store has last done with every key as it was told

    def open(self, save: LayerSave, sizes: Sequence[int]) -> None:
        """A write for each block that the store doesn't have; ``sizes``: bytes of a value, per group.

        A request of which a call failed as a whole is rolled back at once, in all groups.
        """
        for job in range(len(save.jobs)):
            opened: list[str] = []
            self._per_job.append(opened)
            if not all(self._open_part(save, rows, span, sizes[rows.group], opened) for rows, span in save.parts(job)):
                save.drop(job, Status.FAILED)
                self._finish(opened)

    def publish(self, save: LayerSave) -> None:
        """Finish every write: a block that is complete is in the store from here on."""
        for opened in self._per_job:
            self._finish(opened, save)

    def __enter__(self) -> OpenWrites:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as all_of_them:  # one that raises does not keep the others from being dropped
            for opened in self._per_job:
                all_of_them.callback(self._finish, opened)
        if self._all_taken:
            self._book.settle()

    def _open_part(self, save: LayerSave, rows: BlockRows, span: slice, size: int, opened: list[str]) -> bool:
        """Whether the store could be asked at all."""
        asked = [row for row in range(span.start, span.stop) if not rows.idle[row]]
        present = self._client.exists([rows.keys[row] for row in asked])
        mine: list[int] = []
        for row, status in zip(asked, present.statuses, strict=True):
            if status is Status.MISSING and self._book.claim(rows.keys[row]):
                mine.append(row)
                continue
            rows.idle[row] = True
            rows.done[row] = status is Status.OK
            reason = Status.REFUSED if status is Status.MISSING else status  # a stuck save has it open
            save.fail(rows, slice(row, row + 1), reason, cause=present.cause)
        if present.cause is not None or not mine:
            return present.cause is None
        keys = [rows.keys[row] for row in mine]
        self._writer.update((key, (rows, row)) for key, row in zip(keys, mine, strict=True))
        opened += keys
        allocated = self._client.alloc(keys, size)
        at = np.asarray(mine, dtype=np.int64)
        rows.gvas[at] = allocated.gvas
        _fail(save, rows, at, allocated.statuses, allocated.cause)
        closed = {
            key
            for key, gva, unsure in zip(keys, allocated.gvas.tolist(), allocated.unsure, strict=True)
            if gva <= 0 and not unsure
        }
        opened[:] = [key for key in opened if key not in closed]
        self._book.release(closed)
        return allocated.cause is None

    def _finish(self, opened: list[str], save: LayerSave | None = None) -> None:
        """Finish each of ``opened`` once: published if ``save`` allows it and its row is complete, else dropped."""
        keys, opened[:] = list(opened), []
        if not keys:
            return
        rows = [self._writer[key] for key in keys]
        codes = [_code(row, at, publish=save is not None) for row, at in rows]
        try:
            answer = self._client.finish(keys, codes)
            if save is not None:
                for (row, at), code, status in zip(rows, codes, answer.statuses, strict=True):
                    row.done[at] = row.stored[at] = code == 0 and status is Status.OK
                    if code == 0:
                        save.fail(row, slice(at, at + 1), status, cause=answer.cause)
            failed = [keys[at] for at in answer.failed()]
            self._all_taken = not failed
            self._book.finished(set(keys).difference(failed))
            self._drop_unpublished(failed, answer.cause)
        except BaseException as cause:  # the thread ends here
            self._drop_unpublished(keys, cause)
            raise
        finally:
            self._book.release(keys)

    def _drop_unpublished(self, keys: list[str], cause: BaseException | None) -> None:
        """The engine didn't do as it was told with these: drop those that it has not published."""
        if not keys:
            return
        self._stats.failure("write_finish_failed", f"{len(keys)} writes", (), cause)
        self._book.drop(keys)


def _code(rows: BlockRows, row: int, *, publish: bool) -> int:
    """What the engine is told of a write: 0 to publish it, else the first code that it failed with."""
    if publish and rows.statuses[row] == Status.OK:
        return 0
    return int(rows.codes[row]) or UNKNOWN_CODE
