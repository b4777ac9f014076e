"""Whatever an engine answers about global addresses and leases is one status per key, and no address that isn't one."""

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.gva_stores import FlakyGvaStore, GvaPool, KeyInfo, LaxGvaStore
from fixtures.stores import answering, changing, raising
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import UNKNOWN_CODE, GvaClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import open_fence
from vllm_ascend_ext.kv_pool.observe import Stats

KEYS = ["a", "b", "c"]
OK, FULL, MISSING, FAILED = Status.OK, Status.FULL, Status.MISSING, Status.FAILED
WRONG_SHAPES = [None, [], [1], [1, 1, 1, 1], 1, "111", {1: 1, 2: 2, 3: 3}, iter([1, 1, 1])]


class Bench:
    def __init__(self):
        self.pool = GvaPool(1 << 12)
        self.store = FlakyGvaStore(LaxGvaStore(self.pool))
        self.clock = ManualClock()
        self.stats = Stats()
        self.store_client = StoreClient(self.store, self.stats, backoff=5.0, clock=self.clock)
        self.client = GvaClient(self.store_client)

    def fill(self, *keys):
        gvas = self.pool_client().batch_alloc(keys, [8] * len(keys))
        source = np.arange(8 * len(keys), dtype=np.uint8)
        addrs = source.ctypes.data + 8 * np.arange(len(keys))
        assert self.pool_client().batch_copy(np.asarray(gvas), addrs, np.full(len(keys), 8), 0, open_fence()) == 0
        assert self.pool_client().batch_write_finish(list(keys), [0] * len(keys)) == [0] * len(keys)
        return gvas

    def pool_client(self):
        return self.store.inner


@pytest.fixture
def bench():
    return Bench()


class TestAlloc:
    def test_an_address_for_each_key(self, bench):
        answer = bench.client.alloc(KEYS, 8)
        assert answer.statuses == [OK] * 3
        assert len(set(answer.gvas.tolist())) == 3
        assert (answer.gvas > 0).all()
        assert answer.unsure == [False] * 3

    @pytest.mark.parametrize(
        ("raw", "status", "unsure"),
        [(0, FULL, False), (-3016, FAILED, False), (-3014, Status.UNAVAILABLE, False), (None, FAILED, True)]
        + [(value, FAILED, True) for value in ("7", 1.5, True, [7])],
    )
    def test_what_is_no_address_is_a_failure_of_its_key(self, bench, raw, status, unsure):
        """A14. Only where the answer can't be read may something have been opened."""
        bench.store.script("batch_alloc", answering([0x1000, raw, 0x2000]))
        answer = bench.client.alloc(KEYS, 8)
        assert answer.statuses == [OK, status, OK]
        assert answer.gvas.tolist() == [0x1000, 0, 0x2000]
        assert answer.unsure == [False, unsure, False]

    @pytest.mark.parametrize("raw", WRONG_SHAPES, ids=lambda raw: f"{type(raw).__name__}-{raw!s:.12}")
    def test_an_answer_of_the_wrong_shape_fails_all_keys_any_of_which_may_be_open(self, bench, raw):
        bench.store.script("batch_alloc", answering(raw))
        answer = bench.client.alloc(KEYS, 8)
        assert answer.statuses == [FAILED] * 3
        assert answer.gvas.tolist() == [0] * 3
        assert answer.unsure == [True] * 3

    def test_so_does_an_exception(self, bench):
        bench.store.script("batch_alloc", raising(OSError("down"), after=True))
        answer = bench.client.alloc(KEYS, 8)
        assert (answer.statuses, answer.unsure) == ([FAILED] * 3, [True] * 3)
        assert isinstance(answer.cause, OSError)

    def test_a_call_that_was_not_made_has_opened_nothing(self, bench):
        bench.store_client.breaker.trip()
        answer = bench.client.alloc(KEYS, 8)
        assert answer.statuses == [Status.UNAVAILABLE] * 3
        assert answer.unsure == [False] * 3
        assert bench.store.calls("batch_alloc") == []


