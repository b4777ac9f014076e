"""A look-up socket has one owner, one clear error for every path that can't be one, and the owner's rights alone."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.lookup.endpoint import MAX_PATH_BYTES, Endpoint, claim, lookup_path, positive_seconds


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        return peer.connect_ex(path) == 0


def test_the_path_is_the_one_that_vllm_ascend_uses(directory: str) -> None:
    assert lookup_path(directory, 0, 0) == f"{directory}/lookup_rpc_port_0_dp_rank0"
    assert lookup_path(directory, 65535, 12) == f"{directory}/lookup_rpc_port_65535_dp_rank12"


@pytest.mark.parametrize("port", [-1, 65536, 1.0, "7", None, True])
def test_a_port_out_of_range_is_named(directory: str, port: object) -> None:
    with pytest.raises(ConfigError, match=f"lookup_rpc_port is {port!r}; it must be an integer from 0 to 65535"):
        lookup_path(directory, port, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 0.0, None])
def test_a_rank_out_of_range_is_named(directory: str, rank: object) -> None:
    with pytest.raises(ConfigError, match=f"data_parallel_rank is {rank!r}"):
        lookup_path(directory, 0, rank)  # type: ignore[arg-type]


def test_a_missing_directory_is_named(directory: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"VLLM_RPC_BASE_PATH is '{directory}/gone'; it must be an existing directory"
    ):
        lookup_path(f"{directory}/gone", 0, 0)


def test_a_file_is_no_directory(directory: str) -> None:
    # Not __file__: where the checkout's own path is long, the path's length is what gets refused first.
    a_file = Path(directory, "file")
    a_file.touch()
    with pytest.raises(ConfigError, match="must be an existing directory"):
        lookup_path(str(a_file), 0, 0)
    a_file.unlink()


UNWRITABLE = """
import os, sys
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.lookup import lookup_path
if os.getuid() == 0:
    os.setuid(65534)  # root may write everywhere
try:
    lookup_path(sys.argv[1], 0, 0)
except ConfigError as error:
    print(error)
"""


def test_an_unwritable_directory_is_named(directory: str) -> None:
    os.chmod(directory, 0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNWRITABLE, directory], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        os.chmod(directory, 0o700)
    assert f"VLLM_RPC_BASE_PATH is {directory!r}; it must be writable" in done.stdout


def test_a_path_that_is_too_long_names_its_length_and_the_limit(directory: str) -> None:
    name = "lookup_rpc_port_7_dp_rank0"
    room = MAX_PATH_BYTES - len(f"{directory}//{name}")
    fits, too_long = f"{directory}/{'d' * room}", f"{directory}/{'d' * (room + 1)}"
    os.mkdir(fits)
    os.mkdir(too_long)
    try:
        endpoint = claim(lookup_path(fits, 7, 0))
        assert connects(endpoint.path)
        endpoint.release()
        with pytest.raises(ConfigError, match=r"has 108 bytes; a Unix socket's may have 107"):
            lookup_path(too_long, 7, 0)
    finally:
        os.rmdir(fits)
        os.rmdir(too_long)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_a_period_must_be_above_zero(value: object) -> None:
    with pytest.raises(
        ConfigError, match=f"lookup_timeout is {value!r}; it must be a finite number of seconds above 0"
    ):
        positive_seconds("lookup_timeout", value)  # type: ignore[arg-type]
    assert positive_seconds("lookup_timeout", 2) == 2.0


def test_socket_and_lock_belong_to_their_owner_alone_whatever_the_umask(path: str) -> None:
    before = os.umask(0)
    try:
        endpoint = claim(path)
    finally:
        os.umask(before)
    for file in (endpoint.path, endpoint.lock_path):
        assert stat.S_IMODE(os.lstat(file).st_mode) == 0o600
    endpoint.release()


def test_a_path_has_one_owner_and_is_free_again_after_release(path: str) -> None:
    endpoint = claim(path)
    with pytest.raises(ConfigError, match=rf"{path}.* is served already, by process {os.getpid()}"):
        claim(path)
    assert connects(path)
    endpoint.release()
    endpoint.release()
    assert not os.path.exists(path)
    claim(path).release()


def test_of_many_that_want_one_path_at_once_one_gets_it(path: str) -> None:
    won: list[Endpoint] = []
    lost: list[ConfigError] = []
    barrier = threading.Barrier(8)

    def want() -> None:
        barrier.wait(30)
        try:
            won.append(claim(path))
        except ConfigError as error:
            lost.append(error)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(won), len(lost)) == (1, 7)
    assert connects(path)
    won[0].release()


def test_a_lock_file_that_its_owner_removed_meanwhile_is_no_lock(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock
    removals = iter([f"{path}.lock"])

    def lock_late(descriptor: int, operation: int) -> None:
        for file in removals:  # the owner was faster
            os.unlink(file)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    endpoint = claim(path)
    assert os.path.exists(endpoint.lock_path)
    with pytest.raises(ConfigError, match="is served already"):
        claim(path)
    endpoint.release()


CLAIM = """
import sys
from vllm_ascend_ext.kv_pool.lookup.endpoint import claim
endpoint = claim(sys.argv[1])
print("claimed", flush=True)
sys.stdin.read()
"""


def test_another_process_is_respected_while_it_lives_and_not_after_its_death(path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=f"by process {other.pid}"):
            claim(path)
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    assert os.path.exists(path)  # stale, as a kill leaves it
    endpoint = claim(path)
    assert connects(path)
    endpoint.release()


def test_a_live_server_that_takes_no_lock_is_respected(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ConfigError, match="by a server without a lock"):
            claim(path)
        assert connects(path)
    assert not os.path.exists(f"{path}.lock")
    os.unlink(path)


def test_what_is_not_a_socket_is_left_alone(path: str) -> None:
    with open(path, "w") as file:
        file.write("somebody's notes")
    with pytest.raises(ConfigError, match="taken by something that is not a socket"):
        claim(path)
    with open(path) as file:
        assert file.read() == "somebody's notes"
    os.unlink(path)
    os.mkdir(f"{path}.lock")
    with pytest.raises(ConfigError, match="the lock of the look-up socket"):
        claim(path)
    os.rmdir(f"{path}.lock")


def test_release_leaves_a_socket_that_replaced_ours(path: str) -> None:
    endpoint = claim(path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        assert not endpoint.is_ours()
        endpoint.release()
        assert os.path.exists(path)
    os.unlink(path)


def test_a_bind_that_fails_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no chmod today")

    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(ConfigError, match="can't be bound: no chmod today"):
        claim(path)
    monkeypatch.undo()
    os.unlink(path)  # a socket file that nobody listens at is stale, and the next claim would remove it
    claim(path).release()
