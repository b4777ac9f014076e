"""The server answers every request exactly once, whatever it holds and whatever the handler does, and dies aloud."""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.errors import ConfigError, NotRunning, PoolError
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupKeyServer, LookupRequest, WireLimits
from vllm_ascend_ext.kv_pool.lookup import server as server_module
from vllm_ascend_ext.kv_pool.lookup.wire import encode_request
from vllm_ascend_ext.kv_pool.observe import Stats

PATIENCE = 60.0
"""A deadline that no test waits out."""
OVERDUE = 0.1
"""A handler's deadline that a test waits out."""
ZERO = [b"\x00\x00\x00\x00"]
GOOD = [b"\x00\x00\x00\x40", b"\x91\x00", b"\x00\x00\x00\x00", b"\x91\xa4abcd"]
LIMITS = WireLimits(max_hashes=64, max_frame_bytes=1 << 16, max_total_bytes=1 << 17)


def everything(request: LookupRequest) -> int:
    """A handler that has all of it."""
    return request.token_len


@contextmanager
def serving(
    path: str,
    handler: Callable[[LookupRequest], int] = everything,
    stats: Stats | None = None,
    handler_timeout_s: float = PATIENCE,
) -> Iterator[LookupKeyServer]:
    server = LookupKeyServer(path, handler, LIMITS, handler_timeout_s, stats=stats)
    server.start()
    try:
        yield server
    finally:
        assert server.close() == []


