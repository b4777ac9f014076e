"""Names, sums and summaries of the pool's counters for an engine's metrics; must never import vllm or prometheus.

A payload is ``{counter: number or list of numbers}``, as ``observe.Stats.take`` gives it: numbers are counts since the
last one, lists are single observations (seconds). Store calls are counted as ``store_{call}_{what}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Payload: TypeAlias = dict[str, Any]

OPERATIONS = {
    "put": "save_put",
    "get": "load_get",
    "exists": "exists",
    "remove": "remove",
    "alloc": "save_alloc",
    "finish": "save_finish",
    "key_info": "load_key_info",
    "add_lease": "load_add_lease",
    "remove_lease": "load_remove_lease",
    "copy": "copy",
}
"""Label ``operation`` of each call of a store; the later ones are those of layerwise transfer by global addresses."""

COUNTERS = {
    "lookups": "Requests whose prefix was looked up in the pool.",
    "hit_tokens": "Prompt tokens found in the pool beyond those on the device.",
    "lookup_timeouts": "Look-ups that had no answer within their deadline.",
    "load_failed": "Loads of which at least one block did not arrive.",
    "save_failed": "Saves of which at least one block was not stored.",
}
"""Counters with a metric of their own, ``vllm:ascend_store_{name}_total``; each other one is a label ``fault``."""

OPERATION_COUNTERS = {
    "keys": "Blocks asked of the store.",
    "failed_keys": "Blocks for which the store's answer was a failure.",
    "skipped": "Blocks not asked for because the store is being left alone after a failure.",
    "bytes": "Bytes moved to or from the store.",
}
"""Counters per operation, ``vllm:ascend_store_operation_{name}_total``."""

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

QUIET = frozenset({"lookup_ok", "lookup_served"})
"""Counters of ordinary work that other metrics show already."""


def add(total: Payload, more: Mapping[str, Any]) -> Payload:
    """``total`` with ``more`` added in place."""
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value
    return total


def operation_of(counter: str) -> tuple[str, str] | None:
    """(operation, what) of a ``store_{call}_{what}`` counter, None of any other."""
    for call, operation in sorted(OPERATIONS.items(), key=lambda item: -len(item[0])):  # remove_lease before remove
        prefix = f"store_{call}_"
        if counter.startswith(prefix):
            return operation, counter[len(prefix) :]
    return None


def faults(payload: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Counters that have no metric of their own."""
    for name, value in payload.items():
        parts = operation_of(name)
        named = (
            name in COUNTERS or name in QUIET or (parts and (parts[1] in OPERATION_COUNTERS or parts[1] == "seconds"))
        )
        if not named and not isinstance(value, list):
            yield name, value


def summary(payload: Mapping[str, Any]) -> dict[str, int | float]:
    """One line's worth: counts as they are, observations as number, mean and maximum in milliseconds."""
    line: dict[str, int | float] = {}
    for name, value in sorted(payload.items()):
        if not isinstance(value, list):
            line[name] = round(value, 3)
        elif value:
            stem = name.removesuffix("_seconds")
            line[f"{stem}_calls"] = len(value)
            line[f"{stem}_avg_ms"] = round(1e3 * sum(value) / len(value), 3)
            line[f"{stem}_max_ms"] = round(1e3 * max(value), 3)
    return line
