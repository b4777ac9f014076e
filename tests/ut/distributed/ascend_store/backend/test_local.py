"""What only the embedded store promises: exact codes, exact LRU order, leases that end, addresses that go stale."""

import stat

import numpy as np
import pytest

from fixtures.clock import ManualClock
from vllm_ascend_ext.kv_pool.backend.arena import GRANULE
from vllm_ascend_ext.kv_pool.backend.local import destroy
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import open_fence

SIZE = GRANULE
A, B, C, D = (bytes([n]) * SIZE for n in (1, 2, 3, 4))
NOTHING_HELD = {"open_writes": 0, "leases": 0, "pins": 0}


@pytest.fixture
def four(local_pool):
    """A pool with room for four pages, and a clock that only the test moves."""
    local_pool.capacity_bytes = 4 * GRANULE
    local_pool.clock = ManualClock()
    return local_pool


@pytest.fixture
def client(local_pool):
    return local_pool.open()


# -- what is evicted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.get(["k0"], SIZE),
        lambda client: client.exists("k0"),
        lambda client: client.put({"k0": B}),
        lambda client: client.backend.batch_get_key_info(["k0"]),
        lambda client: (client.backend.batch_add_lease(["k0"], 1), client.backend.batch_remove_lease(["k0"])),
    ],
    ids=["get", "exists", "put", "key_info", "lease"],
)
def test_the_least_recently_used_value_goes_first(four, use):
    client = four.open()
    for n in range(4):
        client.put({f"k{n}": A})
    use(client)
    client.put({"new": B})
    assert client.exists("k0", "k1", "k2", "k3", "new") == [1, 0, 1, 1, 1]


def test_within_a_batch_the_last_key_goes_first_so_that_a_prefix_loses_its_tail(four):
    client = four.open()
    client.put({"head": A, "middle": B, "tail": C, "end": D})
    client.put({"x": A, "y": A})
    assert client.exists("head", "middle", "tail", "end") == [1, 1, 0, 0]


def test_no_more_is_evicted_than_is_needed(four):
    client = four.open()
    client.put({"a": A, "b": B})
    client.put({"pair": C + C})
    client.put({"x": D})
    assert client.exists("pair", "x") == [1, 1]
    assert client.backend.stats()["evictions"] == 1


def test_room_for_a_large_value_is_made_in_one_piece(four):
    client = four.open()
    for n in range(4):
        client.put({f"k{n}": A})
    client.get(["k0", "k2"], SIZE)
    assert client.put({"large": B * 3}) == [Status.OK]
    assert client.get(["large"], 3 * SIZE) == [B * 3]


def test_what_was_looked_at_for_room_but_not_needed_stays(local_pool):
    local_pool.capacity_bytes = 8 * GRANULE
    client = local_pool.open()
    for n in range(8):
        client.put({f"k{n}": A})
    client.exists("k1", "k3", "k5", "k7")
    assert client.put({"pair": B + B}) == [Status.OK], "the oldest four leave no two pages side by side"
    assert client.backend.stats()["evictions"] == 2
    assert sum(client.exists(*[f"k{n}" for n in range(8)])) == 6


def test_a_value_larger_than_the_pool_is_full_and_evicts_nothing(four):
    client = four.open()
    client.put({"a": A, "b": B})
    assert client.put({"huge": bytes(5 * SIZE)}) == [Status.FULL]
    assert client.backend.stats()["evictions"] == 0


def test_a_batch_larger_than_the_pool_keeps_its_first_keys(four):
    client = four.open()
    assert client.put({f"k{n}": A for n in range(6)}) == [Status.OK] * 4 + [Status.FULL] * 2


def test_a_pool_whose_every_value_is_leased_is_full(four):
    client = four.open()
    keys = [f"k{n}" for n in range(4)]
    client.put(dict.fromkeys(keys, A))
    client.backend.batch_add_lease(keys, 1000)
    assert client.put({"new": B}) == [Status.FULL]
    assert client.backend.batch_alloc(["new"], [SIZE]) == [0]
    assert client.exists(*keys) == [1] * 4
    client.backend.batch_remove_lease(keys[:1])
    assert client.put({"new": B}) == [Status.OK]
    assert client.exists(*keys) == [0, 1, 1, 1]


