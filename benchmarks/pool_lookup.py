"""Times a look-up of 1,024 block hashes beside a bare ZMQ echo of the same bytes, and the building of their keys.

The two servers run in processes of their own and are asked in turns, so that both see the same machine:

    python -m benchmarks.pool_lookup

``measure`` returns the figures; times are medians in microseconds. ``ratio`` is the median over the rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import zmq

from vllm_ascend_ext.kv_pool.keys import BytesIdentity, KeyScheme, Topology, block_keys
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupKeyServer, LookupRequest
from vllm_ascend_ext.kv_pool.lookup.wire import encode_request

BLOCKS = 1024
TOKENS = BLOCKS * 16
MAX_RATIO = 2.0

_ROUNDS = 7
_TURNS = 300
_WARM_UP = 100
_PATIENCE_S = 60.0


def measure(rounds: int = _ROUNDS, turns: int = _TURNS) -> dict[str, Any]:
    """The look-up against the echo, and the keys; takes about two seconds."""
    hashes = [os.urandom(32) for _ in range(BLOCKS)]
    return {**_measure_lookup(hashes, rounds, turns), **_measure_keys(hashes, rounds, turns)}


def _measure_lookup(hashes: list[bytes], rounds: int, turns: int) -> dict[str, Any]:
    frames = encode_request(LookupRequest(TOKENS, (0,), 0, hashes))
    with (
        tempfile.TemporaryDirectory(prefix="lookup-") as directory,
        _process(_serve_lookups, f"{directory}/lookup"),
        _process(_serve_echo, f"{directory}/echo"),
        zmq.Context() as context,
        context.socket(zmq.REQ) as peer,
    ):
        client = LookupKeyClient(f"{directory}/lookup", _PATIENCE_S)
        peer.linger = 0
        peer.rcvtimeo = round(_PATIENCE_S * 1000)
        peer.connect(f"ipc://{directory}/echo")

        def ask() -> None:
            if client.lookup(TOKENS, hashes) != TOKENS:
                raise RuntimeError("a look-up failed: its time means nothing")

        def echo() -> list[bytes]:
            peer.send_multipart(frames)
            return peer.recv_multipart()

        if echo() != frames:
            raise RuntimeError("the echo failed: its time means nothing")
        _in_turns(ask, echo, _WARM_UP)
        times = [_in_turns(ask, echo, turns) for _ in range(rounds)]
        client.close()
    ratios = sorted(lookup / bare for lookup, bare in times)
    return {
        "blocks": BLOCKS,
        "request_bytes": sum(map(len, frames)),
        "lookup_us": round(statistics.median(lookup for lookup, _ in times), 1),
        "echo_us": round(statistics.median(bare for _, bare in times), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "max_ratio": MAX_RATIO,
    }


def _measure_keys(hashes: list[bytes], rounds: int, turns: int) -> dict[str, Any]:
    """Keys of one group and rank, against one object and one format of all its parts for each block."""
    scheme = KeyScheme(BytesIdentity("/models/some-model", "bfloat16", (16,)))
    rank = Topology()
    parts = _KeyParts(scheme.model, 0, 0, 0, 0, 0)

    def ours() -> list[str]:
        return block_keys(scheme.block_prefix(rank, 0), hashes)

    def each() -> list[str]:
        return [_Key(parts, block_hash.hex()).text() for block_hash in hashes]

    if ours() != each():
        raise RuntimeError("the two ways make different keys: their times mean nothing")
    times = [_in_turns(ours, each, turns) for _ in range(rounds)]
    return {
        "keys_us": round(statistics.median(fast for fast, _ in times), 1),
        "keys_one_by_one_us": round(statistics.median(slow for _, slow in times), 1),
        "keys_ratio": round(statistics.median(fast / slow for fast, slow in times), 3),
    }


@dataclass(frozen=True)
class _KeyParts:
    model: str
    pcp: int
    dcp: int
    head: int
    pp: int
    group: int


@dataclass(frozen=True)
class _Key:
    parts: _KeyParts
    hash_hex: str

    def text(self) -> str:
        parts = self.parts
        return (
            f"{parts.model}@pcp{parts.pcp}@dcp{parts.dcp}@head_or_tp_rank:{parts.head}@pp_rank:{parts.pp}"
            f"@group:{parts.group}@cache_role:kv@cache_family:default@{self.hash_hex}"
        )


def _in_turns(first: Callable[[], object], second: Callable[[], object], turns: int) -> tuple[float, float]:
    """Median microseconds of each, called alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for call, kept in zip((first, second), times, strict=True):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


@contextmanager
def _process(serve: Callable[[str, Connection], None], path: str) -> Iterator[None]:
    """``serve(path, pipe)`` in a process of its own; it says that it serves, and ends when the pipe is closed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE_S):
            raise TimeoutError(f"nobody serves at {path}")
        ours.recv()
        yield
    finally:
        ours.close()
        process.join(_PATIENCE_S)


def _serve_lookups(path: str, pipe: Connection) -> None:
    server = LookupKeyServer(path, _everything)
    server.start()
    pipe.send("serving")
    pipe.poll(None)
    server.close()


def _everything(request: LookupRequest) -> int:
    return request.token_len


def _serve_echo(path: str, pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as server:
        server.linger = 0
        server.bind(f"ipc://{path}")
        server.rcvtimeo = 1000
        pipe.send("serving")
        while True:
            try:
                server.send_multipart(server.recv_multipart())
            except zmq.Again:
                if pipe.poll(0):
                    return


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
