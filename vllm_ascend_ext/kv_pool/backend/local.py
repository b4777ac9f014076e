"""The embedded store: a bounded pool in shared memory between the processes of one host; must never know requests.

No server: every client maps the same files (``arena``) and changes one index (``local_table``) under one lock, which is
never held while bytes are copied. Whoever copies has *pinned* the slot, and a pinned slot's bytes stay where they are.

What a death leaves behind: a client killed at any instruction takes its locks with it; a half changed index is derived
anew by whoever locks it next; leases, pins and open writes of the dead are cleared away when a client opens the pool,
and before a put is refused as FULL or REFUSED. What remains: a client that is *stopped* (SIGSTOP) while it holds the
lock, some 50 to 500 us a call, makes the others answer TIMEOUT after ``lock_timeout`` until it goes on or is killed;
one that is stopped while it copies keeps nobody waiting, only its blocks from being evicted.

Native codes are the values of ``errors.Status``. A GVA is ``GVA_BASE`` plus the offset in the arena; above bit 45 it
carries the number of its allocation, so that an address kept for too long is refused, not taken for its successor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_ascend_ext.kv_pool.backend import local_table
from vllm_ascend_ext.kv_pool.backend.arena import (
    GRANULE,
    MAX_CLIENTS,
    SegmentSpec,
    destroy_segment,
    open_segment,
    pool_folder,
)
from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL, Addresses, Backend, KeyInfo
from vllm_ascend_ext.kv_pool.backend.copier import Copier, HostCopier, copy_fenced
from vllm_ascend_ext.kv_pool.backend.local_table import DIGEST_WORDS, OPEN, PUBLISHED, RESERVED, Digests, H, Ints, Table
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import ClosedError, ConfigError, DeadlineExceeded, Status, as_int
from vllm_ascend_ext.kv_pool.fence import Fence

MAX_KEY = 256
MAX_CAPACITY = 8 << 40
GVA_BASE = 0x110000000000
_TAG_SHIFT = 45
_TAG_MASK = (1 << 18) - 1


@dataclass(frozen=True)
class LocalKeyInfo:
    """Where a published value lies; size 0 and no address when there is none."""

    bytes: int
    gva: int

    def size(self) -> int:
        return self.bytes

    def gva_list(self) -> list[int]:
        return [self.gva] if self.bytes else []


@dataclass(frozen=True)
class _Rows:
    """The usable rows of one put or get: their positions in the call, digests, segments and total bytes."""

    at: Ints
    digests: Digests
    addrs: Ints
    sizes: Ints
    totals: Ints

    def take(self, chosen: Ints) -> _Rows:
        return _Rows(self.at[chosen], self.digests[chosen], self.addrs[chosen], self.sizes[chosen], self.totals[chosen])


class LocalBackend(Backend):
    """One client of a local pool. See ``Backend`` for the calls; what is said here is this engine's own.

    Args:
        name_or_path: a name (the pool lies under /dev/shm), or the absolute path of a folder.
        capacity_bytes: size of the arena, rounded down to whole pages; all clients must give the same.
        lock_timeout: seconds to wait for the index before a call answers TIMEOUT.
        open_timeout: seconds to wait for another process that is still making the pool.
        keep: leave the pool when its last client closes, instead of removing it.
        copier: moves the bytes; the default is for blocks in host memory.
        clock: what the ends of leases are read from.

    Raises ConfigError before anything is started, DeadlineExceeded after ``open_timeout``.
    """

    engine: ClassVar[str] = "local"
    late_data: ClassVar[Literal["fenced", "staged"]] = "fenced"
    has_gva: ClassVar[bool] = True

    def __init__(
        self,
        name_or_path: str,
        capacity_bytes: int,
        *,
        lock_timeout: float = 1.0,
        open_timeout: float = 120.0,
        keep: bool = False,
        copier: Copier | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        capacity = as_int(capacity_bytes)
        if capacity is None or not GRANULE <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity_bytes={capacity_bytes!r}: a number from {GRANULE} to {MAX_CAPACITY} is needed")
        for field, seconds in (("lock_timeout", lock_timeout), ("open_timeout", open_timeout)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
                raise ConfigError(f"{field}={seconds!r}: a positive number of seconds is needed")
        capacity -= capacity % GRANULE
        self._copier: Copier = copier or HostCopier()
        self._clock = clock
        self._lock_timeout = float(lock_timeout)
        self._debts: list[Callable[[Table], None]] = []
        self._state = threading.Lock()
        self._calls = 0
        self._closed = False
        spec = SegmentSpec(
            pool_folder(name_or_path),
            capacity,
            local_table.table_bytes(capacity),
            local_table.VERSION,
            float(open_timeout),
            keep,
        )
        self._segment = open_segment(spec, Table.initialise)
        try:
            self._table = Table(self._segment)
            self._client = self._sign_in(float(open_timeout))
        except BaseException:
            self._segment.close()
            raise

    # -- the key path ---------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 per key, 0 for one that can't be a key. Counts as a use. Raises DeadlineExceeded."""
        at, digests = _digests(keys)
        answer = np.zeros(len(keys), np.int64)
        with self._call(), self._locked() as table:
            slots = table.find(digests)
            there = table.published(slots)
            table.touch(slots[there])
            answer[at] = there
        return _ints(answer)

    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """An unfinished write of the same key by a living client is REFUSED. Pieces are copied in the keys' order."""
        answer = np.full(len(keys), Status.INVALID, np.int64)
        rows = _rows(keys, addrs, sizes)
        first, twin = _first_of_each(rows.digests)
        unique = rows.take(first)
        codes = np.full(len(first), Status.TIMEOUT, np.int64)
        with self._call():
            try:
                with self._changing() as table:
                    slots = self._reserve_for_put(table, unique, codes)
            except DeadlineExceeded:
                slots = np.full(len(first), -1, np.int64)
            mine = np.flatnonzero(slots >= 0)
            if len(mine):
                codes[mine] = self._fill(unique.take(mine), slots[mine], fence)
        answer[rows.at] = codes[twin]
        return _ints(answer)

    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """A value whose size isn't exactly that of the key's segments is REFUSED, and nothing of it written."""
        answer = np.full(len(keys), Status.INVALID, np.int64)
        rows = _rows(keys, addrs, sizes)
        codes = np.full(len(rows.at), Status.TIMEOUT, np.int64)
        with self._call():
            try:
                with self._locked() as table:
                    slots = table.find(rows.digests)
                    there = table.published(slots)
                    fits = there & (table.size[slots] == rows.totals)
                    codes[:] = np.where(there, np.where(fits, Status.CANCELLED, Status.REFUSED), Status.MISSING)
                    good = np.flatnonzero(fits)
                    slots = slots[good]
                    table.touch(slots)
                    table.pin(self._client, slots)
                    starts = self._addresses(table, slots)
            except DeadlineExceeded:
                good = np.empty(0, np.int64)
            if len(good):
                with self._unpinning(slots):
                    chosen = rows.take(good)
                    done = self._copy(chosen, starts, False, fence)
                    codes[good[np.cumsum(chosen.totals) <= done]] = Status.OK
        answer[rows.at] = codes
        return _ints(answer)

    def remove(self, keys: Sequence[str]) -> list[int]:
        """MISSING for a key that isn't published, REFUSED for one that anybody holds a lease on."""
        answer = np.full(len(keys), Status.INVALID, np.int64)
        at, digests = _digests(keys)
        answer[at] = Status.TIMEOUT
        with self._call():
            try:
                with self._changing() as table:
                    for turn in _turns(digests):
                        slots = table.find(digests[turn])
                        there = table.published(slots)
                        leased = there & table.leased(slots, self._now())
                        table.drop(slots[there & ~leased])
                        codes = np.where(there, np.where(leased, Status.REFUSED, Status.OK), Status.MISSING)
                        answer[at[turn]] = codes
            except DeadlineExceeded:
                pass
        return _ints(answer)

    # -- global addresses -----------------------------------------------------------------------------------------

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """A client that is given the address of somebody else's unfinished write takes part in that write."""
        answer = np.zeros(len(keys), np.int64)
        lengths = _numbers(sizes)
        if lengths is None or len(lengths) != len(keys):
            return _ints(answer)
        at, digests = _digests(keys)
        good = lengths[at] > 0
        at, digests = at[good], digests[good]
        with self._call():
            try:
                with self._changing() as table:
                    slots = self._find_living(table, digests)
                    new = np.flatnonzero(slots < 0)
                    new = new[_first_of_each(digests[new])[0]]
                    self._make_room(table, digests[new], lengths[at[new]], OPEN)
                    slots = table.find(digests)
                    found = slots >= 0
                    at, slots = at[found], slots[found]
                    unfinished = slots[table.state[slots] == OPEN]
                    table.writers[unfinished] |= self._bit
                    answer[at] = self._gvas(table, slots)
            except DeadlineExceeded:
                return [0] * len(keys)
        return _ints(answer)

    def batch_copy(
        self, gvas: Sequence[int], addrs: Sequence[int], sizes: Sequence[int], direction: int, fence: Fence
    ) -> int:
        """Checked before anything is copied. A published value is never written again: such ranges are left out, as a
        put of an existing key is."""
        addresses, blocks, lengths = _numbers(gvas), _numbers(addrs), _numbers(sizes)
        if (
            addresses is None
            or blocks is None
            or lengths is None
            or direction not in (LOCAL_TO_GLOBAL, GLOBAL_TO_LOCAL)
        ):
            return Status.INVALID.value
        if not len(addresses) == len(blocks) == len(lengths) or (blocks <= 0).any() or (lengths < 0).any():
            return Status.INVALID.value
        saving = direction == LOCAL_TO_GLOBAL
        with self._call():
            try:
                with self._locked() as table:
                    slots, offsets, valid = self._resolve(table, addresses, lengths)
                    state = table.state[slots]
                    writing = (state == OPEN) & ((table.writers[slots] & self._bit) != 0)
                    if not (valid & ((state == PUBLISHED) | (writing if saving else False))).all():
                        return Status.REFUSED.value
                    if saving:
                        slots, offsets, blocks, lengths = (a[writing] for a in (slots, offsets, blocks, lengths))
                    table.pin(self._client, slots)
            except DeadlineExceeded:
                return Status.TIMEOUT.value
            with self._unpinning(slots):
                done = copy_fenced(self._copier, saving, self._segment.address + offsets, blocks, lengths, fence)
        return (Status.OK if done == int(lengths.sum()) else Status.CANCELLED).value

    def batch_write_finish(self, keys: Sequence[str], results: Sequence[int]) -> list[int]:
        """MISSING for an unknown key, REFUSED for a write that this client has no part in. Nothing checks that bytes
        were written. A result that is not an integer counts as a failure; a value that is published already stays."""
        answer = np.full(len(keys), Status.INVALID, np.int64)
        if not hasattr(results, "__len__") or len(results) != len(keys):
            return _ints(answer)
        at, digests = _digests(keys)
        good = np.array([as_int(results[position]) == 0 for position in at.tolist()], np.bool_)
        with self._call():
            try:
                with self._changing() as table:
                    for turn in _turns(digests):
                        answer[at[turn]] = self._finish(table, digests[turn], good[turn])
            except DeadlineExceeded:
                self._debts.append(lambda table: self._give_up(table, digests))
                answer[at] = Status.TIMEOUT
        return _ints(answer)

    def batch_get_key_info(self, keys: Sequence[str]) -> list[KeyInfo]:
        """Raises DeadlineExceeded when the index can't be had."""
        at, digests = _digests(keys)
        sizes, gvas = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        with self._call(), self._locked() as table:
            slots = table.find(digests)
            there = table.published(slots)
            at, slots = at[there], slots[there]
            table.touch(slots)
            sizes[at] = table.size[slots]
            gvas[at] = self._gvas(table, slots)
        return [LocalKeyInfo(size, gva) for size, gva in zip(_ints(sizes), _ints(gvas), strict=True)]

    # -- leases ---------------------------------------------------------------------------------------------------

    def batch_add_lease(self, keys: Sequence[str], ttl_ms: int) -> list[int]:
        """MISSING for a key that isn't published. Leases of one client on one key add up, and end together."""
        answer = np.full(len(keys), Status.INVALID, np.int64)
        ttl = as_int(ttl_ms)
        if ttl is None or not 0 < ttl < 1 << 42:
            return _ints(answer)
        at, digests = _digests(keys)
        answer[at] = Status.TIMEOUT
        with self._call():
            try:
                with self._locked() as table:
                    slots = table.find(digests)
                    there = table.published(slots)
                    table.touch(slots[there])
                    now = self._now()
                    table.lease(self._client, slots[there], now + ttl * 1_000_000, now)
                    answer[at] = np.where(there, Status.OK, Status.MISSING)
            except DeadlineExceeded:
                pass
        return _ints(answer)

    def batch_remove_lease(self, keys: Sequence[str]) -> int:
        """OK, or REFUSED if one of the keys has no lease of this client that is still in force; the others' are given
        back all the same."""
        at, digests = _digests(keys)

        def remove(table: Table) -> bool:
            now = self._now()
            return all([table.unlease(self._client, slot, now) for slot in _ints(table.find(digests))])

        with self._call():
            try:
                with self._locked() as table:
                    complete = remove(table)
            except DeadlineExceeded:
                self._debts.append(lambda table: None if remove(table) else None)
                return Status.TIMEOUT.value
        if len(at) < len(keys):
            return Status.INVALID.value
        return (Status.OK if complete else Status.REFUSED).value

    # -- ledgers and the end ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Figures of the whole pool: bytes, keys, evictions, rebuilds, clients, and what all clients hold."""
        with self._call(), self._locked() as table:
            high = int(table.header[H.HIGH])
            state, active = table.state[:high], table.active()
            block = np.ix_(active, np.arange(high))
            leased = table.lease_until[block] > self._now()
            return {
                "capacity_bytes": self._segment.spec.capacity_bytes,
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
        """What this client holds now: open writes, leases in force, pins. All 0 after close."""
        try:
            with self._call(), self._locked() as table:
                high = int(table.header[H.HIGH])
                unfinished = np.isin(table.state[:high], (RESERVED, OPEN))
                leased = table.lease_until[self._client, :high] > self._now()
                return {
                    "open_writes": int((unfinished & ((table.writers[:high] & self._bit) != 0)).sum()),
                    "leases": int(table.lease_count[self._client, :high][leased].sum()),
                    "pins": int(table.pins[self._client, :high].sum()),
                }
        except ClosedError:
            return {"open_writes": 0, "leases": 0, "pins": 0}

    def close(self) -> None:
        """Gives back open writes and leases. A call that is still copying goes on, and lets go when it ends."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            if self._calls:
                return
        self._let_go()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _sign_in(self, timeout: float) -> int:
        with self._segment.lock(timeout):
            self._table.settle()
            self._table.begin()
            client = self._table.sign_in()
            if client < 0:
                self._table.commit()
                raise ConfigError(f"{self._segment.spec.folder} has {MAX_CLIENTS} clients, which is the limit")
            self._bit = np.uint64(1 << client)
            self._segment.claim(client)
            self._table.commit()
        return client

    def _let_go(self) -> None:
        if self._segment.forked:
            return
        try:
            with self._segment.lock(self._lock_timeout):
                self._table.settle()
                self._table.begin()
                self._table.sign_out(self._client)
                self._table.commit()
        finally:
            self._segment.disclaim(self._client)  # from here on others take this client for dead, whatever it left
            self._segment.close()
            del self._table, self._segment

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._state:
            if self._closed:
                raise ClosedError("this client of the local store is closed")
            self._segment.check_process()
            self._calls += 1
        try:
            yield
        finally:
            with self._state:
                self._calls -= 1
                last = self._closed and not self._calls
            if last:
                self._let_go()

    @contextmanager
    def _locked(self) -> Iterator[Table]:
        """The index, whole and with this client's debts paid. Raises DeadlineExceeded."""
        with self._segment.lock(self._lock_timeout):
            self._table.settle()
            if self._debts:
                self._table.begin()
                while self._debts:
                    self._debts.pop()(self._table)
                self._table.commit()
            yield self._table

    @contextmanager
    def _changing(self) -> Iterator[Table]:
        """The same for a change; if it is left half done, by an exception too, the next one rebuilds the index."""
        with self._locked() as table:
            table.begin()
            yield table
            table.commit()

    @contextmanager
    def _unpinning(self, slots: Ints) -> Iterator[None]:
        try:
            yield
        finally:
            self._owe(lambda table: table.unpin(self._client, slots))

    def _owe(self, debt: Callable[[Table], None]) -> None:
        """Do it now, or if the lock can't be had before this client's next change."""
        self._debts.append(debt)
        try:
            with self._locked():
                pass
        except DeadlineExceeded:
            pass

    def _reserve_for_put(self, table: Table, rows: _Rows, codes: Ints) -> Ints:
        """Fill in the codes of the keys that are there; pinned slots for the others, -1 where there is none."""
        slots = self._find_living(table, rows.digests)
        there = table.published(slots)
        table.touch(slots[there])
        codes[:] = np.where(there, Status.OK, np.where(slots >= 0, Status.REFUSED, Status.FULL))
        new = np.flatnonzero(slots < 0)
        mine = np.full(len(slots), -1, np.int64)
        mine[new] = self._make_room(table, rows.digests[new], rows.totals[new], RESERVED)
        table.pin(self._client, mine[mine >= 0])
        return mine

    def _fill(self, rows: _Rows, slots: Ints, fence: Fence) -> Ints:
        """Copy into RESERVED slots and publish those that are complete; one code per slot."""
        codes = np.full(len(slots), Status.CANCELLED, np.int64)
        done = 0
        try:
            done = self._copy(rows, self._addresses(self._table, slots), True, fence)
        finally:
            complete = np.cumsum(rows.totals) <= done
            try:
                with self._changing() as table:
                    table.unpin(self._client, slots)
                    twins = table.find(rows.digests)
                    publish = complete & (twins < 0)
                    table.publish(slots[publish])
                    table.drop(slots[~publish])
                    there = table.published(twins)
                    codes[complete] = np.where(publish | there, Status.OK, Status.REFUSED)[complete]
            except DeadlineExceeded:
                self._debts.append(lambda table: (table.unpin(self._client, slots), table.drop(slots))[1])
                codes[:] = Status.TIMEOUT
        return codes

    def _copy(self, rows: _Rows, starts: Ints, saving: bool, fence: Fence) -> int:
        """Copy each row's segments from or to its value's address, row by row; the bytes copied."""
        host = starts[:, None] + np.cumsum(rows.sizes, axis=1) - rows.sizes
        return copy_fenced(self._copier, saving, host.ravel(), rows.addrs.ravel(), rows.sizes.ravel(), fence)

    def _find_living(self, table: Table, digests: Digests) -> Ints:
        """The slots of the keys, after clearing away unfinished writes of the dead."""
        slots = table.find(digests)
        if ((slots >= 0) & (table.state[slots] == OPEN)).any() and table.reap():
            slots = table.find(digests)
        return slots

    def _make_room(self, table: Table, digests: Digests, sizes: Ints, state: int) -> Ints:
        slots = table.reserve(digests, sizes, self._client, state, self._now())
        left = np.flatnonzero(slots < 0)
        if len(left) and table.reap():
            slots[left] = table.reserve(digests[left], sizes[left], self._client, state, self._now())
        return slots

    def _finish(self, table: Table, digests: Digests, good: np.typing.NDArray[np.bool_]) -> Ints:
        """Finish the writes of distinct keys; one code per key."""
        slots = table.find(digests)
        there = table.published(slots)
        part = (slots >= 0) & ~there & ((table.writers[slots] & self._bit) != 0)
        table.publish(slots[part & good])
        self._leave(table, slots[part & ~good])
        codes = np.where(slots < 0, Status.MISSING, np.where(there | part, Status.OK, Status.REFUSED))
        return codes.astype(np.int64)

    def _leave(self, table: Table, slots: Ints) -> None:
        """Take this client's part out of unfinished writes; the last part out drops them."""
        table.writers[slots] &= ~self._bit
        table.drop(slots[table.writers[slots] == 0])

    def _give_up(self, table: Table, digests: Digests) -> None:
        slots = np.unique(table.find(digests))
        slots = slots[slots >= 0]
        mine = (table.state[slots] == OPEN) & ((table.writers[slots] & self._bit) != 0)
        self._leave(table, slots[mine])

    def _now(self) -> int:
        return int(self._clock.now() * 1e9)

    def _addresses(self, table: Table, slots: Ints) -> Ints:
        return self._segment.address + table.offset[slots].astype(np.int64) * GRANULE

    @staticmethod
    def _gvas(table: Table, slots: Ints) -> Ints:
        tag = table.generation[slots].astype(np.int64) & _TAG_MASK
        gvas: Ints = GVA_BASE + table.offset[slots].astype(np.int64) * GRANULE + (tag << _TAG_SHIFT)
        return gvas

    def _resolve(self, table: Table, gvas: Ints, lengths: Ints) -> tuple[Ints, Ints, np.typing.NDArray[np.bool_]]:
        """(slot, offset in the arena, whether the whole range lies in that slot's value) of each global range."""
        offsets = (gvas & ((1 << _TAG_SHIFT) - 1)) - GVA_BASE
        slots = table.slots_at(offsets // GRANULE)
        begin = table.offset[slots].astype(np.int64) * GRANULE
        fits = (offsets >= begin) & (offsets + lengths <= begin + table.size[slots])
        same = (table.generation[slots].astype(np.int64) & _TAG_MASK) == gvas >> _TAG_SHIFT
        return slots, offsets, (slots >= 0) & fits & same


def destroy(name_or_path: str, force: bool = False) -> bool:
    """Remove a pool; False if there is none. ConfigError while clients live, unless ``force``: these keep what they
    have mapped, and share it with nobody new."""
    return destroy_segment(pool_folder(name_or_path), force)


def _digests(keys: Sequence[str]) -> tuple[Ints, Digests]:
    """Positions of the usable keys, and 128 bits of BLAKE2b of each, as (n, 2) uint64."""
    at = [n for n, key in enumerate(keys) if isinstance(key, str) and 0 < len(key) <= MAX_KEY]
    raw = b"".join([blake2b(keys[n].encode("utf-8", "surrogatepass"), digest_size=16).digest() for n in at])
    return np.array(at, np.int64), np.frombuffer(raw, np.uint64).reshape(-1, DIGEST_WORDS)


def _rows(keys: Sequence[str], addrs: Any, sizes: Any) -> _Rows:
    """The rows of a put or get that can be used: a key, some bytes, no null pointer, no negative length."""
    at, digests = _digests(keys)
    starts, lengths = _numbers(addrs, 2), _numbers(sizes, 2)
    if starts is None or lengths is None or starts.shape != lengths.shape or len(starts) != len(keys):
        starts = lengths = np.zeros((len(keys), 1), np.int64)
    starts, lengths = starts[at], lengths[at]
    totals = lengths.sum(axis=1)
    good = ((lengths >= 0) & ((starts > 0) | (lengths == 0))).all(axis=1) & (totals > 0)
    return _Rows(at[good], digests[good], starts[good], lengths[good], totals[good])


def _numbers(values: Any, dimensions: int = 1) -> Ints | None:
    """``values`` as an int64 array of that many dimensions, None if they aren't that."""
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        return None
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        return None
    return array.astype(np.int64, copy=False)


def _first_of_each(digests: Digests) -> tuple[Ints, Ints]:
    """(positions of the first occurrences, in order; for each row which of those it equals)."""
    whole = np.ascontiguousarray(digests).view([("a", np.uint64), ("b", np.uint64)]).ravel()
    unique, first, twin = np.unique(whole, return_index=True, return_inverse=True)
    if len(unique) == len(whole):
        return np.arange(len(whole)), np.arange(len(whole))
    rank = np.argsort(first)
    place = np.empty(len(rank), np.int64)
    place[rank] = np.arange(len(rank))
    return first[rank], place[twin.ravel()]


def _turns(digests: Digests) -> Iterator[Ints]:
    """The rows, in as few groups of distinct keys as there are; a key's rows in their order."""
    left = np.arange(len(digests))
    while len(left):
        first = _first_of_each(digests[left])[0]
        yield left[first]
        left = np.delete(left, first)


def _ints(array: Any) -> list[int]:
    numbers: list[int] = array.tolist()
    return numbers
