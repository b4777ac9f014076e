"""The local store while bytes move: fences in mid-copy, copies that fail or take long, a lock that is not to be had."""

import threading

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.backend.arena import GRANULE
from vllm_ascend_ext.kv_pool.backend.copier import CHUNK_BYTES
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.backend.local_audit import faults
from vllm_ascend_ext.kv_pool.backend.local_table import Table
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

SIZE = GRANULE
A, B = (bytes([n]) * SIZE for n in (1, 2))
NOTHING_HELD = {"open_writes": 0, "leases": 0, "pins": 0}


@pytest.fixture
def four(local_pool):
    """A pool with room for four pages."""
    local_pool.capacity_bytes = 4 * GRANULE
    return local_pool


# -- fences in the middle of a copy -----------------------------------------------------------------------------------


class FenceBetween(Fence):
    """Grants the first ``grants`` chunks."""

    def __init__(self, grants: int) -> None:
        super().__init__()
        self._grants = grants

    def hold(self):
        if self._grants == 0:
            self.revoke(Deadline.after(1.0))
        self._grants -= 1
        return super().hold()


def test_a_put_that_is_fenced_off_half_way_publishes_only_what_was_copied(local_pool):
    size = 3 * CHUNK_BYTES // 4
    local_pool.capacity_bytes = 8 * size
    client = local_pool.open()
    values = {f"k{n}": bytes([n]) * size for n in range(4)}
    statuses = client.put(values, FenceBetween(2))
    done = statuses.count(Status.OK)
    assert 0 < done < 4
    assert statuses == [Status.OK] * done + [Status.CANCELLED] * (4 - done)
    assert client.exists(*values) == [1] * done + [0] * (4 - done)
    assert client.backend.stats()["used_bytes"] == done * size
    assert client.get(["k0"], size) == [values["k0"]]
    assert client.backend.ledger() == NOTHING_HELD


def test_a_get_that_is_fenced_off_half_way_writes_nothing_more(local_pool):
    size = 3 * CHUNK_BYTES // 4
    local_pool.capacity_bytes = 8 * size
    client = local_pool.open()
    client.put({f"k{n}": bytes([n + 1]) * size for n in range(4)})
    memory = client.memory(4, size, fill=0)
    at = np.array(memory.addresses)[:, None]
    codes = client.backend.get([f"k{n}" for n in range(4)], at, np.full_like(at, size), FenceBetween(2))
    done = codes.count(Status.OK)
    assert codes == [Status.OK] * done + [Status.CANCELLED] * (4 - done)
    assert 0 < done < 4
    assert memory.array[:done, 0].tolist() == [1, 2, 3, 4][:done]
    assert not memory.array[3].any()
    assert client.backend.ledger() == NOTHING_HELD


# -- copies that go wrong or take long --------------------------------------------------------------------------------


class Gate:
    """A copier that waits for the test at every copy, and may then fail."""

    def __init__(self) -> None:
        self.copying, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def to_host(self, host, blocks, sizes):
        self.copying.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error

    from_host = to_host


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_copy_that_raises_leaves_nothing_behind(local_pool, error):
    local_pool.copier = Gate()
    local_pool.copier.error = error
    local_pool.copier.go_on.set()
    client = local_pool.open()
    with pytest.raises(type(error)):
        client.put({"a": A})
    (gva,) = client.backend.batch_alloc(["b"], [SIZE])
    with pytest.raises(type(error)):
        client.save_at([gva], [A])
    client.backend.batch_write_finish(["b"], [0])
    with pytest.raises(type(error)):
        client.get(["b"], SIZE)
    assert client.exists("a") == [0]
    assert client.backend.ledger() == NOTHING_HELD
    assert client.backend.stats()["used_bytes"] == SIZE


