"""Statuses: one table of native codes, and nothing that is not in it counts as a success."""

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.errors import (
    NATIVE,
    BadAnswer,
    ConfigError,
    DeadlineExceeded,
    PoolError,
    Status,
    as_int,
    check_length,
    from_native,
)


def test_only_ok_is_a_success():
    assert [status for status in Status if status.ok] == [Status.OK]


@pytest.mark.parametrize("engine", sorted(NATIVE))
def test_in_every_engine_only_zero_means_success(engine):
    assert [code for code in range(-5000, 5000) if from_native(engine, code).ok] == [0]


@pytest.mark.parametrize("engine", sorted(NATIVE))
@pytest.mark.parametrize("code", [None, False, True, 0.0, "0", b"\0", [], (0,), object(), 10**30, np.float32(0)])
def test_what_is_not_a_code_is_a_failure(engine, code):
    assert from_native(engine, code) is Status.FAILED


def test_numpy_integers_are_codes():
    assert from_native("mooncake", np.int32(-704)) is Status.MISSING
    assert from_native("local", np.uint8(0)) is Status.OK


@pytest.mark.parametrize(
    ("engine", "code", "status"),
    [
        ("mooncake", -200, Status.FULL),
        ("mooncake", -704, Status.MISSING),
        ("mooncake", -900, Status.UNAVAILABLE),
        ("mooncake", 4096, Status.FAILED),  # a byte count is not a code: the engine's adapter compares it
        ("memcache", -3102, Status.REFUSED),
        ("memcache", -3014, Status.UNAVAILABLE),
        ("memcache", -2, Status.FAILED),
        ("yuanrong", 1, Status.MISSING),
        ("yuanrong", 2, Status.FAILED),
        ("local", 8, Status.CORRUPT),
        ("local", 10, Status.FAILED),
    ],
)
def test_native_codes_are_mapped_by_the_table(engine, code, status):
    assert from_native(engine, code) is status


@pytest.mark.parametrize("value", [True, None, 1.0, "1", np.array([1, 2])])
def test_as_int_refuses_what_only_looks_like_an_integer(value):
    assert as_int(value) is None


@pytest.mark.parametrize(
    "answer", [None, 0, 2, "ab", b"ab", iter([0, 0]), {0, 1}, {0: 1, 1: 1}, frozenset({0, 1}), {}.keys(), object()]
)
def test_an_answer_that_is_not_a_list_is_refused(answer):
    with pytest.raises(BadAnswer, match="put"):
        check_length(answer, 2, "put")


@pytest.mark.parametrize("answer", [[], [0], [0, 0, 0], (), np.zeros(3), np.zeros((1, 2))])
def test_an_answer_of_the_wrong_length_is_refused_and_says_how_long_it_is(answer):
    with pytest.raises(BadAnswer, match=f"{len(answer)} entries for 2 keys"):
        check_length(answer, 2, "put")


@pytest.mark.parametrize("answer", [[0, -1], (0, -1), np.asarray([0, -1])])
def test_an_answer_with_one_entry_per_key_is_taken(answer):
    assert list(check_length(answer, 2, "put")) == [0, -1]


def test_errors_can_be_caught_by_what_they_are():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert all(issubclass(error, PoolError) for error in (ConfigError, DeadlineExceeded, BadAnswer))
