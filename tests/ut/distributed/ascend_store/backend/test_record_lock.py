"""Locks between processes: one holder at a time, a deadline for whoever waits, and they end with their holder."""

import os
import subprocess
import sys

import pytest

from vllm_ascend_ext.kv_pool.backend import record_lock
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded

HOLD = """
import os, sys
from vllm_ascend_ext.kv_pool.backend import record_lock
fd = os.open(sys.argv[1], os.O_RDWR)
print(record_lock.try_lock(fd, 7), flush=True)
input()
"""


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def holder(tmp_path, fd):
    """Another process that holds byte 7 until it is told to end."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_a_byte_that_another_process_holds_is_not_to_be_had(fd, holder):
    assert not record_lock.try_lock(fd, 7)
    assert record_lock.locked_elsewhere(fd, 7)
    assert record_lock.locked_elsewhere(fd, 0, 8)
    with pytest.raises(DeadlineExceeded, match="the treasure is held by another process"):
        record_lock.lock(fd, 7, Deadline.after(0.05), "the treasure")


def test_the_bytes_beside_it_are(fd, holder):
    assert not record_lock.locked_elsewhere(fd, 8, 100)
    assert record_lock.try_lock(fd, 6)
    record_lock.unlock(fd, 6)


def test_a_killed_holder_holds_nothing(fd, holder):
    holder.kill()
    record_lock.lock(fd, 7, Deadline.after(60), "the treasure")
    assert not record_lock.locked_elsewhere(fd, 7), "our own lock is not somebody else's"


@pytest.mark.parametrize("call", [record_lock.try_lock, record_lock.unlock, record_lock.locked_elsewhere])
def test_what_is_no_file_is_an_error(fd, call):
    closed = os.dup(fd)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        call(closed, 0)