def test_used_bytes_and_keys_are_counted(four):
    client = four.open()
    client.put({"a": b"x", "b": b"y"})
    client.put({"c": bytes(SIZE + 1)})
    stats = client.backend.stats()
    assert (stats["used_bytes"], stats["keys"], stats["capacity_bytes"]) == (4 * SIZE, 3, 4 * SIZE)
    client.backend.remove(["a", "c"])
    assert client.backend.stats()["used_bytes"] == SIZE


# -- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "k" * 257, None, 7, b"bytes"])
def test_what_cannot_be_a_key_is_invalid_alone(client, bad):
    backend, memory = client.backend, client.memory(2, SIZE)
    at = np.array(memory.addresses)[:, None]
    sizes = np.full_like(at, SIZE)
    assert backend.put([bad, "a"], at, sizes, open_fence()) == [Status.INVALID, Status.OK]
    assert backend.get(["a", bad], at, sizes, open_fence()) == [Status.OK, Status.INVALID]
    assert backend.exists([bad, "a"]) == [0, 1]
    assert backend.remove([bad, "missing"]) == [Status.INVALID, Status.MISSING]
    assert backend.batch_add_lease([bad, "a"], 1000) == [Status.INVALID, Status.OK]
    assert backend.batch_remove_lease([bad, "a"]) == Status.INVALID
    assert backend.batch_write_finish([bad, "a"], [0, 0]) == [Status.INVALID, Status.OK]
    assert [info.size() for info in backend.batch_get_key_info([bad, "a"])] == [0, SIZE]
    fresh, none = backend.batch_alloc(["new", bad], [SIZE, SIZE])
    assert (fresh > 0, none) == (True, 0)
    assert backend.ledger() == {"open_writes": 1, "leases": 0, "pins": 0}


def test_keys_may_be_of_any_characters(client):
    keys = ["Qwen2.5@/:~", "ключ", "鍵" * 256, "\udc80", "a\0b"]
    assert client.put({key: bytes([n]) * 8 for n, key in enumerate(keys)}) == [Status.OK] * 5
    assert client.get(keys, 8) == [bytes([n]) * 8 for n in range(5)]


@pytest.mark.parametrize(
    ("addrs", "sizes"),
    [
        ([[0]], [[8]]),
        ([[4096]], [[-8]]),
        ([[4096]], [[0]]),
        ([[4096, -1]], [[8, 8]]),
        ([[4096]], [[8, 8]]),
        ([4096], [8]),
        ([], []),
        ([[4096], [4096]], [[8], [8]]),
        ([[4096.5]], [[8]]),
        ([[4096, 1], [1]], [[8, 8], [8]]),
        ([[2**63]], [[8]]),
        ([[4096] * 5], [[2**62] * 4 + [8]]),  # the sum of these is 8, in 64 bits
        ([[True]], [[8]]),
        (None, None),
    ],
)
def test_segments_that_cannot_be_are_invalid(client, addrs, sizes):
    for call in (client.backend.put, client.backend.get):
        assert call(["k"], addrs, sizes, open_fence()) == [Status.INVALID]
    assert client.exists("k") == [0]


def test_an_empty_segment_may_have_any_address(client):
    memory = client.memory(1, 16, fill=3)
    at, sizes = np.array([[0, memory.addresses[0], 0]]), np.array([[0, 16, 0]])
    assert client.backend.put(["k"], at, sizes, open_fence()) == [Status.OK]
    assert client.get(["k"], 16) == [b"\x03" * 16]


def test_a_size_that_differs_is_refused(client):
    client.put({"a": A, "b": B})
    memory = client.memory(2, SIZE)
    at = np.array(memory.addresses)[:, None]
    codes = client.backend.get(["a", "b"], at, np.array([[SIZE - 1], [SIZE]]), open_fence())
    assert codes == [Status.REFUSED, Status.OK]


def test_a_put_beside_somebody_s_open_write_is_refused(client, local_pool):
    other = local_pool.open()
    other.backend.batch_alloc(["k"], [SIZE])
    assert client.put({"k": A, "free": B}) == [Status.REFUSED, Status.OK]
    other.backend.close()
    assert client.put({"k": A}) == [Status.OK]


