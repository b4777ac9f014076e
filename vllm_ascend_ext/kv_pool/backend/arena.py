"""The shared segment of a local pool: its files, locks and mappings; must never know keys, values or statuses.

A pool is a folder, by default ``/dev/shm/ascend-pool-{uid}-{name}`` (0700), of three files (0600): ``arena`` holds the
values, ``meta`` everything else, and ``lock`` nothing at all: its bytes are what the processes lock.

The locks are POSIX record locks. The kernel takes them back when their process dies, whatever it was doing, a child
made by fork doesn't inherit them, and they work across PID namespaces. They order memory like any other lock, on
weakly ordered hosts too. Their price: closing *any* descriptor of the file drops all locks of the process, so one
process opens a pool's files once, however many clients it has, and nothing else may open ``lock`` in that process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import ClosedError, ConfigError, DeadlineExceeded

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
GRANULE = 4096
MAGIC = 0x4156_504F_4F4C_0001
MAX_CLIENTS = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER_BYTES = GRANULE
_MAGIC, _VERSION, _CAPACITY, _READY = range(4)
_TABLE_BYTE, _CREATE_BYTE, _CLIENT_BYTE = 0, 1, 64
_TOUCH_STEP = 256 << 20
_DESTROY_TIMEOUT = 5.0

Bytes = npt.NDArray[np.uint8]


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
# pool's lock for another 5 ms, until that thread hands the GIL back. F_SETLK never blocks, so nobody waits for us.
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl
_fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Flock))


@dataclass(frozen=True)
class SegmentSpec:
    """Which segment to open, and what it must be like if it has to be made first."""

    folder: Path
    capacity_bytes: int
    meta_bytes: int
    version: int
    open_timeout: float
    keep: bool


def pool_folder(name_or_path: str) -> Path:
    """The folder of a pool: an absolute path as it is, a name under /dev/shm."""
    if not isinstance(name_or_path, str):
        raise ConfigError(f"name_or_path={name_or_path!r}: a string is needed")
    if name_or_path.startswith("/"):
        return Path(name_or_path)
    if not _NAME.fullmatch(name_or_path):
        raise ConfigError(
            f"name_or_path={name_or_path!r}: allowed are an absolute path, or a name of 1 to 64 letters, digits, "
            "'.', '_' and '-' that starts with a letter or a digit"
        )
    return SHM / f"ascend-pool-{os.geteuid()}-{name_or_path}"


class Segment:
    """One process's view of a pool's files. Shared by all its clients in this process and counted."""

    def __init__(self, spec: SegmentSpec, lock_fd: int, meta_fd: int, arena_fd: int) -> None:
        self.spec = spec
        self.pid = os.getpid()
        self.meta_fd = meta_fd
        self._lock_fd = lock_fd
        self._mutex = threading.Lock()
        self._references = 1
        self.claimed: set[int] = set()
        self.forked = False
        self.meta = mmap.mmap(meta_fd, spec.meta_bytes + _HEADER_BYTES)
        arena = mmap.mmap(arena_fd, spec.capacity_bytes)
        self.arena: Bytes = np.frombuffer(arena, np.uint8)
        self.address = int(self.arena.ctypes.data)

    @property
    def table(self) -> memoryview:
        """The part of ``meta`` that is the table's own."""
        return memoryview(self.meta)[_HEADER_BYTES:]

    def reserve_table(self, offset: int, length: int) -> None:
        """Back ``length`` bytes of the table with memory, so that touching them can't kill us; OSError if there is
        none."""
        os.posix_fallocate(self.meta_fd, _HEADER_BYTES + offset, length)

    def check_process(self) -> None:
        """Raises ClosedError in a child that was forked after the segment was opened."""
        if self.forked or self.pid != os.getpid():
            raise ClosedError(f"{self.spec.folder} was opened by process {self.pid}; after a fork open it again")

    @contextmanager
    def lock(self, timeout: float) -> Iterator[None]:
        """Hold the pool's one lock, against the other threads and processes. DeadlineExceeded after ``timeout`` s."""
        deadline = Deadline.after(timeout)
        if not self._mutex.acquire(timeout=timeout):
            raise DeadlineExceeded(f"the lock of {self.spec.folder} is held by another thread for {timeout} s")
        try:
            _poll(self._lock_fd, _TABLE_BYTE, deadline, f"the lock of {self.spec.folder}")
            try:
                yield
            finally:
                _release(self._lock_fd, _TABLE_BYTE)
        finally:
            self._mutex.release()

    def claim(self, client: int) -> None:
        """Mark ``client`` as living in this process for as long as the process lives, or until ``disclaim``."""
        if not _try_lock(self._lock_fd, _CLIENT_BYTE + client):
            raise RuntimeError(f"client {client} of {self.spec.folder} belongs to another process")
        self.claimed.add(client)

    def disclaim(self, client: int) -> None:
        self.claimed.discard(client)
        _release(self._lock_fd, _CLIENT_BYTE + client)

    def alive(self, client: int) -> bool:
        """Whether the process of ``client`` still lives."""
        return client in self.claimed or _locked_elsewhere(self._lock_fd, _CLIENT_BYTE + client, 1)

    def close(self) -> None:
        """Give one reference back; the last one closes the files, and removes them unless they are to be kept or
        another process uses them."""
        with _REGISTRY_LOCK:
            self._references -= 1
            if self._references or self.forked:
                return
            _REGISTRY.pop(_identity(self._lock_fd), None)
            try:
                if not self.spec.keep and _try_lock(self._lock_fd, _CREATE_BYTE):
                    _remove_unused(self.spec.folder, self._lock_fd)
            finally:
                os.close(self._lock_fd)
                os.close(self.meta_fd)

    def retain(self) -> Segment:
        self._references += 1
        return self


