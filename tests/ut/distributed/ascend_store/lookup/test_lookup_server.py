"""The server answers every request exactly once, whatever it holds and whatever the handler does."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.lookup_peer import GOOD_REQUEST as GOOD
from fixtures.lookup_peer import PATIENCE, ZERO, Peer, reply, request, serving
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupRequest
from vllm_ascend_ext.kv_pool.lookup import server as server_module
from vllm_ascend_ext.kv_pool.observe import Stats

if TYPE_CHECKING:
    from conftest import DrivenClock

OVERDUE = 0.1
"""A handler's deadline that a test waits out, or moves the clock by."""


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
    handling: list[int] = []

    def wait_without_the_signal(self: server_module._Socket, seconds: float) -> None:
        waiting.append(threading.get_ident())
        select.select([server._wake.descriptor], [], [], PATIENCE)

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            handling.append(threading.get_ident())
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
        until(lambda: waiting)
        first.ask(request(1))
        until(arrived)
        server._wake.set()
        assert inside.wait(PATIENCE)
        until(lambda: waiting[-1] not in handling)  # the next thread leads
        second.ask(request(2))
        until(arrived)
        gate.set()
        assert first.answer() == reply(1)
        assert second.answer() == reply(2)
        assert len(waiting) < 10


def test_a_handler_that_is_overdue_is_answered_for_and_what_it_says_later_is_dropped(
    path: str, stats: Stats, clock: DrivenClock
) -> None:
    gate, inside = threading.Event(), threading.Event()
    told: list[int] = []
    told_before: list[int] = []

    def handler(request: LookupRequest) -> int:
        if request.token_len == 1:
            inside.set()
            gate.wait(PATIENCE)
        else:
            told_before.append(len(told))
        return request.token_len

    with serving(path, handler, stats, OVERDUE, lambda: told.append(1), clock), Peer(path) as peer:
        peer.ask(request(1))
        assert inside.wait(PATIENCE)
        clock.time += OVERDUE
        assert peer.answer() == ZERO
        peer.ask(request(2))
        assert peer.answer() == reply(2)
        gate.set()
        peer.ask(request(3))
        assert peer.answer() == reply(3)
    assert stats.snapshot() == {"lookup_handler_timeouts": 1, "lookup_served": 2}
    assert told_before == [1, 1], "the owner has been told before the next question is taken"


def test_nobody_is_told_of_a_handler_that_never_began(path: str, stats: Stats, clock: DrivenClock) -> None:
    """It has not been slow itself: it waited for others to end."""
    gate, inside = threading.Event(), threading.Semaphore(0)
    told: list[int] = []

    def handler(request: LookupRequest) -> int:
        inside.release()
        gate.wait(PATIENCE)
        return request.token_len

    busy = server_module._HANDLER_THREADS
    with serving(path, handler, stats, OVERDUE, lambda: told.append(1), clock), Peer(path) as peer:
        for _ in range(busy):
            peer.ask(GOOD)
            assert inside.acquire(timeout=PATIENCE)
        peer.ask(GOOD)
        peer.ask(GOOD[:3])  # answered at once: the one before it has been put aside by now
        assert peer.answer() == ZERO
        clock.time += OVERDUE
        assert [peer.answer() for _ in range(busy + 1)] == [ZERO] * (busy + 1)
        gate.set()
    assert stats.get("lookup_handler_timeouts") == busy + 1
    assert len(told) == busy


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
