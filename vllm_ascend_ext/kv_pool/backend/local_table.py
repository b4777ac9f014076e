"""The index of a local pool: which key lies where, who writes, leases or copies it; must never copy a value.

Arrays in shared memory, one row per *slot*, changed only under the segment's lock. The slots are the truth: a slot is
what its one byte of ``state`` says, every change of which is a single store, made after everything that it promises is
in place and before anything that it forbids begins. All else (hash index, free stretches, page map) is derived. A
process that dies half way leaves ``DIRTY`` set, and whoever takes the lock next derives it all again.

States: FREE -> RESERVED (a put's own, found by nobody) or OPEN (allocated by key, an unfinished write) -> PUBLISHED.
A slot that is dropped or evicted is FREE at once unless somebody is copying; then it is DYING until the last pin goes.
Stretches, like ``offset``, are counted in pages of GRANULE bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.backend import local_space as space
from vllm_ascend_ext.kv_pool.backend.arena import GRANULE, MAX_CLIENTS, Segment
from vllm_ascend_ext.kv_pool.backend.local_hash import Digests, HashIndex, Ints, buckets_for

logger = logging.getLogger(__name__)

VERSION = 2
"""Raised whenever the arrays change their meaning, order or types."""

FREE, RESERVED, OPEN, PUBLISHED, DYING = range(5)

_STEP = 1024  # slots that are given memory at a time
_LOOK_AHEAD = 4096  # candidates for eviction that are sorted at a time

Mask = npt.NDArray[np.bool_]


class H(IntEnum):
    """Fields of the table's header, int64 each."""

    DIRTY = 0
    HIGH = 1  # slots at and above were never used
    BACKED = 2  # slots below have memory behind them
    STRETCHES = 3  # free stretches
    BUCKETS = 4  # the hash index's shape, two fields
    TICK = 6  # counts uses
    GENERATION = 7  # counts allocations
    USED_PAGES = 8
    EVICTIONS = 9
    REBUILDS = 10
    ENTERED = 11  # counts the times that keys became findable


@dataclass(frozen=True)
class _Array:
    """Where an array lies, and what it is."""

    offset: int
    dtype: npt.DTypeLike
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def on(self, buffer: memoryview) -> npt.NDArray[Any]:
        count = int(np.prod(self.shape))
        return np.frombuffer(buffer, self.dtype, count, self.offset).reshape(self.shape)


_PER_SLOT: dict[str, tuple[npt.DTypeLike, int]] = {
    "digest": (np.uint64, 2),
    "size": (np.int64, 1),
    "last_used": (np.int64, 1),
    "writers": (np.uint64, 1),
    "offset": (np.uint32, 1),
    "generation": (np.uint32, 1),
    "bucket": (np.int32, 1),
    "free_start": (np.uint32, 1),
    "free_end": (np.uint32, 1),
    "mapped": (np.uint8, 1),
    "state": (np.uint8, 1),
}
_PER_CLIENT: dict[str, npt.DTypeLike] = {"lease_until": np.int64, "lease_count": np.int32, "pins": np.int32}


