"""What every store engine must do, whatever its codes: bytes and statuses are compared, never flags."""

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import ClosedError, Status
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

SIZE = 4096
A, B, C = (bytes([n]) * SIZE for n in (1, 2, 3))


def revoked_fence():
    fence = Fence()
    assert fence.revoke(Deadline.after(1.0))
    return fence


# -- the key path -----------------------------------------------------------------------------------------------------


def test_what_was_put_is_there_and_comes_back_byte_for_byte(client):
    assert client.exists("a", "b") == [0, 0]
    assert client.put({"a": A, "b": B}) == [Status.OK, Status.OK]
    assert client.exists("a", "c", "b") == [1, 0, 1]
    assert client.get(["b", "a"], SIZE) == [B, A]


def test_another_client_of_the_pool_sees_the_same(engine_pool, client):
    client.put({"a": A})
    other = engine_pool.open()
    assert other.exists("a") == [1]
    assert other.get(["a"], SIZE) == [A]


def test_a_value_is_its_segments_in_order_however_they_are_cut(client):
    pieces, whole = client.memory(3, 100), client.memory(2, 150)
    pieces.write([b"x" * 100, b"y" * 100, b"z" * 100])
    at = np.array([pieces.addresses])
    assert client.statuses(client.backend.put(["k"], at, np.full_like(at, 100), open_fence())) == [Status.OK]
    to = np.array([whole.addresses])
    assert client.statuses(client.backend.get(["k"], to, np.full_like(to, 150), open_fence())) == [Status.OK]
    assert b"".join(whole.read()) == b"x" * 100 + b"y" * 100 + b"z" * 100


def test_a_missing_key_fails_alone(client):
    client.put({"a": A, "b": B})
    assert client.get(["a", "missing", "b"], SIZE) == [A, Status.MISSING, B]


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 1])
def test_a_value_of_another_size_fails_and_nothing_of_it_is_written(client, size):
    client.put({"a": A})
    memory = client.memory(1, size, fill=7)
    at = np.array([memory.addresses])
    (status,) = client.statuses(client.backend.get(["a"], at, np.full_like(at, size), open_fence()))
    assert status is not Status.OK
    assert memory.read() == [b"\x07" * size]


def test_a_put_of_an_existing_key_succeeds_and_the_first_data_stay(client):
    client.put({"a": A})
    assert client.put({"a": B}) == [Status.OK]
    assert client.get(["a"], SIZE) == [A]


def test_a_key_may_come_up_twice_in_one_batch(client):
    memory = client.memory(3, SIZE)
    memory.write([A, A, B])
    at = np.array(memory.addresses)[:, None]
    codes = client.backend.put(["a", "a", "b"], at, np.full_like(at, SIZE), open_fence())
    assert client.statuses(codes) == [Status.OK] * 3
    assert client.exists("a", "b", "a") == [1, 1, 1]
    assert client.get(["a", "b", "a"], SIZE) == [A, B, A]


def test_keys_have_one_to_256_characters(client):
    short, long = "k", "k" * 256
    assert client.put({short: A, long: B}) == [Status.OK, Status.OK]
    assert client.get([long, short], SIZE) == [B, A]


def test_a_removed_key_is_gone_and_can_be_put_anew(client):
    client.put({"a": A, "b": B})
    assert client.statuses(client.backend.remove(["a"])) == [Status.OK]
    assert client.exists("a", "b") == [0, 1]
    assert client.put({"a": C}) == [Status.OK]
    assert client.get(["a", "b"], SIZE) == [C, B]


def test_what_can_never_fit_is_refused_and_nothing_is_published(client, engine_pool):
    client.put({"a": A})
    (status,) = client.put({"huge": bytes(engine_pool.capacity_bytes + SIZE)})
    assert status not in (Status.OK, Status.MISSING)
    assert client.exists("huge", "a") == [0, 1]


