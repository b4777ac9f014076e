"""The pool's status codes, its exceptions and the one table of native codes; must never know a backend's classes.

A store answers with one status per key. Engines speak in native integers; ``NATIVE`` maps them, and a code that is not
in the table is a failure. The codes were read off the real engines (Mooncake Store 0.3.13, MemCache 1.3.0, the Yuanrong
datasystem 0.8.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class Status(IntEnum):
    """What became of one key in one store call. Everything but OK is a failure of that key."""

    OK = 0
    MISSING = 1  # the key is not there: an ordinary answer to exists and get
    FULL = 2  # refused because there is no room, also not after eviction
    REFUSED = 3  # the engine understood and said no: a lease, a size, an unfinished write
    INVALID = 4  # the call's arguments were wrong
    UNAVAILABLE = 5  # the engine, or its metadata service, can't be reached
    TIMEOUT = 6  # no answer within the deadline
    CANCELLED = 7  # given up by the pool itself: abort, preemption, close
    CORRUPT = 8  # bytes came, but not the ones that were saved
    FAILED = 9  # anything else: an unknown code, an exception, an answer of the wrong shape

    @property
    def ok(self) -> bool:
        return self is Status.OK


class PoolError(Exception):
    """Root of everything the pool raises on purpose."""


class ConfigError(PoolError, ValueError):
    """A configuration value can't be used; the message names the field, the value and what is allowed."""


class DeadlineExceeded(PoolError, TimeoutError):
    """A wait did not end in time; the message names what was waited for."""


class ClosedError(PoolError):
    """The part was closed before or during the call."""


class NotRunning(PoolError):
    """Work was handed to a transfer thread that is not running; ``__cause__`` says why it stopped."""


class Cancelled(PoolError):
    """The pool gave the work up itself (abort, preemption, close)."""


class BadAnswer(PoolError):
    """An engine's answer doesn't have one entry per key, or isn't of the documented type."""


_MOONCAKE = {
    0: Status.OK,
    -200: Status.FULL,
    -600: Status.INVALID,
    -703: Status.MISSING,  # begun, and not finished
    -704: Status.MISSING,
    -706: Status.REFUSED,
    -707: Status.REFUSED,  # the lease ended before the bytes had come
    -800: Status.UNAVAILABLE,
    -900: Status.UNAVAILABLE,
    -901: Status.UNAVAILABLE,
}
_MEMCACHE = {
    0: Status.OK,
    -1: Status.INVALID,
    -3000: Status.INVALID,
    -3007: Status.MISSING,
    -3012: Status.INVALID,
    -3014: Status.UNAVAILABLE,
    -3101: Status.MISSING,
    -3102: Status.REFUSED,
    -3106: Status.REFUSED,
}
_PLAIN = {status.value: status for status in Status}

NATIVE: dict[str, dict[int, Status]] = {
    "local": _PLAIN,
    "mooncake": _PLAIN | _MOONCAKE,  # its own are 0 and below; those above are what staging says
    "memcache": _MEMCACHE,
    "yuanrong": {0: Status.OK, 1: Status.MISSING},
}


def as_int(value: Any) -> int | None:
    """``value`` as an int if it is one (numpy integers included, bool and None not), else None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # an array of several entries has the method, but no one value
        return None


def check_length(answer: Any, expected: int, call: str) -> Sequence[Any]:
    """``answer`` if it is a sequence of ``expected`` entries; raises BadAnswer otherwise."""
    unordered = isinstance(answer, Mapping) or not hasattr(answer, "__getitem__")
    if unordered or isinstance(answer, (str, bytes)) or not hasattr(answer, "__len__"):
        raise BadAnswer(f"{call} answered {answer!r} where a list of {expected} was due")
    if len(answer) != expected:
        raise BadAnswer(f"{call} answered {len(answer)} entries for {expected} keys")
    sequence: Sequence[Any] = answer
    return sequence


def from_native(engine: str, code: Any) -> Status:
    """The status of one native code; anything that is not in the table is FAILED."""
    number = as_int(code)
    return Status.FAILED if number is None else NATIVE[engine].get(number, Status.FAILED)
