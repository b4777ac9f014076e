"""Bounded host memory between blocks and an engine, and the count of calls inside an engine; must never know keys.

A slot belongs to one call from its beginning until it returns, however late that is; an engine's late data can land
nowhere else. When all slots are taken, the next call is told so, and by whom they are held.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.clock import Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import ClosedError, DeadlineExceeded


class Staging:
    """``slots`` pieces of ``slot_bytes`` each, page-aligned and in one range. Pages that nobody used take no memory."""

    def __init__(self, slots: int, slot_bytes: int, clock: Clock) -> None:
        self.slot_bytes = slot_bytes
        self.length = slots * slot_bytes
        self._map = mmap.mmap(-1, self.length)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._clock = clock
        self._condition = threading.Condition()
        self._free = list(range(self.address, self.address + self.length, slot_bytes))
        self._holders: dict[int, tuple[str, float]] = {}  # what each slot is held for, and since when

    @contextmanager
    def slot(self, label: str, timeout: float) -> Iterator[int]:
        """The address of a slot that is the caller's alone; DeadlineExceeded if none came free in ``timeout`` s."""
        with self._condition:
            if not Deadline.after(timeout, self._clock).wait_for(self._condition, lambda: bool(self._free)):
                raise DeadlineExceeded(
                    f"staging for {label}: all {len(self._holders)} slots are taken by {'; '.join(self.held())}"
                )
            slot = self._free.pop()  # the one used last: its pages are there already
            self._holders[slot] = (label, self._clock.now())
        try:
            yield slot
        finally:
            with self._condition:
                del self._holders[slot]
                self._free.append(slot)
                self._condition.notify_all()

    def held(self) -> list[str]:
        """What holds slots now, and for how long."""
        with self._condition:
            now = self._clock.now()
            return [f"{label}, for {now - since:.1f} s" for label, since in self._holders.values()]

    def free(self) -> None:
        """Give the memory back; nobody may hold a slot any more."""
        del self._bytes
        self._map.close()


class Turnstile:
    """Counts the calls inside an engine, so that it is let go of when the last one has left and not before."""

    def __init__(self, what: str, let_go: Callable[[], None]) -> None:
        self._what = what
        self._let_go = let_go
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._pid = os.getpid()

    @property
    def inside(self) -> int:
        return self._inside

    @contextmanager
    def call(self) -> Iterator[None]:
        """The length of one call; raises ClosedError after ``close``, and in a forked child."""
        if self._pid != os.getpid():  # asked first: the lock may have been taken when the fork came
            raise ClosedError(f"{self._what} belongs to process {self._pid}; after a fork open it again")
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._what} is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                over = self._is_over()
            if over:
                self._let_go()

    def close(self) -> bool:
        """Let nobody in any more; idempotent. False while calls are inside: the last one to leave lets go then."""
        if self._pid != os.getpid():
            return True
        with self._lock:
            if self._closed:
                return self._is_over()
            self._closed = True
            over = self._is_over()
        if over:
            self._let_go()
        return over

    def _is_over(self) -> bool:
        return self._closed and not self._inside
