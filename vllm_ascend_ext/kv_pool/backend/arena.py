"""The shared segment of a local pool: its files, owner, mappings and lock; must never know keys, values or statuses.

A pool is a folder, by default ``/dev/shm/ascend-pool-{uid}-{name}`` (0700), of three files (0600): ``arena`` holds the
values, ``meta`` a header and the index, and ``lock`` nothing at all: its bytes are what the processes lock. Byte 0 is
the pool's one lock, byte 1 is held while files are made or removed, and byte 64 + n for as long as client n lives.

Whoever makes the files sets ``ready`` in the header last. A maker that dies half way leaves it unset, and the next one
starts anew.
"""

from __future__ import annotations

import errno
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

from vllm_ascend_ext.kv_pool.backend import record_lock
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import ConfigError, DeadlineExceeded

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
GRANULE = 4096
MAX_CLIENTS = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAGIC = 0x4156_504F_4F4C
_HEADER_BYTES = GRANULE
_AT_MAGIC, _AT_VERSION, _AT_CAPACITY, _AT_READY = range(4)
_POOL_BYTE, _MAKER_BYTE, _CLIENT_BYTE = 0, 1, 64
_TOUCH_STEP = 256 << 20
_DESTROY_TIMEOUT = 5.0
_REOPEN_PAUSE = 0.01
_REMOVE_TIMEOUT = 1.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SegmentSpec:
    """Which segment to open, and what it must be like if it has to be made first."""

    folder: Path
    capacity_bytes: int
    table_bytes: int
    version: int
    open_timeout: float
    keep: bool


def pool_folder(name_or_path: str) -> Path:
    """The folder of a pool: an absolute path as it is, a name under /dev/shm."""
    if isinstance(name_or_path, str) and name_or_path.startswith("/"):
        return Path(name_or_path)
    if not isinstance(name_or_path, str) or not _NAME.fullmatch(name_or_path):
        raise ConfigError(
            f"name_or_path={name_or_path!r}: allowed are an absolute path, or a name of 1 to 64 letters, digits, "
            "'.', '_' and '-' that starts with a letter or a digit"
        )
    return SHM / f"ascend-pool-{os.geteuid()}-{name_or_path}"


class Segment:
    """One process's view of a pool's files, shared by its clients in this process."""

    def __init__(self, spec: SegmentSpec, lock_fd: int, meta_fd: int, arena_fd: int) -> None:
        self.spec = spec
        self._lock_fd = lock_fd
        self._meta_fd = meta_fd
        self._mutex = threading.Lock()
        self._entrance = threading.Lock()
        self._users = 1
        self._claimed: set[int] = set()
        self._meta = mmap.mmap(meta_fd, _HEADER_BYTES + spec.table_bytes)
        self.arena: Bytes = np.frombuffer(mmap.mmap(arena_fd, spec.capacity_bytes), np.uint8)
        self.address = int(self.arena.ctypes.data)

    @property
    def table(self) -> memoryview:
        """The part of ``meta`` that is the index's own."""
        return memoryview(self._meta)[_HEADER_BYTES:]

    def reserve_table(self, offset: int, length: int) -> None:
        """Put memory behind a part of the table; OSError if there is none. Touching a part without could kill us."""
        os.posix_fallocate(self._meta_fd, _HEADER_BYTES + offset, length)

    @contextmanager
    def lock(self, timeout: float) -> Iterator[None]:
        """Hold the pool's lock against all other threads and processes. DeadlineExceeded after ``timeout`` seconds."""
        deadline = Deadline.after(timeout)
        if not self._mutex.acquire(timeout=timeout):
            raise DeadlineExceeded(f"the lock of {self.spec.folder} is held by another thread")
        try:
            record_lock.lock(self._lock_fd, _POOL_BYTE, deadline, f"the lock of {self.spec.folder}")
            try:
                yield
            finally:
                record_lock.unlock(self._lock_fd, _POOL_BYTE)
        finally:
            self._mutex.release()

    @contextmanager
    def kept(self, timeout: float) -> Iterator[bool]:
        """Nobody makes or removes the files meanwhile; False if they were removed since they were opened.

        Who doesn't claim a client within this may find itself alone, in files that nobody else will open any more.
        """
        deadline = Deadline.after(timeout)
        if not self._entrance.acquire(timeout=timeout):
            raise DeadlineExceeded(f"{self.spec.folder} is still being opened by another thread")
        try:
            record_lock.lock(self._lock_fd, _MAKER_BYTE, deadline, f"{self.spec.folder}, being opened or removed,")
            try:
                yield _is_at(self._lock_fd, self.spec.folder / "lock")
            finally:
                record_lock.unlock(self._lock_fd, _MAKER_BYTE)
        finally:
            self._entrance.release()

    def claim(self, client: int) -> None:
        """Let ``client`` count as alive for as long as this process lives, or until ``disclaim``."""
        if not record_lock.try_lock(self._lock_fd, _CLIENT_BYTE + client):
            raise RuntimeError(f"client {client} of {self.spec.folder} belongs to another process")
        self._claimed.add(client)

    def disclaim(self, client: int) -> None:
        """Not once the id is free: it would be its next owner's claim that is given back."""
        self._claimed.discard(client)
        record_lock.unlock(self._lock_fd, _CLIENT_BYTE + client)

    def alive(self, client: int) -> bool:
        """Whether ``client``'s process still lives."""
        return client in self._claimed or record_lock.locked_elsewhere(self._lock_fd, _CLIENT_BYTE + client)

    def add_user(self) -> None:
        self._users += 1

    def close(self) -> None:
        """One user less. The last one closes the files, and removes them unless they are to be kept or other processes
        use them."""
        with _REGISTRY_LOCK:
            self._users -= 1
            if self._users:
                return
            _REGISTRY.pop(_identity(self._lock_fd), None)
            try:
                if not self.spec.keep:
                    self._remove_if_unused()
            finally:
                self._close_files()

    def _remove_if_unused(self) -> None:
        """Whoever has the maker's byte at this moment may be leaving, too, and have seen us as a user, or may fail."""
        try:
            deadline = Deadline.after(_REMOVE_TIMEOUT)
            record_lock.lock(self._lock_fd, _MAKER_BYTE, deadline, f"{self.spec.folder}, being opened,")
        except DeadlineExceeded as error:
            logger.info("%s is left to others: %s", self.spec.folder, error)
            return
        unused = not record_lock.locked_elsewhere(self._lock_fd, _CLIENT_BYTE, MAX_CLIENTS)
        if unused and _is_at(self._lock_fd, self.spec.folder / "lock"):
            _unlink_all(self.spec.folder)

    def _close_files(self) -> None:
        os.close(self._lock_fd)
        os.close(self._meta_fd)


