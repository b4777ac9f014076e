"""Staging: an engine that returns late, or never, touches nothing but its own slot, and the others go on."""

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fixtures.gates import Gate
from vllm_ascend_ext.kv_pool.backend.copier import CHUNK_BYTES, HostCopier
from vllm_ascend_ext.kv_pool.backend.staged import StagedBackend
from vllm_ascend_ext.kv_pool.calls import Lanes
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import (
    BadAnswer,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    Status,
    from_native,
)
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

SIZE = 4096
LONG = 60.0
A, B, C = (bytes([n]) * SIZE for n in (1, 2, 3))


class DictEngine:
    """Values in a dictionary. A call that a gate is set for stands before it first, and moves its bytes afterwards."""

    def __init__(self):
        self.values = {}
        self.gates = {}  # by call and key
        self.asked = []  # (call, keys), as they came
        self.answers = {}  # what a call says in place of the truth
        self.closed = 0
        self.memory = range(0)
        self.refuse = None

    def register(self, address, length):
        if self.refuse:
            raise self.refuse
        self.memory = range(address, address + length)

    def exists(self, keys):
        self._come("exists", keys)
        return [int(key in self.values) for key in keys]

    def put(self, keys, starts, lengths):
        self._come("put", keys, starts, lengths)
        for key, start, length in zip(keys, starts, lengths, strict=True):
            self.values.setdefault(key, ctypes.string_at(start, length))
        return self.answers.get("put", [0] * len(keys))

    def get(self, keys, starts, lengths):
        self._come("get", keys, starts, lengths)
        codes = []
        for key, start, length in zip(keys, starts, lengths, strict=True):
            value = self.values.get(key)
            right = value is not None and len(value) == length
            ctypes.memmove(start, value if right else b"\x66" * length, length)
            codes.append((Status.OK if right else Status.MISSING if value is None else Status.REFUSED).value)
        return self.answers.get("get", codes)

    def remove(self, keys):
        return [0 if self.values.pop(key, None) is not None else Status.MISSING.value for key in keys]

    def close(self):
        self.closed += 1

    def _come(self, call, keys, starts=(), lengths=()):
        self.asked.append((call, list(keys)))
        for start, length in zip(starts, lengths, strict=True):
            assert start in self.memory, "the engine was given memory that it was not told of"
            assert start + length <= self.memory.stop, "the engine was given memory that it was not told of"
        for key in keys:
            if (gate := self.gates.get((call, key))) is not None:
                gate.hold()
        assert not self.closed, "the engine's client was closed while a call was inside"


class DictBackend(StagedBackend):
    engine = "local"

    def __init__(self, store, **options):
        self.store = store
        super().__init__(**{"slots": 2, "slot_bytes": 4 * SIZE, "slot_timeout": LONG, **options})

    def _connect(self):
        return self.store


class Blocks:
    def __init__(self, count, size=SIZE, fill=0xEE):
        self.array = np.full((count, size), fill, np.uint8)

    @property
    def table(self):
        at = np.array([[row.ctypes.data] for row in self.array], np.int64).reshape(-1, 1)
        return at, np.full_like(at, self.array.shape[1])

    def fill(self, *rows):
        for block, row in zip(self.array, rows, strict=True):
            block[:] = np.frombuffer(row, np.uint8)
        return self

    def read(self):
        return [row.tobytes() for row in self.array]


@pytest.fixture
def store():
    return DictEngine()


@pytest.fixture
def backend(store):
    backend = DictBackend(store)
    yield backend
    backend.close()
    assert backend.ledger() == {"calls": 0, "slots": 0}


