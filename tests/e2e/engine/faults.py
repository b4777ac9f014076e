"""Faults to put into a running engine; runs inside the engine's process (`Engine.call("faults:...")`).

Each function gets the `Host` first. The store's calls are replaced on the worker's backend object, beneath the pool,
and put back by `heal`. Which blocks a fault is meant for is said by a prompt and a place in it: keys hold the hash.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL
from vllm_ascend_ext.kv_pool.backend.local import LocalKeyInfo
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.factory import make_backend

CALLS = (
    "exists",
    "put",
    "get",
    "remove",
    "batch_alloc",
    "batch_copy",
    "batch_write_finish",
    "batch_get_key_info",
    "batch_add_lease",
    "batch_remove_lease",
)
LATE_SECONDS = 60.0

_released = threading.Event()
_hits: dict[str, int] = {}


class Injected(RuntimeError):
    pass


def heal(host: Any) -> dict[str, int]:
    """The backend as it was, with nobody held back; how often each call was interfered with since the last time."""
    global _released
    _released.set()
    _released = threading.Event()
    backend = _backend(host)
    for call in set(CALLS) & set(vars(backend)):
        delattr(backend, call)
    hits, _hits_before = dict(_hits), _hits.clear()
    return hits


def met(host: Any) -> dict[str, int]:
    """What `heal` would answer: how often each call was interfered with, and how many blocks were `spoiled`."""
    return dict(_hits)


# -- any call ----------------------------------------------------------------------------------------------------------


def break_call(host: Any, call: str, how: str) -> None:
    """Let every use of one call raise, refuse, answer None or too little, or come too late."""

    def act(original: Callable[..., Any], *arguments: Any) -> Any:
        if how == "raises":
            raise Injected(f"{call} was made to fail")
        if how == "ends its thread":
            raise SystemExit(f"{call} was made to end its thread")
        if how == "is late":
            _released.wait(LATE_SECONDS)
        if how == "refuses":
            return [-1] * len(arguments[0]) if call not in ("batch_copy", "batch_remove_lease") else -1
        answer = original(*arguments)
        if how == "answers none":
            return None
        if how == "answers short":
            return answer[:-1] if isinstance(answer, list) else None
        return answer

    _replace(host, call, act)


# -- blocks on their way to the device ---------------------------------------------------------------------------------


def spoil(host: Any, kind: str, prompt: list[int], where: str) -> None:
    """Let the loads of some blocks of `prompt` fail: `lost` on the way, half written, or brought as `garbage`."""
    hashes = _hashes(host, prompt)
    count = len(hashes)
    places = {"first": [0], "middle": [count // 2], "last": [count - 1], "all": range(count)}[where]
    chosen = frozenset(hashes[place] for place in places)
    {"lost": _lose, "garbage": _garble}[kind](host, chosen)


def _lose(host: Any, chosen: frozenset[str]) -> None:
    def get(original: Any, keys: Sequence[str], addrs: Any, sizes: Any, fence: Any) -> Any:
        there = [i for i, key in enumerate(keys) if not _meant(key, chosen)]
        for i in set(range(len(keys))) - set(there):
            _clear(addrs[i], sizes[i])  # or the block might hold the right bytes from an earlier life
            _count("spoiled")
        codes = [int(Status.MISSING)] * len(keys)
        if there:
            loaded = original([keys[i] for i in there], addrs[there], sizes[there], fence)
            for i, code in zip(there, loaded, strict=True):
                codes[i] = code
        return codes

    def key_info(original: Any, keys: Sequence[str]) -> Any:
        infos = list(original(keys))
        for i, key in enumerate(keys):
            if _meant(key, chosen):
                infos[i] = LocalKeyInfo(0, 0)
                _count("spoiled")
        return infos

    _replace(host, "get", get)
    _replace(host, "batch_get_key_info", key_info)


def _garble(host: Any, chosen: frozenset[str]) -> None:
    spans: list[tuple[int, int]] = []  # where the chosen values lie in the store

    def get(original: Any, keys: Sequence[str], addrs: Any, sizes: Any, fence: Any) -> Any:
        codes = original(keys, addrs, sizes, fence)
        for i, key in enumerate(keys):
            if _meant(key, chosen):
                _flip(int(addrs[i][0]))
        return codes

    def key_info(original: Any, keys: Sequence[str]) -> Any:
        infos = original(keys)
        for key, info in zip(keys, infos, strict=True):
            if _meant(key, chosen) and info.size():
                spans.append((info.gva_list()[0], info.size()))
        return infos

    def batch_copy(original: Any, gvas: Any, addrs: Any, sizes: Any, direction: int, fence: Any) -> Any:
        code = original(gvas, addrs, sizes, direction, fence)
        if direction == GLOBAL_TO_LOCAL:
            for gva, address in zip(np.ravel(gvas).tolist(), np.ravel(addrs).tolist(), strict=True):
                if any(start <= gva < start + size for start, size in spans):
                    _flip(address)
        return code

    _replace(host, "get", get)
    _replace(host, "batch_get_key_info", key_info)
    _replace(host, "batch_copy", batch_copy)


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


# -- whole parts -------------------------------------------------------------------------------------------------------


def kill_lookups(host: Any) -> None:
    """The look-up server is gone, as if its thread had died."""
    host.worker_connector.worker._lookups.close()


def restart_lookups(host: Any) -> None:
    host.worker_connector.worker.restart_lookups()


def kill_store(host: Any) -> None:
    """Every call of the store fails from now on, and what was in it is lost when nobody else holds it."""
    _backend(host).close()


def restart_store(host: Any) -> None:
    worker = host.worker_connector.worker
    worker._client.backend = make_backend(worker._setup.config)


def trust_what_failed(host: Any) -> None:
    """Let the scheduler's half forget which blocks failed, and leave their hashes in vLLM's prefix cache."""
    host.scheduler_connector.scheduler.blocks_to_forget = lambda invalid: set()


def live_requests(host: Any) -> bool:
    """Whether the scheduler's half remembers any request."""
    connector = host.scheduler_connector
    announcer = connector._announcer
    return not connector.scheduler.holds_nothing or (announcer is not None and not announcer.holds_nothing)


def blocks_in_use(host: Any) -> int:
    """Blocks on the device that some request still holds, its save included."""
    pool = host.scheduler_connector._kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


# -- inside ------------------------------------------------------------------------------------------------------------


def _backend(host: Any) -> Any:
    return host.worker_connector.worker._client.backend


def _replace(host: Any, call: str, act: Callable[..., Any]) -> None:
    """Let `act(original, *arguments)` stand in for one call of the backend."""
    backend = _backend(host)
    original = getattr(type(backend), call).__get__(backend)

    def stand_in(*arguments: Any) -> Any:
        _count(call)
        return act(original, *arguments)

    setattr(backend, call, stand_in)


def _count(what: str) -> None:
    _hits[what] = _hits.get(what, 0) + 1


def _hashes(host: Any, prompt: list[int]) -> list[str]:
    probe = Request("probe", prompt, SamplingParams(max_tokens=1), None, block_hasher=host.core.request_block_hasher)
    return [block_hash.hex() for block_hash in probe.block_hashes]


def _meant(key: str, chosen: frozenset[str]) -> bool:
    return any(block_hash in key for block_hash in chosen)


def _flip(address: int) -> None:
    _count("spoiled")
    ctypes.c_uint8.from_address(address).value ^= 0x40


def _clear(addrs: Any, sizes: Any) -> None:
    for start, length in zip(np.ravel(addrs).tolist(), np.ravel(sizes).tolist(), strict=True):
        ctypes.memset(start, 0, length)
