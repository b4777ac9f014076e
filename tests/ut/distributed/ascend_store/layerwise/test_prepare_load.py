"""A block is loaded only from an address that was its own under a lease; each other block has failed, and only it."""

import threading

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.gva_stores import FlakyGvaStore, GvaPool, KeyInfo, LaxGvaStore
from fixtures.stores import answering, changing, raising
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, TransferJob
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.gva import LeaseBook, prepare_load
from vllm_ascend_ext.kv_pool.layerwise.step import LayerLoad
from vllm_ascend_ext.kv_pool.observe import Stats

OK, MISSING, FAILED = Status.OK, Status.MISSING, Status.FAILED


class Bench:
    def __init__(self):
        self.pool = GvaPool(1 << 12)
        self.store = FlakyGvaStore(LaxGvaStore(self.pool))
        clock = ManualClock()
        self.client = GvaClient(StoreClient(self.store, Stats(), clock=clock))
        self.book = LeaseBook(self.client, 60.0, 10.0, clock, Stats())
        self.fill("a", "b", "c", "d")

    def fill(self, *keys):
        for key in keys:
            self.store.inner.batch_alloc([key], [8])
            self.pool.blobs[key].written[:] = True
        self.store.inner.batch_write_finish(list(keys), [0] * len(keys))

    def load(self, *jobs, as_one=False):
        plan = LayerPlan(((0, 0), (1, 0)), (None, None), (False, False))
        made = [
            TransferJob(
                number,
                f"r{number}",
                tuple(
                    GroupBlocks(group, np.arange(len(keys)), np.arange(len(keys)) + 1, list(keys))
                    for group, keys in enumerate(groups)
                ),
            )
            for number, groups in enumerate(jobs)
        ]
        return LayerLoad(made, plan, threading.Condition(threading.RLock()), as_one=as_one)

    def prepare(self, load, confirm=True):
        """The statuses after it, and the keys under lease then."""
        with self.book.borrow() as leases:
            prepare_load(load, leases, self.client, [8, 8], confirm=confirm)
            leased = sorted(self.pool.leased())
        assert not self.book.held
        assert self.book.acquired == self.book.released
        assert self.pool.ledger()["leases"] == 0
        return [load.result(job).statuses for job in range(len(load.jobs))], leased


@pytest.fixture
def bench():
    return Bench()


def test_each_block_has_its_address_under_a_lease(bench):
    load = bench.load([["a", "b"], ["c"]])
    assert bench.prepare(load) == ([[[OK, OK], [OK]]], ["a", "b", "c"])
    assert [rows.gvas.tolist() for rows in load.rows] == [
        bench.store.inner.batch_alloc(["a", "b"], [8, 8]),
        bench.store.inner.batch_alloc(["c"], [8]),
    ]


def test_a15_no_info_no_lease_no_block(bench):
    """Three blocks; the second is not there, the lease of the third is refused."""
    bench.store.script("batch_get_key_info", changing(lambda infos: [infos[0], KeyInfo(None), infos[2]]))
    bench.store.script("batch_add_lease", lambda call: [*bench.store.inner.batch_add_lease(["a"], 60_000), -3101])
    load = bench.load([["a", "b", "c"]])
    assert bench.prepare(load) == ([[[OK, MISSING, MISSING]]], ["a"])
    assert load.rows[0].to_copy().tolist() == [0]
    assert bench.store.calls("batch_remove_lease") == [["a"]]


@pytest.mark.parametrize("change", [lambda infos: infos[:2], lambda infos: [], lambda infos: [*infos, infos[0]]])
def test_a15_a_list_of_the_wrong_length_fails_all_of_that_call(bench, change):
    bench.store.script("batch_get_key_info", changing(change))
    assert bench.prepare(bench.load([["a", "b", "c"]], [["d"]])) == ([[[FAILED] * 3], [[OK]]], ["d"])


def test_a15_none_in_the_list_fails_its_block(bench):
    bench.store.script("batch_get_key_info", changing(lambda infos: [infos[0], None, infos[2]]))
    assert bench.prepare(bench.load([["a", "b", "c"]])) == ([[[OK, FAILED, OK]]], ["a", "c"])


@pytest.mark.parametrize("raw", [None, [0], [0, 0, 0, 0]], ids=repr)
def test_a15_leases_of_the_wrong_number_fail_all_of_that_call(bench, raw):
    bench.store.script("batch_add_lease", changing(lambda codes: raw))
    assert bench.prepare(bench.load([["a", "b", "c"]], [["d"]]))[0] == [[[FAILED] * 3], [[OK]]]


def test_a_call_that_raises_fails_its_request_alone(bench):
    bench.store.script("batch_get_key_info", raising(OSError("down")))
    load = bench.load([["a"]], [["b"]])
    assert bench.prepare(load) == ([[[FAILED]], [[OK]]], ["b"])
    assert isinstance(load.result(0).cause, OSError)


def test_a_value_that_moved_before_the_lease_was_held_is_not_read_at_its_old_place(bench):
    """It was evicted and saved anew; without digests nobody could tell its bytes from another block's."""

    def evict_and_save_anew(call):
        infos = call()
        bench.pool.evict("a")
        bench.fill("other", "a")
        return infos

    bench.store.script("batch_get_key_info", evict_and_save_anew)
    assert bench.prepare(bench.load([["a", "b"]])) == ([[[MISSING, OK]]], ["a", "b"])


def test_with_digests_it_is_not_asked_twice(bench):
    bench.prepare(bench.load([["a"]]), confirm=False)
    assert bench.store.calls("batch_get_key_info") == [["a"]]


def test_a_load_that_fails_as_one_stops_at_the_first_failure(bench):
    bench.store.script("batch_get_key_info", answering([]))
    load = bench.load([["a"], ["b"]], as_one=True)
    assert bench.prepare(load) == ([[[FAILED], [OK]]], [])
    assert load.hopeless
    assert bench.store.calls("batch_get_key_info") == [["a"]]


def test_two_requests_with_one_key_share_a_lease(bench):
    assert bench.prepare(bench.load([["a"]], [["a", "b"]])) == ([[[OK]], [[OK, OK]]], ["a", "b"])
    assert bench.store.calls("batch_add_lease") == [["a"], ["b"]]
