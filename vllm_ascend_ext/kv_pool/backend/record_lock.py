"""Locks between processes, with deadlines, that end with their holder; must never know what they guard.

They are POSIX record locks. The kernel takes one back when its process dies, whatever it was doing; a child made by
fork doesn't inherit it; it works across PID namespaces; and it orders memory like any other lock, on weakly ordered
hosts too. The price: closing *any* descriptor of the file drops all locks of the process, and the threads of one
process don't exclude each other. So one process opens a lock file once, and has a mutex of its own in front of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import time

from vllm_ascend_ext.kv_pool.clock import Deadline

_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3


class _Flock(ctypes.Structure):
    """``struct flock`` of 64-bit Linux."""

    _fields_ = (
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    )


# PyDLL keeps the GIL. fcntl.lockf lets go of it, and with one busy Python thread beside us we would then hold the
# lock for another 5 ms, until that thread hands the GIL back. F_SETLK never blocks, so nobody waits for us.
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl
_fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Flock))


@functools.lru_cache(maxsize=256)
def _request(kind: int, byte: int) -> _Flock:
    """What F_SETLK, which doesn't write into it, is asked for."""
    return _Flock(kind, os.SEEK_SET, byte, 1, 0)


def _call(fd: int, command: int, record: _Flock) -> int:
    """errno or 0."""
    return ctypes.get_errno() if _fcntl(fd, command, record) else 0


def try_lock(fd: int, byte: int) -> bool:
    """Lock one byte for this process if no other process has it; OSError for anything but that."""
    number = _call(fd, fcntl.F_SETLK, _request(fcntl.F_WRLCK, byte))
    if number not in (0, errno.EAGAIN, errno.EACCES, errno.EINTR):
        raise OSError(number, os.strerror(number))
    return number == 0


def lock(fd: int, byte: int, deadline: Deadline, what: str) -> None:
    """Lock one byte; DeadlineExceeded, naming ``what``, if it isn't free in time.

    Asks again and again: F_SETLKW has no deadline and can't be given one.
    """
    pause = _FIRST_PAUSE
    while not try_lock(fd, byte):
        deadline.check(f"{what} is held by another process")
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, _LONGEST_PAUSE)


def unlock(fd: int, byte: int) -> None:
    number = _call(fd, fcntl.F_SETLK, _request(fcntl.F_UNLCK, byte))
    if number:
        raise OSError(number, os.strerror(number))


def locked_elsewhere(fd: int, byte: int, length: int = 1) -> bool:
    """Whether another process holds one of ``length`` bytes."""
    record = _Flock(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0)
    number = _call(fd, fcntl.F_GETLK, record)
    if number:
        raise OSError(number, os.strerror(number))
    return bool(record.l_type != fcntl.F_UNLCK)
