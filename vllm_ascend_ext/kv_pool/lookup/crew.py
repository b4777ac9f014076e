"""Threads that take turns at waiting for work; must never know what is waited for, or what the work is.

One leads: it waits, and does itself what has come, after it has handed the lead on. So no work waits for another thread
to wake up (a quarter of a look-up's time), and yet work that takes long, or gets stuck, keeps nobody else waiting.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vllm_ascend_ext.kv_pool.calls import Call, Lanes
from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import NotRunning

_IDLE_SECONDS = 60.0


@dataclass(eq=False)
class Work:
    """``run`` must not raise, or the crew fails; ``refuse`` is called instead when nobody is left to run it."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], object]
    call: Call[None] | None = None  # the thread that runs it

    @property
    def begun(self) -> bool:
        return self.call is not None


@dataclass(eq=False)
class _Seat:
    """One thread's place in the crew, and the work that was waiting when its turn came."""

    call: Call[None] | None = None
    work: Work | None = None


class Crew:
    """``size`` threads that may work at once and one that leads, besides at most ``max_stuck`` that were given up.

    ``lead`` is called by one thread at a time; it returns work, or None when it was told to end. What it raises is
    fatal: the crew ends, and ``on_fatal`` is told on that thread.
    """

    def __init__(
        self,
        name: str,
        lead: Callable[[], Work | None],
        on_fatal: Callable[[BaseException], None],
        *,
        size: int,
        max_stuck: int,
        clock: Clock,
    ) -> None:
        self._lead = lead
        self._on_fatal = on_fatal
        self._size = size
        self._clock = clock
        self._lanes = Lanes(name, size=size + 1, max_stuck=max_stuck, clock=clock)
        self._condition = threading.Condition()
        self._seats: list[_Seat] = []
        self._backlog: deque[Work] = deque()  # came when everybody was at work
        self._idle: set[_Seat] = set()
        self._led = False
        self._closing = False

    def start(self, timeout: float) -> None:
        """Return when the first thread leads; raises what kept it from it."""
        self._lanes.start(timeout)
        with self._condition:
            self._others(self._enlist())

    def give_up(self, work: Work, cause: BaseException) -> None:
        """Don't wait for ``work`` any more: its thread is written off, and another takes its place."""
        with self._condition:
            if work in self._backlog:
                self._backlog.remove(work)
        if work.call is not None:
            self._lanes.give_up(work.call, cause)
            with self._condition:
                self._condition.notify_all()  # its thread may have come back just now, and must leave

    def close(self, timeout: float) -> list[str]:
        """End every thread; the owner has told ``lead`` to end. Idempotent; returns what is still stuck."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        return self._lanes.close(timeout)

    def _serve(self, seat: _Seat) -> None:
        try:
            while self._wait_for_turn(seat):
                work = seat.work or self._lead_to_work(seat)
                if work is None:
                    return
                work.run()
        except BaseException as cause:
            with self._condition:
                self._closing = True
                self._condition.notify_all()
            self._on_fatal(cause)

    def _wait_for_turn(self, seat: _Seat) -> bool:
        """True when this thread shall lead, or do ``seat.work``; False when it shall end."""
        with self._condition:
            self._idle.add(seat)
            try:
                while not self._leaves(seat) and self._led and not self._backlog:
                    self._clock.wait(self._condition, _IDLE_SECONDS)
            finally:
                self._idle.remove(seat)
            if self._leaves(seat):
                self._condition.notify()  # whatever woke it may have been meant for another
                return False
            seat.work = self._backlog.popleft() if self._led else None
            if seat.work is not None:
                seat.work.call = seat.call
            self._led = True
            return True

    def _lead_to_work(self, seat: _Seat) -> Work | None:
        """The next work for this thread, which doesn't lead any more then; None when the crew ends."""
        while (work := self._lead()) is not None:
            with self._condition:
                if not all(self._leaves(idle) for idle in self._idle):
                    self._led = False
                    self._condition.notify()
                    work.call = seat.call
                    return work
                if self._others(seat):
                    self._backlog.append(work)
                    continue
            work.refuse(NotRunning("every thread is stuck, and no more are to be had"))
        return None

    # -- called with the condition held -----------------------------------------------------------------------------

    def _leaves(self, seat: _Seat) -> bool:
        return self._closing or seat.call is None or seat.call.ended

    def _others(self, leader: _Seat) -> bool:
        """Fill the places of threads that were given up; True if there is anybody but ``leader``."""
        self._seats = [seat for seat in self._seats if not self._leaves(seat)]
        try:
            while len(self._seats) <= self._size:
                self._enlist()
        except (NotRunning, RuntimeError):  # too many are stuck, or no thread is to be had
            pass
        return any(seat is not leader for seat in self._seats)

    def _enlist(self) -> _Seat:
        seat = _Seat()
        seat.call = self._lanes.submit("look-up handler", partial(self._serve, seat), Deadline(math.inf, self._clock))
        self._seats.append(seat)
        return seat
