"""Faults to put into a running engine; runs inside the engine's process (`Engine.call("faults:...")`).

Each function gets the `Host` first. The store's calls are replaced on the worker's backend object, beneath the pool,
and put back by `heal`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL


def _backend(host: Any) -> Any:
    return host.worker_connector.worker._client.backend


def _replace(host: Any, call: str, act: Callable[..., Any]) -> None:
    """Let `act(original, *arguments)` stand in for one call of the backend."""
    backend = _backend(host)
    original = getattr(backend, call)
    setattr(backend, call, lambda *arguments: act(original, *arguments))


def _clear(addrs: Any, sizes: Any) -> None:
    for start, length in zip(np.ravel(addrs).tolist(), np.ravel(sizes).tolist(), strict=True):
        ctypes.memset(start, 0, length)


def heal(host: Any) -> None:
    """The backend as it was."""
    backend = _backend(host)
    for call in [name for name in vars(backend) if callable(vars(backend)[name]) and hasattr(type(backend), name)]:
        delattr(backend, call)


def zero_what_is_loaded(host: Any) -> None:
    """Every load succeeds and leaves zeros: what a pool that loses the bytes looks like."""

    def get(original: Any, keys: Sequence[str], addrs: Any, sizes: Any, fence: Any) -> Any:
        codes = original(keys, addrs, sizes, fence)
        _clear(addrs, sizes)
        return codes

    def batch_copy(original: Any, gvas: Any, addrs: Any, sizes: Any, direction: int, fence: Any) -> Any:
        code = original(gvas, addrs, sizes, direction, fence)
        if direction == GLOBAL_TO_LOCAL:
            _clear(addrs, sizes)
        return code

    _replace(host, "get", get)
    _replace(host, "batch_copy", batch_copy)