def test_a_leased_key_cannot_be_removed(client, local_pool):
    client.put({"a": A, "b": B})
    other = local_pool.open()
    other.backend.batch_add_lease(["a"], 1000)
    assert client.backend.remove(["a", "b", "a", "b"]) == [Status.REFUSED, Status.OK, Status.REFUSED, Status.MISSING]
    assert client.exists("a", "b") == [1, 0]


@pytest.mark.parametrize(
    ("gvas", "addrs", "sizes", "direction"),
    [
        ([1], [4096], [8], 2),
        ([1], [0], [8], 0),
        ([1], [4096], [-8], 0),
        ([1], [4096], [8, 8], 0),
        ([None], [4096], [8], 0),
        ([[1]], [[4096]], [[8]], 0),
    ],
)
def test_ranges_that_cannot_be_are_invalid(client, gvas, addrs, sizes, direction):
    assert client.backend.batch_copy(gvas, addrs, sizes, direction, open_fence()) == Status.INVALID


@pytest.mark.parametrize("sizes", [[0], [-1], [8, 8], None, ["8"]])
def test_lengths_that_cannot_be_allocated_are_0(client, sizes):
    assert client.backend.batch_alloc(["k"], sizes) == [0]


def test_results_that_cannot_be_publish_nothing(client):
    client.backend.batch_alloc(["a", "b"], [8, 8])
    assert client.backend.batch_write_finish(["a", "b"], [0]) == [Status.INVALID] * 2
    assert client.backend.batch_write_finish(["a", "b"], None) == [Status.INVALID] * 2
    assert client.backend.ledger()["open_writes"] == 2
    assert client.backend.batch_write_finish(["a", "b"], [None, 0.0]) == [Status.OK] * 2
    assert client.exists("a", "b") == [0, 0]


@pytest.mark.parametrize("ttl", [0, -1, None, 1.5, 2**41])
def test_a_lease_needs_a_length(client, ttl):
    client.put({"a": A})
    assert client.backend.batch_add_lease(["a"], ttl) == [Status.INVALID]


# -- global addresses -------------------------------------------------------------------------------------------------


def test_an_address_kept_too_long_is_refused_and_not_taken_for_its_successor(four):
    client = four.open()
    client.put({"old": A})
    (stale,) = client.backend.batch_get_key_info(["old"])[0].gva_list()
    client.put({f"new{n}": B for n in range(4)})
    assert client.exists("old") == [0]
    assert client.load_at([stale], SIZE) == (Status.REFUSED, [b"\xee" * SIZE])
    assert client.save_at([stale], [C]) is Status.REFUSED
    assert client.get([f"new{n}" for n in range(4)], SIZE) == [B] * 4


def test_a_dropped_write_s_address_is_refused_also_after_the_key_was_allocated_again(client):
    (first,) = client.backend.batch_alloc(["k"], [SIZE])
    client.backend.batch_write_finish(["k"], [1])
    (second,) = client.backend.batch_alloc(["k"], [SIZE])
    assert client.save_at([first], [A]) is Status.REFUSED
    assert client.save_at([second], [B]) is Status.OK


def test_an_address_before_or_behind_the_arena_is_refused(client):
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    for wrong in (gva - SIZE, gva + (1 << 30), -gva, 2**62):
        assert client.save_at([wrong], [A]) is Status.REFUSED


@pytest.mark.parametrize("size", [SIZE + 1, 1 << 40, (1 << 63) - 1])
def test_a_range_that_reaches_past_its_value_is_refused(client, size):
    (_, gva) = client.backend.batch_alloc(["before", "k"], [SIZE, SIZE])
    for direction in (0, 1):
        assert client.backend.batch_copy([gva], [4096], [size], direction, open_fence()) == Status.REFUSED


def test_what_is_not_published_cannot_be_read(client):
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    assert client.load_at([gva], SIZE) == (Status.REFUSED, [b"\xee" * SIZE])


def test_what_is_published_is_not_written_again(client):
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    client.save_at([gva], [A])
    client.backend.batch_write_finish(["k"], [0])
    assert client.save_at([gva], [B]) is Status.OK
    assert client.backend.batch_write_finish(["k"], [5]) == [Status.OK]
    assert client.get(["k"], SIZE) == [A]