_REGISTRY: dict[tuple[int, int], Segment] = {}
"""What this process has open, by device and inode of the lock file."""
_REGISTRY_LOCK = threading.Lock()


def open_segment(spec: SegmentSpec, initialise: Callable[[Segment], None]) -> Segment:
    """The segment of ``spec``, made and filled by ``initialise`` if it isn't there or its maker died half way.

    Raises ConfigError (wrong owner, permissions, capacity, version, no room) and DeadlineExceeded (another process is
    still making it).
    """
    deadline = Deadline.after(spec.open_timeout)
    while True:
        with _REGISTRY_LOCK:
            segment = _open_once(spec, initialise)
        if segment is not None:
            return segment
        deadline.check(f"{spec.folder} is still being made by another process")
        time.sleep(min(_REOPEN_PAUSE, deadline.remaining()))


def _open_once(spec: SegmentSpec, initialise: Callable[[Segment], None]) -> Segment | None:
    """None if another process is making or removing the files at this moment."""
    _ensure_folder(spec.folder)
    segment = _opened_here(spec.folder)
    if segment is not None:
        _check_same(segment.spec, spec)
        segment.add_user()
        return segment
    segment = _attach(spec, initialise)
    if segment is not None:
        _REGISTRY[_identity(segment._lock_fd)] = segment
    return segment


def destroy_segment(folder: Path, force: bool = False) -> bool:
    """Remove a pool's files; False if there are none. ConfigError if living clients use it, unless ``force``."""
    with _REGISTRY_LOCK:
        if _opened_here(folder) is not None:
            # opening and closing "lock" here would cost this process its locks
            if not force:
                raise ConfigError(f"{folder} is in use by this process")
            _unlink_all(folder)
            return True
        try:
            lock_fd = _open_private(folder / "lock", create=False)
        except FileNotFoundError:
            return False
        try:
            record_lock.lock(lock_fd, _MAKER_BYTE, Deadline.after(_DESTROY_TIMEOUT), f"{folder}, being opened,")
            if record_lock.locked_elsewhere(lock_fd, _CLIENT_BYTE, MAX_CLIENTS) and not force:
                raise ConfigError(f"{folder} is in use by other processes")
            _unlink_all(folder)
            return True
        finally:
            os.close(lock_fd)


