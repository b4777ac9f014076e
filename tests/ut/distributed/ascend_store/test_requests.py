"""Orders and reports: plain data that survives the way to another process, merged without gaining or losing a fault."""

import pickle

import numpy as np

from vllm_ascend_ext.kv_pool.requests import (
    LoadSpec,
    PoolMetadata,
    ReqMeta,
    RequestTracker,
    SaveSpec,
    StoredBlock,
    WorkerReport,
)


def test_orders_and_reports_survive_the_way_to_another_process():
    meta = PoolMetadata(
        requests=[ReqMeta("a", (np.asarray([1, 2]),), (b"h",), LoadSpec(1, 0, 8, False), SaveSpec(2, 8, 16), (1, 2))],
        computed_blocks=(np.asarray([3]),),
        preempted=frozenset({"b"}),
        delayed_free=frozenset({"c"}),
    )
    copy = pickle.loads(pickle.dumps(meta))
    assert repr(copy) == repr(meta)
    report = WorkerReport({1: (8, 1)}, {2})
    assert pickle.loads(pickle.dumps(report)) == report
    stored = StoredBlock(0, b"h", None, (1, 2), 2)
    assert pickle.loads(pickle.dumps(stored)) == stored


def test_a_job_got_as_far_as_the_rank_that_got_least_far():
    merged = WorkerReport({1: (16, 1), 2: (4, 1)}).merge(WorkerReport({1: (8, 1), 3: (0, 1)}))
    assert merged.saved_until == {1: (8, 2), 2: (4, 1), 3: (0, 1)}


def test_a_load_that_failed_on_any_rank_has_failed():
    assert WorkerReport(failed_loads={1}).merge(WorkerReport(failed_loads={2})).failed_loads == {1, 2}


def test_merging_is_associative_and_changes_neither_side():
    a, b, c = WorkerReport({1: (8, 1)}, {4}), WorkerReport({1: (4, 1)}), WorkerReport({1: (6, 2), 2: (1, 1)}, {5})
    before = pickle.dumps((a, b, c))
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == c.merge(a).merge(b)
    assert pickle.dumps((a, b, c)) == before


def test_a_new_life_keeps_what_is_true_of_the_request_and_drops_what_was_under_way():
    tracker = RequestTracker(request=None, hit_failed=True, load_job=3, saved_tokens=8, offered_tokens=16)
    tracker.save_jobs[1] = SaveSpec(1, 8, 16)
    tracker.block_ids = ([1, 2],)
    tracker.forget_life()
    assert tracker.hit_failed, "or the hit that failed would be offered again"
    assert tracker.saved_tokens == 8, "what is in the pool is still there"
    assert tracker.offered_tokens == 8, "what was not reported must be offered again"
    assert tracker.load_job is None
    assert not tracker.save_jobs
    assert not tracker.block_ids
