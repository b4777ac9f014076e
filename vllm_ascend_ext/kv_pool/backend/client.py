"""Turns whatever a store engine answers into exactly one status per key; must never know requests or threads.

This is the only caller of a Backend in the pool. It never raises for what an engine does: an Exception, None or an
answer of the wrong length means that every key of the call failed. (A BaseException passes: it ends the thread.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_ext.kv_pool.backend.base import Addresses, Backend
from vllm_ascend_ext.kv_pool.checksum import Trailers
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import Cancelled, Status, as_int, check_length, from_native
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.observe import Stats


@dataclass(frozen=True)
class Answer:
    """One status per key of a call, in the order of its keys, and what went wrong with the call as a whole."""

    statuses: list[Status]
    cause: BaseException | None = None

    @property
    def ok(self) -> bool:
        return all(status is Status.OK for status in self.statuses)

    def failed(self) -> list[int]:
        """The indices of the keys that did not succeed."""
        return [index for index, status in enumerate(self.statuses) if status is not Status.OK]


class Breaker:
    """Keeps a dead engine from costing a deadline per call: open for ``backoff`` seconds, then one call may try."""

    def __init__(self, backoff: float, clock: Clock = MONOTONIC) -> None:
        self._backoff = backoff
        self._clock = clock
        self._lock = threading.Lock()
        self._tripped_at = -math.inf
        self._retry_at: float | None = None

    def trip(self) -> None:
        with self._lock:
            self._tripped_at = self._clock.now()
            self._retry_at = self._tripped_at + self._backoff

    def reset(self, began: float) -> None:
        """A call that began at ``began`` went well. Of one that began before somebody gave up on the engine that says
        nothing: it may be the very call that took too long."""
        with self._lock:
            if began >= self._tripped_at:
                self._retry_at = None

    def allows(self) -> bool:
        """False while the engine is left alone. When the period is over, True for one caller a period."""
        with self._lock:
            if self._retry_at is None:
                return True
            if self._clock.now() < self._retry_at:
                return False
            self._retry_at = self._clock.now() + self._backoff
            return True


class StoreClient:
    """A Backend with statuses. ``breaker`` is tripped by whoever gave up waiting, and by UNAVAILABLE answers.

    With ``checksum`` a digest is stored behind each value and compared after each load (host memory only).
    """

    def __init__(
        self,
        backend: Backend,
        stats: Stats,
        *,
        checksum: bool = False,
        backoff: float = 1.0,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.backend = backend
        self.stats = stats
        self.breaker = Breaker(backoff, clock)
        self._clock = clock
        self._checksum = checksum

    def exists(self, keys: Sequence[str], *, always: bool = False) -> Answer:
        """OK for a published key, MISSING for one that is not there; anything else is a failure of that key.

        ``always``: see ``call``.
        """
        return self.call("exists", len(keys), lambda: self.backend.exists(keys), self._presence, always=always)

    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Answer:
        """Publish each key's segments."""

        def call() -> Sequence[int]:
            if not self._checksum:
                return self.backend.put(keys, addrs, sizes, fence)
            trailers = Trailers(keys)
            if not trailers.write(addrs, sizes, fence):
                raise Cancelled("put")
            return self.backend.put(keys, *trailers.append_to(addrs, sizes), fence)

        return self._moved("put", self.call("put", len(keys), call, self.code), sizes)

    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Answer:
        """Load each key's segments; bytes that are not those that were saved are CORRUPT."""
        if not self._checksum:
            answer = self.call("get", len(keys), lambda: self.backend.get(keys, addrs, sizes, fence), self.code)
            return self._moved("get", answer, sizes)
        trailers = Trailers(keys)
        answer = self.call(
            "get", len(keys), lambda: self.backend.get(keys, *trailers.append_to(addrs, sizes), fence), self.code
        )
        self._moved("get", answer, sizes)
        if not any(status is Status.OK for status in answer.statuses):
            return answer
        same = trailers.verify(addrs, sizes, fence)
        if same is None:
            return Answer([Status.CANCELLED] * len(keys), Cancelled("get"))
        corrupt = [status is Status.OK and not right for status, right in zip(answer.statuses, same, strict=True)]
        if any(corrupt):
            self.forget([key for key, bad in zip(keys, corrupt, strict=True) if bad])
        return Answer(
            [Status.CORRUPT if bad else status for status, bad in zip(answer.statuses, corrupt, strict=True)],
            answer.cause,
        )

    def forget(self, keys: Sequence[str]) -> None:
        """Remove corrupt values, or they would stay: a put of an existing key keeps the first data."""
        self.stats.count("store_get_corrupt_keys", len(keys))
        self.remove(keys)

    def remove(self, keys: Sequence[str]) -> Answer:
        """Take each key out of the store."""
        return self.call("remove", len(keys), lambda: self.backend.remove(keys), self.code)

    def call(
        self, name: str, n: int, call: Callable[[], Any], convert: Callable[[Any], Status], *, always: bool = False
    ) -> Answer:
        """One status for each of the ``n`` keys of ``call``; ``convert`` is asked once for each entry, in order.

        ``always``: also while the engine is left alone, for calls that give back what others have opened.
        """
        if n == 0:
            return Answer([])
        if not always and not self.breaker.allows():
            self.stats.count(f"store_{name}_skipped", n)
            return Answer([Status.UNAVAILABLE] * n)
        began = self._clock.now()
        try:
            raw = check_length(call(), n, name)
            answer = Answer([convert(code) for code in raw])
        except Exception as cause:
            answer = Answer([Status.FAILED] * n, cause)
        self.stats.observe(f"store_{name}_seconds", self._clock.now() - began)
        self._account(name, answer, began)
        return answer

    def _moved(self, name: str, answer: Answer, sizes: Addresses) -> Answer:
        """Count the bytes of the keys that succeeded."""
        moved = int(sizes[[status is Status.OK for status in answer.statuses]].sum()) if len(sizes) else 0
        if moved:
            self.stats.count(f"store_{name}_bytes", moved)
        return answer

    def _account(self, name: str, answer: Answer, began: float) -> None:
        failed = sum(status not in (Status.OK, Status.MISSING) for status in answer.statuses)
        self.stats.count(f"store_{name}_keys", len(answer.statuses))
        if failed:
            self.stats.count(f"store_{name}_failed_keys", failed)
        if all(status is Status.UNAVAILABLE for status in answer.statuses):
            self.breaker.trip()
        elif not failed:
            self.breaker.reset(began)

    def code(self, raw: Any) -> Status:
        """The status of one of the engine's own codes."""
        return from_native(self.backend.engine, raw)

    def _presence(self, raw: Any) -> Status:
        number = as_int(raw)
        if number == 1:
            return Status.OK
        if number == 0:
            return Status.MISSING
        status = from_native(self.backend.engine, raw)
        return Status.FAILED if status is Status.OK else status
