"""Counters and log lines: each fault is counted and written down once, with the request that it belongs to."""

import logging
import threading

from vllm_ascend_ext.kv_pool.observe import MAX_OBSERVED, Stats


def test_a_failure_is_one_count_and_one_error_line_with_request_and_cause(caplog):
    stats = Stats()
    stats.failure("load_failed", "3 of 4 blocks", ["b", "a"], OSError("link down"))
    assert stats.get("load_failed") == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "load_failed [requests: a, b] 3 of 4 blocks: OSError: link down"


def test_a_failure_without_request_or_cause_still_has_its_line(caplog):
    Stats().failure("close_stuck", "get of a")
    assert [record.getMessage() for record in caplog.records] == ["close_stuck [requests: -] get of a"]


def test_taking_the_counts_starts_again_from_nothing_and_loses_none():
    stats = Stats()
    stats.count("keys", 3)
    assert stats.take() == {"keys": 3}
    assert stats.take() == {}
    stats.count("keys", 2)
    assert stats.get("keys") == 2


def test_a_snapshot_is_a_copy():
    stats = Stats()
    stats.count("keys")
    snapshot = stats.snapshot()
    stats.count("keys")
    assert snapshot == {"keys": 1}


def test_asking_for_a_counter_does_not_create_it():
    stats = Stats()
    assert stats.get("never") == 0
    assert stats.snapshot() == {}


def test_counts_from_many_threads_add_up():
    stats = Stats()
    threads = [threading.Thread(target=lambda: [stats.count("n") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stats.get("n") == 8000


def test_observations_come_as_lists_and_are_bounded():
    """A worker whose figures nobody takes must not grow."""
    stats = Stats()
    for number in range(MAX_OBSERVED + 5):
        stats.observe("seconds", number)
    taken = stats.take()
    assert taken["seconds"] == list(range(MAX_OBSERVED))
    assert stats.take() == {}
