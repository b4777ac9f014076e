"""Starts engine processes and drives them from a test; must never import vllm.

    with launcher.engine(EngineConfig(model=path), log=tmp_path / "engine.log") as engine:
        run = engine.generate([Request(prompt, max_tokens=8)])

Every wait has a deadline: an engine that hangs fails the test with the end of its log, and is killed.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_SECONDS = 300.0
ANSWER_SECONDS = 180.0


@dataclass(frozen=True)
class Request:
    """One request: token ids in, `max_tokens` greedy tokens out; times are counted in engine steps."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    arrive: int = 0
    abort: int | None = None
    abort_mid_step: bool = False
    """The abort comes while the step runs: vLLM takes it before it looks at what became of the step."""
    salt: str | None = None
    adapter: tuple[str, int, str] | None = None
    """Name, number and path of a LoRA adapter."""


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    finish: str
    cached: int


@dataclass(frozen=True)
class Run:
    outputs: tuple[Output, ...]
    steps: int

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(output.tokens for output in self.outputs)

    @property
    def cached(self) -> tuple[int, ...]:
        """Prompt tokens that each request did not compute: local prefix hits and hits in the pool."""
        return tuple(output.cached for output in self.outputs)

    @property
    def finishes(self) -> tuple[str, ...]:
        return tuple(output.finish for output in self.outputs)


