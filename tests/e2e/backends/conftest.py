"""Fixtures of the real engines: servers, other processes, and clients that are closed at the end of a test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fixtures.mooncake import MISSING, MooncakeMaster, mooncake_config
from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend
from vllm_ascend_ext.kv_pool.clock import Deadline

from .peer import Peer

HERE = Path(__file__).parent
LIMIT_SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.backend)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session", autouse=True)
def _short_engine_limits() -> None:
    """Read by the engine: a transfer that stands still is given up after 3 s, of 30; one attempt to set up, of 3."""
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = "3"
    os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] = "1"


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """A running mooncake_master that knows nobody yet."""
    with MooncakeMaster() as master:
        yield master


@pytest.fixture
def connect(master: MooncakeMaster) -> Iterator[Callable[..., MooncakeBackend]]:
    """Open a client of the master; ``config`` as in mooncake.json."""
    with ExitStack() as stack:

        def connect(slots: int = 4, **config: Any) -> MooncakeBackend:
            backend = MooncakeBackend(
                mooncake_config(master, **config), slots=slots, slot_bytes=4 << 20, slot_timeout=LIMIT_SECONDS
            )
            stack.callback(backend.close)
            return backend

        yield connect


@pytest.fixture
def new_peer(master: MooncakeMaster) -> Iterator[Callable[..., Peer]]:
    """Start another process with a client of the master."""
    with ExitStack() as stack:

        def new_peer(**config: Any) -> Peer:
            return stack.enter_context(Peer(mooncake_config(master, **config).model_dump()))

        yield new_peer


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Return once ``holds`` does; the engine's servers tell nobody when they are ready."""
    deadline, pause = Deadline.after(LIMIT_SECONDS), threading.Event()
    while not holds():
        assert not deadline.expired, f"{what}: not within {LIMIT_SECONDS} s"
        pause.wait(0.1)
