"""Laws of choosing an implementation and of cutting rows into pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from vllm_ascend_ext.device import DeviceFacts

H200 = DeviceFacts("cuda", "NVIDIA H200", 132, 233_472, runs_triton=True)
A2 = DeviceFacts("npu", "Ascend910B3", 40, 196_608, runs_triton=True)
DUO = DeviceFacts("npu", "Ascend310P3", 1, 196_608, runs_triton=False)
CPU = DeviceFacts("cpu", "cpu", 3, 32_768, runs_triton=True)


@pytest.fixture
def launch() -> ModuleType:
    """Imported when a test runs: the conformance suite decides how Triton is imported while tests are collected."""
    from vllm_ascend_ext.kernels import _launch

    return _launch


Place = Callable[..., None]


@pytest.fixture
def place(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes this process one that has a device, and compiles or interprets its kernels."""

    def place(device: DeviceFacts, *, interpreted: bool = False, missing: str = "") -> None:
        monkeypatch.setattr(launch, "facts", lambda _device: device)
        monkeypatch.setattr(launch._triton, "INTERPRETED", interpreted)
        monkeypatch.setattr(launch._triton, "MISSING", missing)
        monkeypatch.delenv(launch.IMPL_VARIABLE, raising=False)

    return place


TENSOR = torch.zeros(1)


@pytest.mark.parametrize(
    ("device", "interpreted", "expected"),
    [
        (CPU, False, None),
        (CPU, True, ("npu", True, 3)),
        (H200, False, ("cuda", False, 132)),
        (A2, False, ("npu", False, 40)),
    ],
    ids=["cpu", "cpu interpreted", "cuda", "npu"],
)
def test_the_device_decides(
    launch: ModuleType, place: Place, device: DeviceFacts, interpreted: bool, expected: tuple[str, bool, int] | None
) -> None:
    place(device, interpreted=interpreted)
    target = launch.choose(TENSOR, None)
    assert (target and (target.body, target.interpreted, target.cores)) == expected


def test_a_chip_without_triton_uses_the_reference_and_says_so_once(
    launch: ModuleType,
    place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place(DUO)
    launch._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [launch.choose(TENSOR, None) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "Ascend310P3" in caplog.text


@pytest.mark.parametrize(
    ("forced", "device", "interpreted", "missing", "reason"),
    [
        ("triton", CPU, False, "", "need an NPU or a GPU"),
        ("triton", H200, True, "", "TRITON_INTERPRET=1 was set"),
        ("triton", DUO, False, "", "runs no Triton kernels"),
        ("triton", H200, False, "Triton isn't installed", "isn't installed"),
        ("interpret", CPU, False, "", "TRITON_INTERPRET=1 wasn't set"),
        ("interpret", H200, True, "", "takes CPU tensors only"),
    ],
)
@pytest.mark.parametrize("by_environment", [False, True])
def test_a_forced_implementation_that_cannot_run_says_why_and_fails(
    launch: ModuleType,
    place,
    monkeypatch,
    forced,
    device,
    interpreted,
    missing,
    reason,
    by_environment,
) -> None:
    place(device, interpreted=interpreted, missing=missing)
    if by_environment:
        monkeypatch.setenv(launch.IMPL_VARIABLE, forced)
    with pytest.raises(RuntimeError, match=f"{'VLLM_ASCEND_EXT_IMPL' if by_environment else 'impl'} asks.*{reason}"):
        launch.choose(TENSOR, None if by_environment else forced)


@pytest.mark.parametrize("device", [CPU, H200, A2, DUO])
def test_the_reference_can_always_be_forced_and_the_argument_wins(
    launch: ModuleType, place, monkeypatch, device
) -> None:
    place(device)
    monkeypatch.setenv(launch.IMPL_VARIABLE, "interpret")
    assert launch.choose(TENSOR, "reference") is None


def test_a_device_whose_kernels_cannot_run_is_no_silent_fallback(launch: ModuleType, place: Place) -> None:
    place(H200, missing="Triton isn't installed")
    with pytest.raises(RuntimeError, match="VLLM_ASCEND_EXT_IMPL=reference"):
        launch.choose(TENSOR, None)


def test_an_unknown_implementation_is_refused(
    launch: ModuleType, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(CPU)
    with pytest.raises(ValueError, match="impl 'fast': allowed are 'reference', 'interpret' and 'triton'"):
        launch.choose(TENSOR, "fast")
    monkeypatch.setenv(launch.IMPL_VARIABLE, "Triton")
    with pytest.raises(ValueError, match="VLLM_ASCEND_EXT_IMPL 'Triton'"):
        launch.choose(TENSOR, None)


def test_each_backend_gets_its_own_options(launch: ModuleType) -> None:
    def options(body: str, interpreted: bool) -> dict[str, object]:
        return launch.Target(body, interpreted, 1).options(num_warps=2, multibuffer=False)

    assert options("cuda", False) == {"num_warps": 2, "num_stages": 3, "enable_fp_fusion": True}
    assert options("npu", False) == {"multibuffer": False}
    assert options("npu", True) == options("cuda", True) == {}


ROWS = st.integers(1, 5000)
TILES = st.integers(1, 300)
PROGRAMS = st.integers(1, 2000)


@settings(deadline=None, derandomize=True)
@given(rows=ROWS, tiles=TILES, programs=PROGRAMS, most=st.integers(1, 128))
def test_pieces_cover_every_tile_and_none_is_empty(rows: int, tiles: int, programs: int, most: int) -> None:
    from vllm_ascend_ext.kernels import _launch

    pieces = _launch.split_rows(rows, tiles, programs, most)
    per_piece = _launch.cdiv(tiles, pieces)
    assert 1 <= pieces <= most
    assert (pieces - 1) * per_piece < tiles <= pieces * per_piece


@settings(deadline=None, derandomize=True)
@given(rows=ROWS, tiles=TILES, programs=PROGRAMS, tiles_per_piece=st.integers(0, 8))
def test_a_plan_covers_every_tile(rows: int, tiles: int, programs: int, tiles_per_piece: int) -> None:
    """And launches no more programs than there are pieces; as many as run at a time, if rows are cut for that."""
    from vllm_ascend_ext.kernels import _launch

    pieces, grid = _launch.plan(rows, tiles, programs, tiles_per_piece)
    assert pieces * _launch.cdiv(tiles, pieces) >= tiles
    assert 1 <= pieces <= tiles
    assert 1 <= grid <= rows * pieces
    assert tiles_per_piece > 0 or grid <= programs
    if tiles_per_piece:
        assert _launch.cdiv(tiles, pieces) <= tiles_per_piece


def test_one_row_keeps_every_core_busy(launch: ModuleType) -> None:
    assert launch.split_rows(1, 19, 40, 64) == 19
    assert launch.split_rows(1, 149, 1056, 128) == 75
    assert launch.split_rows(40, 19, 40, 64) == 1


@pytest.mark.parametrize(
    ("stride", "element_bytes", "expected"),
    [(151_936, 4, 4), (151_936, 2, 8), (151_665, 4, 1), (100, 2, 1), (100, 4, 4)],
)
def test_only_strides_of_whole_16_bytes_are_vectorised(
    launch: ModuleType, stride: int, element_bytes: int, expected: int
) -> None:
    assert launch.vector_elements(stride, element_bytes) == expected