class Peer:
    """A peer that can ask several times before it reads: a DEALER that writes a REQ's envelope."""

    def __init__(self, path: str, envelope: Sequence[bytes] = (b"",)) -> None:
        self._envelope = list(envelope)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{path}")

    def ask(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart([*self._envelope, *frames])

    def answer(self) -> list[bytes]:
        assert self._socket.poll(PATIENCE * 1000), "no answer"
        message = self._socket.recv_multipart()
        assert message[: len(self._envelope)] == self._envelope
        return message[len(self._envelope) :]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def request(token_len: int) -> list[bytes]:
    return encode_request(LookupRequest(token_len, (0,), 0, [b"\xab" * 32]))


def reply(hit: int) -> list[bytes]:
    return [hit.to_bytes(4, "big")]


def join(name: str) -> None:
    """Wait until no thread of that name is left."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(PATIENCE)
            assert not thread.is_alive()


# -- requests -----------------------------------------------------------------------------------------------------


def test_upstreams_frames_are_answered_with_four_bytes(path: str, stats: Stats) -> None:
    asked: list[LookupRequest] = []

    def handler(request: LookupRequest) -> int:
        asked.append(request)
        return 48

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with serving(path, handler, stats), context.socket(zmq.REQ) as peer:
        peer.connect(f"ipc://{path}")
        peer.send_multipart([b"\x00\x00\x01\x00", b"\x92\x00\x02", b"\x00\x00\x00\x10", b"\x92\xa4abcd\xa40123"])
        assert peer.poll(PATIENCE * 1000)
        assert peer.recv_multipart() == [b"\x00\x00\x00\x30"]
    context.term()
    assert asked == [LookupRequest(256, (0, 2), 16, ["abcd", "0123"])]
    assert stats.snapshot() == {"lookup_served": 1}


BAD_REQUESTS = {
    "nothing": [b""],
    "missing": GOOD[:3],
    "only a count": GOOD[:1],
    "a count of 3 bytes": [b"\x00\x00\x40", *GOOD[1:]],
    "a count of 5 bytes": [*GOOD[:2], b"\x00" * 5, GOOD[3]],
    "an empty count": [b"", *GOOD[1:]],
    "groups not msgpack": [GOOD[0], b"\xc1", *GOOD[2:]],
    "groups of text": [GOOD[0], b"\x91\xa1a", *GOOD[2:]],
    "groups truncated": [GOOD[0], b"\x93\x00", *GOOD[2:]],
    "hashes not msgpack": [*GOOD[:3], b"\xc1"],
    "hashes truncated": [*GOOD[:3], GOOD[3][:-1]],
    "hashes of bytes": [*GOOD[:3], b"\x91\xc4\x01a"],
    "hashes of numbers": [*GOOD[:3], b"\x91\x05"],
    "a map": [*GOOD[:3], b"\x81\xa1a\xa1b"],
    "a promise of 4 Gi hashes": [*GOOD[:3], b"\xdd\xff\xff\xff\xff"],
    "nested too deep": [*GOOD[:3], b"\x91" * 60_000],
    "too many hashes": [*GOOD[:3], b"\xdc\x00\x41" + b"\xa1a" * 65],
    "a huge frame": [*GOOD[:3], b"\x91" * (1 << 25)],
    "too many bytes": [*GOOD, *[b"\x00" * 60_000] * 3],
    "too many frames": [*GOOD, *[b""] * 100],
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_bad_request_is_answered_once_with_0_and_the_next_is_served(
    path: str, stats: Stats, kind: str, caplog: pytest.LogCaptureFixture
) -> None:  # A28 (2)
    with serving(path, stats=stats), Peer(path) as peer:
        peer.ask(BAD_REQUESTS[kind])
        peer.ask(GOOD)
        peer.ask(GOOD)
        assert [peer.answer() for _ in range(3)] == [ZERO, reply(64), reply(64)]
    assert stats.snapshot() == {"lookup_bad_requests": 1, "lookup_served": 2}
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


@pytest.mark.parametrize("frames", [[*GOOD[:3], b"\x90"], [bytes(4), *GOOD[1:]]], ids=["no hashes", "no tokens"])
def test_nothing_to_look_up_is_0_without_asking_the_handler(path: str, frames: list[bytes]) -> None:
    def handler(_: LookupRequest) -> NoReturn:
        raise AssertionError("was asked")

    stats = Stats()
    with serving(path, handler, stats), Peer(path) as peer:
        peer.ask(frames)
        assert peer.answer() == ZERO
    assert stats.snapshot() == {"lookup_served": 1}


@pytest.mark.parametrize("envelope", [(b"",), (b"\x00\x00\x00\x09", b""), (b"one", b"two", b"")])
def test_the_envelope_comes_back_as_it_came(path: str, envelope: Sequence[bytes]) -> None:
    with serving(path), Peer(path, envelope) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)


def test_a_peer_without_an_envelope_is_answered_without_one(path: str) -> None:
    with serving(path), Peer(path, ()) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(64)


def test_a_peer_that_is_gone_before_its_answer_harms_nobody(path: str) -> None:
    gate, inside = threading.Event(), threading.Event()

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            inside.set()
            gate.wait(PATIENCE)
        return request.token_len

    with serving(path, handler):
        with Peer(path) as peer:
            peer.ask(request(1))
            assert inside.wait(PATIENCE)
        gate.set()
        with Peer(path) as peer:
            peer.ask(request(2))
            assert peer.answer() == reply(2)


def test_a_stream_that_is_not_zeromq_harms_nobody(path: str) -> None:
    with serving(path), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        with Peer(path) as peer:
            peer.ask(GOOD)
            assert peer.answer() == reply(64)


def test_whatever_the_frames_hold_there_is_one_answer_and_the_next_request_is_served(path: str) -> None:
    part = st.one_of(
        st.sampled_from(GOOD), st.binary(max_size=40), st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "big"))
    )
    mutated = st.tuples(st.sampled_from(range(4)), st.binary(max_size=40)).map(
        lambda change: [*GOOD[: change[0]], change[1], *GOOD[change[0] + 1 :]]
    )
    messages = st.one_of(st.lists(part, min_size=1, max_size=8), mutated)

    with serving(path), Peer(path) as peer:

        @settings(max_examples=300, deadline=None)
        @given(st.lists(messages, min_size=1, max_size=4))
        def story(batch: list[list[bytes]]) -> None:
            for frames in batch:
                peer.ask(frames)
            for _ in batch:
                assert [len(frame) for frame in peer.answer()] == [4]
            peer.ask(request(123_456))
            assert peer.answer() == reply(123_456)

        story()


def test_many_clients_each_get_their_own_answers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_WATCH_SECONDS", PATIENCE)  # no message is found by chance
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        client = LookupKeyClient(path, PATIENCE)
        got[number] = [client.lookup(number * 1000 + turn, [b"\xab"]) for turn in range(1, 201)]
        client.close()

    with serving(path):
        askers = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(PATIENCE)
    assert got == {number: [number * 1000 + turn for turn in range(1, 201)] for number in range(1, 9)}


# -- handlers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [64, 0, np.int64(48), np.uint32(1)])
def test_an_integer_of_any_kind_is_a_hit(path: str, value: int) -> None:
    with serving(path, lambda _: value), Peer(path) as peer:
        peer.ask(GOOD)
        assert peer.answer() == reply(int(value))


@pytest.mark.parametrize(
    "value",
    [None, -1, 65, 1 << 40, True, 16.0, "16", [16], np.int64(-1), np.float64(16), np.array([1, 2]), np.array(3.5)],
    ids=repr,
)
def test_a_handlers_nonsense_is_0_hits(path: str, stats: Stats, value: object) -> None:
    values = iter([value])
    with serving(path, lambda _: next(values, 64), stats), Peer(path) as peer:  # type: ignore[arg-type, return-value]
        peer.ask(GOOD)
        peer.ask(GOOD)
        assert sorted([peer.answer(), peer.answer()]) == sorted([ZERO, reply(64)])
    assert stats.snapshot() == {"lookup_handler_bad_results": 1, "lookup_served": 1}


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_handler_that_raises_anything_is_0_hits_and_the_server_lives(
    path: str, stats: Stats, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:  # A28 (3)
    errors = iter([error, error])

    def handler(request: LookupRequest) -> int:
        for error in errors:
            raise error
        return request.token_len

    with serving(path, handler, stats) as server, Peer(path) as peer:
        for expected in (ZERO, ZERO, reply(64)):
            peer.ask(GOOD)
            assert peer.answer() == expected
        assert server.failed is None
    assert stats.snapshot() == {"lookup_handler_errors": 2, "lookup_served": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert type(error).__name__ in line


def test_a_handler_that_takes_its_time_delays_nobody_else(path: str) -> None:
    gate = threading.Event()

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            gate.wait(PATIENCE)
        return request.token_len

    with serving(path, handler), Peer(path) as slow, Peer(path) as quick:
        slow.ask(request(1))
        for token_len in range(2, 12):
            quick.ask(request(token_len))
            assert quick.answer() == reply(token_len)
        gate.set()
        assert slow.answer() == reply(1)


def test_a_message_whose_signal_was_eaten_by_an_answer_is_found_and_nobody_spins(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq's descriptor tells of a message once, and sending may take that signal from the thread that waits."""
    gate, inside = threading.Event(), threading.Event()
    waiting: list[int] = []

    def wait_without_the_signal(self: server_module._Socket, seconds: float) -> None:
        waiting.append(threading.get_ident())
        select.select([server._wake.descriptor], [], [], PATIENCE)

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            waiting.clear()
            inside.set()
            gate.wait(PATIENCE)
        return request.token_len

    def arrived() -> bool:
        with server._lock:
            assert server._socket is not None
            return server_module.readable(server._socket._router)

    def until(holds: Callable[[], object]) -> None:
        last = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < last
            gate.wait(0.001)

    monkeypatch.setattr(server_module._Socket, "wait", wait_without_the_signal)
    with serving(path, handler) as server, Peer(path) as first, Peer(path) as second:
        first.ask(request(1))
        until(arrived)
        server._wake.set()
        assert inside.wait(PATIENCE)
        until(lambda: waiting)  # the next thread leads
        second.ask(request(2))
        until(arrived)
        gate.set()
        assert first.answer() == reply(1)
        assert second.answer() == reply(2)
        assert len(waiting) < 10


def test_a_handler_that_is_overdue_is_answered_for_and_what_it_says_later_is_dropped(path: str, stats: Stats) -> None:
    gate = threading.Event()

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            gate.wait(PATIENCE)
        return request.token_len

    with serving(path, handler, stats, OVERDUE), Peer(path) as peer:
        peer.ask(request(1))
        assert peer.answer() == ZERO
        gate.set()
        peer.ask(request(2))
        assert peer.answer() == reply(2)
    assert stats.snapshot() == {"lookup_handler_timeouts": 1, "lookup_served": 1}


def test_stuck_handlers_are_bounded_and_their_end_is_recovered_from(path: str, stats: Stats) -> None:
    gate = threading.Event()

    def handler(request: LookupRequest) -> int:
        gate.wait(PATIENCE)
        return request.token_len

    most = server_module._MAX_STUCK + server_module._HANDLER_THREADS
    with serving(path, handler, stats, OVERDUE), Peer(path) as peer:
        for _ in range(most + 5):
            peer.ask(GOOD)
            assert peer.answer() == ZERO
        assert sum(thread.name.startswith("lookup-handler") for thread in threading.enumerate()) <= most
        assert stats.get("lookup_handler_refused") > 0
        assert stats.get("lookup_handler_refused") + stats.get("lookup_handler_timeouts") == most + 5
        gate.set()
        last = time.monotonic() + PATIENCE
        answers = [ZERO]
        while answers[-1] == ZERO and time.monotonic() < last:  # the stuck ones leave in their own time
            peer.ask(GOOD)
            answers.append(peer.answer())
        assert answers[-1] == reply(64)


# -- start, close, failure ----------------------------------------------------------------------------------------


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
        peer.ask(BAD_REQUESTS["missing"])
        assert peer.answer() == ZERO
    assert stats.snapshot() == {"lookup_handler_timeouts": 1, "lookup_bad_requests": 1}


def test_a_server_is_started_once_and_closed_as_often_as_one_likes(path: str) -> None:
    server = LookupKeyServer(path, everything)
    server.start()
    with pytest.raises(NotRunning, match="only once"):
        server.start()
    assert server.close() == server.close() == []
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
        assert server.close(0.2) == ["look-up handler"]
        assert peer.answer() == ZERO
        assert not os.path.exists(path)
        assert server.close(0.01) == ["look-up handler"]
    gate.set()
    join("lookup-handler")
    assert server.close() == []


def test_close_reports_a_socket_that_cannot_be_closed_and_finishes_when_it_can(path: str) -> None:
    server = LookupKeyServer(path, everything)
    server.start()
    with server._lock:
        assert f"the look-up socket {path}" in server.close(0.05)
        assert os.path.exists(path)
    assert server.close() == []


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
