"""The index itself: its order of eviction, its growth, what its audit sees, and what rebuilding it mends."""

import logging
import threading
from collections import OrderedDict

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.backend import local_table
from vllm_ascend_ext.kv_pool.backend.arena import GRANULE
from vllm_ascend_ext.kv_pool.backend.local_audit import faults
from vllm_ascend_ext.kv_pool.backend.local_rows import Keys
from vllm_ascend_ext.kv_pool.backend.local_table import DYING, FREE, OPEN, PUBLISHED, H
from vllm_ascend_ext.kv_pool.errors import Status

PAGE = b"p" * GRANULE


def test_the_order_of_eviction_is_exact_however_little_is_sorted_ahead(local_pool, monkeypatch):
    monkeypatch.setattr(local_table, "_LOOK_AHEAD", 8)
    local_pool.capacity_bytes = 64 * GRANULE
    client = local_pool.open()
    choose = np.random.default_rng(3)
    order: OrderedDict[str, None] = OrderedDict()
    for n in range(400):
        for key in choose.permutation(list(order))[:2].tolist():
            assert client.get([key], GRANULE) == [PAGE]
            order.move_to_end(key)
        batch = [f"{n}.{m}" for m in range(int(choose.integers(1, 4)))]
        assert client.put(dict.fromkeys(batch, PAGE)) == [Status.OK] * len(batch)
        order |= dict.fromkeys(reversed(batch))
        while len(order) > 64:
            order.popitem(last=False)
        index = client.backend._session.table
        assert np.array_equal(index.in_state(index.find(Keys.of(list(order)).digests), PUBLISHED), [True] * len(order))


def test_the_index_grows_with_its_keys(local_pool):
    local_pool.capacity_bytes = 3000 * GRANULE
    client, other = local_pool.open(), local_pool.open()
    for n in range(0, 3000, 500):
        assert client.put({f"k{m}": b"v" for m in range(n, n + 500)}) == [Status.OK] * 500
    assert faults(client.backend) == []
    assert other.exists(*[f"k{n}" for n in range(3000)]) == [1] * 3000
    assert other.backend.batch_add_lease(["k2999"], 1000) == [Status.OK]
    assert client.put({f"x{n}": b"v" for n in range(3000)}) == [Status.OK] * 2999 + [Status.FULL]
    assert faults(client.backend) == []


def test_keys_that_no_memory_can_be_had_for_are_full(local_pool, monkeypatch, caplog):
    local_pool.capacity_bytes = 3000 * GRANULE
    client = local_pool.open()

    def refuse(offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client.backend._session.segment, "reserve_table", refuse)
    statuses = client.put({f"k{n}": b"v" for n in range(1500)})
    assert statuses == [Status.OK] * 1024 + [Status.FULL] * 476
    assert "no memory for more keys" in caplog.text
    assert faults(client.backend) == []
    monkeypatch.undo()
    assert client.put({f"k{n}": b"v" for n in range(1500)}) == [Status.OK] * 1500


def filled(local_pool):
    client = local_pool.open()
    for n in range(8):
        client.put({f"k{n}": PAGE * (1 + n % 3)})
    client.backend.remove(["k3"])
    client.backend.batch_alloc(["open"], [10])
    return client, client.backend._session.table


def spoil_overlap(table):
    table.offset[1] = table.offset[0]


def spoil_stretches(table):
    table.free_start[0] += 1


def spoil_used_pages(table):
    table.header[H.USED_PAGES] += 1


def spoil_page_map(table):
    (slot,) = np.flatnonzero(table.state[:9] == OPEN)
    table.page_slot[int(table.offset[slot])] = 1


def spoil_buckets(table):
    table.buckets[np.flatnonzero(table.buckets > 0)[0]] = -1


def spoil_digest(table):
    table.digest[0] = table.digest[1]


def spoil_ghost(table):
    table.buckets[np.flatnonzero(table.buckets == 0)[0]] = 4


def spoil_lease(table):
    table.lease_until[0, np.flatnonzero(table.state[:9] == FREE)[:1]] = 1 << 60


DERIVED = [spoil_stretches, spoil_used_pages, spoil_page_map, spoil_buckets, spoil_ghost, spoil_lease]


@pytest.mark.parametrize("spoil", DERIVED)
def test_what_is_derived_is_audited_and_derived_again(local_pool, spoil):
    client, table = filled(local_pool)
    client.backend.remove(["k5"])
    before = client.exists(*[f"k{n}" for n in range(8)])
    spoil(table)
    assert len(faults(client.backend)) >= 1
    table.begin()  # as a client that dies here leaves it
    assert faults(client.backend) == []
    assert client.exists(*[f"k{n}" for n in range(8)]) == before


def spoil_state(table):
    table.state[0] = 99


def spoil_pins(table):
    table.pins[0, 0] = -1


def spoil_writers(table):
    table.writers[np.flatnonzero(table.state[:9] == OPEN)] = 0


@pytest.mark.parametrize("spoil", [spoil_overlap, spoil_digest, spoil_state, spoil_pins, spoil_writers])
def test_what_is_not_derived_is_audited(local_pool, spoil):
    client, table = filled(local_pool)
    assert faults(client.backend) == []
    spoil(table)
    assert len(faults(client.backend)) >= 1


def test_bytes_that_two_values_claim_belong_to_neither(local_pool, caplog):
    client, table = filled(local_pool)
    spoil_overlap(table)
    table.begin()
    assert client.exists(*[f"k{n}" for n in range(8)]) == [0, 0, 1, 0, 1, 1, 1, 1]
    assert faults(client.backend) == []
    assert "values overlap and are dropped" in caplog.text


def test_a_dying_slot_outlives_a_rebuild_only_while_it_is_pinned(local_pool):
    client, table = filled(local_pool)
    (slot,) = np.flatnonzero(table.state[:9] == OPEN)
    table.pin(client.backend._session.client, np.array([slot]))
    client.backend.batch_write_finish(["open"], [1])
    table.begin()
    assert client.exists("open") == [0]
    assert table.state[slot] == DYING
    with client.backend._session.changing():
        table.unpin(client.backend._session.client, np.array([slot]))
    assert table.state[slot] == FREE
    assert faults(client.backend) == []


def test_threads_of_one_client_do_not_get_into_each_other_s_way(local_pool):
    local_pool.capacity_bytes = 24 * GRANULE
    client, other = local_pool.open(), local_pool.open()
    wrong: list[object] = []

    def work(seed):
        choose = np.random.default_rng(seed)
        user = (client, other)[seed % 2]
        try:
            for _ in range(60):
                numbers = choose.permutation(40)[:4].tolist()
                user.put({f"k{n}": bytes([n]) * (GRANULE // 2) for n in numbers})
                got = user.get([f"k{n}" for n in numbers], GRANULE // 2)
                for n, value in zip(numbers, got, strict=True):
                    if value not in (bytes([n]) * (GRANULE // 2), Status.MISSING):
                        wrong.append((n, value))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert faults(client.backend) == []
    assert client.backend.stats()["pins"] == 0


def test_a_dead_client_is_named_in_the_log(local_pool, caplog):
    client, other = local_pool.open(), local_pool.open()
    other.backend._session.segment._claimed.discard(other.backend._session.client)
    with caplog.at_level(logging.WARNING):
        local_pool.open()
    assert "client 1 died; clearing up behind it" in caplog.text
    assert client.backend.stats()["clients"] == 2