def _attach(spec: SegmentSpec, initialise: Callable[[Segment], None]) -> Segment | None:
    """Open the files, making them first if need be. This process has none of them open, and so may close them."""
    try:
        lock_fd = _open_private(spec.folder / "lock", create=True)
    except FileNotFoundError:
        return None
    opened = [lock_fd]
    made = False
    try:
        if not record_lock.try_lock(lock_fd, _MAKER_BYTE) or not _is_at(lock_fd, spec.folder / "lock"):
            os.close(lock_fd)
            return None
        opened += [_open_private(spec.folder / name, create=True) for name in ("meta", "arena")]
        _, meta_fd, arena_fd = opened
        made = not _is_ready(spec, meta_fd)
        if made:
            _make_files(spec, meta_fd, arena_fd)
        segment = Segment(spec, lock_fd, meta_fd, arena_fd)
        _touch(segment.arena, spec.folder, write=made)
        if made:
            initialise(segment)
            header = np.frombuffer(segment._meta, np.int64, 4)
            header[:_AT_READY] = _MAGIC, spec.version, spec.capacity_bytes
            header[_AT_READY] = 1
        os.close(arena_fd)
        record_lock.unlock(lock_fd, _MAKER_BYTE)
        return segment
    except BaseException as error:
        if made:
            _unlink_all(spec.folder)
        for fd in opened:
            os.close(fd)
        if isinstance(error, OSError):
            raise ConfigError(
                f"capacity_bytes={spec.capacity_bytes}: {spec.folder} can't be opened ({error})"
            ) from error
        raise


def _make_files(spec: SegmentSpec, meta_fd: int, arena_fd: int) -> None:
    """Empty both files, whatever a dead maker left in them, and put memory behind the arena."""
    for fd, size in ((meta_fd, _HEADER_BYTES + spec.table_bytes), (arena_fd, spec.capacity_bytes)):
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size)
    disk = os.statvfs(spec.folder)
    for free, where in (
        (disk.f_bavail * disk.f_frsize, f"free in the file system of {spec.folder}"),
        (_memory_available(), "of memory available on this host"),
    ):
        if spec.capacity_bytes > free:
            raise ConfigError(f"capacity_bytes={spec.capacity_bytes}: at most the {free} bytes {where} are allowed")
    os.posix_fallocate(meta_fd, 0, _HEADER_BYTES)
    os.posix_fallocate(arena_fd, 0, spec.capacity_bytes)


def _memory_available() -> int:
    """MemAvailable of /proc/meminfo in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo doesn't say what memory is available")


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
            if done % 8 == 0:
                touched, seconds = done * _TOUCH_STEP >> 10, time.monotonic() - started
                logger.info("%s: %d of %d KiB touched, %.1f s", folder, touched, len(arena) >> 10, seconds)


def _is_ready(spec: SegmentSpec, meta_fd: int) -> bool:
    """Whether the files are a finished pool; ConfigError if they are another one than asked for."""
    raw = os.pread(meta_fd, 32, 0)
    if len(raw) < 32:
        return False
    magic, version, capacity, ready = np.frombuffer(raw, np.int64).tolist()
    if magic != _MAGIC or not ready:
        return False
    _check_same(SegmentSpec(spec.folder, capacity, 0, version, 0, False), spec)
    return True


def _check_same(found: SegmentSpec, asked: SegmentSpec) -> None:
    for field, there, wanted in (
        ("layout version", found.version, asked.version),
        ("capacity_bytes", found.capacity_bytes, asked.capacity_bytes),
    ):
        if there != wanted:
            raise ConfigError(
                f"{found.folder} is there with {field}={there}, but {wanted} was asked for: allowed is {there}, or "
                "close all its clients and destroy it first"
            )


def _ensure_folder(folder: Path) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"name_or_path: the folder {folder} can't be made ({error})") from error
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
        raise ConfigError(f"{path} belongs to user {info.st_uid}; allowed is {os.geteuid()}, who asks")
    if info.st_mode & 0o777 & ~mode:
        raise ConfigError(f"{path} has the permissions {info.st_mode & 0o777:04o}; allowed is {mode:04o} or less")


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
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _REGISTRY.get((info.st_dev, info.st_ino))


def _unlink_all(folder: Path) -> None:
    # "lock" goes last: whoever waits on its maker byte finds it gone from the path, and starts anew
    for name in ("arena", "meta", "lock"):
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        logger.info("%s stays: %s", folder, error)


def _forget_in_child() -> None:
    """Close our copies of the lock files at once: later it would drop the locks of pools that the child opens."""
    global _REGISTRY_LOCK
    _REGISTRY_LOCK = threading.Lock()
    for segment in _REGISTRY.values():
        segment._close_files()
    _REGISTRY.clear()


os.register_at_fork(after_in_child=_forget_in_child)