def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_a_value_is_not_evicted_under_a_reader(four):
    gated = LocalBackend(four.name, four.capacity_bytes, copier=(gate := Gate()))
    client = four.open()
    client.put({f"k{n}": A for n in range(4)})
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.get(["k3"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)
    assert client.put({f"x{n}": B for n in range(4)}) == [Status.OK] * 3 + [Status.FULL]
    assert client.backend.remove(["k3"]) == [Status.OK]
    assert client.put({"y": B, "z": B, "u": B, "v": B})[3] is Status.FULL, "its bytes must not be used again yet"
    gate.go_on.set()
    thread.join(60)
    assert codes == [[Status.OK]]
    assert client.put({f"w{n}": B for n in range(4)}) == [Status.OK] * 4
    gated.close()


def test_a_write_dropped_under_its_copier_frees_its_room_only_afterwards(four):
    four.copier = gate = Gate()
    client = four.open()
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    thread, statuses = in_thread(lambda: client.save_at([gva], [A]))
    assert gate.copying.wait(60)
    assert client.backend.batch_write_finish(["k"], [1]) == [Status.OK]
    assert client.backend.stats()["used_bytes"] == SIZE
    assert 0 not in client.backend.batch_alloc(["x", "y", "z"], [SIZE] * 3)
    assert client.backend.batch_alloc(["u"], [SIZE]) == [0]
    gate.go_on.set()
    thread.join(60)
    assert statuses == [Status.OK]
    assert client.backend.batch_alloc(["u"], [SIZE]) != [0]


def test_of_two_puts_of_one_key_the_first_to_end_stays(local_pool):
    gated = LocalBackend(local_pool.name, local_pool.capacity_bytes, copier=(gate := Gate()))
    client = local_pool.open()
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.put(["k"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)
    assert client.put({"k": A}) == [Status.OK]
    gate.go_on.set()
    thread.join(60)
    assert codes == [[Status.OK]]
    assert client.get(["k"], SIZE) == [A]
    assert client.backend.stats()["used_bytes"] == SIZE
    gated.close()


def test_a_put_notices_a_twin_that_only_a_rebuild_made_findable(local_pool, monkeypatch):
    gated = LocalBackend(local_pool.name, local_pool.capacity_bytes, copier=(gate := Gate()))
    client = local_pool.open()
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.put(["k"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)

    def interrupt(index, slots):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Table, "_enter", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.put({"k": A})
    gate.go_on.set()
    thread.join(60)
    assert codes == [[Status.OK]]
    assert client.get(["k"], SIZE) == [A]
    assert faults(client.backend) == []
    gated.close()


@pytest.mark.parametrize("at", ["_set_free", "pin", "_enter", "publish", "touch"])
def test_a_put_that_is_interrupted_in_the_index_leaves_nothing_behind(local_pool, monkeypatch, at):
    client = local_pool.open()

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Table, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.put({"k": A})
    assert client.backend.ledger() == NOTHING_HELD
    assert faults(client.backend) == []
    assert client.put({"k": A}) == [Status.OK]
    assert client.get(["k"], SIZE) == [A]


def test_a_put_whose_key_was_allocated_meanwhile_is_refused(local_pool):
    gated = LocalBackend(local_pool.name, local_pool.capacity_bytes, copier=(gate := Gate()))
    client = local_pool.open()
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.put(["k"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)
    (gva,) = client.backend.batch_alloc(["k"], [SIZE])
    gate.go_on.set()
    thread.join(60)
    assert codes == [[Status.REFUSED]]
    assert client.save_at([gva], [B]) is Status.OK
    assert client.backend.batch_write_finish(["k"], [0]) == [Status.OK]
    assert client.get(["k"], SIZE) == [B]
    gated.close()


def test_a_client_closed_in_mid_copy_lets_go_when_the_copy_ends(local_pool):
    gated = LocalBackend(local_pool.name, local_pool.capacity_bytes, copier=(gate := Gate()))
    client = local_pool.open()
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.put(["k"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)
    gated.close()
    assert client.backend.stats()["clients"] == 2
    gate.go_on.set()
    thread.join(60)
    assert codes == [[Status.OK]]
    assert client.backend.stats()["clients"] == 1
    assert client.exists("k") == [1]


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_every_call_ends_with_timeout_when_the_index_is_not_to_be_had(local_pool):
    local_pool.lock_timeout = 0.05
    client = local_pool.open()
    backend, memory = client.backend, client.memory(1, SIZE)
    client.put({"k": A})
    backend.batch_add_lease(["k"], 100_000)
    (gva,) = backend.batch_alloc(["open"], [SIZE])
    at, sizes = np.array([memory.addresses]), np.array([[SIZE]])
    with backend._session.segment.lock(1.0):
        assert backend.put(["x"], at, sizes, open_fence()) == [Status.TIMEOUT]
        assert backend.get(["k"], at, sizes, open_fence()) == [Status.TIMEOUT]
        assert backend.remove(["k"]) == [Status.TIMEOUT]
        assert backend.batch_alloc(["y"], [SIZE]) == [0]
        assert client.save_at([gva], [A]) is Status.TIMEOUT
        assert backend.batch_write_finish(["open"], [0]) == [Status.TIMEOUT]
        assert backend.batch_add_lease(["k"], 1000) == [Status.TIMEOUT]
        assert backend.batch_remove_lease(["k"]) == Status.TIMEOUT
        for call in (backend.exists, backend.batch_get_key_info):
            with pytest.raises(TimeoutError):
                call(["k"])
    assert backend.ledger() == NOTHING_HELD, "what could not be given back was owed, and is given back now"
    assert client.exists("k", "open", "x") == [1, 0, 0]


def test_a_put_that_cannot_be_published_in_time_is_dropped_later(local_pool):
    local_pool.lock_timeout = 0.05
    local_pool.copier = gate = Gate()
    client = local_pool.open()
    thread, statuses = in_thread(lambda: client.put({"k": A}))
    assert gate.copying.wait(60)
    with client.backend._session.segment.lock(1.0):
        gate.go_on.set()
        thread.join(60)
    assert statuses == [[Status.TIMEOUT]]
    assert client.exists("k") == [0]
    assert client.backend.stats()["used_bytes"] == 0
    assert client.backend.ledger() == NOTHING_HELD


def test_what_a_get_could_not_unpin_in_time_is_unpinned_later(local_pool):
    local_pool.lock_timeout = 0.05
    client = local_pool.open()
    client.put({"k": A})
    gated = LocalBackend(local_pool.name, local_pool.capacity_bytes, copier=(gate := Gate()), lock_timeout=0.05)
    at = np.array([client.memory(1, SIZE).addresses])
    thread, codes = in_thread(lambda: gated.get(["k"], at, np.full_like(at, SIZE), open_fence()))
    assert gate.copying.wait(60)
    with client.backend._session.segment.lock(1.0):
        gate.go_on.set()
        thread.join(60)
    assert codes == [[Status.OK]]
    assert gated.ledger() == NOTHING_HELD
    gated.close()


def test_a_client_that_cannot_sign_out_in_time_counts_as_dead(local_pool):
    local_pool.lock_timeout = 0.05
    client, other = local_pool.open(), local_pool.open()
    client.backend.batch_alloc(["k"], [SIZE])
    with other.backend._session.segment.lock(1.0):
        client.backend.close()
    assert other.put({"k": A}) == [Status.OK]
    assert other.backend.stats()["clients"] == 1


def test_a_change_that_an_exception_left_half_done_is_mended_by_the_next(local_pool):
    client = local_pool.open()
    client.put({"a": A})

    def spoil():
        with client.backend._session.changing() as index:
            index.free_start[:1] = 0
            index.buckets[:64] = 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spoil()
    assert client.get(["a"], SIZE) == [A]
    assert client.put({"b": B}) == [Status.OK]
    assert client.get(["a", "b"], SIZE) == [A, B]
    assert client.backend.stats()["rebuilds"] == 1
