"""Fixtures of the engine tier: skipped as a whole where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .client import Launcher
from .lab import POOL_BYTES, TRACED, Lab, Machine, Oracle
from .tiny_model import TinyModel

HERE = Path(__file__).parent
SECONDS = 900
"""A test may start several engines, on a busy machine; what they do is bounded by the client's own deadlines."""

MISSING = "vLLM is not installed here: the engine tier runs in an environment of its own (make engine)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(SECONDS))
            if not present:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tier's models and logs lie."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def launcher(folder: Path) -> Iterator[Launcher]:
    launcher = Launcher(folder / "launcher.log")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def oracle(launcher: Launcher, folder: Path) -> Iterator[Oracle]:
    oracle = Oracle(launcher, folder)
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def machines(folder: Path) -> dict[str, Machine]:
    """The models and options under test, by name."""
    plain = TinyModel().write(folder / "plain" / "model")
    hybrid = TinyModel(layers=4, sliding=(0, 2)).write(folder / "hybrid" / "model")
    uneven = TinyModel(layers=3).write(folder / "uneven" / "model")
    two_ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    small_steps = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    return {
        "float32": Machine(plain, small_steps),
        "bfloat16": Machine(plain, small_steps | {"dtype": "bfloat16"}),
        "hybrid": Machine(hybrid, small_steps),
        "adapters": Machine(plain, small_steps | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
        "tp2": Machine(plain, small_steps | {"tensor_parallel_size": 2}, two_ranks),
        "pp2": Machine(uneven, small_steps | TRACED | {"pipeline_parallel_size": 2}, two_ranks),
    }


@pytest.fixture(scope="session")
def adapters(folder: Path) -> list[tuple[str, int, str]]:
    """Two LoRA adapters of the plain model, as `Request` takes them."""
    numbers = {"north": 1, "south": 2}
    return [(name, n, str(TinyModel().write_adapter(folder / name, seed=n))) for name, n in numbers.items()]


@pytest.fixture(scope="session")
def new_lab(
    launcher: Launcher, oracle: Oracle, machines: dict[str, Machine], folder: Path
) -> Iterator[Callable[..., Lab]]:
    """Make a lab: the machine's name, the pool's size, and options for the connector of each of its engines."""
    with ExitStack() as stack:

        def make(machine: str = "float32", pool_bytes: int = POOL_BYTES, **extra: Any) -> Lab:
            lab = Lab(launcher, oracle, folder, machines[machine], extra, pool_bytes)
            stack.callback(lab.close)
            return lab

        yield make
