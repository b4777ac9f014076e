"""The store client: one status per key whatever an engine answers, and no deadline paid twice for a dead one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.clock import ManualClock
from fixtures.memory_store import MemoryStore
from fixtures.parts import Blocks
from fixtures.stores import FlakyStore, answering, changing, raising, wrong_bytes
from vllm_ascend_ext.kv_pool.backend.client import Answer, Breaker, StoreClient
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import BadAnswer, Cancelled, Status
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence
from vllm_ascend_ext.kv_pool.observe import Stats

KEYS = ["a", "b", "c"]
OK, MISSING, FAILED, UNAVAILABLE = Status.OK, Status.MISSING, Status.FAILED, Status.UNAVAILABLE

WRONG_SHAPES = [None, [], [0], [0, 0], [0] * 4, 0, "000", b"\0\0\0", {0: 0, 1: 0, 2: 0}, {0, 1, 2}, iter([0, 0, 0])]


class Bench:
    """A client on a flaky store, three blocks of memory, and their addresses."""

    def __init__(self, checksum=False, clock=None):
        self.store = FlakyStore(MemoryStore())
        self.stats = Stats()
        self.clock = clock or ManualClock()
        self.client = StoreClient(self.store, self.stats, checksum=checksum, backoff=5.0, clock=self.clock)
        self.memory = Blocks(3, 32)
        self.memory.bytes[:] = np.arange(96, dtype=np.uint8).reshape(3, 32)
        self.addrs, self.sizes = self.memory.layout().addresses(np.arange(3))

    def put(self, keys=KEYS, fence=None):
        n = len(keys)
        return self.client.put(keys, self.addrs[:n], self.sizes[:n], fence or open_fence())

    def get(self, keys=KEYS, fence=None):
        n = len(keys)
        return self.client.get(keys, self.addrs[:n], self.sizes[:n], fence or open_fence())

    def call(self, method):
        return self.client.exists(KEYS) if method == "exists" else getattr(self, method)()


@pytest.fixture(params=[False, True], ids=["plain", "checksum"])
def bench(request):
    return Bench(request.param)


class TestOneStatusPerKey:
    def test_what_was_put_is_there_and_comes_back_byte_for_byte(self, bench):
        before = bench.memory.bytes.copy()
        assert bench.client.exists(KEYS).statuses == [MISSING] * 3
        assert bench.put().ok
        assert bench.client.exists([*KEYS, "d"]).statuses == [OK, OK, OK, MISSING]
        bench.memory.bytes[:] = 0
        assert bench.get().ok
        assert (bench.memory.bytes == before).all()

    @pytest.mark.parametrize("method", ["exists", "put", "get"])
    @pytest.mark.parametrize("answer", WRONG_SHAPES, ids=lambda answer: f"{type(answer).__name__}-{answer!s:.12}")
    def test_an_answer_of_the_wrong_shape_fails_every_key(self, bench, method, answer):
        """A46: a short answer must not leave its tail counted as done, nor its head."""
        bench.put()
        bench.store.script(method, answering(answer))
        result = bench.call(method)
        assert result.statuses == [FAILED] * 3
        assert isinstance(result.cause, BadAnswer)
        assert bench.stats.get(f"store_{method}_failed_keys") == 3
        bench.store.check_all_played()

    @pytest.mark.parametrize("method", ["exists", "put", "get"])
    @pytest.mark.parametrize("after", [False, True])
    def test_an_exception_fails_every_key_and_is_the_cause(self, bench, method, after):
        error = OSError("link down")
        bench.store.script(method, raising(error, after=after))
        result = bench.call(method)
        assert result.statuses == [FAILED] * 3
        assert result.cause is error
        assert bench.call(method).cause is None, "the next call is served"

    @pytest.mark.parametrize("method", ["exists", "put", "get"])
    def test_what_ends_a_thread_is_not_swallowed(self, bench, method):
        bench.store.script(method, raising(SystemExit(3)))
        with pytest.raises(SystemExit):
            bench.call(method)

    @pytest.mark.parametrize("method", ["put", "get"])
    def test_a_key_that_failed_is_the_one_that_is_named(self, bench, method):
        """A46: some keys fail."""
        bench.put()
        bench.store.script(method, changing(lambda codes: [codes[0], int(Status.FULL), codes[2]]))
        result = bench.call(method)
        assert result.statuses == [OK, Status.FULL, OK]
        assert result.failed() == [1]
        assert not result.ok
        assert bench.stats.get(f"store_{method}_failed_keys") == 1

    @pytest.mark.parametrize("code", [None, False, True, 0.0, "0", -1, 10, 4096, [0], object], ids=repr)
    @pytest.mark.parametrize("method", ["put", "get"])
    def test_a_code_that_is_not_in_the_table_is_a_failure_of_its_key(self, bench, method, code):
        bench.put()
        bench.store.script(method, changing(lambda codes: [codes[0], code, codes[2]]))
        assert bench.call(method).statuses == [OK, FAILED, OK]

    @pytest.mark.parametrize("code", [2, -1, None, True, 1.0, "1", [1]], ids=repr)
    def test_presence_is_one_or_zero_and_nothing_else(self, bench, code):
        bench.put()
        bench.store.script("exists", answering([1, code, 0]))
        first, second, third = bench.client.exists(KEYS).statuses
        assert (first, third) == (OK, MISSING)
        assert second not in (OK, MISSING)

    def test_duplicate_keys_have_a_status_each(self, bench):
        """A46."""
        assert bench.put(["a", "a", "b"]).statuses == [OK] * 3
        assert bench.client.exists(["a", "a", "c"]).statuses == [OK, OK, MISSING]
        assert bench.get(["a", "a", "c"]).statuses == [OK, OK, MISSING]

    def test_numpy_answers_are_answers(self, bench):
        bench.store.script("exists", answering(np.asarray([1, 0, 1])))
        assert bench.client.exists(KEYS).statuses == [OK, MISSING, OK]

    def test_a_value_of_another_size_is_not_loaded(self, bench):
        """A46: as many bytes as were asked for, or none."""
        bench.put()
        bench.memory.bytes[:] = 7
        result = bench.client.get(KEYS, bench.addrs, bench.sizes // 2, open_fence())
        assert result.statuses == [Status.INVALID] * 3
        assert (bench.memory.bytes == 7).all()

    def test_no_keys_are_no_call(self, bench):
        for result in (bench.client.exists([]), bench.put([]), bench.get([])):
            assert result == Answer([])
        assert [bench.store.calls(method) for method in ("exists", "put", "get")] == [[], [], []]

    @settings(deadline=None)
    @given(data=st.data(), n=st.integers(0, 5))
    def test_there_is_always_one_status_per_key(self, data, n):
        """Whatever comes back."""
        anything = st.one_of(st.none(), st.integers(-4000, 4000), st.booleans(), st.floats(), st.text(max_size=3))
        bench = Bench(checksum=data.draw(st.booleans()))
        method = data.draw(st.sampled_from(["exists", "put", "get"]))
        bench.store.script(method, answering(data.draw(st.one_of(anything, st.lists(anything, max_size=6)))))
        keys = [str(i) for i in range(n)]
        addrs = np.repeat(bench.addrs[:1], n, axis=0)
        sizes = np.repeat(bench.sizes[:1], n, axis=0)
        if method == "exists":
            result = bench.client.exists(keys)
        else:
            result = getattr(bench.client, method)(keys, addrs, sizes, open_fence())
        assert len(result.statuses) == n
        assert all(isinstance(status, Status) for status in result.statuses)


class TestChecksum:
    def test_wrong_bytes_are_corrupt_and_the_value_is_removed(self):
        """Or it would stay for good: a put of an existing key keeps the first data."""
        bench = Bench(checksum=True)
        bench.put()
        bench.store.script("get", wrong_bytes)
        assert bench.get().statuses == [Status.CORRUPT] * 3
        assert bench.stats.get("store_get_corrupt_keys") == 3
        assert bench.client.exists(KEYS).statuses == [MISSING] * 3
        assert bench.put().ok
        assert bench.get().ok

    def test_only_the_wrong_value_is_removed(self):
        bench = Bench(checksum=True)
        bench.put()
        value = bench.store.inner.values["b"]
        bench.store.inner.values["b"] = bytes([value[0] ^ 1]) + value[1:]
        assert bench.get().statuses == [OK, Status.CORRUPT, OK]
        assert bench.client.exists(KEYS).statuses == [OK, MISSING, OK]

    def test_success_without_a_byte_copied_is_corrupt(self):
        bench = Bench(checksum=True)
        bench.put()
        bench.store.script("get", answering([0, 0, 0]))
        bench.memory.bytes[:] = 0
        assert bench.get().statuses == [Status.CORRUPT] * 3

    def test_a_failed_remove_changes_nothing_for_the_caller(self):
        bench = Bench(checksum=True)
        bench.put()
        bench.store.script("get", wrong_bytes)
        bench.store.script("remove", raising(OSError("leased")))
        assert bench.get().statuses == [Status.CORRUPT] * 3
        assert bench.stats.get("store_remove_failed_keys") == 3

    def test_a_key_that_is_not_there_has_no_digest_to_compare(self):
        bench = Bench(checksum=True)
        bench.put(["a"])
        assert bench.get().statuses == [OK, MISSING, MISSING]

    def test_nothing_is_read_or_sent_behind_a_revoked_fence(self):
        bench, fence = Bench(checksum=True), Fence()
        bench.put()
        fence.revoke(Deadline.after(1.0))
        result = bench.put(fence=fence)
        assert result.statuses == [FAILED] * 3
        assert isinstance(result.cause, Cancelled)
        assert len(bench.store.calls("put")) == 1

    def test_a_load_that_was_given_up_before_its_digests_were_compared_is_cancelled(self):
        bench, fence = Bench(checksum=True), Fence()
        bench.put()

        def revoke_afterwards(call):
            codes = call()
            fence.revoke(Deadline.after(1.0))
            return codes

        bench.store.script("get", revoke_afterwards)
        result = bench.get(fence=fence)
        assert result.statuses == [Status.CANCELLED] * 3
        assert isinstance(result.cause, Cancelled)

    def test_without_checksums_a_revoked_fence_is_the_engines_to_ask(self):
        bench, fence = Bench(), Fence()
        bench.put()
        fence.revoke(Deadline.after(1.0))
        bench.memory.bytes[:] = 9
        assert bench.get(fence=fence).statuses == [Status.CANCELLED] * 3
        assert (bench.memory.bytes == 9).all()


class TestBreaker:
    def test_it_is_closed_until_it_is_tripped_then_open_for_its_period_and_then_lets_one_try(self):
        clock = ManualClock()
        breaker = Breaker(5.0, clock)
        assert breaker.allows()
        breaker.trip()
        clock.advance(4.9)
        assert not breaker.allows()
        clock.advance(0.2)
        assert [breaker.allows(), breaker.allows()] == [True, False]
        clock.advance(5.0)
        assert breaker.allows(), "one a period"
        breaker.reset(clock.now())
        assert [breaker.allows(), breaker.allows()] == [True, True]

    def test_a_call_that_was_given_up_and_went_well_in_the_end_does_not_close_it(self, bench):
        """Or a store that is merely slow would be waited for again as soon as each overdue call has returned."""

        def slow(call):
            bench.clock.advance(3.0)
            bench.client.breaker.trip()  # whoever waited has given up
            bench.clock.advance(3.0)
            return call()

        bench.store.script("exists", slow)
        assert bench.client.exists(KEYS).statuses == [MISSING] * 3
        assert bench.put().statuses == [UNAVAILABLE] * 3
        bench.clock.advance(2.0)
        assert bench.put().ok, "it is asked again when the period is over"

    def test_an_engine_that_says_unavailable_is_left_alone(self, bench):
        bench.store.script("exists", answering([int(UNAVAILABLE)] * 3))
        bench.client.exists(KEYS)
        assert bench.put().statuses == [UNAVAILABLE] * 3
        assert bench.get().statuses == [UNAVAILABLE] * 3
        assert bench.store.calls("put") == bench.store.calls("get") == []
        assert bench.stats.get("store_put_skipped") == 3

    def test_it_is_asked_again_after_the_period_and_one_good_answer_is_enough(self, bench):
        bench.client.breaker.trip()
        bench.clock.advance(5.0)
        assert bench.client.exists(KEYS).statuses == [MISSING] * 3
        assert bench.put().ok

    def test_a_try_that_fails_leaves_it_alone_for_another_period(self, bench):
        bench.client.breaker.trip()
        bench.clock.advance(5.0)
        bench.store.script("exists", answering([int(UNAVAILABLE)] * 3))
        bench.client.exists(KEYS)
        assert bench.put().statuses == [UNAVAILABLE] * 3

    def test_a_key_that_fails_alone_does_not_trip_it(self, bench):
        bench.store.script("exists", answering([int(UNAVAILABLE), 0, 0]))
        bench.client.exists(KEYS)
        assert bench.put().ok
