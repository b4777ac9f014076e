"""A signal happens once, or fails once; every wait for it ends then, by the event itself and not by looking again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.clock import ManualClock
from fixtures.device_events import ScriptedEvent
from fixtures.gates import Gate
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded
from vllm_ascend_ext.kv_pool.layerwise.gate import AttentionComputeStartGate, Signal, StepEnded


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def waiter():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def make(kind=Signal):
    return kind("the thing", threading.Condition(threading.RLock()))


def test_who_comes_after_it_has_happened_does_not_wait(clock):
    signal = make()
    signal.set(7)
    assert signal.wait(Deadline.after(0, clock)) == 7
    assert signal.ended


def test_a_failure_is_told_with_its_cause(clock):
    signal, cause = make(), OSError("gone")
    signal.fail(cause)
    with pytest.raises(StepEnded, match="the thing") as told:
        signal.wait(Deadline.after(60, clock))
    assert told.value.__cause__ is cause


@pytest.mark.parametrize("end", [lambda signal: signal.set(1), lambda signal: signal.fail(OSError())])
def test_only_the_first_end_counts(clock, end):
    signal = make()
    signal.set(5)
    end(signal)
    assert signal.wait(Deadline.after(60, clock)) == 5


def test_what_never_happens_is_waited_for_until_the_deadline(clock, waiter):
    waiting = waiter.submit(make().wait, Deadline.after(10, clock))
    clock.wait_for_waiters(1)
    clock.advance(10)
    with pytest.raises(DeadlineExceeded, match="the thing"):
        waiting.result(60)


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_waits_is_woken_by_the_event(clock, waiter, fails):
    """The clock stands still: nothing but the event itself can end this wait."""
    signal = make()
    waiting = waiter.submit(signal.wait, Deadline.after(10, clock))
    clock.wait_for_waiters(1)
    signal.fail(OSError()) if fails else signal.set(3)
    if fails:
        with pytest.raises(StepEnded):
            waiting.result(60)
    else:
        assert waiting.result(60) == 3


class TestAttentionGate:
    def test_it_opens_at_the_point_that_the_device_has_reached(self, clock, waiter):
        gate = make(AttentionComputeStartGate)
        with Gate() as device:
            event = ScriptedEvent(on_synchronize=device)
            gate.record(event)
            waiting = waiter.submit(gate.wait, Deadline.after(10, clock))
            device.wait_until_reached()
            assert event.recorded
            assert not waiting.done()
        assert waiting.result(60) is event

    def test_a_device_that_can_not_record_fails_it(self, clock):
        """Nobody stands before a gate that can't open any more."""
        gate = make(AttentionComputeStartGate)
        with pytest.raises(RuntimeError, match="device lost"):
            gate.record(ScriptedEvent(on_record=RuntimeError("device lost")))
        with pytest.raises(StepEnded):
            gate.wait(Deadline.after(60, clock))

    def test_it_can_be_opened_without_any_attention(self, clock):
        gate = make(AttentionComputeStartGate)
        gate.open()
        assert gate.wait(Deadline.after(0, clock)).query()

    def test_a_device_that_fails_while_it_is_waited_for_is_heard_of(self, clock):
        gate = make(AttentionComputeStartGate)
        gate.record(ScriptedEvent(on_synchronize=RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            gate.wait(Deadline.after(60, clock))
