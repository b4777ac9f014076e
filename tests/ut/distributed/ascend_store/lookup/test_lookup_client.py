"""The client answers 0 rather than wait, never takes a late answer for a later question, and hides no failure."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest
import zmq

from fixtures.dripping_server import DrippingServer
from fixtures.lookup_answers import BAD_ANSWERS, answer, dies, held, late, script, silent, until
from fixtures.lookup_server import AsyncFakeLookupServer, FakeLookupServer
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, WireError
from vllm_ascend_ext.kv_pool.lookup import client as client_module
from vllm_ascend_ext.kv_pool.observe import Stats

if TYPE_CHECKING:
    from conftest import DrivenClock

TIMEOUT = 0.1
"""A deadline that a test waits out. No answer is expected within it: a busy machine may need longer."""
PATIENCE = 60.0
"""A deadline that no test waits out: what ends earlier has not waited for it."""
BACKOFF = 5.0
FAILURES = {
    "lookup_timeouts",
    "lookup_unreachable",
    "lookup_bad_answers",
    "lookup_errors",
    "lookup_skipped",
    "lookup_closed",
}


@pytest.fixture
def client(path: str, stats: Stats, clock: DrivenClock) -> Iterator[LookupKeyClient]:
    """Its deadline is short, and the back-off passes when the test says so."""
    client = LookupKeyClient(path, TIMEOUT, BACKOFF, clock, stats)
    yield client
    assert client.close() == []


@pytest.fixture
def patient(path: str, stats: Stats, clock: DrivenClock) -> Iterator[LookupKeyClient]:
    client = LookupKeyClient(path, PATIENCE, BACKOFF, clock, stats)
    yield client
    assert client.close() == []


def error_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def failures(stats: Stats) -> dict[str, float]:
    return {name: count for name, count in stats.snapshot().items() if name in FAILURES}


# -- answers -------------------------------------------------------------------------------------------------


def test_a_good_answer_is_the_hit_and_the_question_is_upstreams_frames(
    path: str, patient: LookupKeyClient, stats: Stats
) -> None:
    with FakeLookupServer(path, answer(128)) as server:
        assert patient.lookup(256, [b"\xab" * 32], (0, 2), 16) == 128
        assert server.requests == [
            [b"\x00\x00\x01\x00", b"\x92\x00\x02", b"\x00\x00\x00\x10", b"\x91\xd9\x40" + b"ab" * 32]
        ]
    assert stats.snapshot() == {"lookup_ok": 1}


@pytest.mark.parametrize("hit", [0, 1, 256])
def test_every_hit_up_to_the_tokens_asked_for_is_taken(
    path: str, patient: LookupKeyClient, hashes: list[bytes], hit: int
) -> None:
    with FakeLookupServer(path, answer(hit)):
        assert patient.lookup(256, hashes) == hit


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_answer_is_0_hits_counted_and_the_next_question_is_asked_at_once(
    path: str,
    patient: LookupKeyClient,
    stats: Stats,
    hashes: list[bytes],
    kind: str,
    clock: DrivenClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeLookupServer(path, script(BAD_ANSWERS[kind](), then=answer(64))):
        assert patient.lookup(256, hashes, request_id="req-9") == 0
        (line,) = error_lines(caplog)
        assert "req-9" in line
        assert path in line
        if kind == "oversized":  # libzmq cuts the connection before it has taken the bytes in
            assert stats.snapshot() == {"lookup_unreachable": 1}
            clock.time += BACKOFF
        else:
            assert stats.snapshot() == {"lookup_bad_answers": 1}
        assert patient.lookup(256, hashes) == 64
    assert stats.get("lookup_ok") == 1


def test_whole_prompt_hits_with_one_block_too_many_are_not_believed(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes]
) -> None:  # A41: the client's part
    with FakeLookupServer(path, answer(64 + 16)):
        assert patient.lookup(64, hashes[:4]) == 0
    assert failures(stats) == {"lookup_bad_answers": 1}


@pytest.mark.parametrize(("token_len", "count"), [(0, 4), (64, 0)])
def test_nothing_to_look_up_is_not_asked(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes], token_len: int, count: int
) -> None:
    with FakeLookupServer(path, answer(0)) as server:
        assert patient.lookup(token_len, hashes[:count]) == 0
        assert server.requests == []
    assert stats.snapshot() == {}


# -- silence and lateness ------------------------------------------------------------------------------------


def test_a_silent_server_costs_one_deadline_per_back_off_and_one_error_line(
    path: str,
    client: LookupKeyClient,
    stats: Stats,
    hashes: list[bytes],
    clock: DrivenClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeLookupServer(path, silent()) as server:
        for _ in range(3):
            assert [client.lookup(256, hashes) for _ in range(50)] == [0] * 50
            clock.time += BACKOFF
        assert len(server.requests) <= 3
    assert stats.snapshot() == {"lookup_timeouts": 3, "lookup_skipped": 147}
    assert len(error_lines(caplog)) == 1


def test_the_end_of_an_outage_is_told_and_the_next_outage_is_a_new_line(
    path: str, client: LookupKeyClient, hashes: list[bytes], clock: DrivenClock, caplog: pytest.LogCaptureFixture
) -> None:
    def outage() -> None:
        client.timeout_s = TIMEOUT
        with FakeLookupServer(path, silent()):
            for _ in range(2):
                assert client.lookup(256, hashes) == 0
                clock.time += BACKOFF

    def recovery() -> None:
        client.timeout_s = PATIENCE
        with FakeLookupServer(path, answer(64)):
            assert client.lookup(256, hashes) == 64

    outage()
    recovery()
    outage()
    recovery()
    assert len(error_lines(caplog)) == 2
    told = [record.getMessage() for record in caplog.records if "works again" in record.getMessage()]
    assert told == [f"look-up at {path} works again after: lookup_timeouts 2"] * 2


def ask_in_vain(client: LookupKeyClient, server: FakeLookupServer, clock: DrivenClock, received: int) -> None:
    """Until the server has ``received`` questions, none of which it answers. It may take more of them: one that it gets
    late, on a busy machine, is given up and asked again."""
    while len(server.requests) < received:
        assert client.lookup(256, [b"\xab"]) == 0
        clock.time += BACKOFF


def test_the_answer_to_a_question_that_timed_out_is_never_the_answer_to_a_later_one(
    path: str, client: LookupKeyClient, stats: Stats, hashes: list[bytes], clock: DrivenClock
) -> None:  # A29
    answers = threading.Event()
    with FakeLookupServer(path, until(answers, held(answer(64)), then=answer(128))) as server:
        ask_in_vain(client, server, clock, 1)
        answers.set()
        server.release()
        client.timeout_s = PATIENCE
        assert client.lookup(256, hashes) == 128
        assert client.lookup(256, hashes) == 128
    assert failures(stats).keys() == {"lookup_timeouts"}
    assert stats.get("lookup_ok") == 2


def test_late_answers_that_come_with_no_question_open_are_not_taken_either(
    path: str, client: LookupKeyClient, hashes: list[bytes], clock: DrivenClock
) -> None:
    answers, late_ones = threading.Event(), script(held(answer(64)), then=held(answer(96)))
    with FakeLookupServer(path, until(answers, late_ones, then=answer(128))) as server:
        ask_in_vain(client, server, clock, 2)
        answers.set()
        server.release()
        client.timeout_s = PATIENCE
        assert client.lookup(256, hashes) == 128


def test_an_answer_within_the_deadline_may_take_its_time(path: str, hashes: list[bytes], stats: Stats) -> None:
    client = LookupKeyClient(path, PATIENCE, stats=stats)
    with FakeLookupServer(path, late(answer(64), seconds=0.05)):
        assert client.lookup(256, hashes) == 64
    assert client.close() == []


@pytest.mark.parametrize("part", ["greeting", "answer"])
def test_a_peer_that_drips_is_not_waited_for_byte_by_byte(
    path: str, client: LookupKeyClient, stats: Stats, hashes: list[bytes], clock: DrivenClock, part: str
) -> None:
    with DrippingServer(path, part, pause_s=TIMEOUT / 4) as server:  # type: ignore[arg-type]
        while not server.dripped.is_set():
            assert client.lookup(256, hashes) == 0
            clock.time += BACKOFF
    assert stats.snapshot().keys() == {"lookup_timeouts"}
    client.timeout_s = PATIENCE
    with FakeLookupServer(path, answer(64)):
        assert client.lookup(256, hashes) == 64


def test_a_dripped_answer_that_is_complete_in_time_is_an_answer(
    path: str, patient: LookupKeyClient, hashes: list[bytes]
) -> None:
    with DrippingServer(path, "answer", pause_s=0.001, hit_tokens=48):
        assert patient.lookup(256, hashes) == 48


# -- death and restart ---------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_not_waited_for(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes], clock: DrivenClock
) -> None:
    assert patient.lookup(256, hashes) == 0  # within PATIENCE, or this test times out
    assert stats.snapshot() == {"lookup_unreachable": 1}
    with FakeLookupServer(path, answer(64)):
        assert patient.lookup(256, hashes) == 0
        assert stats.get("lookup_skipped") == 1
        clock.time += BACKOFF
        assert patient.lookup(256, hashes) == 64


def test_a_server_that_dies_between_receive_and_reply_is_not_waited_for(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes], clock: DrivenClock
) -> None:
    with FakeLookupServer(path, script(dies(), then=answer(64))) as server:
        assert patient.lookup(256, hashes) == 0
        assert stats.snapshot() == {"lookup_unreachable": 1}
        server.restart()
        clock.time += BACKOFF
        assert patient.lookup(256, hashes) == 64


def test_a_restart_between_two_questions_is_not_noticed(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes]
) -> None:
    with FakeLookupServer(path, answer(64)) as server:
        assert patient.lookup(256, hashes) == 64
        server.restart()
        assert patient.lookup(256, hashes) == 64
    assert failures(stats) == {}


UPSTREAM_SERVER = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.REP) as server:
    server.bind("ipc://" + sys.argv[1])
    print("bound", flush=True)
    for hit in (64, None):
        server.recv_multipart()
        print("received", flush=True)
        if hit is None:
            sys.stdin.read()  # until it is killed
        server.send(hit.to_bytes(4, "big"))
"""


