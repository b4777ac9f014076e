"""Faults to put into a running engine; runs inside the engine's process (`Engine.call("faults:...")`).

Each function gets the `Host` first. The store's calls are replaced on the worker's backend object, beneath the pool,
and put back by `heal`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any


def _backend(host: Any) -> Any:
    return host.worker_connector.worker._client.backend


def _replace(host: Any, call: str, act: Callable[..., Any]) -> None:
    """Let `act(original, *arguments)` stand in for one call of the backend."""
    backend = _backend(host)
    original = getattr(backend, call)
    setattr(backend, call, lambda *arguments: act(original, *arguments))


def heal(host: Any) -> None:
    """The backend as it was."""
    backend = _backend(host)
    for call in [name for name in vars(backend) if callable(vars(backend)[name]) and hasattr(type(backend), name)]:
        delattr(backend, call)


def zero_what_is_loaded(host: Any) -> None:
    """Every get succeeds and leaves zeros: what a pool that loses the bytes looks like."""

    def get(original: Any, keys: Sequence[str], addrs: Any, sizes: Any, fence: Any) -> Any:
        codes = original(keys, addrs, sizes, fence)
        for start, length in zip(addrs.ravel().tolist(), sizes.ravel().tolist(), strict=True):
            ctypes.memset(start, 0, length)
        return codes

    _replace(host, "get", get)
