"""A look-up server starts as a whole or not at all, is closed in time whatever its handlers do, and dies aloud."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest
import zmq

from fixtures.lookup_peer import GOOD_REQUEST as GOOD
from fixtures.lookup_peer import PATIENCE, ZERO, Peer, everything, reply, serving
from vllm_ascend_ext.kv_pool.errors import ConfigError, NotRunning, PoolError
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupKeyServer, LookupRequest
from vllm_ascend_ext.kv_pool.lookup import server as server_module
from vllm_ascend_ext.kv_pool.observe import Stats

if TYPE_CHECKING:
    from conftest import DrivenClock

OVERDUE = 0.1
"""A handler's deadline that a test waits out."""


def join(name: str) -> None:
    """Wait until no thread of that name is left."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def until(holds: Callable[[], object]) -> None:
    last = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < last


def test_two_servers_on_one_path_fail_loudly_and_the_first_goes_on(path: str) -> None:
    with serving(path), Peer(path) as peer:
        second = LookupKeyServer(path, everything)
        with pytest.raises(ConfigError, match="is served already"):
            second.start()
        assert second.close() == []
        peer.ask(GOOD)
        assert peer.answer() == reply(64)
    with serving(path), Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)


def test_a_server_of_a_peer_without_our_lock_is_not_pushed_aside(path: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.REP) as other:
        other.bind(f"ipc://{path}")
        with pytest.raises(ConfigError, match="is served already"):
            LookupKeyServer(path, everything).start()
    context.term()
    os.unlink(path)


def test_the_socket_file_is_its_owners_alone(path: str) -> None:
    before = os.umask(0)
    try:
        with serving(path):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_handlers_deadline_must_be_above_zero(path: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"lookup_handler_timeout is {value!r}"):
        LookupKeyServer(path, everything, handler_timeout_s=value)


def test_a_missing_socket_directory_is_refused_with_nothing_started(directory: str) -> None:
    with pytest.raises(ConfigError, match="must be an existing directory"):
        LookupKeyServer(f"{directory}/gone/socket", everything)


def no_more_threads_than(count: int) -> Callable[[threading.Thread], None]:
    """A ``Thread.start`` that fails for the crew's threads behind the first ``count``."""
    start = threading.Thread.start
    allowed = {f"lookup-handler-{number}" for number in range(count)}

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("lookup-handler") and thread.name not in allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    return limited


def test_a_start_that_fails_leaves_nothing_and_the_path_is_free(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more_threads_than(0))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        LookupKeyServer(path, everything).start()
    monkeypatch.undo()
    with serving(path), Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)


def test_a_bind_that_fails_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "bind", refuse)
    with pytest.raises(zmq.ZMQError):
        LookupKeyServer(path, everything).start()
    monkeypatch.undo()
    with serving(path), Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)


def test_a_server_that_gets_only_one_thread_still_answers_in_time(
    path: str, stats: Stats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more_threads_than(1))
    with serving(path, stats=stats, handler_timeout_s=OVERDUE), Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == ZERO
        peer.ask(GOOD[:3])
        assert peer.answer() == ZERO
    assert stats.snapshot() == {"lookup_handler_timeouts": 1, "lookup_bad_requests": 1}


def test_a_server_is_started_once_and_closed_as_often_as_one_likes(path: str) -> None:
    server = LookupKeyServer(path, everything)
    server.start()
    with pytest.raises(NotRunning, match="only once"):
        server.start()
    assert server.close(PATIENCE) == server.close() == []
    with pytest.raises(NotRunning, match="only once"):
        server.start()
    never = LookupKeyServer(path, everything)
    assert never.close() == []


def test_close_answers_what_is_open_and_names_a_handler_that_stays(path: str) -> None:
    gate, inside = threading.Event(), threading.Event()

    def handler(_: LookupRequest) -> int:
        inside.set()
        gate.wait(PATIENCE)
        return 1

    server = LookupKeyServer(path, handler, handler_timeout_s=PATIENCE)
    server.start()
    with Peer(path) as peer:
        peer.ask(GOOD)
        assert inside.wait(PATIENCE)
        until(lambda: server.close(0.2) == ["look-up handler"])  # the other threads leave in their own time
        assert peer.answer() == ZERO
        assert not os.path.exists(path)
        assert server.close(0.01) == ["look-up handler"]
    gate.set()
    join("lookup-handler")
    assert server.close(PATIENCE) == []