_REGISTRY: dict[tuple[int, int], Segment] = {}
_REGISTRY_LOCK = threading.Lock()


def open_segment(spec: SegmentSpec, initialise: Callable[[Segment], None]) -> Segment:
    """The segment of ``spec``, made and filled by ``initialise`` if it isn't there or its maker died half way.

    Raises ConfigError (wrong owner, permissions, capacity, version, no room) and DeadlineExceeded (somebody else is
    still making it).
    """
    deadline = Deadline.after(spec.open_timeout)
    with _REGISTRY_LOCK:
        while True:
            _ensure_folder(spec.folder)
            opened = _opened_here(spec.folder)
            if opened is not None:
                _check_same(opened.spec, spec.capacity_bytes, spec.version)
                return opened.retain()
            segment = _attach(spec, deadline, initialise)
            if segment is not None:
                _REGISTRY[_identity(segment._lock_fd)] = segment
                return segment
            deadline.check(f"opening {spec.folder}")


def destroy_segment(folder: Path, force: bool = False) -> bool:
    """Remove a pool's files; False if there are none. ConfigError if living clients use it, unless ``force``."""
    with _REGISTRY_LOCK:
        opened = _opened_here(folder)
        if opened is not None:
            if not force:
                raise ConfigError(f"{folder} is in use by this process")
            _unlink_all(folder)
            return True
        try:
            lock_fd = _open_private(folder / "lock", create=False)
        except FileNotFoundError:
            return False
        try:
            _poll(lock_fd, _CREATE_BYTE, Deadline.after(_DESTROY_TIMEOUT), f"{folder}, which is being opened,")
            if _locked_elsewhere(lock_fd, _CLIENT_BYTE, MAX_CLIENTS) and not force:
                raise ConfigError(f"{folder} is in use by other processes")
            _unlink_all(folder)
            return True
        finally:
            os.close(lock_fd)


