"""A toy queue worker with a switch for every kind of bug that faultinject must find; knows nothing of faultinject."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

logger = logging.getLogger("toy_worker")


left_open: list[Closable] = []  # what the bugs leave open; the tests close it, the worker never does


class Closable(Protocol):
    def close(self) -> None: ...


def open_socket() -> Closable:
    import zmq

    return zmq.Context.instance().socket(zmq.PAIR)


class Store:
    """Takes a value per key; `undo` takes it back."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def put(self, key: str, value: int) -> list[int]:
        self.values[key] = value
        return [0]

    def undo(self, key: str) -> None:
        self.values.pop(key, None)


class Worker:
    """Puts items into a store in a thread of its own. `bugs` names what is wrong with it.

    dies       an exception ends the thread, and nobody completes the items
    stuck      after an exception the thread never looks at the queue again, so that close() waits in vain
    forgotten  after an exception close() doesn't end the thread
    silent     an exception counts as success
    fd, item, ledger, zmq  what an exception leaves open: a descriptor, a queue item, a ledger entry, a socket
    wrong      a failed put leaves another value
    """

    def __init__(self, store: Store, bugs: Iterable[str] = (), retries: int = 0) -> None:
        self.store, self.bugs, self.retries = store, frozenset(bugs), retries
        self.queue: queue.Queue[tuple[str, int, Future[int]] | None] = queue.Queue()
        self.held: list[str] = []
        self.failed = False
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.serve, name="toy-worker-1", daemon=True)
        self.thread.start()

    def submit(self, key: str, value: int) -> Future[int]:
        done: Future[int] = Future()
        self.queue.put((key, value, done))
        return done

    def close(self) -> None:
        self.closing.set()
        if "forgotten" in self.bugs and self.failed:
            return
        self.queue.put(None)
        self.thread.join(0.2 if "stuck" in self.bugs else 5)

    def serve(self) -> None:
        while (item := self.queue.get()) is not None:
            self.handle(*item)
            self.queue.task_done()
            if "stuck" in self.bugs and self.failed:
                threading.Event().wait()
        self.queue.task_done()

    def handle(self, key: str, value: int, done: Future[int]) -> None:
        self.held.append(key)
        try:
            done.set_result(self.put(key, value))
            self.held.remove(key)
        except BaseException as exc:
            self.failed = True
            if "dies" in self.bugs:
                raise
            self.fail(key, value, done, exc)

    def put(self, key: str, value: int) -> int:
        for attempt in range(self.retries + 1):
            try:
                codes = self.store.put(key, value)
                if not isinstance(codes, list) or len(codes) != 1:
                    raise RuntimeError(f"put answered {codes!r}")
                return codes[0]
            except OSError:
                if attempt == self.retries:
                    self.store.undo(key)
                    raise
        raise AssertionError("unreachable")

    def fail(self, key: str, value: int, done: Future[int], exc: BaseException) -> None:
        if "fd" in self.bugs:
            left_open.extend(os.fdopen(end) for end in os.pipe())
        if "zmq" in self.bugs:
            left_open.append(open_socket())
        if "item" in self.bugs:
            self.queue.put(("left", 0, Future()))
        if "ledger" not in self.bugs:
            self.held.remove(key)
        if "wrong" in self.bugs:
            self.store.values[key] = value + 1
        if "silent" in self.bugs:
            done.set_result(0)
            return
        logger.error("put of %s failed: %r", key, exc)
        done.set_exception(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))
