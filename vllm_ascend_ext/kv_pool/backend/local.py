"""The embedded store: a bounded pool in shared memory between the processes of one host; must never know requests.

No server: every client maps the same files (``arena``) and changes one index (``local_table``) under one lock, which is
never held while bytes are copied. Whoever copies has *pinned* the slot, and a pinned slot's bytes stay where they are.

What a death leaves behind: a client killed at any instruction takes its locks with it; a half changed index is derived
anew by whoever locks it next; leases, pins and open writes of the dead are cleared away when a client opens the pool,
and before a write is refused for want of room or because another one is open. What remains: a client that is *stopped*
(SIGSTOP) while it holds the lock, some 0.1 to 0.5 ms a call, makes the others answer TIMEOUT after ``lock_timeout``
until it goes on or is killed; one stopped while it copies keeps nobody waiting, only its blocks from being evicted.

Native codes are the values of ``errors.Status``. A GVA is ``GVA_BASE`` plus the offset in the arena; from bit 45 on it
carries the number of its allocation, so that an address kept for too long is refused, not taken for its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from vllm_ascend_ext.kv_pool.backend import local_table
from vllm_ascend_ext.kv_pool.backend.arena import GRANULE, SegmentSpec, destroy_segment, pool_folder
from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL, Addresses, Backend, KeyInfo
from vllm_ascend_ext.kv_pool.backend.copier import Copier, HostCopier, copy_fenced
from vllm_ascend_ext.kv_pool.backend.local_hash import Digests, Ints
from vllm_ascend_ext.kv_pool.backend.local_rows import Keys, Rows, numbers
from vllm_ascend_ext.kv_pool.backend.local_session import Session
from vllm_ascend_ext.kv_pool.backend.local_table import OPEN, PUBLISHED, RESERVED, H, Mask, Table
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import ConfigError, DeadlineExceeded, Status, as_int
from vllm_ascend_ext.kv_pool.fence import Fence

MAX_CAPACITY = 8 << 40
MAX_TTL_MS = 1 << 40
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


class LocalBackend(Backend):
    """One client of a local pool. See ``Backend`` for the calls; what is said here is this engine's own.

    Args:
        name_or_path: a name (the pool lies under /dev/shm), or the absolute path of a folder.
        capacity_bytes: size of the arena, rounded down to whole pages; all clients must give the same.
        lock_timeout: seconds to wait for the index before a call answers TIMEOUT.
        open_timeout: seconds to wait for another process that is still making the pool.
        keep: leave the pool when its last client closes, instead of removing it.
        copier: moves the bytes; the default is for blocks in host memory.
        clock: what leases end by.

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
        folder = pool_folder(name_or_path)
        capacity = as_int(capacity_bytes)
        if capacity is None or not GRANULE <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity_bytes={capacity_bytes!r}: allowed are {GRANULE} to {MAX_CAPACITY}")
        for field, seconds in (("lock_timeout", lock_timeout), ("open_timeout", open_timeout)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 86400:
                raise ConfigError(f"{field}={seconds!r}: allowed are numbers of seconds above 0, up to 86400")
        capacity -= capacity % GRANULE
        size = local_table.table_bytes(capacity)
        spec = SegmentSpec(folder, capacity, size, local_table.VERSION, float(open_timeout), keep)
        self._copier: Copier = HostCopier() if copier is None else copier
        self._session = Session(spec, float(lock_timeout), clock)

    # -- the key path -------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 per key, 0 for one that can't be a key. Counts as a use. Raises DeadlineExceeded."""
        usable = Keys.of(keys)
        answer = np.zeros(len(keys), np.int64)
        with self._session.call(), self._session.locked() as table:
            slots = table.find(usable.digests)
            there = table.in_state(slots, PUBLISHED)
            table.touch(slots[there])
            answer[usable.at] = there
        return answer.tolist()

    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """REFUSED for a key that somebody alive has an open write of."""
        rows = Rows.of(keys, addrs, sizes)
        first, twin = rows.keys.first_of_each()
        unique = rows if len(first) == len(twin) else rows.take(first)
        codes = np.full(len(first), Status.TIMEOUT, np.int64)
        slots, entered = np.full(len(first), -1, np.int64), 0
        with self._session.call():
            try:
                with self._session.changing() as table:
                    slots = self._reserve(table, unique, codes)
                    entered = int(table.header[H.ENTERED])
            except DeadlineExceeded:
                pass
            mine = np.flatnonzero(slots >= 0)
            if len(mine):
                codes[mine] = self._fill(unique.take(mine), slots[mine], entered, fence)
        return _answer(len(keys), rows.keys, codes[twin])

    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """REFUSED for a value whose size isn't exactly that of the key's segments; nothing of it is written."""
        rows = Rows.of(keys, addrs, sizes)
        codes = np.full(len(rows.totals), Status.TIMEOUT, np.int64)
        good = slots = starts = np.empty(0, np.int64)
        with self._session.call():
            try:
                with self._session.locked() as table:
                    slots = table.find(rows.keys.digests)
                    there = table.in_state(slots, PUBLISHED)
                    fits = there & (table.size[np.maximum(slots, 0)] == rows.totals)
                    codes[:] = np.where(there, np.where(fits, Status.CANCELLED, Status.REFUSED), Status.MISSING)
                    good = np.flatnonzero(fits)
                    slots = slots[good]
                    starts = self._offsets(table, slots)
                    table.touch(slots)
                    table.pin(self._session.client, slots)
            except DeadlineExceeded:
                pass
            if len(good):
                chosen = rows.take(good)
                with self._session.unpinning(slots):
                    done = self._copy(chosen, starts, False, fence)
                codes[good[np.cumsum(chosen.totals) <= done]] = Status.OK
        return _answer(len(keys), rows.keys, codes)

    def remove(self, keys: Sequence[str]) -> list[int]:
        """MISSING for a key that isn't published, REFUSED for one that anybody holds a lease on."""
        usable = Keys.of(keys)
        codes = np.full(len(usable.at), Status.TIMEOUT, np.int64)
        with self._session.call():
            try:
                with self._session.changing() as table:
                    for turn in usable.turns():
                        slots = table.find(usable.digests[turn])
                        there = table.in_state(slots, PUBLISHED)
                        leased = there & table.leased(np.maximum(slots, 0), self._session.now())
                        codes[turn] = np.where(there, np.where(leased, Status.REFUSED, Status.OK), Status.MISSING)
                        table.drop(slots[there & ~leased])
            except DeadlineExceeded:
                pass
        return _answer(len(keys), usable, codes)

    # -- global addresses ---------------------------------------------------------------------------------------------

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """A client that is given the address of somebody's unfinished write takes part in that write from then on."""
        answer = np.zeros(len(keys), np.int64)
        lengths = numbers(sizes)
        if lengths is None or len(lengths) != len(keys):
            return answer.tolist()
        usable = Keys.of(keys)
        usable = usable.take(np.flatnonzero(lengths[usable.at] > 0))
        with self._session.call():
            try:
                with self._session.changing() as table:
                    slots = self._find_living(table, usable.digests)
                    new = np.flatnonzero(slots < 0)
                    new = new[usable.take(new).first_of_each()[0]]
                    self._make_room(table, usable.digests[new], lengths[usable.at[new]], OPEN)
                    slots = table.find(usable.digests)
                    table.writers[slots[table.in_state(slots, OPEN)]] |= self._session.bit
                    there = slots >= 0
                    answer[usable.at[there]] = self._gvas(table, slots[there])
            except DeadlineExceeded:
                pass
        return answer.tolist()

    def batch_copy(self, gvas: Addresses, addrs: Addresses, sizes: Addresses, direction: int, fence: Fence) -> int:
        """Checked before anything is copied. What is published is never written again: ranges that save into it are
        left out, as a put of an existing key is. REFUSED to read from what isn't published."""
        addresses, blocks, lengths = numbers(gvas), numbers(addrs), numbers(sizes)
        if addresses is None or blocks is None or lengths is None or not len(addresses) == len(blocks) == len(lengths):
            return Status.INVALID.value
        if direction not in (LOCAL_TO_GLOBAL, GLOBAL_TO_LOCAL) or (blocks <= 0).any() or (lengths < 0).any():
            return Status.INVALID.value
        saving = direction == LOCAL_TO_GLOBAL
        with self._session.call():
            try:
                with self._session.locked() as table:
                    slots, offsets, valid = self._resolve(table, addresses, lengths)
                    writing = saving & table.in_state(slots, OPEN) & table.takes_part(slots, self._session.bit)
                    if not (valid & (writing | table.in_state(slots, PUBLISHED))).all():
                        return Status.REFUSED.value
                    if saving:
                        slots, offsets, blocks, lengths = (a[writing] for a in (slots, offsets, blocks, lengths))
                    table.pin(self._session.client, slots)
            except DeadlineExceeded:
                return Status.TIMEOUT.value
            with self._session.unpinning(slots):
                host = self._session.segment.address + offsets
                done = copy_fenced(self._copier, saving, host, blocks, lengths, fence)
        return (Status.OK if done == int(lengths.sum()) else Status.CANCELLED).value

    def batch_write_finish(self, keys: Sequence[str], results: Sequence[int]) -> list[int]:
        """MISSING for an unknown key, REFUSED for a write that this client has no part in. Nothing checks that bytes
        were written. A result that isn't an integer is a failure. What is published already stays so."""
        if not hasattr(results, "__len__") or len(results) != len(keys):
            return [Status.INVALID.value] * len(keys)
        usable = Keys.of(keys)
        good = np.array([as_int(results[position]) == 0 for position in usable.at.tolist()], np.bool_)
        codes = np.full(len(usable.at), Status.TIMEOUT, np.int64)
        with self._session.call():
            try:
                with self._session.changing() as table:
                    for turn in usable.turns():
                        codes[turn] = self._finish(table, usable.digests[turn], good[turn])
            except DeadlineExceeded:
                self._session.owe(lambda table: self._give_up(table, usable.digests))
        return _answer(len(keys), usable, codes)

    def batch_get_key_info(self, keys: Sequence[str]) -> list[KeyInfo]:
        """Counts as a use. Raises DeadlineExceeded when the index can't be had."""
        usable = Keys.of(keys)
        sizes, gvas = np.zeros((2, len(keys)), np.int64)
        with self._session.call(), self._session.locked() as table:
            slots = table.find(usable.digests)
            there = table.in_state(slots, PUBLISHED)
            slots = slots[there]
            table.touch(slots)
            sizes[usable.at[there]] = table.size[slots]
            gvas[usable.at[there]] = self._gvas(table, slots)
        return [LocalKeyInfo(size, gva) for size, gva in zip(sizes.tolist(), gvas.tolist(), strict=True)]

    # -- leases -------------------------------------------------------------------------------------------------------

    def batch_add_lease(self, keys: Sequence[str], ttl_ms: int) -> list[int]:
        """MISSING for a key that isn't published. Leases of one client on one key add up and end together. Counts as
        a use."""
        ttl = as_int(ttl_ms)
        if ttl is None or not 0 < ttl <= MAX_TTL_MS:
            return [Status.INVALID.value] * len(keys)
        usable = Keys.of(keys)
        codes = np.full(len(usable.at), Status.TIMEOUT, np.int64)
        with self._session.call():
            try:
                with self._session.locked() as table:
                    slots = table.find(usable.digests)
                    there = table.in_state(slots, PUBLISHED)
                    table.touch(slots[there])
                    now = self._session.now()
                    table.lease(self._session.client, slots[there], now + ttl * 1_000_000, now)
                    codes[:] = np.where(there, Status.OK, Status.MISSING)
            except DeadlineExceeded:
                pass
        return _answer(len(keys), usable, codes)

    def batch_remove_lease(self, keys: Sequence[str]) -> int:
        """REFUSED if one of the keys has no lease of this client in force (any more), INVALID if one can't be a key;
        the others' leases are given back all the same. After TIMEOUT they are, too, as soon as that can be done."""
        usable = Keys.of(keys)
        turns = list(usable.turns())

        def remove(table: Table) -> bool:
            client, now = self._session.client, self._session.now()
            return bool(np.all([table.unlease(client, table.find(usable.digests[turn]), now).all() for turn in turns]))

        with self._session.call():
            try:
                with self._session.locked() as table:
                    complete = remove(table)
            except DeadlineExceeded:
                self._session.owe(remove)
                return Status.TIMEOUT.value
        if len(usable.at) < len(keys):
            return Status.INVALID.value
        return (Status.OK if complete else Status.REFUSED).value

    # -- ledgers and the end ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Figures of the whole pool: capacity_bytes, used_bytes, keys, evictions, rebuilds, clients; and open_writes,
        leases and pins of all its clients together."""
        return self._session.stats()

    def ledger(self) -> dict[str, int]:
        """What this client holds now: open_writes, leases, pins. All 0 after close."""
        return self._session.ledger()

    def close(self) -> None:
        """Gives back open writes and leases. A call that is still copying goes on, and lets go when it ends."""
        self._session.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _reserve(self, table: Table, rows: Rows, codes: Ints) -> Ints:
        """Codes for the keys that are there or find no room; for the others a pinned slot, -1 where there is none."""
        slots = self._find_living(table, rows.keys.digests)
        codes[:] = Status.FULL
        known = np.flatnonzero(slots >= 0)
        if not len(known):  # what a put is for
            mine = self._make_room(table, rows.keys.digests, rows.totals, RESERVED)
        else:
            there = table.in_state(slots[known], PUBLISHED)
            table.touch(slots[known[there]])
            codes[known] = np.where(there, Status.OK, Status.REFUSED)
            mine, new = np.full(len(slots), -1, np.int64), np.flatnonzero(slots < 0)
            mine[new] = self._make_room(table, rows.keys.digests[new], rows.totals[new], RESERVED)
        table.pin(self._session.client, mine[mine >= 0])
        return mine

    def _fill(self, rows: Rows, slots: Ints, entered: int, fence: Fence) -> Ints:
        """Copy into RESERVED slots, publish those that are complete and drop the others; one code per slot.

        ``entered`` tells how things stood when they were reserved: if no key became findable since, none has a twin.
        """
        codes = np.full(len(slots), Status.TIMEOUT, np.int64)
        done = 0
        try:
            done = self._copy(rows, self._offsets(self._session.table, slots), True, fence)
        finally:
            complete = np.cumsum(rows.totals) <= done
            self._session.owe(lambda table: table.unpin(self._session.client, slots))
            try:
                with self._session.changing() as table:
                    publish = stored = complete
                    if table.header[H.ENTERED] != entered:
                        twins = table.find(rows.keys.digests)
                        publish = complete & (twins < 0)
                        stored = publish | table.in_state(twins, PUBLISHED)
                    table.publish(slots[publish])
                    table.drop(slots[~publish])
                    codes[:] = np.where(complete, np.where(stored, Status.OK, Status.REFUSED), Status.CANCELLED)
            except DeadlineExceeded:
                self._session.owe(lambda table: table.drop(slots))
        return codes

    def _copy(self, rows: Rows, starts: Ints, saving: bool, fence: Fence) -> int:
        """Copy each row's segments to or from its value, row by row; the bytes copied."""
        host = self._session.segment.address + starts[:, None] + np.cumsum(rows.sizes, axis=1) - rows.sizes
        return copy_fenced(self._copier, saving, host.ravel(), rows.addrs.ravel(), rows.sizes.ravel(), fence)

    def _find_living(self, table: Table, digests: Digests) -> Ints:
        """The slots of the keys, after clearing away unfinished writes of the dead."""
        slots = table.find(digests)
        if (slots >= 0).any() and table.in_state(slots, OPEN).any() and table.reap():
            slots = table.find(digests)
        return slots

    def _make_room(self, table: Table, digests: Digests, sizes: Ints, state: int) -> Ints:
        slots = table.reserve(digests, sizes, self._session.bit, state, self._session.now())
        left = np.flatnonzero(slots < 0)
        if len(left) and table.reap():
            slots[left] = table.reserve(digests[left], sizes[left], self._session.bit, state, self._session.now())
        return slots

    def _finish(self, table: Table, digests: Digests, good: Mask) -> Ints:
        """Finish the writes of distinct keys; one code per key."""
        slots = table.find(digests)
        there, part = table.in_state(slots, PUBLISHED), table.takes_part(slots, self._session.bit)
        table.publish(slots[part & good])
        table.leave(slots[part & ~good], self._session.bit)
        return np.where(slots < 0, Status.MISSING, np.where(there | part, Status.OK, Status.REFUSED)).astype(np.int64)

    def _give_up(self, table: Table, digests: Digests) -> None:
        slots = np.unique(table.find(digests))
        table.leave(slots[table.takes_part(slots, self._session.bit)], self._session.bit)

    @staticmethod
    def _offsets(table: Table, slots: Ints) -> Ints:
        return table.starts(slots) * GRANULE

    def _gvas(self, table: Table, slots: Ints) -> Ints:
        table.map_pages(slots)
        tags = table.generation[slots].astype(np.int64) & _TAG_MASK
        return (tags << _TAG_SHIFT) + GVA_BASE + self._offsets(table, slots)

    def _resolve(self, table: Table, gvas: Ints, lengths: Ints) -> tuple[Ints, Ints, Mask]:
        """(slot, offset in the arena, whether the whole range lies in that slot's value) of each global range."""
        offsets = (gvas & ((1 << _TAG_SHIFT) - 1)) - GVA_BASE
        slots = table.slots_at(offsets // GRANULE)
        rows = np.maximum(slots, 0)
        begins = self._offsets(table, rows)
        within = (offsets >= begins) & (lengths <= begins + table.size[rows] - offsets)  # a sum could overflow
        same = (table.generation[rows].astype(np.int64) & _TAG_MASK) == gvas >> _TAG_SHIFT
        return slots, offsets, (slots >= 0) & within & same


def destroy(name_or_path: str, force: bool = False) -> bool:
    """Remove a pool; False if there is none. ConfigError while clients live, unless ``force``: they keep what they have
    mapped, and share it with nobody new."""
    return destroy_segment(pool_folder(name_or_path), force)


def _answer(count: int, usable: Keys, codes: Ints) -> list[int]:
    """The codes at their keys' positions, INVALID at all others."""
    answer = np.full(count, Status.INVALID, np.int64)
    answer[usable.at] = codes
    return answer.tolist()
