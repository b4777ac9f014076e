"""Clients that come while others go: each ends up in the one pool that all others find, with an id that is its own."""

import random
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from vllm_ascend_ext.kv_pool.backend import arena, local_session, record_lock
from vllm_ascend_ext.kv_pool.backend.arena import Segment

OTHER = """
import os, sys
from vllm_ascend_ext.kv_pool.backend import record_lock
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
what, pool, folder = sys.argv[1:]
if what == "client":
    client = LocalBackend(pool, 1 << 20)
else:
    lock = os.open(folder + "/lock", os.O_RDWR)
    assert record_lock.try_lock(lock, 1), "the maker's byte"
print(flush=True)
input()
if what == "client":
    client.close()
"""

COMER_AND_GOER = """
import random, sys
from vllm_ascend_ext.kv_pool.backend import arena
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
choose = random.Random(int(sys.argv[2]))
for _ in range(150):
    client = LocalBackend(sys.argv[1], 1 << 20)
    segment = client._session.segment
    assert arena._is_at(segment._lock_fd, segment.spec.folder / "lock"), "alone in files that nobody finds"
    for _ in range(choose.randrange(3)):
        assert client.exists(["k"]) == [0]
    client.close()
"""


class Other:
    """Another process: a client of the pool (``client``), or one that makes or removes its files (``maker``)."""

    def __init__(self, what: str, pool) -> None:
        command = [sys.executable, "-c", OTHER, what, pool.name, str(pool.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "\n"

    def leave(self) -> None:
        self._process.communicate("\n", timeout=60)
        assert self._process.returncode == 0


@pytest.mark.parametrize("where", ["in this process", "in another one"])
def test_an_id_is_not_given_back_after_somebody_else_has_got_it(local_pool, monkeypatch, where):
    leaving, staying = local_pool.open(), local_pool.open()
    lock, came = Segment.lock, []

    @contextmanager
    def lock_and_then_let_one_in(segment, timeout):
        with lock(segment, timeout):
            yield
        monkeypatch.undo()
        came.append(local_pool.open() if where == "in this process" else Other("client", local_pool))

    monkeypatch.setattr(Segment, "lock", lock_and_then_let_one_in)
    leaving.backend.close()
    session = staying.backend._session
    assert len(came) == 1
    assert [session.segment.alive(client) for client in session.table.active().tolist()] == [True, True]
    if where == "in another one":
        came[0].leave()


def test_a_pool_that_its_last_client_removes_while_it_is_opened_is_opened_anew(local_pool, monkeypatch):
    other, attach = Other("client", local_pool), local_session.open_segment

    def attach_and_be_left_alone(*args):
        segment = attach(*args)
        monkeypatch.undo()
        other.leave()
        return segment

    monkeypatch.setattr(local_session, "open_segment", attach_and_be_left_alone)
    client = local_pool.open()
    assert local_pool.folder.exists(), "others would make another pool of the same name"
    segment = client.backend._session.segment
    assert arena._is_at(segment._lock_fd, local_pool.folder / "lock")
    client.backend.close()
    assert not local_pool.folder.exists()


def test_the_last_client_removes_the_pool_although_another_process_has_just_looked_whether_it_may(
    local_pool, monkeypatch
):
    client = local_pool.open()
    other, refused, try_lock = Other("maker", local_pool), threading.Event(), record_lock.try_lock

    def try_and_tell(fd, byte):
        done = try_lock(fd, byte)
        if not done and byte == arena._MAKER_BYTE:
            refused.set()
        return done

    monkeypatch.setattr(record_lock, "try_lock", try_and_tell)
    monkeypatch.setattr(arena, "_REMOVE_TIMEOUT", 60.0)
    closing = threading.Thread(target=client.backend.close, daemon=True)
    closing.start()
    assert refused.wait(60)
    other.leave()
    closing.join(60)
    assert not closing.is_alive()
    assert not local_pool.folder.exists()


def test_a_process_that_is_stuck_in_opening_does_not_keep_a_client_from_leaving(local_pool, monkeypatch):
    client, other = local_pool.open(), Other("maker", local_pool)
    monkeypatch.setattr(arena, "_REMOVE_TIMEOUT", 0.05)
    client.backend.close()
    assert local_pool.folder.exists()
    other.leave()


@pytest.mark.parametrize("keep", [True, False])
def test_processes_that_come_and_go_all_the_time_share_one_pool(local_pool, keep):
    local_pool.keep = keep
    if keep:
        local_pool.open()
    seed = random.randrange(1 << 30)
    command = [sys.executable, "-c", COMER_AND_GOER, local_pool.name]
    others = [subprocess.Popen([*command, str(seed + n)], stderr=subprocess.PIPE, text=True) for n in range(3)]
    for other in others:
        _, errors = other.communicate(timeout=120)
        assert other.returncode == 0, f"seed {seed}: {errors}"
    assert local_pool.folder.exists() == keep
