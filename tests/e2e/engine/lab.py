"""What the engine tests share: pools, engines on them, and the outputs that a run without a pool gives.

Must never know a scenario. A `Lab` is one pool and the engines that share it; the `Oracle` says what is right.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_ascend_ext.kv_pool.backend.local import LocalBackend

from .client import Engine, EngineConfig, Launcher, Request, Run
from .tiny_model import VOCABULARY

BLOCK = 32
POOL_BYTES = 64 << 20
TRACED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""Options for pipeline stages: on the CPU vLLM 0.32 makes the buffers between them only where it traces the model."""

_numbers = itertools.count()


def prompts(seed: object, *lengths: int) -> list[tuple[int, ...]]:
    """Random prompts of these lengths, the same for the same seed."""
    draw = random.Random(repr(seed))
    return [tuple(draw.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@dataclass(frozen=True)
class Machine:
    """A model directory and vLLM's options for it: what must be equal in the run under test and in the right one."""

    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def alone(self) -> Machine:
        """The same on one rank: in float32 ranks add up to the same greedy tokens, and cost several times as much."""
        ranks = {"tensor_parallel_size", "pipeline_parallel_size", *TRACED}
        return Machine(self.model, {name: value for name, value in self.options.items() if name not in ranks})

    def config(self, transfer: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
        return EngineConfig(self.model, transfer, self.options | options, self.environment)


class Oracle:
    """Greedy outputs of one-rank engines without a connector; one per machine, started when first asked."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder
        self._stack = ExitStack()
        self._engines: dict[str, Engine] = {}
        self._known: dict[tuple[str, Request], tuple[int, ...]] = {}

    def tokens(self, machine: Machine, requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
        """What each request must give, whatever else is in its batch. Arrival and abort don't matter here."""
        machine = machine.alone()
        name = repr((machine.model, sorted(machine.options.items())))
        plain = [replace(request, arrive=0, abort=None, abort_mid_step=False, salt=None) for request in requests]
        new = [request for request in dict.fromkeys(plain) if (name, request) not in self._known]
        if new:
            run = self._engine(name, machine).generate(new)
            self._known |= {(name, request): tokens for request, tokens in zip(new, run.tokens, strict=True)}
        return tuple(self._known[name, request] for request in plain)

    def _engine(self, name: str, machine: Machine) -> Engine:
        if name not in self._engines:
            config = machine.config(enable_prefix_caching=False)
            log = self._folder / f"oracle-{len(self._engines)}.log"
            self._engines[name] = self._stack.enter_context(self._launcher.engine(config, log))
        return self._engines[name]

    def close(self) -> None:
        self._stack.close()


class Lab:
    """One pool that lives as long as the lab, and engines on it."""

    def __init__(
        self,
        launcher: Launcher,
        oracle: Oracle,
        folder: Path,
        machine: Machine,
        extra: dict[str, Any],
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.oracle = oracle
        self.machine = machine
        self.extra = extra
        self.pool = f"engine-tier-{folder.name}-{next(_numbers)}"
        self.module = "vllm_ascend_ext.kv_pool.connector"
        self._launcher = launcher
        self.folder = folder
        self._stack = ExitStack()
        self.sockets = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pool-"))
        self._pool_bytes = pool_bytes
        keeper = LocalBackend(self.pool, pool_bytes)
        self._stack.callback(keeper.close)

    def transfer(self, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
        """vLLM's KV transfer configuration for one more engine on this pool."""
        port = next(_numbers)
        return {
            "kv_connector": "AscendStoreConnector",
            "kv_connector_module_path": self.module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "backend": "local",
                "local_pool_name": self.pool,
                "local_capacity_bytes": self._pool_bytes,
                "lookup_rpc_port": port,
                "rpc_base_path": self.sockets,
            }
            | self.extra
            | extra,
        }

    @contextmanager
    def engine(
        self, policy: str = "recompute", options: dict[str, Any] | None = None, **extra: Any
    ) -> Iterator[Engine]:
        """One more engine on this pool. `extra` goes to the connector, `options` to vLLM."""
        config = self.machine.config(self.transfer(policy, **extra), **(options or {}))
        with self._launcher.engine(config, self.folder / f"engine-{next(_numbers)}.log") as engine:
            yield engine

    def check(self, engine: Engine, requests: Sequence[Request], run: Run) -> None:
        """Every request that was not aborted gave the right tokens, and the engine holds no block any more."""
        right = self.oracle.tokens(self.machine, requests)
        for number, (request, output, tokens) in enumerate(zip(requests, run.outputs, right, strict=True)):
            if request.abort is None:
                assert output.finish == "length", f"request {number} ended with {output.finish!r}"
            if output.finish != "abort":
                assert output.tokens == tokens, f"request {number} gave wrong tokens"
        assert engine.blocks_in_use() == 0

    def run(self, engine: Engine, requests: Sequence[Request]) -> Run:
        """Run the requests and check them."""
        run = engine.generate(list(requests))
        self.check(engine, requests, run)
        return run

    def close(self) -> None:
        self._stack.close()