@dataclass(frozen=True)
class EngineConfig:
    """What makes an engine: the model's directory, vLLM's options, the KV transfer configuration (None: no pool)."""

    model: Path
    transfer: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Arguments for vllm.EngineArgs."""
        defaults: dict[str, Any] = {
            "model": str(self.model),
            "dtype": "float32",
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        return defaults | self.options | ({"kv_transfer_config": self.transfer} if self.transfer else {})

    def command_line(self) -> list[str]:
        """The same as options of `vllm serve`."""
        words: list[str] = []
        for name, value in self.arguments().items():
            option = "--" + name.replace("_", "-")
            if isinstance(value, dict):
                words += [option, json.dumps(value)]
            elif value is True:
                words.append(option)
            elif value is not False and value is not None:
                words += [option, str(value)]
        return words


class EngineError(AssertionError):
    """The engine process answered with a traceback, died, or did not answer in time."""


class Launcher:
    """The process that has vLLM imported and forks the engines; started when the first one is asked for."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def engine(self, config: EngineConfig, log: Path) -> Engine:
        """A new engine process; it is ready when the context that it makes is entered."""
        return Engine(self._fork({"arguments": config.arguments(), "environment": config.environment}, log), log)

    def script(self, text: str, log: Path, **environment: str) -> str:
        """What a Python script prints in a process that has vLLM imported and no engine."""
        connection = self._fork({"script": text, "environment": environment}, log)
        connection.settimeout(ANSWER_SECONDS)
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            answer = json.loads(lines.readline() or '{"error": "the process died"}')
        if "error" in answer:
            raise EngineError(f"script: {answer['error']}\n{log.read_text(errors='replace')[-2000:]}")
        return str(answer["ok"])

    def server(self, config: EngineConfig, log: Path) -> Server:
        """vLLM's API server with this configuration, on a free port of the loopback; ready when entered.

        If the configuration's environment names a door (see `controlled`), `Server.call` goes through it.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        order = {
            "serve": ["--host", "127.0.0.1", "--port", str(port), *config.command_line()],
            "environment": config.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        }
        return Server(self._fork(order, log), log, port, config.environment.get("ENGINE_TIER_DOOR"))

    def _fork(self, order: dict[str, Any], log: Path) -> socket.socket:
        """The connection of a new process that carries out `order` and writes what it prints to `log`."""
        if self._control is None:
            self._control = self._start()
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno(), output.fileno()])
        return ours

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(ANSWER_SECONDS)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with theirs, self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "host.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        return ours


def _completion(request: Request, **more: Any) -> str:
    """The body of a request of the completions API."""
    body = {"prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0}
    return json.dumps(body | {"ignore_eos": True, "return_token_ids": True} | more)


def _kill(pid: int) -> None:
    """End a process that leads a group, and its group, and wait until it has ended."""
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        with os.fdopen(ended), suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            select.select([ended], [], [], 30)


class Server:
    """vLLM's API server, driven over HTTP. A context manager; ended by SIGTERM on success, killed otherwise."""

    def __init__(self, connection: socket.socket, log: Path, port: int, door: str | None = None) -> None:
        self.port = port
        self._connection = connection
        self._log = log
        self._door = door
        connection.settimeout(START_SECONDS)
        with connection.makefile("r", encoding="utf-8") as lines:
            self.pid = int(json.loads(lines.readline())["ok"])

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self.get("/health")[0] == 200:
                    return self
            if select.select([self._connection], [], [], 0.2)[0]:  # the connection ends with the process
                break
        _kill(self.pid)
        self._connection.close()
        raise EngineError(f"the server did not start\n{self.log()[-4000:]}")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            os.kill(self.pid, signal.SIGTERM)
            select.select([self._connection], [], [], ANSWER_SECONDS)
        _kill(self.pid)
        self._connection.close()

    def get(self, path: str) -> tuple[int, str]:
        return self._exchange("GET", path, None)

    def complete(self, request: Request) -> Output:
        """One greedy completion."""
        status, text = self._exchange("POST", "/v1/completions", _completion(request))
        if status != 200:
            raise EngineError(f"HTTP {status}: {text}\n{self.log()[-2000:]}")
        choice = json.loads(text)["choices"][0]
        return Output(tuple(choice["token_ids"]), choice["finish_reason"], 0)

    def leave(self, request: Request, after: int) -> tuple[int, ...]:
        """Begin one greedy completion and hang up when `after` tokens have come, 0: before anything has; the tokens."""
        tokens: list[int] = []
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            body = _completion(request, stream=True)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if after == 0:
                return ()
            with connection.getresponse() as response:
                if response.status != 200:
                    raise EngineError(f"HTTP {response.status}: {response.read().decode()}")
                for line in response:
                    word, _, data = line.decode().strip().partition(" ")
                    if word == "data:" and data != "[DONE]":
                        tokens += json.loads(data)["choices"][0]["token_ids"]
                    if len(tokens) >= after:
                        break
        finally:
            connection.close()
        return tuple(tokens)

    def call(self, half: str, function: str, **arguments: Any) -> Any:
        """Run `module:function(inside, **arguments)` in the process of the connector's half: scheduler or worker."""
        assert self._door is not None, "this server was started without a door"
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw", encoding="utf-8") as lines:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"{self._door}-{half}")
            lines.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
            lines.flush()
            answer = json.loads(lines.readline() or '{"error": "the process died"}')
        if "error" in answer:
            raise EngineError(f"{function}: {answer['error']}\n{self.log()[-2000:]}")
        return answer["ok"]

    def metrics(self, prefix: str) -> dict[str, float]:
        """Prometheus samples by name, summed over their labels."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


class Engine:
    """One engine process. A context manager: closed in order on success, killed on failure."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw", encoding="utf-8", newline="\n")
        self._log = log
        self._pid: int | None = None

    def __enter__(self) -> Engine:
        try:
            self._pid = int(self._answer(START_SECONDS, "start"))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._pid is not None:
            self._ask(ANSWER_SECONDS, "close")
        self.kill()

    def generate(self, requests: list[Request], seconds: float = 60.0) -> Run:
        """Run the requests to their ends; fails when that takes longer than `seconds` (a livelock does)."""
        answer = self._ask(seconds + 30, "generate", requests=[asdict(r) for r in requests], seconds=seconds)
        outputs = [Output(tuple(o["tokens"]), o["finish"], o["cached"] or 0) for o in answer["outputs"]]
        return Run(tuple(outputs), answer["steps"])

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache, so that only the pool can still supply a prefix."""
        return bool(self._ask(ANSWER_SECONDS, "reset_prefix_cache", connector=connector))

    def metrics(self, prefix: str) -> dict[str, float]:
        return dict(self._ask(ANSWER_SECONDS, "metrics", prefix=prefix))

    def blocks_in_use(self) -> int:
        return int(self._ask(ANSWER_SECONDS, "blocks_in_use"))

    def footprint(self) -> dict[str, Any]:
        return dict(self._ask(ANSWER_SECONDS, "footprint"))

    def call(self, function: str, **arguments: Any) -> Any:
        """Run `module:function(host, **arguments)` in the engine's process."""
        return self._ask(ANSWER_SECONDS, "call", function=function, arguments=arguments)

    def kill(self) -> None:
        """End the process and the workers that it started, whatever state they are in; idempotent."""
        if self._pid is not None:
            pid, self._pid = self._pid, None
            _kill(pid)
        self._lines.close()
        self._connection.close()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _ask(self, limit: float, command: str, **arguments: Any) -> Any:
        self._connection.settimeout(limit)
        try:
            self._lines.write(json.dumps({"do": command} | arguments) + "\n")
            self._lines.flush()
        except OSError as error:
            raise EngineError(f"{command}: {error!r}\n{self.log()[-4000:]}") from error
        return self._answer(limit, command)

    def _answer(self, limit: float, command: str) -> Any:
        self._connection.settimeout(limit)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise EngineError(f"{command}: no answer within {limit} s: {error!r}\n{self.log()[-4000:]}") from error
        if not line:
            raise EngineError(f"{command}: the engine process died\n{self.log()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{command}: {answer['error']}\n{self.log()[-2000:]}")
        return answer["ok"]
