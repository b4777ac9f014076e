"""Turns a store engine's answers about global addresses and leases into one status per key; must never know requests.

Nothing here raises for what an engine does. Calls that give something back (a lease, an open write) are made even while
the engine is left alone after a failure: what was opened must not stay open because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
class Located:
    """A global address for each key whose status is OK, 0 for every other; ``unsure`` marks keys of which the engine
    may have opened a write although it gave no address."""

    answer: Answer
    gvas: IntArray
    unsure: list[bool]


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

    def exists(self, keys: Sequence[str]) -> Answer:
        """OK for a published key, MISSING for one that is absent or not finished."""
        return self._client.exists(keys)

    def alloc(self, keys: Sequence[str], size: int) -> Located:
        """Open a write of ``size`` bytes for each key. No value <= 0 is ever an address."""
        gvas: list[int] = []
        unsure: list[bool] = []
        calls: list[None] = []

        def call() -> Sequence[int]:
            calls.append(None)
            return self._backend.batch_alloc(keys, [size] * len(keys))

        def convert(raw: Any) -> Status:
            number = as_int(raw)
            gvas.append(number if number is not None and number > 0 else 0)
            unsure.append(number is None)
            if number is None:
                return Status.FAILED
            if number > 0:
                return Status.OK
            status = self._client.code(number) if number else Status.FULL
            return Status.FAILED if status is Status.OK else status

        answer = self._client.call("alloc", len(keys), call, convert)
        if answer.cause is not None or not calls:  # raised or of the wrong shape; or never made
            unsure = [bool(calls)] * len(keys)
        return Located(answer, _addresses(answer, gvas), unsure)

    def copy(
        self, gvas: IntArray, addrs: IntArray, sizes: IntArray, direction: int, fence: Fence
    ) -> Copied:
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

    def locate(self, keys: Sequence[str], size: int) -> Located:
        """Where each published value of exactly ``size`` bytes lies. MISSING if there is none, INVALID if its size is
        another one."""
        gvas: list[int] = []

        def convert(info: Any) -> Status:
            status, gva = _read_info(info, size)
            gvas.append(gva)
            return status

        answer = self._client.call("key_info", len(keys), lambda: self._backend.batch_get_key_info(keys), convert)
        return Located(answer, _addresses(answer, gvas), [False] * len(keys))

    def add_lease(self, keys: Sequence[str], ttl: float) -> Answer:
        """Keep each key from being evicted for ``ttl`` seconds."""
        ttl_ms = max(round(ttl * 1e3), 1)
        return self._client.call(
            "add_lease", len(keys), lambda: self._backend.batch_add_lease(keys, ttl_ms), self._client.code
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
        self._client.forget(keys)


def _addresses(answer: Answer, gvas: list[int]) -> IntArray:
    """``gvas`` where the status is OK; a call that failed as a whole has no address at all."""
    if len(gvas) != len(answer.statuses) or answer.cause is not None:
        return np.zeros(len(answer.statuses), dtype=np.int64)
    return np.asarray(gvas, dtype=np.int64) * (np.asarray(answer.statuses, dtype=np.int64) == Status.OK)


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