def _attach(spec: SegmentSpec, deadline: Deadline, initialise: Callable[[Segment], None]) -> Segment | None:
    """Open the files, making them first if need be. None if the folder was removed meanwhile: try again."""
    try:
        lock_fd = _open_private(spec.folder / "lock", create=True)
    except FileNotFoundError:
        return None
    fds = [lock_fd]
    try:
        _poll(lock_fd, _CREATE_BYTE, deadline, f"{spec.folder}, which another process is still making,")
        if not _is_at(lock_fd, spec.folder / "lock"):
            os.close(lock_fd)
            return None
        meta_fd = _open_private(spec.folder / "meta", create=True)
        fds.append(meta_fd)
        arena_fd = _open_private(spec.folder / "arena", create=True)
        fds.append(arena_fd)
        ready = _check_ready(spec, meta_fd)
        if not ready:
            _make_files(spec, meta_fd, arena_fd)
        segment = Segment(spec, lock_fd, meta_fd, arena_fd)
        _touch(segment.arena, spec.folder, write=not ready)
        if not ready:
            initialise(segment)
            header = np.frombuffer(segment.meta, np.int64, 4)
            header[:] = MAGIC, spec.version, spec.capacity_bytes, 0
            header[_READY] = 1
        os.close(arena_fd)
        _release(lock_fd, _CREATE_BYTE)
        return segment
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _make_files(spec: SegmentSpec, meta_fd: int, arena_fd: int) -> None:
    """Empty both files, whatever a dead maker left in them, and back the arena with memory."""
    for fd, size in ((meta_fd, spec.meta_bytes + _HEADER_BYTES), (arena_fd, spec.capacity_bytes)):
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size)
    _check_room(spec)
    try:
        os.posix_fallocate(meta_fd, 0, _HEADER_BYTES)
        os.posix_fallocate(arena_fd, 0, spec.capacity_bytes)
    except OSError as error:
        os.ftruncate(arena_fd, 0)
        raise ConfigError(f"capacity_bytes={spec.capacity_bytes}: {spec.folder} can't hold it ({error})") from error


def _check_room(spec: SegmentSpec) -> None:
    disk = os.statvfs(spec.folder)
    free = disk.f_bavail * disk.f_frsize
    if spec.capacity_bytes > free:
        raise ConfigError(f"capacity_bytes={spec.capacity_bytes}: the file system of {spec.folder} has {free} free")
    available = _memory_available()
    if available is not None and spec.capacity_bytes > available:
        raise ConfigError(f"capacity_bytes={spec.capacity_bytes}: this host has {available} bytes of memory available")


