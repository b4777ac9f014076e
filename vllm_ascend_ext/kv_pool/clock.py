"""Deadlines and the one clock that they are read from; must never know what is being waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded


class Clock:
    """Monotonic time in seconds. Tests drive a subclass; everything in the pool waits through ``wait``."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        """Wait on a held ``condition`` for at most ``timeout`` seconds of this clock; may return early."""
        condition.wait(max(timeout, 0.0))


MONOTONIC = Clock()


@dataclass(frozen=True)
class Deadline:
    """A point in time by which a wait must have ended. Made once at the outside and passed down."""

    at: float
    clock: Clock = MONOTONIC

    @classmethod
    def after(cls, seconds: float, clock: Clock = MONOTONIC) -> Deadline:
        return cls(clock.now() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(self.at - self.clock.now(), 0.0)

    @property
    def expired(self) -> bool:
        return self.clock.now() >= self.at

    def check(self, what: str) -> None:
        """Raise DeadlineExceeded naming ``what`` if the deadline has passed."""
        if self.expired:
            raise DeadlineExceeded(what)

    def earlier(self, other: Deadline) -> Deadline:
        return self if self.at <= other.at else other

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Wait on a held ``condition`` until ``predicate`` holds; False if the deadline came first."""
        while not predicate():
            remaining = self.remaining()
            if remaining <= 0.0:
                return False
            self.clock.wait(condition, remaining)
        return True