def test_a_server_killed_in_mid_call_is_not_waited_for_and_its_successor_is_found(
    path: str, patient: LookupKeyClient, stats: Stats, hashes: list[bytes], clock: DrivenClock
) -> None:
    command = [sys.executable, "-c", UPSTREAM_SERVER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "bound\n"
        assert patient.lookup(256, hashes) == 64
        hits: list[int] = []
        asker = threading.Thread(target=lambda: hits.append(patient.lookup(256, hashes)))
        asker.start()
        assert [server.stdout.readline() for _ in range(2)] == ["received\n"] * 2
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE)
        asker.join(PATIENCE)
    assert hits == [0]
    assert failures(stats) == {"lookup_unreachable": 1}
    clock.time += BACKOFF
    with FakeLookupServer(path, answer(32)):
        assert patient.lookup(256, hashes) == 32


# -- faults of the socket itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [zmq.ZMQError(zmq.EFSM), OSError("injected"), RuntimeError("injected")])
def test_a_fault_of_the_socket_is_0_hits_and_the_client_goes_on(
    path: str,
    patient: LookupKeyClient,
    stats: Stats,
    hashes: list[bytes],
    clock: DrivenClock,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
) -> None:
    def fail(*_: object) -> NoReturn:
        raise fault

    with FakeLookupServer(path, answer(64)):
        assert patient.lookup(256, hashes) == 64
        monkeypatch.setattr(client_module._Channel, "exchange", fail)
        assert patient.lookup(256, hashes) == 0
        monkeypatch.undo()
        assert failures(stats) == {"lookup_errors": 1}
        clock.time += BACKOFF
        assert patient.lookup(256, hashes) == 64