def _layout(pages: int) -> tuple[dict[str, _Array], int]:
    """Every array for an arena of ``pages`` pages, and the bytes of all. Each starts on a page of its own."""
    slots = pages + 1  # one more, for there may be one more free stretch than values
    shapes: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
        "header": (np.int64, (64,)),
        "clients": (np.int64, (MAX_CLIENTS,)),
        "page_slot": (np.int32, (pages,)),
        "buckets": (np.int32, (buckets_for(slots),)),
    }
    shapes |= {name: (dtype, (slots, words) if words > 1 else (slots,)) for name, (dtype, words) in _PER_SLOT.items()}
    shapes |= {name: (dtype, (MAX_CLIENTS, slots)) for name, dtype in _PER_CLIENT.items()}
    arrays, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        arrays[name] = _Array(end, dtype, shape)
        end += -(-arrays[name].row_bytes * shape[0] // GRANULE) * GRANULE
    return arrays, end


def table_bytes(capacity_bytes: int) -> int:
    """The length of the table for one capacity; sparse, most of it never has memory behind it."""
    return _layout(capacity_bytes // GRANULE)[1]


def pages_of(sizes: Ints) -> Ints:
    return -(-sizes // GRANULE)


class Table:
    """The arrays of one segment. Every method needs the segment's lock."""

    header: Ints
    clients: Ints
    page_slot: npt.NDArray[np.int32]
    buckets: npt.NDArray[np.int32]
    digest: Digests
    size: Ints
    last_used: Ints
    writers: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint32]
    bucket: npt.NDArray[np.int32]
    free_start: npt.NDArray[np.uint32]
    free_end: npt.NDArray[np.uint32]
    mapped: npt.NDArray[np.uint8]
    state: npt.NDArray[np.uint8]
    lease_until: Ints
    lease_count: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int32]

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.pages = segment.spec.capacity_bytes // GRANULE
        self._arrays, _ = _layout(self.pages)
        for name, array in self._arrays.items():
            setattr(self, name, array.on(segment.table))
        shape = self.header[H.BUCKETS : H.BUCKETS + 2]
        self._index = HashIndex(self.buckets, self.digest, self.bucket, shape)
        self._queue = self._queue_ticks = np.empty(0, np.int64)

    @classmethod
    def initialise(cls, segment: Segment) -> None:
        """Make the table of a new segment, whose files are all zeros: an empty pool."""
        table = cls(segment)
        for name in ("header", "clients", "page_slot"):
            table._reserve(name, 0, table._arrays[name].shape[0])
        table._back(1)
        table.rebuild(np.uint64(0))

    # -- who is there -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a change: until ``commit`` the derived arrays count as broken."""
        self.header[H.DIRTY] = 1

    def commit(self) -> None:
        self.header[H.DIRTY] = 0

    def settle(self) -> None:
        """Derive everything anew if somebody died, or was interrupted, in the middle of a change."""
        if self.header[H.DIRTY]:
            logger.warning("%s: a change of the index was left half done; rebuilding", self._segment.spec.folder)
            self.rebuild(bits(np.array([c for c in self.active().tolist() if self._segment.alive(c)], np.int64)))
            self.header[H.REBUILDS] += 1

    def active(self) -> Ints:
        """Ids of the clients that are signed in, dead ones that nobody noticed yet included."""
        return np.flatnonzero(self.clients)

    def sign_in(self) -> int:
        """A free client id, or -1 if there is none. Dead clients are cleared away first."""
        self.reap()
        free = np.flatnonzero(self.clients == 0)
        if not len(free):
            return -1
        client = int(free[0])
        for name in _PER_CLIENT:
            self._reserve(name, client, 0, int(self.header[H.BACKED]))
        self.clients[client] = 1
        return client

    def sign_out(self, client: int) -> None:
        """Give back whatever ``client`` still holds, and its id."""
        high = self.header[H.HIGH]
        self.lease_until[client, :high] = 0
        self.lease_count[client, :high] = 0
        pinned = np.flatnonzero(self.pins[client, :high])
        self.pins[client, pinned] = 0
        unfinished = np.flatnonzero(np.isin(self.state[:high], (RESERVED, OPEN)))
        self.leave(unfinished[self.takes_part(unfinished, bits(np.array([client])))], bits(np.array([client])))
        self.bury(pinned)
        self.clients[client] = 0

    def reap(self) -> bool:
        """Clear away what dead clients left: leases, pins, open writes. True if there was a dead one."""
        dead = [client for client in self.active().tolist() if not self._segment.alive(client)]
        for client in dead:
            logger.warning("%s: client %d died; clearing up behind it", self._segment.spec.folder, client)
            self.sign_out(client)
        return bool(dead)

    # -- finding: -1 stands for a missing slot throughout -------------------------------------------------------------

    def find(self, digests: Digests) -> Ints:
        """The slot of each key, OPEN or PUBLISHED; -1 where there is none."""
        return self._index.find(digests)

    def in_state(self, slots: Ints, state: int) -> Mask:
        there: Mask = (slots >= 0) & (self.state[np.maximum(slots, 0)] == state)
        return there

    def takes_part(self, slots: Ints, bit: np.uint64) -> Mask:
        """Which slots are unfinished writes that the client of ``bit`` has a part in."""
        rows = np.maximum(slots, 0)
        unfinished = (self.state[rows] == OPEN) | (self.state[rows] == RESERVED)
        part: Mask = (slots >= 0) & unfinished & ((self.writers[rows] & bit) != 0)
        return part

    def starts(self, slots: Ints) -> Ints:
        """The first page of each slot's value."""
        return self.offset[slots].astype(np.int64)

    def map_pages(self, slots: Ints) -> None:
        """Let ``slots_at`` know these slots; done when their addresses are handed out, which is not for every value."""
        slots = slots[self.mapped[slots] == 0]
        pages = pages_of(self.size[slots])
        first = np.repeat(self.starts(slots) - (np.cumsum(pages) - pages), pages)
        self.page_slot[first + np.arange(len(first))] = np.repeat(slots, pages)
        self.mapped[slots] = 1

    def slots_at(self, pages: Ints) -> Ints:
        """The slot that holds, or once held, each page of the arena; -1 outside of the arena."""
        inside = (pages >= 0) & (pages < self.pages)
        return np.where(inside, self.page_slot[np.where(inside, pages, 0)], -1).astype(np.int64)

    def touch(self, slots: Ints) -> None:
        """Mark as just used. Within a batch the first counts as last used: a prefix must lose its tail first."""
        tick = self.header[H.TICK]
        self.last_used[slots[::-1]] = tick + 1 + np.arange(len(slots))
        self.header[H.TICK] = tick + len(slots)

    # -- leases and pins ----------------------------------------------------------------------------------------------

    def pin(self, client: int, slots: Ints) -> None:
        """Keep the bytes of each slot in place while they are copied."""
        np.add.at(self.pins[client], slots, 1)

    def unpin(self, client: int, slots: Ints) -> None:
        np.subtract.at(self.pins[client], slots, 1)
        self.bury(slots)

    def lease(self, client: int, slots: Ints, until: int, now: int) -> None:
        """One lease more on each slot, of which all last until the latest of their ends."""
        unique = np.unique(slots)
        expired = unique[self.lease_until[client, unique] <= now]
        self.lease_count[client, expired] = 0
        np.add.at(self.lease_count[client], slots, 1)
        self.lease_until[client, unique] = np.maximum(self.lease_until[client, unique], until)

    def unlease(self, client: int, slots: Ints, now: int) -> Mask:
        """One lease less on each of these distinct slots; False where this client holds none that is in force."""
        rows = np.maximum(slots, 0)
        held: Mask = (slots >= 0) & (self.lease_count[client, rows] > 0) & (self.lease_until[client, rows] > now)
        slots = slots[held]
        self.lease_count[client, slots] -= 1
        self.lease_until[client, slots[self.lease_count[client, slots] == 0]] = 0
        return held

    def leased(self, slots: Ints, now: int) -> Mask:
        """Which slots somebody holds a lease on that is in force."""
        leased: Mask = np.any(self.lease_until[np.ix_(self.active(), slots)] > now, axis=0)
        return leased

    def pinned(self, slots: Ints) -> Mask:
        """Which slots somebody copies."""
        pinned: Mask = np.any(self.pins[np.ix_(self.active(), slots)] > 0, axis=0)
        return pinned

    # -- making and dropping values -----------------------------------------------------------------------------------

    def reserve(self, digests: Digests, sizes: Ints, bit: np.uint64, state: int, now: int) -> Ints:
        """A slot with room for each value, -1 where none fits, evicting the least recently used ones for it.

        ``state`` is RESERVED or OPEN; OPEN slots are found by their keys, which must not be there yet.
        """
        pages = pages_of(sizes)
        slots = np.full(len(sizes), -1, np.int64)
        possible = np.flatnonzero((pages > 0) & (pages <= self.pages))
        offsets, victims = self._plan(pages[possible], now)
        self._evict(victims)
        placed = possible[offsets >= 0]
        rows = self._vacant(len(placed))
        placed, offsets = placed[: len(rows)], offsets[offsets >= 0][: len(rows)]
        self._set_free(space.carve(self._free(), offsets, pages[placed]))
        generation = self.header[H.GENERATION]
        self.header[H.GENERATION] = generation + len(rows)
        self.digest[rows] = digests[placed]
        self.size[rows] = sizes[placed]
        self.offset[rows] = offsets
        self.generation[rows] = (generation + 1 + np.arange(len(rows))) & 0xFFFFFFFF
        self.writers[rows] = bit
        self.mapped[rows] = 0
        self.state[rows] = state
        self.header[H.USED_PAGES] += int(pages[placed].sum())
        if state == OPEN:
            self._enter(rows)
        slots[placed] = rows
        return slots

    def publish(self, slots: Ints) -> None:
        """Let RESERVED or OPEN slots, whose bytes are all there, be found."""
        hidden = slots[self.state[slots] == RESERVED]
        self.touch(slots)
        self.state[slots] = PUBLISHED
        self._enter(hidden)

    def leave(self, slots: Ints, bit: np.uint64) -> None:
        """Take a client's part out of unfinished writes; the last part out drops them."""
        self.writers[slots] &= ~bit
        self.drop(slots[self.writers[slots] == 0])

    def drop(self, slots: Ints) -> None:
        """Forget values and unfinished writes; their room is free once nobody copies any more."""
        if not len(slots):
            return
        self._index.delete(slots)
        self.state[slots] = DYING
        self.bury(slots)

    def bury(self, slots: Ints) -> None:
        """Free those of ``slots`` that are DYING and that nobody copies any more."""
        dying = slots[self.state[slots] == DYING]
        if len(dying):
            dying = np.unique(dying)
            self._release(dying[~self.pinned(dying)])

    def _evict(self, victims: Ints) -> None:
        if len(victims):
            self._index.delete(victims)
            self._release(victims)
            self.header[H.EVICTIONS] += len(victims)

    def _release(self, slots: Ints) -> None:
        self.state[slots] = FREE
        rows = np.ix_(self.active(), slots)
        self.lease_until[rows] = 0
        self.lease_count[rows] = 0
        pages = pages_of(self.size[slots])
        self._set_free(space.join(self._free(), self.starts(slots), pages))
        self.header[H.USED_PAGES] -= int(pages.sum())

    def _plan(self, pages: Ints, now: int) -> tuple[Ints, Ints]:
        """Where to put values of these lengths, and which slots to evict for it: the oldest, no more than needed."""
        free = self._free()
        offsets = space.fit(free, pages)
        victims, count = np.empty(0, np.int64), 0
        while (offsets < 0).any():
            if count == len(victims):
                victims = self._oldest(2 * count + len(pages), now)
                if len(victims) <= count:
                    break
            starts, lengths = self.starts(victims), pages_of(self.size[victims])
            missing = int(pages[offsets < 0].sum())
            enough = int(np.searchsorted(np.cumsum(lengths[count:]), missing)) + 1
            count = min(count + max(enough, count // 2), len(victims))
            offsets = space.fit(space.join(free, starts[:count], lengths[:count]), pages)
        if not count:
            return offsets, victims[:0]
        chosen = offsets >= 0
        needed = space.overlaps(starts[:count], lengths[:count], offsets[chosen], pages[chosen])
        return offsets, victims[:count][needed]

    def _oldest(self, wanted: int, now: int) -> Ints:
        """At least ``wanted`` evictable slots, least recently used first; fewer only if there are no more.

        Sorting all slots at every put would be too dear, so the oldest few thousand are sorted ahead. One that was
        not used since is still older than everything that is not in the queue.
        """
        evictable = self._evictable(wanted, now)
        for look_ahead in (max(_LOOK_AHEAD, 4 * wanted), None):
            if len(evictable) >= wanted:
                break
            live = np.flatnonzero(self.state[: self.header[H.HIGH]] == PUBLISHED)
            if look_ahead is not None and look_ahead < len(live):
                live = live[np.argpartition(self.last_used[live], look_ahead)[:look_ahead]]
            self._queue = live[np.argsort(self.last_used[live])]
            self._queue_ticks = self.last_used[self._queue]
            evictable = self._evictable(wanted, now)
        return evictable

    def _evictable(self, wanted: int, now: int) -> Ints:
        """The evictable slots at the head of the queue, or in all of it if there are too few."""
        for length in (2 * wanted, len(self._queue)):
            queue = self._queue[:length]
            same = (self.state[queue] == PUBLISHED) & (self.last_used[queue] == self._queue_ticks[:length])
            evictable: Ints = queue[same & ~(self.leased(queue, now) | self.pinned(queue))]
            if len(evictable) >= wanted:
                break
        gone = int(same.argmax()) if same.any() else len(same)  # what was used since, or is not there any more
        self._queue, self._queue_ticks = self._queue[gone:], self._queue_ticks[gone:]
        return evictable

    # -- what is derived ----------------------------------------------------------------------------------------------

    def rebuild(self, alive: np.uint64) -> None:
        """Derive everything from the slots, of which unfinished ones stay only with a writer among ``alive``.

        RESERVED ones must be pinned, too: a put pins what it reserves before it lets go of the lock.
        """
        high = int(self.header[H.HIGH])
        state, pinned = self.state[:high], self.pinned(np.arange(high))
        unfinished = (state == RESERVED) | (state == OPEN)
        state[unfinished & ((self.writers[:high] & alive) == 0)] = DYING
        state[((state == DYING) | (state == RESERVED)) & ~pinned] = FREE
        self._drop_overlaps()
        live = np.flatnonzero(state)
        pages = pages_of(self.size[live])
        whole = (np.zeros(1, np.int64), np.full(1, self.pages, np.int64))
        self._set_free(space.carve(whole, self.starts(live), pages))
        mapped = live[self.mapped[live] == 1]
        self.mapped[mapped] = 0
        self.map_pages(mapped)
        self.header[H.USED_PAGES] = int(pages.sum())
        rows = np.ix_(self.active(), np.flatnonzero(state == FREE))
        self.lease_until[rows] = 0
        self.lease_count[rows] = 0
        self._queue = self._queue_ticks = np.empty(0, np.int64)
        self._index.make_anew(self._findable())
        self.header[H.ENTERED] += 1
        self.commit()

    def _drop_overlaps(self) -> None:
        """Defence in depth: bytes that two slots claim belong to neither."""
        live = np.flatnonzero(self.state[: self.header[H.HIGH]])
        live = live[np.argsort(self.offset[live])]
        starts = self.starts(live)
        clash = np.flatnonzero(starts[1:] < (starts + pages_of(self.size[live]))[:-1])
        if len(clash):
            logger.error("%s: %d values overlap and are dropped", self._segment.spec.folder, len(clash))
            self.state[live[np.concatenate((clash, clash + 1))]] = FREE

    def _findable(self) -> Ints:
        state = self.state[: self.header[H.HIGH]]
        return np.flatnonzero((state == OPEN) | (state == PUBLISHED))

    def _enter(self, slots: Ints) -> None:
        """Make slots findable that are so by their state."""
        self.header[H.ENTERED] += 1
        if not self._index.insert(slots):
            self._index.make_anew(self._findable())

    def _free(self) -> space.Stretches:
        count = self.header[H.STRETCHES]
        return self.free_start[:count].astype(np.int64), self.free_end[:count].astype(np.int64)

    def _set_free(self, free: space.Stretches) -> None:
        count = len(free[0])
        self.free_start[:count], self.free_end[:count] = free
        self.header[H.STRETCHES] = count

    def _vacant(self, count: int) -> Ints:
        """``count`` FREE rows, used ones first; fewer if memory for more of them can't be had."""
        high = int(self.header[H.HIGH])
        rows = np.flatnonzero(self.state[:high] == FREE)[:count]
        new = min(count - len(rows), self.pages - high)
        if high + new > self.header[H.BACKED]:
            try:
                self._back(high + new)
            except OSError as error:
                logger.error("%s: no memory for more keys: %s", self._segment.spec.folder, error)
                new = int(self.header[H.BACKED]) - high
        self.header[H.HIGH] = high + new
        return np.concatenate((rows, np.arange(high, high + new)))

    def _back(self, slots: int) -> None:
        """Put memory behind the rows up to ``slots``; OSError if there is none."""
        upto = min(-(-slots // _STEP) * _STEP, self.pages + 1)
        self._reserve("buckets", 0, buckets_for(upto))
        for name in _PER_SLOT:
            self._reserve(name, 0, upto)
        for client in self.active().tolist():
            for name in _PER_CLIENT:
                self._reserve(name, client, 0, upto)
        self.header[H.BACKED] = upto

    def _reserve(self, name: str, first: int, count: int, columns: int | None = None) -> None:
        """Memory behind ``count`` rows of an array, or behind the first ``columns`` of one row."""
        array = self._arrays[name]
        length = count * array.row_bytes if columns is None else columns * np.dtype(array.dtype).itemsize
        self._segment.reserve_table(array.offset + first * array.row_bytes, length)


def bits(clients: Ints) -> np.uint64:
    """The set of clients as bits of ``writers``."""
    return np.uint64(sum(1 << client for client in clients.tolist()))