def _memory_available() -> int | None:
    """MemAvailable of /proc/meminfo in bytes, None if the host doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _touch(arena: Bytes, folder: Path, write: bool) -> None:
    """Map every page now, in parallel: the first touch of a page costs up to ten times the copy into it."""
    started = time.monotonic()

    def touch(begin: int) -> None:
        pages = arena[begin : begin + _TOUCH_STEP : GRANULE]
        if write:
            pages[:] = 0
        else:
            pages.max()

    steps = range(0, len(arena), _TOUCH_STEP)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(steps))) as threads:
        for done, _ in enumerate(threads.map(touch, steps), 1):
            if done % 8 == 0 or (done == len(steps) and done > 8):
                touched = min(done * _TOUCH_STEP, len(arena))
                seconds = time.monotonic() - started
                logger.info("%s: %d of %d MiB touched after %.1f s", folder, touched >> 20, len(arena) >> 20, seconds)


def _check_ready(spec: SegmentSpec, meta_fd: int) -> bool:
    """Whether the files are a finished pool; ConfigError if they are another one than asked for."""
    header = np.zeros(4, np.int64)
    raw = os.pread(meta_fd, header.nbytes, 0)
    if len(raw) < header.nbytes:
        return False
    header = np.frombuffer(raw, np.int64)
    if header[_READY] != 1 or header[_MAGIC] != MAGIC:
        return False
    found = SegmentSpec(spec.folder, int(header[_CAPACITY]), 0, int(header[_VERSION]), 0, False)
    _check_same(found, spec.capacity_bytes, spec.version)
    return True


def _check_same(found: SegmentSpec, capacity: int, version: int) -> None:
    for field, there, asked in (
        ("layout version", found.version, version),
        ("capacity_bytes", found.capacity_bytes, capacity),
    ):
        if there != asked:
            raise ConfigError(
                f"{found.folder} is there with {field} {there}, and {asked} was asked for: open it with {there}, or "
                "close all its clients and destroy it first"
            )


def _ensure_folder(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise ConfigError(f"name_or_path: the folder {folder.parent} is missing")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"name_or_path: {folder} can't be made ({error})") from error
    try:
        info = os.lstat(folder)
    except FileNotFoundError:  # removed by its last user this moment; the caller comes round again
        return
    _check_private(folder, info, stat.S_ISDIR(info.st_mode), "a folder", 0o700)


def _open_private(path: Path, create: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        raise ConfigError(f"{path} can't be opened ({error})") from error
    try:
        info = os.fstat(fd)
        _check_private(path, info, stat.S_ISREG(info.st_mode), "a plain file", 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_private(path: Path, info: os.stat_result, right_kind: bool, kind: str, mode: int) -> None:
    if not right_kind:
        raise ConfigError(f"{path} must be {kind}")
    if info.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {info.st_uid}; it must belong to {os.geteuid()}")
    if info.st_mode & 0o777 & ~mode:
        raise ConfigError(f"{path} has the mode {info.st_mode & 0o777:04o}; allowed is {mode:04o} or less")


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _is_at(fd: int, path: Path) -> bool:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return False
    return (info.st_dev, info.st_ino) == _identity(fd)


def _opened_here(folder: Path) -> Segment | None:
    """This process's segment in ``folder``; found without opening a file, which would cost us our locks."""
    try:
        info = os.lstat(folder / "lock")
    except FileNotFoundError:
        return None
    return _REGISTRY.get((info.st_dev, info.st_ino))


def _remove_unused(folder: Path, lock_fd: int) -> None:
    """Remove the files if no other process has a client; the caller holds the create byte and has none itself."""
    if not _locked_elsewhere(lock_fd, _CLIENT_BYTE, MAX_CLIENTS) and _is_at(lock_fd, folder / "lock"):
        _unlink_all(folder)


def _unlink_all(folder: Path) -> None:
    # "lock" goes last: whoever waits on its create byte finds it gone from the path, and starts anew
    for name in ("arena", "meta", "lock"):
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        logger.info("%s stays: somebody is making a new pool in it", folder)


def _flock(kind: int, byte: int, length: int = 1) -> _Flock:
    return _Flock(kind, os.SEEK_SET, byte, length, 0)


def _try_lock(fd: int, byte: int) -> bool:
    if _fcntl(fd, fcntl.F_SETLK, _flock(fcntl.F_WRLCK, byte)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EACCES, errno.EINTR):
        return False
    raise OSError(number, os.strerror(number))


def _release(fd: int, byte: int) -> None:
    if _fcntl(fd, fcntl.F_SETLK, _flock(fcntl.F_UNLCK, byte)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _locked_elsewhere(fd: int, byte: int, length: int) -> bool:
    probe = _flock(fcntl.F_WRLCK, byte, length)
    if _fcntl(fd, fcntl.F_GETLK, probe) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return bool(probe.l_type != fcntl.F_UNLCK)


def _poll(fd: int, byte: int, deadline: Deadline, what: str) -> None:
    """Take a record lock by asking again and again: F_SETLKW has no deadline, and can't be given one."""
    pause = 50e-6
    while not _try_lock(fd, byte):
        if deadline.expired:
            raise DeadlineExceeded(f"{what} is not free")
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, 1e-3)


def _forget_in_child() -> None:
    """Close our copies of the lock files at once: later it would drop the locks of pools that the child opens."""
    global _REGISTRY_LOCK
    _REGISTRY_LOCK = threading.Lock()
    for segment in _REGISTRY.values():
        segment.forked = True
        os.close(segment._lock_fd)
        os.close(segment.meta_fd)
    _REGISTRY.clear()


os.register_at_fork(after_in_child=_forget_in_child)
