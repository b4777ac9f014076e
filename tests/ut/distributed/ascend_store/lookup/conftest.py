"""What the look-up tests share: a socket directory, hashes, and the law that every test leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from faultinject.leaks import live_threads, open_descriptors
from vllm_ascend_ext.kv_pool.clock import Clock
from vllm_ascend_ext.kv_pool.lookup import lookup_path
from vllm_ascend_ext.kv_pool.observe import Stats


class DrivenClock(Clock):
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def directory() -> Iterator[str]:
    """A short path: a Unix socket's may have 107 bytes, and pytest's own directories are long."""
    path = tempfile.mkdtemp(prefix="lookup-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(directory: str) -> str:
    return lookup_path(directory, 7, 0)


@pytest.fixture
def stats() -> Stats:
    return Stats()


@pytest.fixture
def clock() -> DrivenClock:
    return DrivenClock()


@pytest.fixture
def hashes() -> list[bytes]:
    """Sixteen block hashes of 32 bytes."""
    return [bytes([i]) * 32 for i in range(1, 17)]


@pytest.fixture(autouse=True)
def nothing_left(directory: str) -> Iterator[None]:
    """Threads, descriptors, socket and lock files are gone when the test is over."""
    threads, descriptors = live_threads(), open_descriptors()
    yield
    assert live_threads() - threads == set()
    assert open_descriptors().keys() - descriptors.keys() == set()
    assert os.listdir(directory) == []
