"""What the parts of a step wait on: signals that happen once, and attention's gate; must never know layers or stores.

A signal ends every wait for it, at once and for good, whether what it stands for has happened or can't happen any more.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from vllm_ascend_ext.device import Event
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded, PoolError

T = TypeVar("T")


class StepEnded(PoolError):
    """The step failed or was closed before what was waited for; ``__cause__`` says why."""


class Signal(Generic[T]):
    """Happens once with a value, or fails once with a cause; what comes later is ignored."""

    def __init__(self, what: str, condition: threading.Condition) -> None:
        self.what = what
        self._condition = condition
        self._ended = False
        self._value: T | None = None
        self._cause: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def set(self, value: T) -> None:
        self._end(value, None)

    def fail(self, cause: BaseException) -> None:
        self._end(None, cause)

    def wait(self, deadline: Deadline) -> T:
        """The value; raises StepEnded if it can't come any more, DeadlineExceeded if it hasn't come in time."""
        with self._condition:
            if not deadline.wait_for(self._condition, lambda: self._ended):
                raise DeadlineExceeded(f"{self.what} did not come in time")
        if self._cause is not None:
            raise StepEnded(self.what) from self._cause
        return self._value  # type: ignore[return-value]  # None only where T allows it

    def _end(self, value: T | None, cause: BaseException | None) -> None:
        with self._condition:
            if self._ended:
                return
            self._ended, self._value, self._cause = True, value, cause
            self._condition.notify_all()


class _Reached:
    """A point that the device has passed."""

    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class AttentionComputeStartGate(Signal[Event]):
    """Opens when the compute stream comes to a layer's attention; prefetches of later layers stand before it."""

    def record(self, event: Event) -> None:
        """Open the gate at the point that the current stream has reached; raises what the device raises."""
        try:
            event.record()
        except BaseException as cause:
            self.fail(cause)
            raise
        self.set(event)

    def open(self) -> None:
        """Let everybody through: there is no attention to wait for."""
        self.set(_Reached())

    def wait(self, deadline: Deadline) -> Event:
        """As ``Signal.wait``, and then until the device has come to that point."""
        event = super().wait(deadline)
        event.synchronize()
        return event
