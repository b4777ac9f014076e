"""The look-up client and server driven through their failure paths over a real socket.

The laws: an answer is the right one or 0 and never another question's, nobody waits longer than the deadline, and the
client finds the server again by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import faultinject as fi
from faultinject import Block, Delay, Kill, NoneResult, Raise, Return, Site
from fixtures.fault_clock import FaultClock
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupKeyServer, LookupRequest, lookup_path
from vllm_ascend_ext.kv_pool.observe import Stats

pytestmark = pytest.mark.fault

HANDLER = Site(
    "handler.hit",
    (
        Raise(OSError),
        Kill(),
        Block(),
        Block(after=True),
        Delay(0.01, benign=True),
        NoneResult(),
        Return(-1, label="negative"),
        Return(1 << 30, label="too-large"),
        Return("4", label="text"),
        Return(4.0, label="float"),
    ),
)
ACCEPT = Site("server.accept", (Raise(OSError), Kill(), Delay(0.01, benign=True)))
ASK = Site("client.ask", (Raise(OSError), Raise(RuntimeError, after=True), Delay(0.01, benign=True)))
ROLES = {"handler": "lookup-handler-*"}
QUESTIONS = (4, 8, 12, 16)


class Handler:
    """Knows the right answer to each question: all tokens asked for."""

    def hit(self, asked: LookupRequest) -> int:
        return asked.token_len


HANDLER_SECONDS = 0.15
PATIENCE = 20.0


def ask_all(run: fi.Run, folder: Path, *, client_first: bool = False) -> list[int]:
    """Ask four different questions, then once more after the back-off has passed; returns the answers.

    A question that nobody answers is answered for by the server, or given up by the client, whoever is the first. Its
    deadline is short only where a fault may keep it waiting, and the server's counts from the fault on.
    """
    blocks = any(isinstance(fault.action, Block) for fault in run.session.plan.faults)
    patience = 0.4 if client_first and blocks else PATIENCE
    path = lookup_path(folder, 0, 0)
    declared = run.session.sites
    if ACCEPT.name in declared:
        run.patch(LookupKeyServer, "_accept", site=ACCEPT.name)
    if ASK.name in declared:
        run.patch(LookupKeyClient, "_ask", site=ASK.name)
    handler = run.wrap(Handler(), "handler") if HANDLER.name in declared else Handler()
    seconds = 3 * patience if client_first else HANDLER_SECONDS
    server = LookupKeyServer(path, lambda asked: handler.hit(asked), handler_timeout_s=seconds, clock=FaultClock(run))
    stats = Stats()
    client = LookupKeyClient(path, timeout_s=patience, backoff_s=5.0, stats=stats)
    run.on_cleanup(client.close)
    run.on_cleanup(server.close)
    server.start()
    answers = []
    for number, tokens in enumerate(QUESTIONS):
        answers.append(client.lookup(tokens, [bytes([number])] * (tokens // 4)))
        assert answers[-1] in (0, tokens), f"asked for {tokens} tokens, {answers[-1]} were said to be there"
    run.release()  # late answers come now
    client._retry_at = 0.0  # the back-off has passed
    again = client.lookup(20, [b"again"] * 5)
    assert again in (0, 20), f"asked for 20 tokens, {again} were said to be there"
    if stats.get("lookup_timeouts"):  # said here, for on a busy machine a client may give up before the fault strikes
        run.saw("counter", "the client gave up")
    stuck = [*client.close(), *server.close()]
    if stuck:
        run.saw("counter", stuck)
    return answers


def lookup_scenario(name: str):  # type: ignore[no-untyped-def]  # what fi.scenario returns
    return fi.scenario(
        name=name, sites=[HANDLER, ACCEPT, ASK], roles=ROLES, deadline=20.0, grace=5.0, expects=(), max_faults=1
    )


@lookup_scenario("lookup")
def test_lookup(run: fi.Run, tmp_path: Path) -> list[int]:
    return ask_all(run, tmp_path)


@lookup_scenario("lookup-client-gives-up-first")
def test_lookup_client_gives_up_first(run: fi.Run, tmp_path: Path) -> list[int]:
    """The server allows its handler more time than the client waits: answers come late, to nobody."""
    return ask_all(run, tmp_path, client_first=True)
