"""Counts faults of look-ups and writes one ERROR line per outage; must never decide what a fault leads to."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from vllm_ascend_ext.kv_pool.observe import Stats, logger


class OutageLog:
    """Every fault is counted; of an unbroken run of one kind only the first is logged. ``over`` ends all runs."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._runs: dict[str, int] = {}

    def fault(
        self, name: str, detail: object, requests: Iterable[str] = (), cause: BaseException | None = None
    ) -> None:
        with self._lock:
            self._runs[name] = seen = self._runs.get(name, 0) + 1
        if seen == 1:
            self._stats.failure(name, detail, requests, cause)
        else:
            self._stats.count(name)

    def over(self, what: str) -> None:
        """Say how many faults went by unlogged, if there were any."""
        if not self._runs:  # the usual case, without the lock
            return
        with self._lock:
            runs, self._runs = self._runs, {}
        counts = ", ".join(f"{name} {seen}" for name, seen in sorted(runs.items()))
        logger.warning("%s works again after: %s", what, counts)
