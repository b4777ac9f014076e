"""Calls that can be given up: each ends exactly once, and none keeps the others, the caller or close() waiting."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.clock import ManualClock
from fixtures.gates import Gate
from vllm_ascend_ext.kv_pool.calls import Lanes, State
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, NotRunning
from vllm_ascend_ext.kv_pool.fence import Fence

LONG = 60.0


class Fatal(BaseException):
    """What ends a thread."""


def soon():
    return Deadline.after(LONG)


@pytest.fixture
def lanes():
    subject = Lanes("t")
    subject.start(LONG)
    yield subject
    assert subject.close(LONG) == []


@pytest.fixture
def gate():
    with Gate() as opened_at_the_end:
        yield opened_at_the_end


def fail(error):
    raise error


def copy(fence, gate):
    """A copy that does not come to an end before ``gate`` is opened."""
    with fence.hold():
        gate.hold()


class TestOutcomes:
    def test_a_call_returns_its_value(self, lanes):
        assert lanes.run("a", lambda: 7, soon()) == 7

    def test_an_exception_fails_that_call_alone(self, lanes):
        with pytest.raises(OSError, match="down"):
            lanes.run("a", lambda: fail(OSError("down")), soon())
        assert lanes.run("b", lambda: 1, soon()) == 1
        assert lanes.state is State.RUNNING

    def test_every_call_is_run_exactly_once_and_in_order_on_one_lane(self):
        lanes, ran = Lanes("t", size=1), []
        lanes.start(LONG)
        calls = [lanes.submit(str(i), lambda i=i: ran.append(i), soon()) for i in range(50)]
        for call in calls:
            call.wait()
        assert ran == list(range(50))
        lanes.close(LONG)

    def test_as_many_calls_run_at_once_as_there_are_lanes(self, lanes, gate):
        held = [lanes.submit("held", gate.hold, soon()) for _ in range(2)]
        gate.wait_until_reached(2)
        third = lanes.submit("third", lambda: 3, soon())
        assert not third.ended
        gate.open()
        assert third.result() == 3
        assert [call.result() for call in held] == [None, None]

    def test_work_from_many_threads_is_all_done(self, lanes):
        results: list[int] = []

        def submit():
            results.extend(lanes.run("x", lambda: 1, soon()) for _ in range(50))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert sum(results) == 200


class TestOverdue:
    def test_an_overdue_call_ends_and_the_others_go_on(self, gate):
        clock = ManualClock()
        lanes = Lanes("t", size=1, clock=clock)
        lanes.start(LONG)
        stuck = lanes.submit("the get of a", gate.hold, Deadline.after(1.0, clock))
        gate.wait_until_reached()
        behind = lanes.submit("b", lambda: 2, Deadline.after(100.0, clock))
        clock.advance(1.0)
        with pytest.raises(DeadlineExceeded, match="the get of a was not done in time"):
            stuck.result()
        assert behind.result() == 2, "a lane that is stuck is replaced"
        gate.open()
        gate.wait_until_passed()
        assert lanes.close(LONG) == []
        assert lanes.late == 1, "what it did later is counted"
        assert isinstance(stuck.cause, DeadlineExceeded), "and seen by nobody"

    def test_a_call_that_is_overdue_in_the_queue_is_never_begun(self, gate):
        clock = ManualClock()
        lanes = Lanes("t", size=1, clock=clock)
        lanes.start(LONG)
        held = lanes.submit("held", gate.hold, Deadline.after(100.0, clock))
        gate.wait_until_reached()
        ran: list[int] = []
        queued = lanes.submit("queued", lambda: ran.append(1), Deadline.after(1.0, clock))
        clock.advance(1.0)
        with pytest.raises(DeadlineExceeded):
            queued.result()
        gate.open()
        held.wait()
        assert lanes.run("after", lambda: 3, Deadline.after(100.0, clock)) == 3
        assert ran == []
        lanes.close(LONG)

    def test_owners_that_poll_can_end_what_is_overdue(self, gate):
        clock = ManualClock()
        lanes = Lanes("t", clock=clock)
        lanes.start(LONG)
        stuck = lanes.submit("a", gate.hold, Deadline.after(1.0, clock))
        gate.wait_until_reached()
        lanes.expire()
        assert not stuck.ended
        clock.advance(1.0)
        lanes.expire()
        assert stuck.ended
        assert isinstance(stuck.cause, DeadlineExceeded)
        gate.open()
        lanes.close(LONG)

    def test_the_fence_of_an_overdue_call_is_revoked_before_anybody_sees_it_ended(self, gate):
        clock, fence = ManualClock(), Fence()
        lanes = Lanes("t", clock=clock)
        lanes.start(LONG)
        stuck = lanes.submit("a", gate.hold, Deadline.after(1.0, clock), fence)
        clock.advance(1.0)
        stuck.wait()
        with fence.hold() as granted:
            assert not granted
        gate.open()
        lanes.close(LONG)

    def test_an_end_is_not_seen_while_a_copy_still_holds_the_fence(self, gate):
        clock, fence = ManualClock(), Fence()
        lanes = Lanes("t", clock=clock)
        lanes.start(LONG)
        call = lanes.submit("copy", lambda: copy(fence, gate), Deadline.after(LONG, clock), fence)
        gate.wait_until_reached()
        with ThreadPoolExecutor() as threads:
            cancelling = threads.submit(call.cancel)
            clock.wait_for_waiters(1)
            assert fence.revoked
            assert not call.ended
            gate.open()
            cancelling.result(LONG)
        assert call.ended
        lanes.close(LONG)

    def test_a_copy_that_never_lets_go_of_its_blocks_is_fatal(self, gate):
        """Its blocks can't be handed on safely any more: whoever submits next is told."""
        clock, fence, told = ManualClock(), Fence(), []
        lanes = Lanes("t", clock=clock, on_fatal=told.append)
        lanes.start(LONG)
        call = lanes.submit("copy", lambda: copy(fence, gate), Deadline.after(1.0, clock), fence)
        gate.wait_until_reached()
        clock.advance(1.0)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(call.wait)
            clock.wait_for_waiters(1)  # it waits for the copy to let go
            clock.advance(LONG)
            waiting.result(LONG)
        assert isinstance(call.cause, DeadlineExceeded)
        assert isinstance(told[0], DeadlineExceeded)
        with pytest.raises(NotRunning):
            lanes.submit("next", lambda: 1, soon())
        gate.open()
        lanes.close(LONG)

    def test_so_many_may_be_stuck_and_then_new_work_is_refused_with_their_names(self, gate):
        lanes = Lanes("t", size=1, max_stuck=2)
        lanes.start(LONG)
        for count, name in enumerate(("one", "two"), start=1):
            call = lanes.submit(name, gate.hold, soon())
            gate.wait_until_reached(count)
            call.cancel()
        with pytest.raises(NotRunning, match="2 calls stuck: one, two"):
            lanes.submit("three", lambda: 1, soon())
        gate.open()
        gate.wait_until_passed(2)
        assert lanes.close(LONG) == []

    def test_work_is_taken_again_once_the_stuck_call_has_returned(self, gate):
        lanes = Lanes("t", size=1, max_stuck=1)
        lanes.start(LONG)
        call = lanes.submit("a", gate.hold, soon())
        gate.wait_until_reached()
        call.cancel()
        with pytest.raises(NotRunning):
            lanes.submit("b", lambda: 1, soon())
        gate.open()
        with lanes._condition:
            assert lanes._condition.wait_for(lambda: not lanes._lanes, LONG), "a lane that was written off stays"
        assert lanes.run("c", lambda: 1, soon()) == 1
        lanes.close(LONG)


