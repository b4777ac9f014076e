"""Turns a store engine's answers about global addresses and leases into one status per key; must never know requests.

Nothing here raises for what an engine does. Calls that give something back (a lease, an open write) are made even while
the engine is left alone after a failure: what was opened must not stay open because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import Backend
from vllm_ascend_ext.kv_pool.backend.client import Answer, StoreClient
from vllm_ascend_ext.kv_pool.errors import BadAnswer, Status, as_int
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.layout import IntArray

UNKNOWN_CODE = -1
"""What an engine is told of a write that failed without a code of the engine's own."""


@dataclass(frozen=True)
class Opened(Answer):
    """``unsure``: keys for which the engine may have opened something although its answer can't be read.

    ``gvas``: a global address for each key whose status is OK, 0 for every other.
    """

    unsure: list[bool] = field(default_factory=list)
    gvas: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Copied:
    """What became of one batch of copies: all of it, or nothing that can be relied on."""

    status: Status
    code: int = 0
    cause: BaseException | None = None


class GvaClient:
    def __init__(self, client: StoreClient) -> None:
        self._client = client

    @property
    def _backend(self) -> Backend:
        return self._client.backend

    def exists(self, keys: Sequence[str], *, always: bool = False) -> Answer:
        """OK for a published key, MISSING for one that is absent or not finished. ``always``: see ``StoreClient``."""
        return self._client.exists(keys, always=always)

    def alloc(self, keys: Sequence[str], size: int) -> Opened:
        """Open a write of ``size`` bytes for each key. No value <= 0 is ever an address."""
        return self._open("alloc", keys, lambda: self._backend.batch_alloc(keys, [size] * len(keys)), self._allocated)

    def copy(self, gvas: IntArray, addrs: IntArray, sizes: IntArray, direction: int, fence: Fence) -> Copied:
        """Copy all ranges, or nothing that can be relied on; arrays of one entry per range."""
        codes: list[int] = []

        def call() -> list[Any]:
            code = self._backend.batch_copy(gvas, addrs, sizes, direction, fence)
            return [code]

        def convert(raw: Any) -> Status:
            number = as_int(raw)
            codes.append(UNKNOWN_CODE if number is None else number)
            return self._client.code(raw)

        answer = self._client.call("copy", 1, call, convert)
        status = answer.statuses[0]
        code = codes[0] if codes else UNKNOWN_CODE
        if status is Status.OK:
            return Copied(status)
        return Copied(status, code or UNKNOWN_CODE, answer.cause)

    def finish(self, keys: Sequence[str], codes: Sequence[int]) -> Answer:
        """Publish each open write whose code is 0, drop the others; OK is what the engine did as it was told."""
        return self._client.call(
            "finish",
            len(keys),
            lambda: self._backend.batch_write_finish(keys, list(codes)),
            self._client.code,
            always=True,
        )

    def locate(self, keys: Sequence[str], size: int) -> Opened:
        """Where each published value of exactly ``size`` bytes lies. MISSING if there is none, INVALID if its size is
        another one."""
        return self._open(
            "key_info", keys, lambda: self._backend.batch_get_key_info(keys), lambda info: _read_info(info, size)
        )

    def add_lease(self, keys: Sequence[str], ttl: float) -> Opened:
        """Keep each key from being evicted for ``ttl`` seconds."""
        ttl_ms = max(round(ttl * 1e3), 1)
        return self._open(
            "add_lease",
            keys,
            lambda: self._backend.batch_add_lease(keys, ttl_ms),
            lambda code: (self._client.code(code), 0),
        )

    def remove_lease(self, keys: Sequence[str]) -> Answer:
        """Give back one lease of each key (a key may be there several times); one status for all of them."""
        if not keys:
            return Answer([])
        return self._client.call(
            "remove_lease", 1, lambda: [self._backend.batch_remove_lease(keys)], self._client.code, always=True
        )

    def forget(self, keys: Sequence[str]) -> None:
        """Remove values whose bytes turned out wrong: a later save would leave them as they are."""
        if keys:
            self._client.forget(keys)

    def _open(
        self, name: str, keys: Sequence[str], call: Callable[[], Any], read: Callable[[Any], tuple[Status, int]]
    ) -> Opened:
        made: list[None] = []
        entries: list[Any] = []
        gvas: list[int] = []

        def counted() -> Any:
            made.append(None)
            return call()

        def convert(raw: Any) -> Status:
            status, gva = read(raw)
            entries.append(raw)
            gvas.append(gva)
            return status

        answer = self._client.call(name, len(keys), counted, convert)
        if answer.cause is not None or not made:  # raised, or of the wrong shape; or the call was never made
            nowhere = np.zeros(len(keys), dtype=np.int64)
            return Opened(answer.statuses, answer.cause, [bool(made)] * len(keys), nowhere)
        return Opened(answer.statuses, None, [as_int(raw) is None for raw in entries], np.asarray(gvas, dtype=np.int64))

    def _allocated(self, raw: Any) -> tuple[Status, int]:
        number = as_int(raw)
        if number is None:
            return Status.FAILED, 0
        if number > 0:
            return Status.OK, number
        status = self._client.code(number) if number else Status.FULL
        return Status.FAILED if status is Status.OK else status, 0


def _read_info(info: Any, size: int) -> tuple[Status, int]:
    """A key's status and address; an info that can't be read fails its key alone."""
    try:
        found = as_int(info.size())
        if found is None or found < 0:
            raise BadAnswer(f"a key info's size is {found!r}")
        if found == 0:
            return Status.MISSING, 0
        if found != size:
            return Status.INVALID, 0
        gva = as_int(info.gva_list()[0])
    except Exception:
        return Status.FAILED, 0
    return (Status.FAILED, 0) if gva is None or gva <= 0 else (Status.OK, gva)
