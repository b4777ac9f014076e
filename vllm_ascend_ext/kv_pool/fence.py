"""The right to touch device blocks, which can be taken back; must never know requests or stores.

A store call that outlives its deadline may still hold addresses of blocks that were handed on meanwhile. Whoever moves
bytes therefore asks the fence first, chunk by chunk; whoever hands the blocks on revokes it first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_ext.kv_pool.clock import Deadline


class Fence:
    """Revocable access to the blocks of one transfer. Copies hold it for the length of one chunk (a few MiB)."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._holders = 0
        self._revoked = False

    @property
    def revoked(self) -> bool:
        return self._revoked

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Yields True while the blocks may be touched, False once they may not be any more."""
        with self._condition:
            granted = not self._revoked
            self._holders += granted
        try:
            yield granted
        finally:
            if granted:
                with self._condition:
                    self._holders -= 1
                    self._condition.notify_all()

    def revoke(self, deadline: Deadline) -> bool:
        """Take the right back; True once nobody holds it any more, False if a holder outlasted ``deadline``."""
        with self._condition:
            self._revoked = True
            return deadline.wait_for(self._condition, lambda: self._holders == 0)


def open_fence() -> Fence:
    """A fence that nobody will revoke, for callers that own their buffers outright."""
    return Fence()