def test_a_full_pool_makes_room_for_what_is_new(client, engine_pool):
    count = 2 * engine_pool.capacity_bytes // SIZE
    for n in range(count):
        assert client.put({f"k{n}": n.to_bytes(2, "big") * (SIZE // 2)}) == [Status.OK]
    last = f"k{count - 1}"
    assert client.get([last], SIZE) == [(count - 1).to_bytes(2, "big") * (SIZE // 2)]
    assert client.exists("k0") == [0]


def test_a_call_without_keys_is_no_error(client):
    nothing = np.zeros((0, 1), np.int64)
    assert list(client.backend.exists([])) == []
    assert list(client.backend.put([], nothing, nothing, open_fence())) == []
    assert list(client.backend.get([], nothing, nothing, open_fence())) == []


def test_a_value_without_bytes_is_invalid_and_its_neighbours_are_not(client):
    memory = client.memory(3, SIZE)
    memory.write([A, B, C])
    starts = np.array([[address] for address in memory.addresses], np.int64).reshape(3, 1)
    sizes = np.array([[SIZE], [0], [SIZE]], np.int64)
    for call in (client.backend.put, client.backend.get):
        codes = call(["a", "b", "c"], starts, sizes, open_fence())
        assert client.statuses(codes) == [Status.OK, Status.INVALID, Status.OK]
    assert client.exists("a", "b", "c") == [1, 0, 1]


def test_a_put_behind_a_revoked_fence_publishes_nothing(client):
    assert client.put({"a": A, "b": B}, revoked_fence()) == [Status.CANCELLED] * 2
    assert client.exists("a", "b") == [0, 0]
    assert client.put({"a": C}) == [Status.OK]
    assert client.get(["a"], SIZE) == [C]


def test_a_get_behind_a_revoked_fence_writes_nothing(client):
    client.put({"a": A})
    memory = client.memory(1, SIZE, fill=7)
    at = np.array([memory.addresses])
    codes = client.backend.get(["a"], at, np.full_like(at, SIZE), revoked_fence())
    assert client.statuses(codes) == [Status.CANCELLED]
    assert memory.read() == [b"\x07" * SIZE]


def test_a_closed_client_says_so_and_closing_twice_is_fine(engine_pool):
    client = engine_pool.open()
    client.backend.close()
    client.backend.close()
    with pytest.raises(ClosedError):
        client.exists("a")


# -- global addresses -------------------------------------------------------------------------------------------------


def test_an_allocated_write_becomes_a_value_when_it_is_finished(gva_client):
    gvas = gva_client.backend.batch_alloc(["a", "b"], [SIZE, SIZE])
    assert len(set(gvas)) == 2
    assert min(gvas) > 0
    assert gva_client.save_at(gvas, [A, B]) is Status.OK
    assert gva_client.statuses(gva_client.backend.batch_write_finish(["a", "b"], [0, 0])) == [Status.OK] * 2
    assert gva_client.get(["a", "b"], SIZE) == [A, B]
    assert gva_client.load_at(gvas, SIZE) == (Status.OK, [A, B])


def test_a_value_may_be_written_and_read_in_parts(gva_client):
    (gva,) = gva_client.backend.batch_alloc(["a"], [SIZE])
    half = SIZE // 2
    assert gva_client.save_at([gva + half, gva], [b"2" * half, b"1" * half]) is Status.OK
    gva_client.backend.batch_write_finish(["a"], [0])
    assert gva_client.get(["a"], SIZE) == [b"1" * half + b"2" * half]
    assert gva_client.load_at([gva + half], half) == (Status.OK, [b"2" * half])


def test_an_unfinished_write_is_no_hit(gva_client):
    (gva,) = gva_client.backend.batch_alloc(["a"], [SIZE])
    assert gva_client.save_at([gva], [A]) is Status.OK
    assert gva_client.exists("a") == [0]
    assert gva_client.get(["a"], SIZE) == [Status.MISSING]
    (info,) = gva_client.backend.batch_get_key_info(["a"])
    assert info.size() == 0
    assert list(info.gva_list()) == []
    assert Status.OK not in gva_client.statuses(gva_client.backend.batch_add_lease(["a"], 1000))


def test_a_write_that_failed_is_dropped_and_may_be_tried_again(gva_client):
    (gva,) = gva_client.backend.batch_alloc(["a"], [SIZE])
    gva_client.save_at([gva], [A])
    assert gva_client.statuses(gva_client.backend.batch_write_finish(["a"], [-3102])) == [Status.OK]
    assert gva_client.exists("a") == [0]
    assert gva_client.put({"a": B}) == [Status.OK]
    assert gva_client.get(["a"], SIZE) == [B]


def test_finishing_an_unknown_key_is_an_error_of_that_key(gva_client):
    gva_client.backend.batch_alloc(["a"], [SIZE])
    codes = gva_client.backend.batch_write_finish(["unknown", "a"], [0, 0])
    unknown, known = gva_client.statuses(codes)
    assert unknown is not Status.OK
    assert known is Status.OK


def test_an_existing_key_gives_its_own_address_to_everybody(gva_client, engine_pool):
    other = engine_pool.open()
    (gva,) = gva_client.backend.batch_alloc(["a"], [SIZE])
    assert list(gva_client.backend.batch_alloc(["a", "a"], [SIZE, 1])) == [gva, gva]
    assert list(other.backend.batch_alloc(["a"], [SIZE // 2])) == [gva]
    gva_client.save_at([gva], [A])
    gva_client.backend.batch_write_finish(["a"], [0])
    assert list(other.backend.batch_alloc(["a"], [SIZE])) == [gva]
    assert other.get(["a"], SIZE) == [A]


def test_an_allocation_that_fails_is_0_and_leaves_the_others_alone(gva_client, engine_pool):
    too_much = engine_pool.capacity_bytes + SIZE
    gvas = gva_client.backend.batch_alloc(["a", "huge", "b"], [SIZE, too_much, SIZE])
    assert gvas[1] == 0
    assert min(gvas[0], gvas[2]) > 0
    assert gva_client.exists("huge") == [0]


@pytest.mark.parametrize("spoil", ["unknown", "past the end", "null"])
def test_one_bad_range_refuses_the_whole_batch_and_nothing_is_copied(gva_client, spoil):
    backend = gva_client.backend
    gvas = list(backend.batch_alloc(["a", "b"], [SIZE, SIZE]))
    gva_client.save_at(gvas, [A, B])
    backend.batch_write_finish(["a", "b"], [0, 0])
    memory = gva_client.memory(2, SIZE, fill=7)
    addresses, sizes = memory.addresses, [SIZE, SIZE]
    if spoil == "unknown":
        gvas[1] = 0x10
    elif spoil == "past the end":
        gvas[1] += 1
    else:
        addresses[1] = 0
    arrays = (np.array(numbers, np.int64) for numbers in (gvas, addresses, sizes))
    (status,) = gva_client.statuses([backend.batch_copy(*arrays, 1, open_fence())])
    assert status is not Status.OK
    assert memory.read() == [b"\x07" * SIZE] * 2


def test_lists_of_different_lengths_are_refused(gva_client):
    memory = gva_client.memory(2, SIZE, fill=7)
    gvas = list(gva_client.backend.batch_alloc(["a", "b"], [SIZE, SIZE]))
    gva_client.backend.batch_write_finish(["a", "b"], [0, 0])
    at, addresses = np.array(gvas[:1]), np.array(memory.addresses)
    code = gva_client.backend.batch_copy(at, addresses, np.full(2, SIZE), 1, open_fence())
    assert gva_client.statuses([code]) != [Status.OK]
    assert memory.read() == [b"\x07" * SIZE] * 2


def test_key_info_has_one_entry_per_key(gva_client):
    gva_client.put({"a": A})
    found, missing = gva_client.backend.batch_get_key_info(["a", "missing"])
    assert (found.size(), missing.size()) == (SIZE, 0)
    assert gva_client.load_at(found.gva_list(), SIZE) == (Status.OK, [A])


def test_a_copy_behind_a_revoked_fence_writes_nothing(gva_client):
    if gva_client.backend.late_data != "fenced":
        pytest.skip("the pool copies through a buffer of its own")
    gva_client.put({"a": A})
    (info,) = gva_client.backend.batch_get_key_info(["a"])
    status, rows = gva_client.load_at(info.gva_list(), SIZE, revoked_fence())
    assert status is Status.CANCELLED
    assert rows == [b"\xee" * SIZE]


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_leased_value_is_not_evicted_however_much_is_put(gva_client, engine_pool):
    gva_client.put({"a": A})
    assert gva_client.statuses(gva_client.backend.batch_add_lease(["a"], 600_000)) == [Status.OK]
    for n in range(2 * engine_pool.capacity_bytes // SIZE):
        gva_client.put({f"k{n}": B})
    assert gva_client.get(["a"], SIZE) == [A]
    assert gva_client.statuses([gva_client.backend.batch_remove_lease(["a"])]) == [Status.OK]


def test_a_lease_on_a_missing_key_fails_alone(gva_client):
    gva_client.put({"a": A})
    missing, there = gva_client.statuses(gva_client.backend.batch_add_lease(["missing", "a"], 1000))
    assert missing is not Status.OK
    assert there is Status.OK
    gva_client.backend.batch_remove_lease(["a"])


def test_a_lease_that_was_never_taken_cannot_be_given_back(gva_client):
    gva_client.put({"a": A})
    assert gva_client.statuses([gva_client.backend.batch_remove_lease(["a"])]) != [Status.OK]
