"""Another process with a client of the same store, and the values that all of them agree on.

    with Peer(config) as peer:
        peer.ask("put", keys=["a"], size=4096)          # -> native codes

`python peer.py` is that process: it answers each line of JSON on its standard input with one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_ascend_ext.kv_pool.backend.base import Backend
from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend
from vllm_ascend_ext.kv_pool.backend.mooncake_config import MooncakeConfig
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

ANSWER_SECONDS = 90.0


def value_of(key: str, size: int) -> np.ndarray:
    """The bytes of ``key``; no two keys have the same."""
    return np.random.default_rng(zlib.crc32(key.encode())).integers(0, 256, size, np.uint8)


def put(backend: Backend, keys: Sequence[str], size: int) -> list[int]:
    """Save the right bytes under each of ``keys``; native codes."""
    rows = np.stack([value_of(key, size) for key in keys])
    return list(backend.put(keys, *_table(rows), open_fence()))


def get(backend: Backend, keys: Sequence[str], size: int, fence: Fence | None = None) -> list[int]:
    """Native codes of a load; AssertionError if a byte of a success is wrong, or one of a failure was written."""
    rows = np.full((len(keys), size), 0xEE, np.uint8)
    codes = list(backend.get(keys, *_table(rows), fence or open_fence()))
    for key, row, code in zip(keys, rows, codes, strict=True):
        right = value_of(key, size) if code == 0 else 0xEE
        assert (row == right).all(), f"{key}: code {code}, and bytes that are not its own"
    return codes


def _table(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = rows.ctypes.data + np.arange(len(rows), dtype=np.int64)[:, None] * rows.shape[1]
    return at, np.full_like(at, rows.shape[1])


class Peer:
    """A context manager; the process is killed at its end."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Peer:
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> Any:
        output = self._process.stdout
        assert output is not None
        assert select.select([output], [], [], ANSWER_SECONDS)[0], "the other process doesn't answer"
        answer = json.loads(output.readline() or '{"error": "the other process died"}')
        assert "error" not in answer, answer["error"]
        return answer["ok"]


# -- the process -------------------------------------------------------------------------------------------------------


class _Commands:
    def __init__(self, config: dict[str, Any]) -> None:
        self.backend = MooncakeBackend(MooncakeConfig(**config), slots=4, slot_bytes=4 << 20)

    def put(self, keys: list[str], size: int) -> list[int]:
        return put(self.backend, keys, size)

    def get(self, keys: list[str], size: int) -> list[int]:
        return get(self.backend, keys, size)

    def begin(self, key: str, size: int) -> list[int]:
        """Begin a write, and leave it so."""
        native, how = self.backend._store._store, self.backend._store._replication
        return list(native.batch_put_session_start([key], [size], how))

    def drop(self, key: str) -> list[int]:
        return list(self.backend._store._store.batch_put_session_revoke([key]))

    def run(self, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        """A whole pool with a small engine on this process's client; how its requests ended, what they loaded, and
        what was counted as failed."""
        from fixtures.world import World  # takes seconds to import

        with tempfile.TemporaryDirectory() as folder:
            world = World.open(self.backend, folder, **options)
            requests = [world.engine.add(f"r{n}", prompt) for n, prompt in enumerate(prompts)]
            world.engine.run()
            answer: dict[str, Any] = {r.request_id: [r.state.value, r.loaded_tokens] for r in requests}
            answer["failed"] = {name: n for name, n in world.counters().items() if "failed" in name}
            world.close()  # the client with it
        return answer


def _main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever the engine prints is no answer

    def say(answer: dict[str, Any]) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    try:
        commands = _Commands(json.loads(sys.argv[1]))
    except BaseException:
        say({"error": traceback.format_exc()})
        raise
    say({"ok": "ready"})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say({"ok": getattr(commands, order.pop("do"))(**order)})
        except BaseException:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    _main()
