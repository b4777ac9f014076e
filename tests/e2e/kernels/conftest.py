"""Tiers of the conformance suite: which implementation an `impl` test runs on, and why it can't if it can't.

One process either interprets kernels (the CPU tier, the default) or compiles them for a device (`--device npu|cuda`, or
`-m npu`, `-m cuda`): Triton settles that when it is imported, so it is settled here, before any kernel is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from vllm_ascend_ext import device

from .kernel_checks import Impl

_OPERATIONS = ("bitmask", "logprobs", "penalties", "request_update", "token_counts", "topk")

settings.register_profile(
    "interpret",
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("device", parent=settings.get_profile("interpret"), max_examples=40)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("npu", "cuda"),
        default=None,
        help="run the sampler kernels on this device, and fail if there is none",
    )


def _device_of(config: pytest.Config) -> str | None:
    """The device that this run is for: the option's, or that of a plain -m npu or -m cuda."""
    chosen = config.getoption("--device", default=None)
    marker = (config.getoption("markexpr", default="") or "").strip()
    return chosen or (marker if marker in ("npu", "cuda") else None)


def pytest_configure(config: pytest.Config) -> None:
    wanted = _device_of(config)
    settings.load_profile("device" if wanted else "interpret")
    if config.getoption("--device", default=None) not in (None, device.current_kind()):
        raise pytest.UsageError(f"--device {wanted}: this machine's device is a {device.current_kind()}")
    if wanted is None:
        _import_interpreted()


def _import_interpreted() -> None:
    """Import Triton and the kernels for the interpreter, and leave the environment as it was for everyone else."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in ("triton", "triton.experimental.gluon"):
            if importlib.util.find_spec(name.split(".")[0]) is not None:
                importlib.import_module(name)
        for name in _OPERATIONS:
            importlib.import_module(f"vllm_ascend_ext.kernels.{name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """-inf and NaN are ordinary inputs here: numpy, in which the interpreter computes, is to take them without a word.

    Its other warnings, an integer that overflows above all, stay errors.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for message in ("divide by zero encountered", "invalid value encountered"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}:RuntimeWarning"))


def _obstacle(name: str, config: pytest.Config) -> str:
    """Why a tier is skipped; empty if it runs."""
    if name == "reference":
        return ""
    wanted = _device_of(config)
    if name.startswith("interpret"):
        if wanted:
            return f"this run compiles the kernels for {wanted}; the interpreter needs a run of its own"
        return "Triton isn't installed" if "triton" not in sys.modules else ""
    if name != wanted:
        return f"the {name} tier runs with --device {name} or -m {name}"
    return "" if device.current_kind() == name else f"this machine has no {name} device"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("interpret-npu", marks=pytest.mark.interpret),
        pytest.param("interpret-cuda", marks=pytest.mark.interpret),
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("npu", marks=pytest.mark.npu),
    ],
)
def impl(request: pytest.FixtureRequest) -> Iterator[Impl]:
    """Each implementation that this run has a device for; the interpreter runs the kernels' Ascend and CUDA bodies."""
    if reason := _obstacle(request.param, request.config):
        pytest.skip(reason)
    yield from _activate(request.param)


@pytest.fixture(
    scope="session",
    params=[
        "reference",
        pytest.param("interpret-npu", marks=pytest.mark.interpret),
        pytest.param("interpret-cuda", marks=pytest.mark.interpret),
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("npu", marks=pytest.mark.npu),
    ],
)
def each(request: pytest.FixtureRequest) -> Iterator[Impl]:
    """As `impl`, and the reference: for cases whose results are written out."""
    if reason := _obstacle(request.param, request.config):
        pytest.skip(reason)
    yield from _activate(request.param)


def _activate(name: str) -> Iterator[Impl]:
    from vllm_ascend_ext.kernels import _launch, _triton

    if name in ("cuda", "npu"):
        yield Impl(name, "triton", torch.device(name))
        return
    if name == "reference":
        yield Impl(name, "reference", torch.device("cpu"))
        return
    assert _triton.INTERPRETED, "Triton was imported before tests/e2e/kernels/conftest.py could ask for its interpreter"
    token = _launch.interpreted_body.set("npu" if name == "interpret-npu" else "cuda")
    yield Impl(name, "interpret", torch.device("cpu"))
    _launch.interpreted_body.reset(token)
