"""Law: a metric says what its name says; every counter of the pool ends in exactly one metric, log line included."""

from __future__ import annotations

import pytest

from vllm_ascend_ext.kv_pool import metrics


@pytest.mark.parametrize(
    ("counter", "parts"),
    [
        ("store_put_keys", ("save_put", "keys")),
        ("store_get_failed_keys", ("load_get", "failed_keys")),
        ("store_remove_keys", ("remove", "keys")),
        ("store_remove_lease_keys", ("load_remove_lease", "keys")),
        ("store_key_info_seconds", ("load_key_info", "seconds")),
        ("lookups", None),
        ("store_something_keys", None),
    ],
)
def test_operation_of_a_counter(counter: str, parts: tuple[str, str] | None) -> None:
    assert metrics.operation_of(counter) == parts


def test_faults_are_what_has_no_metric_of_its_own() -> None:
    payload = {
        "lookups": 3,
        "lookup_ok": 3,
        "load_failed": 1,
        "store_get_keys": 9,
        "store_get_seconds": [0.1],
        "store_get_corrupt_keys": 1,
        "close_stuck": 2,
    }
    assert dict(metrics.faults(payload)) == {"store_get_corrupt_keys": 1, "close_stuck": 2}


def test_adding_counts_and_observations() -> None:
    total: metrics.Payload = {"lookups": 1, "store_get_seconds": [0.5]}
    more = {"lookups": 2, "store_get_seconds": [0.25], "hit_tokens": 64}
    assert metrics.add(total, more) == {"lookups": 3, "store_get_seconds": [0.5, 0.25], "hit_tokens": 64}
    assert more == {"lookups": 2, "store_get_seconds": [0.25], "hit_tokens": 64}


def test_adding_to_nothing_shares_no_list() -> None:
    more = {"store_get_seconds": [0.25]}
    total = metrics.add({}, more)
    metrics.add(total, {"store_get_seconds": [1.0]})
    assert more == {"store_get_seconds": [0.25]}


def test_summary_has_counts_and_times() -> None:
    payload = {"lookups": 2.0, "store_get_seconds": [0.001, 0.003], "store_put_seconds": []}
    assert metrics.summary(payload) == {
        "lookups": 2.0,
        "store_get_calls": 2,
        "store_get_avg_ms": 2.0,
        "store_get_max_ms": 3.0,
    }
