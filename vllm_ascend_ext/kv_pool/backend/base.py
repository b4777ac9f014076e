"""What every store engine offers, in that engine's own codes; must never know requests, groups or vLLM.

The rest of the pool doesn't call a Backend directly but through ``backend.client.StoreClient``, which turns whatever
comes back (native codes, short lists, None, exceptions) into exactly one status per key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.fence import Fence

Addresses = npt.NDArray[np.int64]
"""(keys, segments) addresses, or lengths in bytes, of the memory that makes up each key's value, in order."""

LOCAL_TO_GLOBAL = 0
GLOBAL_TO_LOCAL = 1


class KeyInfo(Protocol):
    """Where a published value lies: ``size()`` bytes (0 when there is none) at ``gva_list()``."""

    def size(self) -> int: ...

    def gva_list(self) -> list[int]: ...


class Backend(ABC):
    """One client of a store engine. All calls may be made from several threads at once.

    ``late_data`` says what keeps a call that outlives its deadline from touching blocks that were handed on:
    "fenced" engines ask the fence before each chunk they copy; for "staged" ones the client copies through a buffer of
    its own (one more copy of the bytes).
    """

    engine: ClassVar[str]
    late_data: ClassVar[Literal["fenced", "staged"]]
    has_gva: ClassVar[bool] = False

    def set_device(self) -> None:
        """Bind the calling thread to this rank's device; called first on each transfer thread."""
        return None

    def register_buffer(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Tell the engine which memory will take part in transfers (bytes from each address on)."""
        return None

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> Sequence[int]:
        """1 for each published key, 0 for each that is missing or not finished; negative for an error."""

    @abstractmethod
    def put(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Sequence[int]:
        """Publish each key's segments; one native code per key. An existing key keeps its data and is a success."""

    @abstractmethod
    def get(self, keys: Sequence[str], addrs: Addresses, sizes: Addresses, fence: Fence) -> Sequence[int]:
        """Copy each key's value into its segments; one native code per key; no byte is written for a failed key's
        size mismatch."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> Sequence[int]:
        """Forget each key (its bytes turned out wrong); one native code per key; a leased one is refused."""

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[int]:
        """Open a write of ``sizes`` bytes for each key: its global address, or 0. An existing key's own address."""
        raise NotImplementedError(f"{self.engine} has no global addresses")

    def batch_copy(self, gvas: Addresses, addrs: Addresses, sizes: Addresses, direction: int, fence: Fence) -> int:
        """Copy all ranges (flat arrays of one length), direction 0 local to global, 1 global to local; one code for the
        whole batch."""
        raise NotImplementedError(f"{self.engine} has no global addresses")

    def batch_write_finish(self, keys: Sequence[str], results: Sequence[int]) -> Sequence[int]:
        """Publish each open write whose result is 0 and drop the others; one native code per key."""
        raise NotImplementedError(f"{self.engine} has no global addresses")

    def batch_get_key_info(self, keys: Sequence[str]) -> Sequence[KeyInfo]:
        """One entry per key, of size 0 when the key isn't published."""
        raise NotImplementedError(f"{self.engine} has no global addresses")

    def batch_add_lease(self, keys: Sequence[str], ttl_ms: int) -> Sequence[int]:
        """Keep each key from being evicted for ``ttl_ms`` milliseconds; one native code per key."""
        raise NotImplementedError(f"{self.engine} has no leases")

    def batch_remove_lease(self, keys: Sequence[str]) -> int:
        """Give one lease of each key back; one code for the whole batch."""
        raise NotImplementedError(f"{self.engine} has no leases")

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; idempotent; calls made afterwards raise ClosedError."""
