"""Digests of values by address, so that wrong bytes are never taken for right ones; must never know who stores them.

A digest is 16 bytes: XXH3-128 over the key and then the value's segments in order. It travels as one more segment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.layout import IntArray

DIGEST_BYTES = 16

Digests = npt.NDArray[np.uint8]


class Trailers:
    """Room for one digest per key, which can be put behind the key's segments."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._room: Digests = np.zeros((len(keys), DIGEST_BYTES), dtype=np.uint8)

    def addresses(self) -> IntArray:
        """Where each key's digest is, or will be, for as long as this object lives."""
        return self._room.ctypes.data + np.arange(len(self._keys), dtype=np.int64) * DIGEST_BYTES

    def append_to(self, addrs: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """``addrs`` and ``sizes`` with one column more, for the digests."""
        lengths = np.full((len(self._keys), 1), DIGEST_BYTES, dtype=np.int64)
        return np.hstack((addrs, self.addresses()[:, None])), np.hstack((sizes, lengths))

    def write(self, addrs: IntArray, sizes: IntArray, fence: Fence) -> bool:
        """Take the digests of what is at ``addrs``; False if the fence was revoked meanwhile."""
        digests = _digests(self._keys, addrs, sizes, fence)
        if digests is None:
            return False
        self._room[:] = digests
        return True

    def verify(self, addrs: IntArray, sizes: IntArray, fence: Fence) -> npt.NDArray[np.bool_] | None:
        """For each key, whether its segments have the digest that came with them; None if the fence was revoked."""
        digests = _digests(self._keys, addrs, sizes, fence)
        if digests is None:
            return None
        same: npt.NDArray[np.bool_] = (digests == self._room).all(axis=1)
        return same


def _digests(keys: Sequence[str], addrs: IntArray, sizes: IntArray, fence: Fence) -> Digests | None:
    found = np.empty((len(keys), DIGEST_BYTES), dtype=np.uint8)
    for row, (key, starts, lengths) in enumerate(zip(keys, addrs.tolist(), sizes.tolist(), strict=True)):
        digest = xxhash.xxh3_128(key.encode())
        with fence.hold() as granted:
            if not granted:
                return None
            for start, length in zip(starts, lengths, strict=True):
                digest.update((ctypes.c_char * length).from_address(start))
        found[row] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return found