class TestCancel:
    def test_a_queued_call_is_cancelled_at_once(self, gate):
        lanes = Lanes("t", size=1)
        lanes.start(LONG)
        held = lanes.submit("held", gate.hold, soon())
        gate.wait_until_reached()
        queued = lanes.submit("queued", lambda: fail(AssertionError("it ran")), soon())
        queued.cancel()
        with pytest.raises(Cancelled):
            queued.result()
        gate.open()
        assert held.result() is None
        lanes.close(LONG)

    def test_cancelling_what_has_ended_changes_nothing(self, lanes):
        call = lanes.submit("a", lambda: 1, soon())
        call.wait()
        call.cancel()
        assert call.result() == 1
        assert lanes.late == 0


class TestStart:
    def test_it_returns_when_the_thread_serves(self):
        ready: list[str] = []
        lanes = Lanes("t", setup=lambda: ready.append(threading.current_thread().name))
        lanes.start(LONG)
        assert ready == ["t-0"]
        assert lanes.state is State.RUNNING
        lanes.close(LONG)

    @pytest.mark.parametrize("error", [OSError("no such device"), Fatal("driver")])
    def test_what_kept_a_thread_from_serving_is_raised(self, error):
        """A10."""
        lanes = Lanes("t", setup=lambda: fail(error))
        with pytest.raises(type(error)):
            lanes.start(LONG)
        assert lanes.state is State.FAILED
        with pytest.raises(NotRunning) as caught:
            lanes.submit("a", lambda: 1, soon())
        assert caught.value.__cause__ is error
        assert lanes.close(LONG) == []

    def test_a_setup_that_does_not_end_is_given_up_at_the_deadline(self, gate):
        clock = ManualClock()
        lanes = Lanes("t", setup=gate.hold, clock=clock)
        with ThreadPoolExecutor() as threads:
            starting = threads.submit(lanes.start, 5.0)
            gate.wait_until_reached()
            clock.wait_for_waiters(1)
            clock.advance(5.0)
            with pytest.raises(DeadlineExceeded, match=r"t did not start within 5\.0 s"):
                starting.result(LONG)
            closing = threads.submit(lanes.close, 1.0)
            clock.wait_for_waiters(1)
            clock.advance(1.0)
            assert closing.result(LONG) == ["setup"]
            gate.open()
            gate.wait_until_passed()

    def test_it_can_be_started_once(self, lanes):
        with pytest.raises(NotRunning, match="running"):
            lanes.start(LONG)

    def test_before_the_start_nothing_is_taken(self):
        lanes = Lanes("t")
        with pytest.raises(NotRunning, match="t is new"):
            lanes.submit("a", lambda: 1, soon())
        assert lanes.close(LONG) == []

    def test_a_start_without_a_thread_to_be_had_raises(self, monkeypatch):
        lanes = Lanes("t")
        monkeypatch.setattr(threading.Thread, "start", lambda self: fail(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            lanes.start(LONG)
        assert lanes.close(LONG) == []


class TestFatal:
    def test_it_fails_the_call_drains_the_queue_and_tells_the_owner(self, gate):
        told: list[BaseException] = []
        lanes = Lanes("t", size=1, on_fatal=told.append)
        lanes.start(LONG)
        cause = Fatal("device lost")

        def die():
            gate.hold()
            raise cause

        dying = lanes.submit("dying", die, soon())
        queued = [lanes.submit(f"q{i}", lambda: fail(AssertionError("it ran")), soon()) for i in range(3)]
        gate.open()
        with pytest.raises(NotRunning, match="dying ended its thread") as caught:
            dying.result()
        assert caught.value.__cause__ is cause
        for call in queued:
            with pytest.raises(NotRunning) as caught:
                call.result()
            assert caught.value.__cause__ is cause
        with pytest.raises(NotRunning, match="failed"):
            lanes.submit("next", lambda: 1, soon())
        assert told == [cause]
        assert lanes.close(LONG) == []
        assert lanes.state is State.FAILED

    def test_what_runs_beside_it_may_end_by_itself(self, gate):
        lanes = Lanes("t", size=2)
        lanes.start(LONG)

        def slow():
            gate.hold()
            return 5

        beside = lanes.submit("beside", slow, soon())
        gate.wait_until_reached()
        with pytest.raises(NotRunning):
            lanes.run("dying", lambda: fail(Fatal()), soon())
        gate.open()
        assert beside.result() == 5
        assert lanes.close(LONG) == []

    def test_a_replacement_whose_setup_fails_is_fatal_too(self, gate):
        errors = iter([None, OSError("device lost")])

        def setup():
            error = next(errors)
            if error is not None:
                raise error

        lanes = Lanes("t", size=1, setup=setup)
        lanes.start(LONG)
        stuck = lanes.submit("stuck", gate.hold, soon())
        gate.wait_until_reached()
        queued = lanes.submit("queued", lambda: 1, soon())
        stuck.cancel()
        with pytest.raises(NotRunning) as caught:
            queued.result()
        assert isinstance(caught.value.__cause__, OSError)
        gate.open()
        assert lanes.close(LONG) == []


class TestThreadsRunOut:
    def test_a_call_that_another_lane_will_reach_is_kept(self, lanes, gate, monkeypatch):
        held = lanes.submit("held", gate.hold, soon())
        gate.wait_until_reached()
        monkeypatch.setattr(threading.Thread, "start", lambda self: fail(RuntimeError("can't start new thread")))
        queued = lanes.submit("queued", lambda: 2, soon())
        gate.open()
        assert queued.result() == 2
        held.wait()

    def test_a_call_that_nobody_will_reach_is_refused_and_not_left_in_the_queue(self, gate, monkeypatch):
        lanes = Lanes("t", size=1)
        lanes.start(LONG)
        stuck = lanes.submit("stuck", gate.hold, soon())
        gate.wait_until_reached()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda self: fail(RuntimeError("can't start new thread")))
            stuck.cancel()
            with pytest.raises(RuntimeError, match="can't start"):
                lanes.submit("refused", lambda: fail(AssertionError("it ran")), soon())
        assert lanes.run("later", lambda: 3, soon()) == 3, "threads are to be had again"
        gate.open()
        lanes.close(LONG)


class TestClose:
    def test_it_ends_everything_and_says_what_is_stuck(self, gate):
        clock = ManualClock()
        lanes = Lanes("t", size=1, clock=clock)
        lanes.start(LONG)
        running = lanes.submit("the put of b", gate.hold, Deadline.after(LONG, clock))
        gate.wait_until_reached()
        queued = lanes.submit("q", lambda: 1, Deadline.after(LONG, clock))
        with ThreadPoolExecutor() as threads:
            closing = threads.submit(lanes.close, 2.0)
            clock.wait_for_waiters(1)
            for call in (running, queued):
                with pytest.raises(ClosedError):
                    call.result()
            clock.advance(2.0)
            assert closing.result(LONG) == ["the put of b"]
            gate.open()
            gate.wait_until_passed()

    def test_it_is_idempotent_and_final(self, lanes):
        assert lanes.close(LONG) == []
        assert lanes.close(LONG) == []
        assert lanes.state is State.CLOSED
        with pytest.raises(NotRunning, match="closed"):
            lanes.submit("a", lambda: 1, soon())
        with pytest.raises(NotRunning, match="closed"):
            lanes.start(LONG)

    def test_it_leaves_no_thread_behind(self):
        before = set(threading.enumerate())
        lanes = Lanes("t", size=4)
        lanes.start(LONG)
        with Gate() as gate:
            calls = [lanes.submit(str(i), gate.hold, soon()) for i in range(4)]
            gate.wait_until_reached(4)
            gate.open()
            for call in calls:
                call.wait()
        assert lanes.close(LONG) == []
        assert set(threading.enumerate()) <= before

    def test_its_deadline_holds_however_many_copies_hold_their_blocks(self, gate):
        """close(timeout) must not wait for each stuck copy in turn."""
        clock = ManualClock()
        lanes = Lanes("t", size=4, clock=clock)
        lanes.start(LONG)
        for fence in [Fence() for _ in range(4)]:
            lanes.submit("copy", lambda fence=fence: copy(fence, gate), Deadline.after(LONG, clock), fence)
        gate.wait_until_reached(4)
        with ThreadPoolExecutor() as threads:
            closing = threads.submit(lanes.close, 1.0)
            clock.wait_for_waiters(1)
            clock.advance(1.0)
            assert closing.result(LONG) == ["copy"] * 4
            gate.open()

    def test_one_of_its_own_threads_can_close_it(self, lanes):
        """It does not wait for itself."""
        closed: list[list[str]] = []
        call = lanes.submit("close", lambda: closed.append(lanes.close(0.001)), soon())
        with pytest.raises(ClosedError):
            call.result()
        with lanes._condition:
            assert lanes._condition.wait_for(lambda: not lanes._lanes, LONG)
        assert closed == [["close"]]


class TestIdle:
    def test_idle_threads_leave_and_come_back_when_there_is_work(self):
        clock = ManualClock()
        lanes = Lanes("t", clock=clock)
        lanes.start(LONG)
        clock.wait_for_waiters(1)
        clock.advance(3600.0)
        with lanes._condition:
            assert lanes._condition.wait_for(lambda: not lanes._lanes, LONG)
        assert lanes.run("a", lambda: 1, Deadline.after(LONG, clock)) == 1
        assert lanes.close(LONG) == []