def test_close_reports_a_socket_that_cannot_be_closed_and_finishes_when_it_can(path: str) -> None:
    server = LookupKeyServer(path, everything)
    server.start()
    with server._lock:
        assert f"the look-up socket {path}" in server.close(0.05)
        assert os.path.exists(path)
    assert server.close(PATIENCE) == []


class NotedFailure(Stats):
    """``failed`` is set once the server says that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()

    def failure(self, name: str, *args: object, **kwargs: object) -> None:
        super().failure(name, *args, **kwargs)  # type: ignore[arg-type]
        if name == "lookup_server_failed":
            self.failed.set()


FATAL = [
    (LookupKeyServer, "_accept"),
    (LookupKeyServer, "_expire"),
    (LookupKeyServer, "_settle"),
    (server_module._Socket, "receive"),
    (server_module._Socket, "send"),
    (server_module.Crew, "_lead_to_work"),
]


@pytest.mark.parametrize(("owner", "method"), FATAL, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("cause", [SystemExit("injected"), RuntimeError("injected")], ids=repr)
def test_a_fatal_error_is_visible_at_once_and_clients_do_not_wait(
    path: str,
    owner: type,
    method: str,
    cause: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def die(*_: object) -> NoReturn:
        raise cause

    stats = NotedFailure()
    client = LookupKeyClient(path, PATIENCE)
    with serving(path, stats=stats) as server:
        assert client.lookup(64, [b"\xab"]) == 64
        monkeypatch.setattr(owner, method, die)
        assert client.lookup(64, [b"\xab"]) in (0, 64)  # 64 if the thread that leads was past the method already
        assert client.lookup(64, [b"\xab"]) == 0
        assert stats.failed.wait(PATIENCE)
        assert server.failed is cause
    assert not os.path.exists(path)
    assert stats.get("lookup_server_failed") == 1
    assert any("lookup_server_failed" in record.getMessage() for record in caplog.records)
    assert client.close() == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_socket_file_that_was_removed_or_replaced_is_noticed(path: str, replaced: bool) -> None:
    stats = NotedFailure()
    with serving(path, stats=stats) as server, socket.socket(socket.AF_UNIX) as other:
        os.unlink(path)
        if replaced:
            other.bind(path)
        assert stats.failed.wait(PATIENCE)
        assert isinstance(server.failed, PoolError)
        assert "was removed or replaced" in str(server.failed)
    assert os.path.exists(path) == replaced
    if replaced:
        os.unlink(path)


def test_so_it_is_by_one_that_is_never_idle(path: str, clock: DrivenClock, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, period = NotedFailure(), 10 * PATIENCE
    monkeypatch.setattr(server_module, "_WATCH_SECONDS", period)  # it is not idle for as long as this
    with serving(path, stats=stats, clock=clock) as server, Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)
        os.unlink(path)
        peer.ask(GOOD)
        assert peer.answer() == reply(64)
        clock.time += period
        peer.ask(GOOD)
        assert stats.failed.wait(PATIENCE)
        assert isinstance(server.failed, PoolError)


SERVER = """
import sys
from vllm_ascend_ext.kv_pool.lookup import LookupKeyServer

def handler(request):
    if request.token_len == 2:
        print("stuck", flush=True)
        sys.stdin.read()  # until it is killed
    return request.token_len

server = LookupKeyServer(sys.argv[1], handler, handler_timeout_s=600)
server.start()
print("serving", flush=True)
sys.stdin.read()
"""


def test_after_a_kill_in_mid_call_the_next_server_takes_the_path_and_the_client_finds_it(path: str) -> None:
    stats = Stats()
    client = LookupKeyClient(path, PATIENCE, backoff_s=0.001, stats=stats)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "serving\n"
        assert client.lookup(64, [b"\xab"]) == 64
        hits: list[int] = []
        asker = threading.Thread(target=lambda: hits.append(client.lookup(2, [b"\xab"])))
        asker.start()
        assert killed.stdout.readline() == "stuck\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait(PATIENCE)
        asker.join(PATIENCE)
    assert hits == [0]
    assert os.path.exists(path)
    with serving(path):
        last = time.monotonic() + PATIENCE
        while client.lookup(32, [b"\xab"]) != 32:
            assert time.monotonic() < last
    assert stats.get("lookup_unreachable") == 1
    assert client.close() == []
