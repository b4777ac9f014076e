"""Makes a fenced Backend of an engine whose calls can't ask a fence; must never know requests or which engine it is.

An engine's ``get`` may write late: after the pool has given the call up and its blocks were handed on. So it writes
into a slot of ``Staging``, and what arrived is copied to the blocks chunk by chunk under the fence; a put copies to the
slot first. What it costs: one more copy of every byte (10 to 13 GB/s on one core), ``slots * slot_bytes`` of memory per
client, and one engine call per ``slot_bytes`` of a batch. A value larger than a slot is refused.

A call that never returns keeps its slot, one Python thread (see ``calls``) and the engine's client until it does. Once
all slots are taken so, puts and gets fail after ``slot_timeout`` with an error that names the calls; look-ups go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import Addresses, Backend
from vllm_ascend_ext.kv_pool.backend.copier import Copier, HostCopier, Ints, copy_fenced
from vllm_ascend_ext.kv_pool.backend.staging import Staging, Turnstile
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock
from vllm_ascend_ext.kv_pool.errors import ConfigError, Status, as_int, check_length, from_native
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.observe import logger

MAX_SLOTS = 64
MAX_SLOT_BYTES = 8 << 30


class PlainEngine(Protocol):
    """An engine's own calls, on memory that it was told of. One native code per key; ``exists``: 1 or 0 or negative.

    ``starts`` and ``lengths`` have one entry per key: each value is one piece.
    """

    def register(self, address: int, length: int) -> None: ...

    def exists(self, keys: Sequence[str]) -> Sequence[int]: ...

    def put(self, keys: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> Sequence[int]: ...

    def get(self, keys: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> Sequence[int]: ...

    def remove(self, keys: Sequence[str]) -> Sequence[int]: ...

    def close(self) -> None: ...


class StagedBackend(Backend):
    """Subclasses name the engine and make its client. The pool's own codes are the positive values of ``Status``.

    Args:
        slots: how many puts and gets may be inside the engine at once; those beyond wait ``slot_timeout`` seconds.
        slot_bytes: size of a slot; at least the largest value that will be saved.
        copier: moves the bytes between blocks and slots; the default is for blocks in host memory.
    """

    late_data: ClassVar[Literal["fenced", "staged"]] = "staged"

    def __init__(
        self,
        *,
        slots: int,
        slot_bytes: int,
        slot_timeout: float,
        copier: Copier | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        for field, value, most in (
            ("staging_slots", slots, MAX_SLOTS),
            ("staging_slot_bytes", slot_bytes, MAX_SLOT_BYTES),
        ):
            number = as_int(value)
            if number is None or not 1 <= number <= most:
                raise ConfigError(f"{field}={value!r}: allowed are 1 to {most}")
        self._slot_timeout = slot_timeout
        self._copier: Copier = HostCopier() if copier is None else copier
        self._told_too_large = False
        self._staging = Staging(slots, slot_bytes, clock)
        self._store = self._connect()
        self._turnstile = Turnstile(f"this client of {self.engine}", self._let_go)
        try:
            self._store.register(self._staging.address, self._staging.length)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _connect(self) -> PlainEngine:
        """The engine's client; raises ConfigError, and leaves nothing open, if it can't be had."""

    def exists(self, keys: Sequence[str]) -> Sequence[int]:
        with self._turnstile.call():
            return self._store.exists(keys) if len(keys) else []

    def remove(self, keys: Sequence[str]) -> Sequence[int]:
        with self._turnstile.call():
            return self._store.remove(keys) if len(keys) else []

    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """CANCELLED, and nothing is put, if the fence is revoked before all of a round's bytes were taken.

        INVALID for a value without bytes, and one that is larger than a slot. Raises DeadlineExceeded if no slot came
        free.
        """
        return self._in_rounds("put", keys, addrs, sizes, fence, self._put)

    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> list[int]:
        """CANCELLED for what arrived too late to be copied to the blocks. Raises DeadlineExceeded if no slot came
        free."""
        return self._in_rounds("get", keys, addrs, sizes, fence, self._get)

    def ledger(self) -> dict[str, int]:
        """Calls inside the engine, and slots that they hold."""
        return {"calls": self._turnstile.inside, "slots": len(self._staging.held())}

    def close(self) -> None:
        """Idempotent. A call that is still inside goes on, and the engine's client is closed when it has returned."""
        if not self._turnstile.close():
            held = "; ".join(self._staging.held()) or "a look-up"
            logger.error("%s: closed while calls are inside (%s); it is let go of when they return", self.engine, held)

    def _let_go(self) -> None:
        try:
            self._store.close()
        finally:
            self._staging.free()

    def _in_rounds(
        self,
        what: str,
        keys: Sequence[str],
        addrs: Addresses,
        sizes: Addresses,
        fence: Fence,
        move: Callable[[int, Sequence[str], Addresses, Addresses, Fence], Ints],
    ) -> list[int]:
        """``move`` for as many keys at a time as fit into a slot."""
        addrs, sizes = np.asarray(addrs, np.int64), np.asarray(sizes, np.int64)
        codes = np.full(len(keys), Status.CANCELLED.value, np.int64)
        with self._turnstile.call():
            if not len(keys):
                return []
            totals = sizes.sum(axis=1)
            codes[totals <= 0] = Status.INVALID.value
            codes[totals > self._staging.slot_bytes] = self._too_large(int(totals.max()))
            with self._staging.slot(f"{what} of {len(keys)} keys", self._slot_timeout) as slot:
                for chosen in _rounds(totals, self._staging.slot_bytes):
                    if fence.revoked:
                        break
                    codes[chosen] = move(slot, [keys[i] for i in chosen.tolist()], addrs[chosen], sizes[chosen], fence)
        answer: list[int] = codes.tolist()
        return answer

    def _put(self, slot: int, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Ints:
        host, starts, lengths = _places(slot, sizes)
        done = copy_fenced(self._copier, True, host, addrs.ravel(), sizes.ravel(), fence)
        if done < int(lengths.sum()):
            return np.full(len(keys), Status.CANCELLED.value, np.int64)
        return self._codes("put", self._store.put(keys, starts.tolist(), lengths.tolist()), len(keys))

    def _get(self, slot: int, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Ints:
        host, starts, lengths = _places(slot, sizes)
        codes = self._codes("get", self._store.get(keys, starts.tolist(), lengths.tolist()), len(keys))
        good = np.array([i for i, code in enumerate(codes) if from_native(self.engine, code) is Status.OK], np.int64)
        where = host.reshape(sizes.shape)[good]
        done = copy_fenced(self._copier, False, where.ravel(), addrs[good].ravel(), sizes[good].ravel(), fence)
        codes[good[np.cumsum(lengths[good]) > done]] = Status.CANCELLED.value
        return codes

    def _codes(self, call: str, answer: object, expected: int) -> Ints:
        """The engine's codes, one per key; what isn't an integer counts as FAILED. Raises BadAnswer."""
        numbers = [as_int(code) for code in check_length(answer, expected, f"{self.engine}'s {call}")]
        return np.array([Status.FAILED.value if n is None else n for n in numbers], np.int64)

    def _too_large(self, size: int) -> int:
        """The code of a value of ``size`` bytes if that is larger than a slot; says so once."""
        if size > self._staging.slot_bytes and not self._told_too_large:
            self._told_too_large = True
            logger.error(
                "staging_slot_bytes=%d: a block takes %d bytes, and none of that size can be saved or loaded; allowed "
                "are %d to %d",
                self._staging.slot_bytes,
                size,
                size,
                MAX_SLOT_BYTES,
            )
        return Status.INVALID.value


def _rounds(totals: Ints, room: int) -> Iterator[Ints]:
    """The keys in order, as many at a time as take at most ``room`` bytes together; without those that never fit, and
    those of no bytes."""
    fitting = np.flatnonzero((totals > 0) & (totals <= room))
    while len(fitting):
        count = int(np.searchsorted(np.cumsum(totals[fitting]), room, side="right"))
        yield fitting[:count]
        fitting = fitting[count:]


def _places(slot: int, sizes: Addresses) -> tuple[Ints, Ints, Ints]:
    """Where each segment lies when the values follow each other from ``slot`` on; start and length of each value."""
    flat = sizes.ravel()
    host = slot + np.cumsum(flat) - flat
    lengths = sizes.sum(axis=1)
    return host, slot + np.cumsum(lengths) - lengths, lengths
