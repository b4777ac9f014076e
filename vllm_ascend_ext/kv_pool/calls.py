"""Calls that can be given up: a few daemon threads, a deadline for each call; must never know what is called.

Python can't stop a thread that is stuck in a native call. So a call that is overdue is *ended* for whoever waits, its
fence is revoked, and its thread is written off and replaced: the others go on, and whatever the stuck call does later
is seen by nobody. How many may be stuck at once is bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Generic, TypeVar

from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, NotRunning
from vllm_ascend_ext.kv_pool.fence import Fence

T = TypeVar("T")

_IDLE_SECONDS = 60.0
_REVOKE_SECONDS = 5.0


class State(Enum):
    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class Call(Generic[T]):
    """One submitted call. It ends exactly once: with a value, or with a cause (its own, the deadline's, a close's)."""

    def __init__(self, lanes: Lanes, label: str, fn: Callable[[], T], deadline: Deadline, fence: Fence) -> None:
        self.label = label
        self.deadline = deadline
        self.fence = fence
        self.fn: Callable[[], T] | None = fn
        self.value: T | None = None
        self.cause: BaseException | None = None
        self.ended = False
        self.lane: _Lane | None = None
        self._lanes = lanes

    def wait(self) -> None:
        """Return when the call has ended; an overdue one is ended here with DeadlineExceeded."""
        self._lanes.wait(self)

    def result(self) -> T:
        """The value; raises the cause if the call failed. Waits as ``wait`` does."""
        self.wait()
        if isinstance(self.cause, Exception):
            raise self.cause
        if self.cause is not None:  # meant to end the thread that it was raised on, not this one
            raise NotRunning(f"{self.label} ended its thread") from self.cause
        return self.value  # type: ignore[return-value]  # None only where T allows it

    def cancel(self) -> None:
        """End the call with Cancelled unless it has ended; when this returns its blocks are not touched any more."""
        self._lanes.give_up(self, Cancelled(self.label))


class _Lane:
    """One thread and what it is doing."""

    def __init__(self) -> None:
        self.call: Call[object] | None = None
        self.stray = False  # written off: leaves as soon as its call returns
        self.thread: threading.Thread | None = None

    def describe(self) -> str:
        return self.call.label if self.call is not None else "setup"


class Lanes:
    """Runs calls on up to ``size`` threads at once, besides at most ``max_stuck`` that are written off.

    ``setup`` runs first on each thread. Anything but an Exception out of a call, and anything out of ``setup``, is
    fatal: the state becomes FAILED, what was queued ends with NotRunning, and ``on_fatal`` is told.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int = 2,
        max_stuck: int = 16,
        setup: Callable[[], None] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.name = name
        self.clock = clock
        self.state = State.NEW
        self.fatal: BaseException | None = None
        self.late = 0  # calls that returned after they had been given up
        self._size = size
        self._max_stuck = max_stuck
        self._setup = setup
        self._on_fatal = on_fatal
        self._condition = threading.Condition(threading.RLock())
        self._queue: deque[Call[object]] = deque()
        self._lanes: list[_Lane] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._spawned = 0

    def start(self, timeout: float) -> None:
        """Return when the first thread serves; raises what its ``setup`` raised, or DeadlineExceeded."""
        deadline = Deadline.after(timeout, self.clock)
        with self._condition:
            if self.state is not State.NEW:
                raise NotRunning(f"{self.name} can't be started: it is {self.state.value}")
            self.state = State.STARTING
            self._spawn()
            deadline.wait_for(self._condition, lambda: self.state is not State.STARTING)
            started = self.state is not State.STARTING
        if not started:
            self._fail(DeadlineExceeded(f"{self.name} did not start within {timeout} s"))
        if self.fatal is not None:
            raise self.fatal

    def submit(self, label: str, fn: Callable[[], T], deadline: Deadline, fence: Fence | None = None) -> Call[T]:
        """Queue a call; raises NotRunning when nobody would serve it."""
        call = Call(self, label, fn, deadline, fence or Fence())
        with self._condition:
            self._check_running()
            self._queue.append(call)  # type: ignore[arg-type]  # from here on nobody cares for the value's type
            try:
                self._make_room()
            except RuntimeError:  # no thread to be had: fail only if no other will get to it
                if not self._serving():
                    self._queue.remove(call)  # type: ignore[arg-type]
                    raise
            self._condition.notify_all()
        return call

    def run(self, label: str, fn: Callable[[], T], deadline: Deadline, fence: Fence | None = None) -> T:
        """Submit, wait, and return the value or raise the cause."""
        return self.submit(label, fn, deadline, fence).result()

    def wait(self, call: Call[T]) -> None:
        with self._condition:
            if call.deadline.wait_for(self._condition, lambda: call.ended):
                return
        self.give_up(call, DeadlineExceeded(f"{call.label} was not done in time"))

    def wait_until(self, predicate: Callable[[], bool], timeout: float) -> bool:
        """Wait for something that only the end of a call brings about; False after ``timeout`` seconds."""
        with self._condition:
            return Deadline.after(timeout, self.clock).wait_for(self._condition, predicate)

    def give_up(self, call: Call[T], cause: BaseException, patience: Deadline | None = None) -> None:
        """End ``call`` with ``cause`` unless it has ended; nobody sees it ended before its blocks are safe from it.

        A copy that still touches them at the end of ``patience`` fails the lanes for good.
        """
        if not call.fence.revoke(patience or Deadline.after(_REVOKE_SECONDS, self.clock)):
            self._fail(DeadlineExceeded(f"{call.label} is stuck inside a copy"))
        with self._condition:
            if call.ended:
                return
            self._end(call, None, cause)
            if call.lane is None:
                with suppress(ValueError):  # a failure has emptied the queue meanwhile
                    self._queue.remove(call)  # type: ignore[arg-type]
                return
            call.lane.stray = True
            if self.state is State.RUNNING:
                with suppress(RuntimeError):  # no thread to be had now: the next submit tries again
                    self._make_room()

    def expire(self) -> None:
        """End every call whose deadline has passed; for owners that poll instead of waiting."""
        with self._condition:
            overdue = [call for call in self._open_calls() if call.deadline.expired]
        patience = Deadline.after(_REVOKE_SECONDS, self.clock)
        for call in overdue:
            self.give_up(call, DeadlineExceeded(f"{call.label} was not done in time"), patience)

    def close(self, timeout: float) -> list[str]:
        """End everything; idempotent. Returns the labels of the calls still stuck after ``timeout`` seconds."""
        deadline = Deadline.after(timeout, self.clock)
        with self._condition:
            if self.state not in (State.CLOSED, State.FAILED):
                self.state = State.CLOSING
            calls = self._open_calls()
            self._condition.notify_all()
        for call in calls:
            self.give_up(call, ClosedError(f"{self.name} was closed"), deadline)
        with self._condition:
            deadline.wait_for(self._condition, lambda: not self._lanes)
            stuck = [lane.describe() for lane in self._lanes]
            threads, self._threads = self._threads, []
            if self.state is not State.FAILED:
                self.state = State.CLOSED
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        return stuck

    # -- the thread's side ------------------------------------------------------------------------------------------

    def _serve(self, lane: _Lane) -> None:
        try:
            if self._setup is not None:
                self._setup()
            with self._condition:
                if self.state is State.STARTING:
                    self.state = State.RUNNING
                    self._condition.notify_all()
            while (call := self._next(lane)) is not None:
                self._perform(call)
        except BaseException as cause:
            self._fail(cause)
        finally:
            with self._condition:
                self._lanes.remove(lane)
                self._condition.notify_all()

    def _next(self, lane: _Lane) -> Call[object] | None:
        """The next call for ``lane``, or None when its thread shall end."""
        with self._condition:
            lane.call = None
            self._idle += 1
            try:
                Deadline.after(_IDLE_SECONDS, self.clock).wait_for(
                    self._condition, lambda: bool(self._queue) or lane.stray or self.state is not State.RUNNING
                )
            finally:
                self._idle -= 1
            if lane.stray or self.state is not State.RUNNING or not self._queue:
                return None
            lane.call = call = self._queue.popleft()
            call.lane = lane
            return call

    def _perform(self, call: Call[object]) -> None:
        fn = call.fn
        if fn is None:  # given up between the queue and here
            return
        try:
            value = fn()
        except BaseException as cause:
            self._end(call, None, cause)
            if not isinstance(cause, Exception):
                raise
        else:
            self._end(call, value, None)

    def _fail(self, cause: BaseException) -> None:
        """Enter FAILED for good: end what was queued, wake everybody, tell the owner."""
        with self._condition:
            if self.state in (State.FAILED, State.CLOSED):
                return
            self.state = State.FAILED
            self.fatal = cause
            calls, self._queue = list(self._queue), deque()
            for call in calls:
                error = NotRunning(f"{self.name} failed before {call.label} was served")
                error.__cause__ = cause
                self._end(call, None, error)
            self._condition.notify_all()
        if self._on_fatal is not None:
            self._on_fatal(cause)

    def _end(self, call: Call[T], value: T | None, cause: BaseException | None) -> None:
        with self._condition:
            if call.ended:
                self.late += 1
                return
            call.value, call.cause, call.ended, call.fn = value, cause, True, None
            self._condition.notify_all()

    # -- called with the condition held -----------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.state is not State.RUNNING:
            raise NotRunning(f"{self.name} is {self.state.value}") from self.fatal
        stuck = [lane.describe() for lane in self._lanes if lane.stray]
        if len(stuck) >= self._max_stuck:
            raise NotRunning(f"{self.name} has {len(stuck)} calls stuck: {', '.join(stuck)}")

    def _make_room(self) -> None:
        """Start another thread if calls wait, none is idle, and fewer than ``size`` serve."""
        if len(self._queue) > self._idle and self._serving() < self._size:
            self._spawn()

    def _serving(self) -> int:
        return sum(not lane.stray for lane in self._lanes)

    def _spawn(self) -> None:
        lane = _Lane()
        lane.thread = threading.Thread(
            target=self._serve, args=(lane,), name=f"{self.name}-{self._spawned}", daemon=True
        )
        self._spawned += 1
        self._lanes.append(lane)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [lane.thread]
        try:
            lane.thread.start()
        except BaseException:  # no more threads to be had: nobody will serve this lane
            self._lanes.remove(lane)
            self._threads.remove(lane.thread)
            raise

    def _open_calls(self) -> list[Call[object]]:
        running = [lane.call for lane in self._lanes if lane.call is not None]
        return [call for call in [*self._queue, *running] if not call.ended]
