"""Leak checks: what a case must give back (threads, descriptors, ZMQ sockets, ledgers); knows no sessions."""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from faultinject.evidence import join

_FD_DIR = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)


@dataclass(frozen=True)
class Leak:
    """Something that a case didn't give back."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def open_descriptors() -> dict[int, str]:
    """Open file descriptors and what they point to; empty where the system can't tell."""
    found: dict[int, str] = {}
    if _FD_DIR is None:
        return found
    for name in os.listdir(_FD_DIR):
        try:
            # A file that is unlinked while it is open stays the same file.
            found[int(name)] = os.readlink(f"{_FD_DIR}/{name}").removesuffix(" (deleted)")
        except OSError:  # the listing's own descriptor, or one closed meanwhile
            continue
    return found


def live_threads() -> set[threading.Thread]:
    """Threads started through `threading`; foreign ones that logged something leave dummies, which don't count."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


class _ZmqWatch:
    """Remembers, weakly, every ZMQ socket and context made since the first look; does nothing until zmq is imported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._installed = False

    def install(self) -> None:
        zmq = sys.modules.get("zmq")
        if self._installed or zmq is None or not hasattr(zmq, "Socket"):
            return
        self._installed = True
        for cls in (zmq.Socket, zmq.Context):
            cls.__init__ = self._noting(cls.__init__)

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            with self._lock:
                self._number += 1
                self._made[self._number] = weakref.ref(made)

        return init

    def mark(self) -> int:
        """Everything made from now on has a number above this."""
        self.install()
        with self._lock:
            self._made = {number: ref for number, ref in self._made.items() if ref() is not None}
            return self._number

    def open_since(self, mark: int) -> list[str]:
        with self._lock:
            alive = [ref() for number, ref in self._made.items() if number > mark]
        # A shadow borrows the handle of a socket that is listed itself.
        return [
            repr(made) for made in alive if made is not None and not made.closed and not getattr(made, "_shadow", 0)
        ]


_zmq_watch = _ZmqWatch()


@dataclass(frozen=True)
class Ledger:
    """A count that must be back where it started: an int, or a collection counted as a multiset."""

    name: str
    read: Callable[[], int | Mapping[Any, int] | Iterable[Any]]
    start: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self._value())

    def _value(self) -> int | Counter[Any]:
        value = self.read()
        try:
            return operator.index(value)  # type: ignore[arg-type]  # any integer type, numpy's too
        except TypeError:
            return +Counter(value)  # type: ignore[arg-type]  # not an integer, then

    def check(self) -> Leak | None:
        try:
            now = self._value()
        except Exception as exc:
            return Leak(self.name, f"the ledger can't be read: {type(exc).__name__}: {exc}")
        if now == self.start:
            return None
        if isinstance(now, int) or isinstance(self.start, int):
            return Leak(self.name, f"{now}, was {self.start} at the start")
        kept, lost = now - self.start, self.start - now
        parts = [f"left over {dict(kept)}" if kept else "", f"missing {dict(lost)}" if lost else ""]
        return Leak(self.name, ", ".join(part for part in parts if part))


@dataclass(frozen=True)
class Balance:
    """How often something was taken and given back: two counts that must end equal, and that the matrix shows."""

    name: str
    read: Callable[[], tuple[int, int]]

    def counts(self) -> tuple[int, int]:
        taken, given_back = self.read()
        return operator.index(taken), operator.index(given_back)

    def check(self) -> Leak | None:
        try:
            taken, given_back = self.counts()
        except Exception as exc:
            return Leak(self.name, f"the balance can't be read: {type(exc).__name__}: {exc}")
        return None if taken == given_back else Leak(self.name, f"{taken} taken, {given_back} given back")


def queue_ledgers(name: str, queue: Any) -> list[Ledger]:
    """Items still in a `queue.Queue`-like object, and items taken without a `task_done`."""
    ledgers = [Ledger(f"{name} items", lambda: int(queue.qsize()))]
    if hasattr(queue, "unfinished_tasks"):
        ledgers.append(Ledger(f"{name} unfinished tasks", lambda: int(queue.unfinished_tasks)))
    return ledgers


class LeakCheck:
    """Takes stock when made; `wait_clean` tells what is still missing once the grace is over, at once if nothing is."""

    def __init__(self) -> None:
        self._zmq = _zmq_watch.mark()
        self._threads = live_threads()
        self._descriptors = open_descriptors()
        self.ledgers: list[Ledger | Balance] = []

    def new_threads(self) -> list[threading.Thread]:
        return sorted(live_threads() - self._threads, key=lambda thread: thread.name)

    def wait_threads(self, ours: set[threading.Thread], end: float) -> list[threading.Thread]:
        """Wait until `end` (monotonic seconds) for new threads to end, except `ours`; those that did not."""
        while True:
            alive = [thread for thread in self.new_threads() if thread not in ours]
            if not alive or time.monotonic() >= end:
                return alive
            join(alive[0], end - time.monotonic())

    def wait_clean(self, end: float) -> list[Leak]:
        """Leaks other than threads that are there at `end` (monotonic seconds) after garbage was collected."""
        found = self._look()
        if not found:
            return found
        gc.collect()
        pause = 0.0005
        while (found := self._look()) and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return found

    def balances(self) -> dict[str, tuple[int, int]]:
        """What was taken and given back, by name; (0, 0) where that can't be read, which is a leak."""
        found = {}
        for balance in self.ledgers:
            if isinstance(balance, Balance):
                found[balance.name] = (0, 0)
                with suppress(Exception):
                    found[balance.name] = balance.counts()
        return found

    def _look(self) -> list[Leak]:
        leaks = [leak for ledger in self.ledgers if (leak := ledger.check())]
        leaks += [Leak("zmq", made) for made in _zmq_watch.open_since(self._zmq)]
        now = open_descriptors()
        new = {number: path for number, path in now.items() if self._descriptors.get(number) != path}
        if new:
            leaks.append(Leak("descriptors", ", ".join(f"{number} -> {path}" for number, path in sorted(new.items()))))
        return leaks
