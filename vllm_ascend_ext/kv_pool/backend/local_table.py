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

logger = logging.getLogger(__name__)

VERSION = 1
"""Raised whenever the arrays change their meaning, order or types."""

FREE, RESERVED, OPEN, PUBLISHED, DYING = range(5)
DIGEST_WORDS = 2

_STEP = 4096  # slots that are given memory at a time
_TOMBSTONE = -1
_LOOK_AHEAD = 4096  # candidates for eviction that are sorted at a time

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class H(IntEnum):
    """Fields of the table's header, int64 each."""

    DIRTY = 0
    HIGH = 1  # slots at and above were never used
    BACKED = 2  # slots below have memory behind them
    STRETCHES = 3  # free stretches
    BUCKETS = 4  # buckets of the hash index, a power of two
    FILLED = 5  # buckets that are not empty, tombstones included
    TICK = 6  # counts uses
    GENERATION = 7  # counts allocations
    USED_PAGES = 8
    EVICTIONS = 9
    REBUILDS = 10


@dataclass(frozen=True)
class _Field:
    name: str
    dtype: Any
    per_slot: tuple[int, ...] = ()


_SLOT_FIELDS = (
    _Field("digest", np.uint64, (DIGEST_WORDS,)),
    _Field("size", np.int64),
    _Field("last_used", np.int64),
    _Field("writers", np.uint64),
    _Field("offset", np.uint32),
    _Field("generation", np.uint32),
    _Field("free_start", np.uint32),
    _Field("free_end", np.uint32),
    _Field("state", np.uint8),
)
_CLIENT_FIELDS = (_Field("lease_until", np.int64), _Field("lease_count", np.int32), _Field("pins", np.int32))


def _layout(pages: int) -> tuple[dict[str, tuple[int, Any, tuple[int, ...]]], int]:
    """Offset, dtype and shape of every array for an arena of ``pages`` pages, and the bytes of all."""
    slots = pages + 1  # one more, for there may be one more free stretch than values
    shapes: list[tuple[str, Any, tuple[int, ...]]] = [
        ("header", np.int64, (64,)),
        ("clients", np.int64, (MAX_CLIENTS,)),
        ("page_slot", np.int32, (pages,)),
        ("index", np.int32, (8 << slots.bit_length(),)),
        *((field.name, field.dtype, (slots, *field.per_slot)) for field in _SLOT_FIELDS),
        *((field.name, field.dtype, (MAX_CLIENTS, slots)) for field in _CLIENT_FIELDS),
    ]
    places, end = {}, 0
    for name, dtype, shape in shapes:
        places[name] = (end, dtype, shape)
        end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // GRANULE) * GRANULE
    return places, end