@contextmanager
def in_thread(call):
    """Run ``call`` beside the block; its outcome is a future. Waits for its end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def put(backend, values, fence=None):
    blocks = Blocks(len(values), len(next(iter(values.values())))).fill(*values.values())
    return backend.put(list(values), *blocks.table, fence or open_fence())


def get(backend, *keys, size=SIZE):
    blocks = Blocks(len(keys), size)
    codes = backend.get(keys, *blocks.table, open_fence())
    return [row if code == 0 else Status(code) for code, row in zip(codes, blocks.read(), strict=True)]


def revoke(fence):
    assert fence.revoke(Deadline.after(LONG))


# -- late data ---------------------------------------------------------------------------------------------------------


def test_what_arrives_after_the_blocks_were_handed_on_is_dropped(store, backend):
    put(backend, {"a": A})
    blocks, fence = Blocks(1), Fence()
    with Gate() as gate:
        store.gates["get", "a"] = gate
        with in_thread(lambda: backend.get(["a"], *blocks.table, fence)) as late:
            gate.wait_until_reached()
            revoke(fence)
            blocks.fill(B)
            gate.open()
            assert late.result(LONG) == [Status.CANCELLED]
    assert blocks.read() == [B]


def test_a_call_given_up_by_its_lane_keeps_nobody_waiting(store, backend):
    """As a transfer thread does it: the deadline ends the call, its blocks go to another, and that one loads."""
    put(backend, {"a": A, "b": B})
    blocks, fence = Blocks(1), Fence()
    lanes = Lanes("test", size=1)
    lanes.start(LONG)
    with Gate() as gate:
        store.gates["get", "a"] = gate
        call = lanes.submit("stuck", lambda: backend.get(["a"], *blocks.table, fence), Deadline.after(0.0), fence)
        gate.wait_until_reached()
        with pytest.raises(DeadlineExceeded):
            call.result()
        other = lanes.run("next", lambda: backend.get(["b"], *blocks.table, open_fence()), Deadline.after(LONG))
        assert other == [0]
        gate.open()
        assert lanes.wait_until(lambda: lanes.late == 1, LONG)
    assert lanes.close(LONG) == []
    assert blocks.read() == [B]


def test_a_slot_is_nobody_elses_until_its_call_returns(store, backend):
    put(backend, {"a": A, "b": B, "c": C})
    fence = Fence()
    with Gate() as gate:
        store.gates["get", "a"] = gate
        with in_thread(lambda: backend.get(["a"], *Blocks(1).table, fence)) as late:
            gate.wait_until_reached()
            revoke(fence)
            with Gate() as second:
                store.gates["get", "b"] = second
                with in_thread(lambda: get(backend, "b")) as other:
                    second.wait_until_reached()
                    gate.open()  # A arrives in its slot while B's call has not moved its bytes yet
                    assert late.result(LONG) == [Status.CANCELLED]
                    second.open()
                    assert other.result(LONG) == [B]
    assert get(backend, "c", "a") == [C, A]


def test_a_put_takes_the_bytes_before_the_engine_is_asked(store, backend):
    """The blocks may be handed on while the engine still sends."""
    blocks, fence = Blocks(1).fill(A), Fence()
    with Gate() as gate:
        store.gates["put", "a"] = gate
        with in_thread(lambda: backend.put(["a"], *blocks.table, fence)) as late:
            gate.wait_until_reached()
            revoke(fence)
            blocks.fill(B)
            gate.open()
            late.result(LONG)
    assert store.values == {"a": A}


def test_behind_a_revoked_fence_the_engine_is_not_even_asked(store, backend):
    fence = Fence()
    revoke(fence)
    assert put(backend, {"a": A}, fence) == [Status.CANCELLED]
    assert backend.get(["a"], *Blocks(1).table, fence) == [Status.CANCELLED]
    assert store.asked == []


class RevokingCopier(HostCopier):
    """Has ``fence`` revoked while the second chunk is being copied."""

    def __init__(self, fence):
        super().__init__()
        self._fence = fence
        self._chunks = 0

    def _move(self, to, start, sizes):
        super()._move(to, start, sizes)
        self._chunks += 1
        if self._chunks == 2:
            assert not self._fence.revoke(Deadline.after(0.0)), "this very copy holds it"


def test_a_fence_revoked_between_two_chunks_ends_the_copy_there(store):
    values = {name: bytes([n]) * CHUNK_BYTES for n, name in enumerate("abc", 1)}
    fence = Fence()
    backend = DictBackend(store, slot_bytes=3 * CHUNK_BYTES, copier=RevokingCopier(fence))
    store.values.update(values)
    blocks = Blocks(3, CHUNK_BYTES)
    codes = backend.get(list(values), *blocks.table, fence)
    backend.close()
    assert codes == [Status.OK, Status.OK, Status.CANCELLED]
    assert blocks.read() == [values["a"], values["b"], b"\xee" * CHUNK_BYTES]


def test_a_put_whose_fence_is_revoked_half_way_publishes_nothing(store):
    fence = Fence()
    backend = DictBackend(store, slot_bytes=3 * CHUNK_BYTES, copier=RevokingCopier(fence))
    codes = put(backend, {name: bytes(CHUNK_BYTES) for name in "abc"}, fence)
    backend.close()
    assert codes == [Status.CANCELLED] * 3
    assert store.values == {}


# -- stuck calls -------------------------------------------------------------------------------------------------------


def test_when_all_slots_are_stuck_the_next_call_fails_by_name_and_look_ups_go_on(store):
    backend = DictBackend(store, slot_timeout=0.01)
    put(backend, {"a": A})
    with Gate() as gate, ThreadPoolExecutor(2) as pool:
        store.gates["get", "a"] = gate
        stuck = [pool.submit(get, backend, "a", "missing") for _ in range(2)]
        gate.wait_until_reached(2)
        assert backend.ledger() == {"calls": 2, "slots": 2}
        with pytest.raises(
            DeadlineExceeded, match=r"put of 1 keys: all 2 slots .* get of 2 keys, for .* get of 2 keys"
        ):
            put(backend, {"b": B})
        assert backend.exists(["a", "b"]) == [1, 0]
        gate.open()
        assert [call.result(LONG) for call in stuck] == [[A, Status.MISSING]] * 2
    assert put(backend, {"b": B}) == [0]
    assert backend.ledger() == {"calls": 0, "slots": 0}
    backend.close()


def test_a_call_waits_for_a_slot_that_comes_free(store):
    backend = DictBackend(store, slots=1)
    put(backend, {"a": A, "b": B})
    with Gate() as gate, ThreadPoolExecutor(2) as pool:
        store.gates["get", "a"] = gate
        first = pool.submit(get, backend, "a")
        gate.wait_until_reached()
        second = pool.submit(get, backend, "b")
        gate.open()
        assert (first.result(LONG), second.result(LONG)) == ([A], [B])
    backend.close()


def test_closing_waits_for_nobody_and_the_last_call_lets_go(store, backend, caplog):
    put(backend, {"a": A, "b": B})
    with Gate() as first, Gate() as last:
        store.gates = {("get", "a"): first, ("get", "b"): last}
        with in_thread(lambda: get(backend, "a")) as one, in_thread(lambda: get(backend, "b")) as two:
            first.wait_until_reached()
            last.wait_until_reached()
            with caplog.at_level(logging.ERROR):
                backend.close()
            assert "get of 1 keys" in caplog.text
            with pytest.raises(ClosedError):
                backend.exists(["a"])
            first.open()
            assert one.result(LONG) == [A]
            assert store.closed == 0, "a call is still inside"
            last.open()
            assert two.result(LONG) == [B]
    assert store.closed == 1
    backend.close()
    assert store.closed == 1


def test_a_closed_client_says_so_to_every_call(store, backend):
    backend.close()
    for call in (
        lambda: backend.exists(["a"]),
        lambda: backend.remove(["a"]),
        lambda: put(backend, {"a": A}),
        lambda: get(backend, "a"),
    ):
        with pytest.raises(ClosedError):
            call()
    assert store.asked == []


def test_a_forked_child_neither_uses_nor_closes_the_client(store, backend):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"no"
        try:
            backend.close()
            backend.exists(["a"])
        except ClosedError as error:
            answer = b"open it again" if "open it again" in str(error) and not store.closed else b"no"
        finally:
            os.write(write, answer)
            os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(read, 100)
    os.close(read)
    os.close(write)
    assert answer == b"open it again"
    assert backend.exists(["a"]) == [0]


# -- bytes and codes ---------------------------------------------------------------------------------------------------


def test_nothing_of_a_failed_key_reaches_its_block(store, backend):
    put(backend, {"a": A, "b": B})
    blocks = Blocks(3)
    store.values["b"] = B[:-1]
    assert backend.get(["missing", "a", "b"], *blocks.table, open_fence()) == [Status.MISSING, 0, Status.REFUSED]
    assert blocks.read() == [b"\xee" * SIZE, A, b"\xee" * SIZE]


def test_a_batch_larger_than_a_slot_goes_in_rounds(store, backend):
    values = {f"k{n}": bytes([n]) * SIZE for n in range(11)}
    assert put(backend, values) == [0] * 11
    assert get(backend, *values) == list(values.values())
    assert [len(keys) for _, keys in store.asked] == [4, 4, 3] * 2


def test_a_value_larger_than_a_slot_fails_alone_and_is_named_once(store, backend, caplog):
    memory = Blocks(3, 5 * SIZE).fill(*(bytes([n]) * 5 * SIZE for n in (1, 2, 3)))
    at, _ = memory.table
    sizes = np.array([[SIZE], [5 * SIZE], [SIZE]])
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert backend.put(["a", "big", "c"], at, sizes, open_fence()) == [0, Status.INVALID, 0]
    assert sorted(store.values) == ["a", "c"]
    assert caplog.text.count(f"staging_slot_bytes={4 * SIZE}") == 1
    assert str(5 * SIZE) in caplog.text


@pytest.mark.parametrize("answer", [None, [], [0, 0, 0], 0, {"a": 0}, "ok"])
@pytest.mark.parametrize("call", ["put", "get"])
def test_an_answer_of_the_wrong_shape_fails_the_call(store, backend, call, answer):
    put(backend, {"a": A, "b": B})
    store.answers[call] = answer
    blocks = Blocks(2)
    with pytest.raises(BadAnswer):
        getattr(backend, call)(["a", "b"], *blocks.table, open_fence())
    assert blocks.read() == [b"\xee" * SIZE] * 2
    assert backend.ledger() == {"calls": 0, "slots": 0}


@pytest.mark.parametrize("code", [None, True, "0", 0.0, [0], -12345, 77])
def test_a_code_that_is_not_in_the_table_is_a_failure_of_its_key(store, backend, code):
    put(backend, {"a": A, "b": B})
    store.answers["get"] = [code, 0]
    blocks = Blocks(2)
    first, second = backend.get(["a", "b"], *blocks.table, open_fence())
    assert (from_native("local", first), second) == (Status.FAILED, 0)
    assert blocks.read() == [b"\xee" * SIZE, B]


def test_an_engine_that_raises_gives_its_slot_back(store, backend):
    for _ in range(5):
        store.gates["get", "a"] = _Broken()
        with pytest.raises(OSError, match="the engine fell over"):
            get(backend, "a")
    store.gates.clear()
    put(backend, {"a": A})
    assert get(backend, "a") == [A]


class _Broken:
    def hold(self):
        raise OSError("the engine fell over")


@settings(deadline=None, max_examples=60)
@example(cuts=[[0, 1], [0, 0]], slot=1, seed=0)  # the empty one would begin behind the slot's end
@given(
    cuts=st.lists(st.lists(st.integers(0, 90), min_size=2, max_size=2), min_size=1, max_size=12),
    slot=st.integers(1, 400),
    seed=st.integers(0, 9),
)
def test_values_are_their_segments_whatever_their_sizes(cuts, slot, seed):
    """Put in two pieces, got in one; what fits into a slot comes back byte for byte, and nothing else does."""
    backend = DictBackend(DictEngine(), slot_bytes=slot)
    sizes = np.array(cuts, np.int64)
    source = np.random.default_rng(seed).integers(0, 256, (len(cuts), 200), np.uint8)
    starts = source.ctypes.data + np.arange(len(cuts))[:, None] * 200 + np.array([0, 100])
    keys = [f"k{n}" for n in range(len(cuts))]
    fits = (sizes.sum(axis=1) > 0) & (sizes.sum(axis=1) <= slot)
    expected = np.where(fits, 0, Status.INVALID.value).tolist()
    assert backend.put(keys, starts, sizes, open_fence()) == expected
    target = np.full((len(cuts), 200), 0xEE, np.uint8)
    whole = sizes.sum(axis=1, keepdims=True)
    to = target.ctypes.data + np.arange(len(cuts))[:, None] * 200
    assert backend.get(keys, to, whole, open_fence()) == expected
    for row, (head, tail), out, right in zip(source, cuts, target, fits, strict=True):
        length = (head + tail) * right
        assert out[:length].tobytes() == (row[:head].tobytes() + row[100 : 100 + tail].tobytes())[:length]
        assert (out[length:] == 0xEE).all()
    backend.close()


def test_many_threads_never_see_each_others_bytes(store, backend):
    def work(thread):
        for n in range(40):
            value = (thread * 40 + n).to_bytes(2, "big") * (SIZE // 2)
            key = f"{thread}-{n}"
            assert put(backend, {key: value}) == [0]
            assert get(backend, key, "missing", key) == [value, Status.MISSING, value]

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, thread) for thread in range(6)]:
            done.result(LONG)


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["slots", "slot_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1.5, "many", None, True])
def test_sizes_that_can_not_be_are_refused(store, field, value):
    with pytest.raises(ConfigError, match=rf"staging_{field}={value!r}: allowed are 1 to"):
        DictBackend(store, **{field: value})
    assert store.closed == 0


def test_an_engine_that_refuses_the_staging_memory_is_closed(store):
    store.refuse = ConfigError("no")
    with pytest.raises(ConfigError, match="no"):
        DictBackend(store)
    assert store.closed == 1


def test_no_keys_ask_the_engine_nothing(backend, store):
    nothing = np.zeros((0, 1), np.int64)
    assert backend.put([], nothing, nothing, open_fence()) == []
    assert backend.get([], nothing, nothing, open_fence()) == []
    assert store.asked == []
