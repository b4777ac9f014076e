"""Compares everything that a local pool derives with the slots that it derives it from; must never change anything.

For tests and for support: a pool that works answers with an empty list.
"""

from __future__ import annotations

import numpy as np

from vllm_ascend_ext.kv_pool.backend import local_space as space
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.backend.local_table import DYING, FREE, OPEN, PUBLISHED, RESERVED, H, Table, pages_of


def faults(backend: LocalBackend) -> list[str]:
    """What is wrong with the index, one sentence each. Raises DeadlineExceeded if its lock can't be had."""
    with backend._session.call(), backend._session.locked() as table:
        return [*_room(table), *_keys(table), *_holders(table)]


def _room(table: Table) -> list[str]:
    live = np.flatnonzero(table.state[: table.header[H.HIGH]])
    live = live[np.argsort(table.offset[live])]
    starts, pages = table.offset[live].astype(np.int64), pages_of(table.size[live])
    found = []
    if (starts[1:] < (starts + pages)[:-1]).any() or (len(live) and starts[-1] + pages[-1] > table.pages):
        found.append("values overlap, or reach past the arena")
        return found
    free = space.carve((np.zeros(1, np.int64), np.full(1, table.pages, np.int64)), starts, pages)
    count = int(table.header[H.STRETCHES])
    if not (np.array_equal(free[0], table.free_start[:count]) and np.array_equal(free[1], table.free_end[:count])):
        found.append("the free stretches are not what the values leave free")
    if table.header[H.USED_PAGES] != pages.sum():
        found.append(f"{table.header[H.USED_PAGES]} pages are counted as used, and {pages.sum()} are")
    known = table.mapped[live] == 1
    if (table.slots_at(np.repeat(starts[known], pages[known])) != np.repeat(live[known], pages[known])).any():
        found.append("the page map doesn't lead to the values")
    return found


def _keys(table: Table) -> list[str]:
    state = table.state[: table.header[H.HIGH]]
    found = []
    if (state > DYING).any():
        found.append("a slot is in no known state")
    findable = np.flatnonzero((state == OPEN) | (state == PUBLISHED))
    if (table.find(table.digest[findable]) != findable).any():
        found.append("a value isn't found by its key, or two have the same")
    entries = table.buckets[: table.header[H.BUCKETS]]
    if np.sort(entries[entries > 0] - 1).tolist() != findable.tolist():
        found.append("the hash index holds other slots than those that can be found")
    return found


def _holders(table: Table) -> list[str]:
    high = int(table.header[H.HIGH])
    state, active = table.state[:high], table.active()
    block = np.ix_(active, np.arange(high))
    found = []
    if (table.pins[block] < 0).any() or (table.lease_count[block] < 0).any():
        found.append("more pins or leases were given back than taken")
    if (table.pins[block][:, state == FREE] != 0).any() or (table.lease_until[block][:, state != PUBLISHED] != 0).any():
        found.append("somebody holds what isn't there")
    writers = table.writers[:high][(state == OPEN) | (state == RESERVED)]
    signed_in = np.uint64(sum(1 << client for client in active.tolist()))
    if (writers & signed_in == 0).any():
        found.append("an open write has no writer")
    return found