def table_bytes(capacity_bytes: int) -> int:
    """The size of the table's file for one capacity: a sparse file, most of it never backed by memory."""
    return _layout(capacity_bytes // GRANULE)[1]


class Table:
    """The arrays of one segment. Every method needs the segment's lock."""

    header: Ints
    clients: Ints
    page_slot: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    digest: Digests
    size: Ints
    last_used: Ints
    writers: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint32]
    free_start: npt.NDArray[np.uint32]
    free_end: npt.NDArray[np.uint32]
    state: npt.NDArray[np.uint8]
    lease_until: Ints
    lease_count: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int32]

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.pages = segment.spec.capacity_bytes // GRANULE
        self._places, _ = _layout(self.pages)
        buffer = segment.table
        for name, (begin, dtype, shape) in self._places.items():
            array = np.frombuffer(buffer, dtype, int(np.prod(shape)), begin)
            setattr(self, name, array.reshape(shape))
        self._queue = np.empty(0, np.int64)
        self._queue_ticks = np.empty(0, np.int64)

    @staticmethod
    def initialise(segment: Segment) -> None:
        """Make the table of a new segment, whose files are all zeros: an empty pool."""
        table = Table(segment)
        for name in ("header", "clients", "page_slot"):
            begin, dtype, shape = table._places[name]
            segment.reserve_table(begin, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        table._back(1)
        table.rebuild(np.uint64(0))

    # -- who is there ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a change: until ``commit`` the derived arrays count as broken."""
        self.header[H.DIRTY] = 1

    def commit(self) -> None:
        self.header[H.DIRTY] = 0

    def settle(self) -> None:
        """Derive everything anew if somebody died, or was interrupted, in the middle of a change."""
        if self.header[H.DIRTY]:
            logger.warning("%s: a change of the index was left half done; rebuilding", self._segment.spec.folder)
            alive = [client for client in self.active() if self._segment.alive(int(client))]
            self.rebuild(self._bits(np.array(alive, np.int64)))
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
        for field in _CLIENT_FIELDS:
            self._reserve(field.name, client * (self.pages + 1), int(self.header[H.BACKED]))
        self.clients[client] = 1
        return client

    def sign_out(self, client: int) -> None:
        """Give back whatever ``client`` still holds, and its id."""
        bit = self._bits(np.array([client]))
        high = self.header[H.HIGH]
        self.lease_until[client, :high] = 0
        self.lease_count[client, :high] = 0
        pinned = np.flatnonzero(self.pins[client, :high])
        self.pins[client, pinned] = 0
        written = np.flatnonzero(self.writers[:high] & bit)
        self.writers[written] &= ~bit
        orphans = written[self.writers[written] == 0]
        self.drop(orphans[np.isin(self.state[orphans], (RESERVED, OPEN))])
        self.bury(pinned)
        self.clients[client] = 0

    def reap(self) -> bool:
        """Clear away what dead clients left: leases, pins, open writes. True if there was a dead one."""
        dead = [int(client) for client in self.active() if not self._segment.alive(int(client))]
        for client in dead:
            logger.warning("%s: client %d died; clearing up behind it", self._segment.spec.folder, client)
            self.sign_out(client)
        return bool(dead)

    # -- finding --------------------------------------------------------------------------------------------------

    def find(self, digests: Digests) -> Ints:
        """The slot of each key, OPEN or PUBLISHED; -1 where there is none."""
        return self._probe(digests)[0]

    def published(self, slots: Ints) -> Mask:
        return (slots >= 0) & (self.state[slots] == PUBLISHED)

    def slots_at(self, pages: Ints) -> Ints:
        """The slot that holds, or once held, each page of the arena; -1 outside of the arena."""
        inside = (pages >= 0) & (pages < self.pages)
        return np.where(inside, self.page_slot[np.where(inside, pages, 0)], -1).astype(np.int64)

    def touch(self, slots: Ints) -> None:
        """Mark as just used. Within a batch the first counts as last used: a prefix must lose its tail first."""
        tick = self.header[H.TICK]
        self.last_used[slots[::-1]] = tick + 1 + np.arange(len(slots))
        self.header[H.TICK] = tick + len(slots)

    # -- leases and pins ------------------------------------------------------------------------------------------

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

    def unlease(self, client: int, slot: int, now: int) -> bool:
        """One lease less; False if this client holds none that is still in force."""
        if slot < 0 or self.lease_count[client, slot] == 0 or self.lease_until[client, slot] <= now:
            return False
        self.lease_count[client, slot] -= 1
        if self.lease_count[client, slot] == 0:
            self.lease_until[client, slot] = 0
        return True

    def leased(self, slots: Ints, now: int) -> Mask:
        """Which slots somebody holds a lease on that is in force."""
        leased: Mask = (self.lease_until[np.ix_(self.active(), slots)] > now).any(axis=0)
        return leased

    def pinned(self, slots: Ints) -> Mask:
        """Which slots somebody copies."""
        pinned: Mask = (self.pins[np.ix_(self.active(), slots)] > 0).any(axis=0)
        return pinned

    # -- making and dropping values -------------------------------------------------------------------------------

    def reserve(self, digests: Digests, sizes: Ints, client: int, state: int, now: int) -> Ints:
        """A slot with room for each value, -1 where none fits, evicting the least recently used ones for it.

        ``state`` is RESERVED or OPEN; OPEN slots are found by their keys, which must not be there yet.
        """
        pages = -(-sizes // GRANULE)
        possible = np.flatnonzero((pages > 0) & (pages <= self.pages))
        slots = np.full(len(sizes), -1, np.int64)
        offsets, victims = self._plan(pages[possible], now)
        self._evict(victims)
        placed = possible[offsets >= 0]
        offsets = offsets[offsets >= 0]
        rows = self._vacant(len(placed))
        placed, offsets = placed[: len(rows)], offsets[: len(rows)]
        self._set_free(space.carve(self._free(), offsets, pages[placed]))
        generation = self.header[H.GENERATION]
        self.header[H.GENERATION] = generation + len(rows)
        self.digest[rows] = digests[placed]
        self.size[rows] = sizes[placed]
        self.offset[rows] = offsets
        self.generation[rows] = (generation + 1 + np.arange(len(rows))) & 0xFFFFFFFF
        self.writers[rows] = self._bits(np.array([client]))
        self.state[rows] = state
        self._map_pages(rows)
        self.header[H.USED_PAGES] += int(pages[placed].sum())
        if state == OPEN:
            self._insert(rows)
        slots[placed] = rows
        return slots

    def publish(self, slots: Ints) -> None:
        """Let RESERVED or OPEN slots, whose bytes are all there, be found."""
        hidden = slots[self.state[slots] == RESERVED]
        self.touch(slots)
        self.state[slots] = PUBLISHED
        self._insert(hidden)
        self.writers[slots] = 0

    def drop(self, slots: Ints) -> None:
        """Forget values and unfinished writes; their room is free once nobody copies any more."""
        self._delete(slots[self.state[slots] != RESERVED])
        self.state[slots] = DYING
        self.bury(slots)

    def bury(self, slots: Ints) -> None:
        """Free those of ``slots`` that are DYING and that nobody copies any more."""
        slots = np.unique(slots[self.state[slots] == DYING])
        slots = slots[~self.pinned(slots)]
        if len(slots):
            self._release(slots)

    def _evict(self, victims: Ints) -> None:
        if len(victims):
            self._delete(victims)
            self._release(victims)
            self.header[H.EVICTIONS] += len(victims)

    def _release(self, slots: Ints) -> None:
        self.state[slots] = FREE
        active = self.active()
        self.lease_until[np.ix_(active, slots)] = 0
        self.lease_count[np.ix_(active, slots)] = 0
        pages = -(-self.size[slots] // GRANULE)
        self._set_free(space.join(self._free(), self.offset[slots].astype(np.int64), pages))
        self.header[H.USED_PAGES] -= int(pages.sum())

    def _plan(self, pages: Ints, now: int) -> tuple[Ints, Ints]:
        """Where to put values of these lengths, and which slots to evict for it: the oldest, no more than needed."""
        none = np.empty(0, np.int64)
        free = self._free()
        offsets = space.fit(free, pages)
        if (offsets >= 0).all():
            return offsets, none
        victims, count = none, 0
        while (offsets < 0).any():
            missing = int(pages[offsets < 0].sum())
            if count >= len(victims):
                more = self._oldest(2 * count + len(pages), now)
                if len(more) <= len(victims):
                    break
                victims = more
            starts = self.offset[victims].astype(np.int64)
            lengths = -(-self.size[victims] // GRANULE)
            enough = int(np.searchsorted(np.cumsum(lengths[count:]), missing)) + 1
            count = min(count + max(enough, count // 2), len(victims))
            offsets = space.fit(space.join(free, starts[:count], lengths[:count]), pages)
        if count == 0:
            return offsets, none
        order = np.argsort(offsets)
        begins, ends = offsets[order], (offsets + pages)[order]
        begins, ends = begins[begins >= 0], ends[begins >= 0]
        first = np.searchsorted(ends, starts[:count], "right")
        needed = (first < len(begins)) & (np.append(begins, self.pages)[first] < starts[:count] + lengths[:count])
        return offsets, victims[:count][needed]

    def _oldest(self, wanted: int, now: int) -> Ints:
        """At least ``wanted`` evictable slots, least recently used first; fewer only if there are no more.

        Sorting all slots at every put would be too dear, so the oldest few thousand are sorted ahead. One that was
        not used since is still older than everything that is not in the queue.
        """
        for look_ahead in (0, max(_LOOK_AHEAD, 4 * wanted), None):
            if look_ahead != 0:
                live = np.flatnonzero(self.state[: self.header[H.HIGH]] == PUBLISHED)
                ticks = self.last_used[live]
                if look_ahead is not None and look_ahead < len(live):
                    chosen = np.argpartition(ticks, look_ahead)[:look_ahead]
                    live, ticks = live[chosen], ticks[chosen]
                order = np.argsort(ticks)
                self._queue, self._queue_ticks = live[order], ticks[order]
            same = (self.state[self._queue] == PUBLISHED) & (self.last_used[self._queue] == self._queue_ticks)
            self._queue, self._queue_ticks = self._queue[same], self._queue_ticks[same]
            evictable = self._queue[~(self.leased(self._queue, now) | self.pinned(self._queue))]
            if len(evictable) >= wanted:
                break
        return evictable

    # -- derived arrays -------------------------------------------------------------------------------------------

    def rebuild(self, alive: np.uint64) -> None:
        """Derive free stretches, page map and hash index from the slots, keeping only what living clients hold."""
        high = int(self.header[H.HIGH])
        state = self.state[:high]
        pinned = self.pinned(np.arange(high))
        unfinished = np.isin(state, (RESERVED, OPEN))
        orphans = unfinished & ((self.writers[:high] & alive) == 0)
        state[orphans] = DYING
        state[(state == DYING) & ~pinned] = FREE
        self._drop_overlaps()
        live = np.flatnonzero(state)
        pages = -(-self.size[live] // GRANULE)
        everything = (np.array([0], np.int64), np.array([self.pages], np.int64))
        self._set_free(space.carve(everything, self.offset[live].astype(np.int64), pages))
        self._map_pages(live)
        self.header[H.USED_PAGES] = int(pages.sum())
        self.lease_until[np.ix_(self.active(), np.flatnonzero(state == FREE))] = 0
        self._queue = self._queue_ticks = np.empty(0, np.int64)
        self._index_anew(0)
        self.commit()

    def _drop_overlaps(self) -> None:
        """Defence in depth: bytes that two slots claim belong to neither."""
        live = np.flatnonzero(self.state[: self.header[H.HIGH]])
        live = live[np.argsort(self.offset[live])]
        ends = self.offset[live] + -(-self.size[live] // GRANULE)
        clash = np.flatnonzero(self.offset[live][1:] < ends[:-1])
        if len(clash):
            logger.error("%s: %d values overlap and are dropped", self._segment.spec.folder, len(clash))
            self.state[live[np.concatenate((clash, clash + 1))]] = FREE

    def _free(self) -> space.Stretches:
        count = self.header[H.STRETCHES]
        return self.free_start[:count].astype(np.int64), self.free_end[:count].astype(np.int64)

    def _set_free(self, free: space.Stretches) -> None:
        count = len(free[0])
        self.free_start[:count], self.free_end[:count] = free
        self.header[H.STRETCHES] = count

    def _map_pages(self, slots: Ints) -> None:
        pages = -(-self.size[slots] // GRANULE)
        before = np.cumsum(pages) - pages
        rows = np.repeat(self.offset[slots].astype(np.int64) - before, pages) + np.arange(int(pages.sum()))
        self.page_slot[rows] = np.repeat(slots, pages)

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
        self._reserve("index", 0, self._buckets(upto))
        for field in _SLOT_FIELDS:
            self._reserve(field.name, 0, upto)
        for client in self.active():
            for field in _CLIENT_FIELDS:
                self._reserve(field.name, int(client) * (self.pages + 1), upto)
        self.header[H.BACKED] = upto

    def _reserve(self, name: str, first: int, count: int) -> None:
        begin, dtype, shape = self._places[name]
        row = np.dtype(dtype).itemsize * (shape[1] if name == "digest" else 1)
        self._segment.reserve_table(begin + first * row, count * row)

    @staticmethod
    def _buckets(keys: int) -> int:
        """Three to six buckets a key, so that half full is far away right after the index was made anew."""
        return 1 << max(4, (3 * keys).bit_length())

    @staticmethod
    def _bits(clients: Ints) -> np.uint64:
        return np.bitwise_or.reduce(np.uint64(1) << clients.astype(np.uint64), initial=np.uint64(0))

    # -- the hash index: open addressing, linear probing; 0 is empty, -1 a tombstone, else slot + 1 ------------------

    def _probe(self, digests: Digests) -> tuple[Ints, Ints]:
        """(slots, buckets) of the keys, -1 where they are missing."""
        slots = np.full(len(digests), -1, np.int64)
        buckets = np.full(len(digests), -1, np.int64)
        mask = int(self.header[H.BUCKETS]) - 1
        place = (digests[:, 0] & np.uint64(mask)).astype(np.int64)
        open_ = np.arange(len(digests))
        while len(open_):
            entry = self.index[place]
            row = np.maximum(entry - 1, 0)
            hit = (entry > 0) & (self.digest[row] == digests[open_]).all(axis=1)
            slots[open_[hit]] = row[hit]
            buckets[open_[hit]] = place[hit]
            on = ~hit & (entry != 0)
            open_, place = open_[on], (place[on] + 1) & mask
        return slots, buckets

    def _insert(self, slots: Ints) -> None:
        """Enter slots whose keys are not in the index."""
        if 2 * (self.header[H.FILLED] + len(slots)) > self.header[H.BUCKETS]:
            self._index_anew(len(slots))
            return
        mask = int(self.header[H.BUCKETS]) - 1
        place = (self.digest[slots, 0] & np.uint64(mask)).astype(np.int64)
        while len(slots):
            entry = self.index[place]
            free = np.flatnonzero(entry <= 0)
            self.index[place[free]] = slots[free] + 1  # of several for one bucket, the last one wins
            lost = self.index[place] != slots + 1
            self.header[H.FILLED] += int((~lost & (entry == 0)).sum())
            slots, place = slots[lost], (place[lost] + 1) & mask

    def _delete(self, slots: Ints) -> None:
        found, buckets = self._probe(self.digest[slots])
        self.index[buckets[found == slots]] = _TOMBSTONE

    def _index_anew(self, more: int) -> None:
        """Empty the index and enter all findable slots, with buckets for ``more``."""
        state = self.state[: self.header[H.HIGH]]
        live = np.flatnonzero((state == OPEN) | (state == PUBLISHED))
        buckets = self._buckets(len(live) + more)
        self.index[: max(buckets, int(self.header[H.BUCKETS]))] = 0
        self.header[H.BUCKETS] = buckets
        self.header[H.FILLED] = 0
        self._insert(live)
