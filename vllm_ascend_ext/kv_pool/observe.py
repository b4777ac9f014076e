"""Counters and the one ERROR line per fault, so that nothing is swallowed; must never decide anything."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable

logger = logging.getLogger("vllm_ascend_ext.kv_pool")


MAX_OBSERVED = 1000


class Stats:
    """Thread-safe counters and single observations.

    ``failure`` counts a fault and logs it once, with the request that it belongs to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._observed: defaultdict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Keep one observation (seconds, say) until the next ``take``, at most ``MAX_OBSERVED`` of a name."""
        with self._lock:
            if len(self._observed[name]) < MAX_OBSERVED:
                self._observed[name].append(value)

    def failure(
        self, name: str, detail: object, requests: Iterable[str] = (), cause: BaseException | None = None
    ) -> None:
        """Count ``name`` and write one ERROR line: what failed, for whom, and why."""
        self.count(name)
        whom = ", ".join(sorted(requests)) or "-"
        why = f": {type(cause).__name__}: {cause}" if cause is not None else ""
        logger.error("%s [requests: %s] %s%s", name, whom, detail, why)

    def get(self, name: str) -> float:
        with self._lock:
            return self._counts.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, float | list[float]]:
        """The counts and, as lists, the observations since the last ``take``; starts again from nothing."""
        with self._lock:
            taken: dict[str, float | list[float]] = {**self._counts, **self._observed}
            self._counts, self._observed = defaultdict(float), defaultdict(list)
            return taken
