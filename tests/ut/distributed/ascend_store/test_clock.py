"""Deadlines: they end every wait, and only by the clock that they were made with."""

import threading

import pytest

from fixtures.clock import ManualClock
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded


def test_a_deadline_expires_exactly_when_its_time_has_come():
    clock = ManualClock(100.0)
    deadline = Deadline.after(2.0, clock)
    clock.advance(1.5)
    assert deadline.remaining() == 0.5
    assert not deadline.expired
    deadline.check("the answer")
    clock.advance(0.5)
    assert deadline.expired
    with pytest.raises(DeadlineExceeded, match="the answer"):
        deadline.check("the answer")


def test_what_remains_is_never_negative():
    clock = ManualClock()
    deadline = Deadline.after(1.0, clock)
    clock.advance(5.0)
    assert deadline.remaining() == 0.0


def test_the_earlier_of_two_deadlines_wins_from_either_side():
    clock = ManualClock()
    soon, late = Deadline.after(1.0, clock), Deadline.after(2.0, clock)
    assert soon.earlier(late) is soon
    assert late.earlier(soon) is soon


def test_a_wait_ends_with_true_as_soon_as_its_predicate_holds():
    clock = ManualClock()
    condition = threading.Condition()
    done: list[bool] = []
    with condition:
        waiter = threading.Thread(target=_wait, args=(condition, Deadline.after(10.0, clock), done, lambda: ready))
        ready: list[int] = []
        waiter.start()
    clock.wait_for_waiters(1)
    with condition:
        ready.append(1)
        condition.notify_all()
    waiter.join(60)
    assert done == [True]


def test_a_wait_ends_with_false_at_its_deadline():
    clock = ManualClock()
    done: list[bool] = []
    waiter = threading.Thread(
        target=_wait, args=(threading.Condition(), Deadline.after(10.0, clock), done, lambda: False)
    )
    waiter.start()
    clock.wait_for_waiters(1)
    clock.advance(10.0)
    waiter.join(60)
    assert done == [False]


def test_a_wait_with_a_deadline_that_has_passed_looks_once_and_does_not_wait():
    clock = ManualClock()
    deadline = Deadline.after(0.0, clock)
    condition = threading.Condition()
    with condition:
        assert deadline.wait_for(condition, lambda: True)
        assert not deadline.wait_for(condition, lambda: False)


def test_the_real_clock_moves_forward_and_its_wait_can_end_by_time_alone():
    before = MONOTONIC.now()
    condition = threading.Condition()
    with condition:
        Clock().wait(condition, -1.0)
        assert not Deadline.after(0.001).wait_for(condition, lambda: False)
    assert MONOTONIC.now() > before


def _wait(condition, deadline, done, predicate):
    with condition:
        done.append(deadline.wait_for(condition, lambda: bool(predicate())))
