"""The Unix socket that look-ups go through: its path, who owns it, its rights; must never know what is sent.

libzmq's own bind on ``ipc://`` silently takes a path away from a live server and leaves the socket's mode to the
umask. So the socket is bound here, under a lock, and handed to libzmq as a listening descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from vllm_ascend_ext.kv_pool.errors import ConfigError, as_int

MAX_PATH_BYTES = 107
"""sockaddr_un.sun_path on Linux: 108 bytes with the closing NUL."""

_BACKLOG = 128
_PROBE_SECONDS = 0.2


def lookup_path(base_path: str | os.PathLike[str], port: int, dp_rank: int) -> str:
    """``{base_path}/lookup_rpc_port_{port}_dp_rank{dp_rank}``, the name that vllm-ascend's peers use.

    ConfigError if a number is out of range, the directory is missing or not writable, or the path is too long.
    """
    number = as_int(port)
    if number is None or not 0 <= number <= 65535:
        raise ConfigError(f"lookup_rpc_port is {port!r}; it must be an integer from 0 to 65535")
    rank = as_int(dp_rank)
    if rank is None or rank < 0:
        raise ConfigError(f"data_parallel_rank is {dp_rank!r}; it must be an integer of at least 0")
    path = os.path.join(os.fspath(base_path), f"lookup_rpc_port_{number}_dp_rank{rank}")
    check_path(path)
    return path


def check_path(path: str) -> None:
    """ConfigError if no Unix socket can be made at ``path``; an existing file is not looked at."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"the look-up socket's path {path!r} has {length} bytes; a Unix socket's may have {MAX_PATH_BYTES}. "
            "Set rpc_base_path or VLLM_RPC_BASE_PATH to a shorter directory"
        )
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"rpc_base_path or VLLM_RPC_BASE_PATH is {directory!r}; it must be an existing directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"rpc_base_path or VLLM_RPC_BASE_PATH is {directory!r}; it must be writable by this user")


def positive_seconds(field: str, value: float) -> float:
    """``value`` if it is a finite number above 0; ConfigError otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{field} is {value!r}; it must be a finite number of seconds above 0")
    return float(value)


@dataclass
class Endpoint:
    """A claimed path: the lock is held, and ``descriptor`` listens on a socket that only its owner may use."""

    path: str
    descriptor: int  # listens; -1 once somebody else has to close it
    _lock: int
    _inode: tuple[int, int] | None

    @property
    def lock_path(self) -> str:
        return _lock_path(self.path)

    def hand_over(self) -> int:
        """The listening descriptor, which the caller has to close from now on."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def is_ours(self) -> bool:
        """False once the socket file was removed, or replaced by another server's."""
        return _inode(self.path) == self._inode

    def release(self) -> None:
        """Remove the socket and lock files and give the lock back; idempotent. Another server's socket is left."""
        if self.descriptor >= 0:
            os.close(self.hand_over())
        if self._lock < 0:
            return
        if self.is_ours():
            _remove(self.path)
        _remove(self.lock_path)  # while the lock is held: whoever waits for it looks again
        os.close(self._lock)
        self._lock = -1


def claim(path: str) -> Endpoint:
    """Bind a socket of mode 0600 at ``path``; what a dead server left there is removed.

    ConfigError if a live server is there, if the path can't be used, or if something that is not a socket lies there.
    """
    check_path(path)
    lock = _take_lock(path)
    try:
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)  # before listen(): nobody can connect earlier
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            return Endpoint(path, listener.detach(), lock, _inode(path))
        except BaseException:
            listener.close()
            raise
    except BaseException as error:
        _remove(_lock_path(path))
        os.close(lock)
        if isinstance(error, OSError):
            raise ConfigError(f"the look-up socket {path!r} can't be bound: {error}") from error
        raise


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _take_lock(path: str) -> int:
    """A descriptor that holds the lock file beside ``path``; the lock goes with the process, however it ends."""
    while True:
        try:
            lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the lock of the look-up socket {path!r} can't be opened: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(lock)
            if (info.st_dev, info.st_ino) == _inode(_lock_path(path)):
                os.ftruncate(lock, 0)
                os.write(lock, f"{os.getpid()}\n".encode())
                return lock
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise _in_use(path, f"process {owner}") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its owner removed the file between our open and our lock


def _remove_stale(path: str) -> None:
    """Remove the socket file of a dead server; ConfigError if a server that takes no lock is alive behind it."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"the look-up socket's path {path!r} is taken by something that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        code = probe.connect_ex(path)
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise _in_use(path, "a server without a lock")
    _remove(path)


def _in_use(path: str, owner: str) -> ConfigError:
    return ConfigError(
        f"the look-up socket {path!r} is served already, by {owner}; "
        "give each server its own lookup_rpc_port or data-parallel rank"
    )
