"""Wakes a thread that polls descriptors; must never know what for."""

from __future__ import annotations

import os
import threading


class Wake:
    """A descriptor that polls readable from ``set`` to ``clear``; neither does anything unless it is open."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._write = -1
        self._is_set = False
        self._lock = threading.Lock()

    def open(self) -> None:
        self.descriptor, self._write = os.pipe()

    def set(self) -> None:
        with self._lock:
            if self._write >= 0 and not self._is_set:
                self._is_set = True
                os.write(self._write, b"x")

    def clear(self) -> None:
        if not self._is_set:  # the usual case, without the lock
            return
        with self._lock:
            if self._is_set and self.descriptor >= 0:
                os.read(self.descriptor, 1)
                self._is_set = False

    def close(self) -> None:
        """Give the descriptors back; idempotent."""
        with self._lock:
            descriptors = (self.descriptor, self._write)
            self.descriptor = self._write = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