def test_only_who_was_given_an_open_write_may_copy_into_it_and_finish_it(client, local_pool):
    other = local_pool.open()
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    assert other.save_at([gva], [B]) is Status.REFUSED
    assert other.backend.batch_write_finish(["k"], [0]) == [Status.REFUSED]
    other.backend.batch_alloc(["k"], [SIZE])
    assert other.save_at([gva], [A]) is Status.OK
    assert client.backend.batch_write_finish(["k"], [7]) == [Status.OK]
    assert client.backend.batch_write_finish(["k"], [0]) == [Status.REFUSED]
    assert other.backend.batch_write_finish(["k"], [0]) == [Status.OK]
    assert client.get(["k"], SIZE) == [A]


def test_a_write_that_all_its_writers_gave_up_is_gone(client, local_pool):
    other = local_pool.open()
    client.backend.batch_alloc(["k"], [SIZE])
    other.backend.batch_alloc(["k"], [SIZE])
    client.backend.close()
    assert other.backend.stats()["open_writes"] == 1
    assert other.backend.batch_write_finish(["k", "k"], [1, 0]) == [Status.OK, Status.MISSING]
    assert other.backend.stats()["used_bytes"] == 0


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_ends_by_itself(four):
    client = four.open()
    client.put({f"k{n}": A for n in range(4)})
    client.backend.batch_add_lease(["k0"], 1000)
    four.clock.advance(0.999)
    assert client.put({f"x{n}": B for n in range(4)}) == [Status.OK] * 3 + [Status.FULL]
    assert client.backend.ledger()["leases"] == 1
    four.clock.advance(0.002)
    assert client.backend.ledger()["leases"] == 0
    assert client.put({f"y{n}": B for n in range(4)}) == [Status.OK] * 4
    assert client.exists("k0") == [0]


def test_a_lease_that_ended_cannot_be_given_back(four):
    client = four.open()
    client.put({"k": A})
    client.backend.batch_add_lease(["k", "k"], 1000)
    four.clock.advance(2.0)
    assert client.backend.batch_remove_lease(["k"]) == Status.REFUSED
    client.backend.batch_add_lease(["k"], 1000)
    assert client.backend.batch_remove_lease(["k"]) == Status.OK
    assert client.backend.batch_remove_lease(["k"]) == Status.REFUSED


def test_two_leases_on_one_key_are_given_back_one_by_one(four):
    client, other = four.open(), four.open()
    client.put({"k": A})
    assert client.backend.batch_add_lease(["k", "k"], 1000) == [Status.OK, Status.OK]
    assert other.backend.batch_add_lease(["k"], 1000) == [Status.OK]
    assert client.backend.ledger()["leases"] == 2
    assert client.backend.stats()["leases"] == 3
    assert client.backend.batch_remove_lease(["k", "k"]) == Status.OK
    assert client.backend.batch_remove_lease(["k"]) == Status.REFUSED
    assert client.put({f"x{n}": B for n in range(4)})[3] is Status.FULL, "the other client's lease still holds"


def test_a_shorter_lease_does_not_shorten_a_longer_one(four):
    client = four.open()
    client.put({"k": A})
    client.backend.batch_add_lease(["k"], 5000)
    client.backend.batch_add_lease(["k"], 10)
    four.clock.advance(1.0)
    assert client.backend.ledger()["leases"] == 2


def test_the_other_leases_are_given_back_when_one_is_refused(four):
    client = four.open()
    client.put({"a": A, "b": B})
    client.backend.batch_add_lease(["a", "b"], 1000)
    assert client.backend.batch_remove_lease(["a", "missing", "b"]) == Status.REFUSED
    assert client.backend.ledger() == NOTHING_HELD


# -- files and owners -------------------------------------------------------------------------------------------------


def test_the_files_are_the_owner_s_alone(client, local_pool):
    folder = local_pool.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert files == {"arena": 0o600, "meta": 0o600, "lock": 0o600}


def test_the_last_client_out_removes_the_pool(local_pool):
    first, second = local_pool.open(), local_pool.open()
    first.backend.close()
    assert local_pool.folder.exists()
    second.backend.close()
    assert not local_pool.folder.exists()


def test_a_kept_pool_is_there_again_until_it_is_destroyed(local_pool):
    local_pool.keep = True
    client = local_pool.open()
    client.put({"a": A})
    client.backend.close()
    again = local_pool.open()
    assert again.get(["a"], SIZE) == [A]
    again.backend.close()
    assert destroy(local_pool.name)
    assert not local_pool.folder.exists()
    assert not destroy(local_pool.name)