def test_a_socket_that_cannot_be_made_is_0_hits_and_leaves_nothing(
    path: str,
    patient: LookupKeyClient,
    stats: Stats,
    hashes: list[bytes],
    clock: DrivenClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "connect", refuse)
    assert patient.lookup(256, hashes) == 0
    monkeypatch.undo()
    assert failures(stats) == {"lookup_errors": 1}
    clock.time += BACKOFF
    with FakeLookupServer(path, answer(64)):
        assert patient.lookup(256, hashes) == 64


def test_an_interrupt_passes_through_and_the_next_question_gets_its_own_answer(
    path: str, patient: LookupKeyClient, hashes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = client_module._Channel.exchange

    def interrupted(self: client_module._Channel, *args: object) -> NoReturn:
        exchange(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with FakeLookupServer(path, script(answer(64), then=answer(128))):
        monkeypatch.setattr(client_module._Channel, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            patient.lookup(256, hashes)
        monkeypatch.undo()
        assert patient.lookup(256, hashes) == 128


# -- close ---------------------------------------------------------------------------------------------------


def test_close_ends_a_question_in_mid_call_from_any_thread(path: str, stats: Stats, hashes: list[bytes]) -> None:
    client = LookupKeyClient(path, PATIENCE, stats=stats)
    with FakeLookupServer(path, silent()) as server:
        hits: list[int] = []
        asker = threading.Thread(target=lambda: hits.append(client.lookup(256, hashes)))
        asker.start()
        server.wait_for_requests(1)
        assert client.close(PATIENCE) == []
        asker.join(PATIENCE)
    assert hits == [0]
    assert stats.snapshot() == {"lookup_closed": 1}


def test_a_question_that_waits_for_another_ends_with_close_too(path: str, stats: Stats, hashes: list[bytes]) -> None:
    client = LookupKeyClient(path, PATIENCE, stats=stats)
    with FakeLookupServer(path, silent()) as server:
        hits: list[int] = []
        askers = [threading.Thread(target=lambda: hits.append(client.lookup(256, hashes))) for _ in range(4)]
        for asker in askers:
            asker.start()
        server.wait_for_requests(1)
        assert client.close(PATIENCE) == []
        for asker in askers:
            asker.join(PATIENCE)
    assert hits == [0] * 4
    assert stats.snapshot() == {"lookup_closed": 4}


def test_a_question_waits_for_another_no_longer_than_its_own_deadline(
    path: str, stats: Stats, hashes: list[bytes]
) -> None:
    client = LookupKeyClient(path, PATIENCE, stats=stats)
    with FakeLookupServer(path, held(answer(64))) as server:
        hits: list[int] = []
        asker = threading.Thread(target=lambda: hits.append(client.lookup(256, hashes)))
        asker.start()
        server.wait_for_requests(1)
        client.timeout_s = TIMEOUT
        assert client.lookup(256, hashes) == 0
        assert stats.snapshot() == {"lookup_timeouts": 1}
        server.release()
        asker.join(PATIENCE)
    assert hits == [64]
    assert client.close() == []


def test_close_can_be_repeated_and_a_closed_client_answers_0(path: str, stats: Stats, hashes: list[bytes]) -> None:
    client = LookupKeyClient(path, PATIENCE, stats=stats)
    with FakeLookupServer(path, answer(64)) as server:
        assert client.lookup(256, hashes) == 64
        closers = [threading.Thread(target=client.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE)
        assert client.close() == client.close() == []
        assert client.lookup(256, hashes) == 0
        assert len(server.requests) == 1
    assert failures(stats) == {"lookup_closed": 1}


def test_close_reports_a_question_that_cannot_be_ended_and_finishes_when_it_could(
    path: str, hashes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def stuck(*_: object) -> NoReturn:
        inside.set()
        go_on.wait(PATIENCE)
        raise RuntimeError("let go")

    monkeypatch.setattr(client_module._Channel, "exchange", stuck)
    client = LookupKeyClient(path, PATIENCE)
    asker = threading.Thread(target=client.lookup, args=(256, hashes))
    asker.start()
    assert inside.wait(PATIENCE)
    assert client.close(0.05) == [f"a look-up at {path}"]
    go_on.set()
    asker.join(PATIENCE)
    assert client.close() == []


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["lookup_timeout", "lookup_backoff"])
def test_a_deadline_that_is_none_is_refused_with_nothing_started(
    path: str, field: str, value: float
) -> None:  # A28 (5)
    with pytest.raises(ConfigError, match=f"{field} is {value!r}; it must be a finite number of seconds above 0"):
        LookupKeyClient(path, **{f"{field.removeprefix('lookup_')}_s": value})


def test_a_path_that_cannot_be_a_socket_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match="must be an existing directory"):
        LookupKeyClient(os.path.join(directory, "gone", "socket"))


def test_an_argument_that_cannot_be_sent_is_the_callers_error(patient: LookupKeyClient, stats: Stats) -> None:
    with pytest.raises(WireError, match="token_len is 4294967296"):
        patient.lookup(1 << 32, [b"\x01"])
    assert stats.snapshot() == {}


# -- a peer on asyncio ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_client_beside_an_asyncio_server(
    path: str, client: LookupKeyClient, hashes: list[bytes], clock: DrivenClock
) -> None:
    answers = threading.Event()
    async with AsyncFakeLookupServer(path, until(answers, held(answer(64)), then=answer(128))) as server:
        while not server.requests:
            assert await asyncio.to_thread(client.lookup, 256, hashes) == 0
            clock.time += BACKOFF
        answers.set()
        await server.release()
        client.timeout_s = PATIENCE
        assert await asyncio.to_thread(client.lookup, 256, hashes) == 128
        await server.received(2)
    await asyncio.get_running_loop().shutdown_default_executor()