class TestLocate:
    def test_only_published_values_of_the_right_size_are_somewhere(self, bench):
        (gva,) = bench.fill("a")
        bench.pool_client().batch_alloc(["b"], [8])  # A19: allocated, but not finished
        answer = bench.client.locate(KEYS, 8)
        assert answer.statuses == [OK, MISSING, MISSING]
        assert answer.gvas.tolist() == [gva, 0, 0]
        assert bench.client.locate(["a"], 9).statuses == [Status.INVALID]

    @pytest.mark.parametrize("size", [None, -1, "8", 8.0, True, OSError("no size")])
    def test_an_info_that_can_not_be_read_fails_its_key_alone(self, bench, size):
        class Info:
            def size(self):
                if isinstance(size, Exception):
                    raise size
                return size

            def gva_list(self):
                return [7]

        (gva,) = bench.fill("a")
        bench.store.script("batch_get_key_info", changing(lambda infos: [infos[0], Info(), None]))
        answer = bench.client.locate(KEYS, 8)
        assert answer.statuses == [OK, FAILED, FAILED]
        assert answer.gvas.tolist() == [gva, 0, 0]

    @pytest.mark.parametrize("gvas", [[], [0], [-3016], [None], None, ["7"]])
    def test_an_info_without_an_address_fails_its_key(self, bench, gvas):
        class Info(KeyInfo):
            def size(self):
                return 8

            def gva_list(self):
                return gvas

        bench.store.script("batch_get_key_info", answering([Info(None)]))
        assert bench.client.locate(["a"], 8).statuses == [FAILED]

    def test_the_metadata_service_is_away(self, bench):
        """MemCache answers an empty list then."""
        bench.fill("a")
        bench.pool.meta_service_is_away = True
        answer = bench.client.locate(["a"], 8)
        assert answer.statuses == [FAILED]
        assert answer.gvas.tolist() == [0]


class TestCopy:
    def copy(self, bench):
        (gva,) = bench.fill("a")
        target = np.zeros(8, dtype=np.uint8)
        addrs, sizes = np.asarray([target.ctypes.data]), np.asarray([8])
        return bench.client.copy(np.asarray([gva]), addrs, sizes, 1, open_fence()), target

    def test_all_is_copied(self, bench):
        copied, target = self.copy(bench)
        assert (copied.status, copied.code) == (OK, 0)
        assert target.tolist() == list(range(8))

    @pytest.mark.parametrize(
        ("raw", "status", "code"),
        [(-3102, Status.REFUSED, -3102), (-3000, Status.INVALID, -3000), (-77, FAILED, -77)]
        + [(value, FAILED, UNKNOWN_CODE) for value in (None, "0", [0], False, 0.0)],
    )
    def test_a_failure_keeps_the_engines_own_code(self, bench, raw, status, code):
        bench.store.script("batch_copy", answering(raw))
        copied, _ = self.copy(bench)
        assert (copied.status, copied.code) == (status, code)

    def test_an_exception_is_a_failure_of_the_batch(self, bench):
        bench.store.script("batch_copy", raising(OSError("down")))
        copied, _ = self.copy(bench)
        assert (copied.status, copied.code) == (FAILED, UNKNOWN_CODE)
        assert isinstance(copied.cause, OSError)


class TestGivingBack:
    """What was opened is given back even while the engine is left alone after a failure."""

    def test_writes_are_finished(self, bench):
        bench.pool_client().batch_alloc(["a"], [8])
        bench.store_client.breaker.trip()
        assert bench.client.finish(["a"], [UNKNOWN_CODE]).statuses == [OK]
        assert bench.pool.ledger()["open_writes"] == 0

    def test_leases_are_removed(self, bench):
        bench.fill("a")
        assert bench.client.add_lease(["a"], 60.0).statuses == [OK]
        bench.store_client.breaker.trip()
        assert bench.client.remove_lease(["a"]).ok
        assert bench.pool.ledger()["leases"] == 0

    def test_there_is_nothing_to_say_about_no_keys(self, bench):
        assert bench.client.remove_lease([]).ok
        assert bench.store.calls("batch_remove_lease") == []

    @pytest.mark.parametrize("raw", [-3106, None, "0", [0], False])
    def test_a_refusal_is_seen(self, bench, raw):
        bench.store.script("batch_remove_lease", answering(raw))
        assert not bench.client.remove_lease(["a"]).ok


class TestAddLease:
    def test_missing_and_unfinished_keys_have_none(self, bench):
        bench.fill("a")
        bench.pool_client().batch_alloc(["b"], [8])
        answer = bench.client.add_lease(KEYS, 60.0)
        assert answer.statuses == [OK, MISSING, Status.REFUSED]
        assert answer.unsure == [False] * 3

    @pytest.mark.parametrize("raw", WRONG_SHAPES, ids=lambda raw: f"{type(raw).__name__}-{raw!s:.12}")
    def test_an_answer_of_the_wrong_shape_may_have_given_some(self, bench, raw):
        bench.store.script("batch_add_lease", answering(raw))
        answer = bench.client.add_lease(KEYS, 60.0)
        assert (answer.statuses, answer.unsure) == ([FAILED] * 3, [True] * 3)

    def test_the_time_is_in_milliseconds(self, bench):
        bench.fill("a")
        bench.client.add_lease(["a"], 0.25)
        (ends,) = bench.pool.leases.values()
        assert ends[0] - bench.pool.clock.now() == pytest.approx(0.25, abs=0.2)
