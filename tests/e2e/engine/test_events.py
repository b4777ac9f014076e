"""Law: an event announces a block exactly when it has come into the pool, and names the tokens that it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from .client import Request
from .lab import BLOCK, Lab, prompts

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}


class Listener:
    """A subscriber of one engine's KV events, as a router would be."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.seen: list[dict[str, Any]] = []

    def stored(self, count: int, seconds: float = 20.0) -> list[dict[str, Any]]:
        """At least `count` BlockStored events of the pool (its medium is called as in vllm-ascend), and any more."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count or self._socket.poll(200):
            if not self._socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
                raise AssertionError(f"{len(found)} of {count} events after {seconds} s: {found}")
            _, _, payload = self._socket.recv_multipart()
            events = msgspec.msgpack.decode(payload)[1]
            self.seen += events
            found += [e for e in events if e["type"] == "BlockStored" and e["medium"] == "cpu"]
        return found


@contextmanager
def listening(lab: Lab) -> Iterator[tuple[Listener, dict[str, Any]]]:
    """A listener, and vLLM's options for the engine that it listens to."""
    endpoint = f"ipc://{lab.sockets}/events"
    options = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoint)
        yield Listener(socket), {"kv_events_config": options}


def blocks(prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [prompt[i : i + BLOCK] for i in range(0, len(prompt) // BLOCK * BLOCK, BLOCK)]


@pytest.mark.parametrize("extra", [pytest.param(extra, id=mode) for mode, extra in MODES.items()])
def test_each_block_is_announced_once_and_only_if_it_is_there(
    new_lab: Callable[..., Lab], extra: dict[str, Any]
) -> None:
    lab = new_lab(**extra)
    first, second, third = (Request(prompt) for prompt in prompts("events", 100, 200, 150))
    with listening(lab) as (listener, options), lab.engine(options=options) as engine:
        lab.run(engine, [first])
        lab.run(engine, [first, second])
        announced = listener.stored(9)
        assert sorted(tuple(e["token_ids"]) for e in announced) == sorted(blocks(first.prompt) + blocks(second.prompt))
        check_chains(announced)

        call = "batch_alloc" if "use_layerwise" in extra else "put"
        engine.call("faults:break_call", call=call, how="refuses")
        engine.reset_prefix_cache()
        lab.run(engine, [third])
        engine.call("faults:heal")
        engine.reset_prefix_cache()
        lab.run(engine, [third])
        announced = listener.stored(4)
        assert sorted(tuple(e["token_ids"]) for e in announced) == sorted(blocks(third.prompt))


def test_an_event_says_what_vllms_own_says_of_the_block(
    new_lab: Callable[..., Lab], adapters: list[tuple[str, int, str]]
) -> None:
    """The adapter, the salt, the group and its kind: all but where the block lies."""
    lab = new_lab("adapters")
    (prompt,) = prompts("same", 100)
    requests = [Request(prompt, adapter=adapters[1]), Request(prompt, salt="pepper"), Request(prompt)]
    with listening(lab) as (listener, options), lab.engine(options=options) as engine:
        for request in requests:
            lab.run(engine, [request])
        announced = listener.stored(9)
        own = [event for event in listener.seen if event["type"] == "BlockStored" and event["medium"] == "GPU"]
        assert not engine.call("faults:live_requests")
    assert said(announced) == said(own)
    keys = {(event["lora_id"], event["lora_name"], repr(event["extra_keys"])) for event in announced}
    assert keys == {(2, "south", "[['south']]"), (None, None, "[['pepper']]"), (None, None, "[None]")}
    assert {event["kv_cache_spec_kind"] for event in announced} == {"full_attention"}


def said(events: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """What events say of each block, by its hash; vLLM's own are of several blocks each."""
    found = {}
    for event in events:
        size = event["block_size"]
        alike = {name: event.get(name) for name in ("lora_id", "lora_name", "group_idx", "session_id", "block_size")}
        for number, block_hash in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][number * size : (number + 1) * size]
            found[block_hash] = alike | {"tokens": tokens, "extra_keys": (event["extra_keys"] or [None] * 9)[number]}
    return found


def check_chains(events: list[dict[str, Any]]) -> None:
    """Every block's parent is known, or it is the first of its prompt."""
    known = {e["block_hashes"][0] for e in events}
    parents = [e["parent_block_hash"] for e in events]
    assert parents.count(None) == 2
    assert all(parent in known for parent in parents if parent is not None)
    assert {e["block_size"] for e in events} == {BLOCK}
