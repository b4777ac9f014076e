"""The one seam to the accelerator: an Ascend NPU, an NVIDIA GPU or the CPU; must never know kernels, the pool or vllm.

Importing this module imports neither torch_npu nor triton: both are looked for when the first device is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch

Kind = Literal["npu", "cuda", "cpu"]

#: Unified Buffer of one vector core on the chips whose kernels are compiled here (A2 and A3), in bytes.
UNIFIED_BUFFER_BYTES = 192 * 1024

#: What is assumed of a CPU: enough cores and tile space that the interpreter walks through every loop.
_CPU_CORES = 3
_CPU_BUFFER_BYTES = 32 * 1024

#: Chips of this family have no support for these Triton kernels.
_WITHOUT_TRITON = "Ascend310P"


@dataclass(frozen=True)
class DeviceFacts:
    """What a launch is sized from."""

    kind: Kind
    #: The vendor's name of the chip, e.g. ``NVIDIA H200`` or ``Ascend910B3``.
    name: str
    #: Vector cores of an NPU, streaming multiprocessors of a GPU.
    cores: int
    #: Memory that one core computes in: the Unified Buffer of a vector core, the shared memory of a multiprocessor.
    buffer_bytes: int
    #: False on chips that can't run Triton kernels at all.
    runs_triton: bool


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the point that the current stream has reached."""

    def synchronize(self) -> None:
        """Block until the recorded point is reached; return at once if nothing was recorded."""

    def query(self) -> bool:
        """Whether the recorded point is reached; True if nothing was recorded."""


class _CpuEvent:
    """CPU work is done when the call returns, so every point is reached."""

    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


@functools.cache
def current_kind() -> Kind:
    """The kind of device that this process computes on: an NPU before a GPU before the CPU."""
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
        if _backend("npu").is_available():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def kind_of(device: torch.device) -> Kind:
    """The kind of ``device``; raises ValueError for one that is none of npu, cuda and cpu."""
    if device.type not in ("npu", "cuda", "cpu"):
        raise ValueError(f"device {device}: its kind is {device.type!r}; allowed are 'npu', 'cuda' and 'cpu'")
    return cast(Kind, device.type)


def _backend(kind: Kind) -> Any:
    return getattr(torch, kind)


def set_device(rank: int) -> None:
    """Bind the calling thread to device ``rank`` of this process's kind; on the CPU there is nothing to bind.

    Raises ValueError unless 0 <= rank < the number of devices.
    """
    kind = current_kind()
    count = _backend(kind).device_count() if kind != "cpu" else None
    if rank < 0 or (count is not None and rank >= count):
        raise ValueError(
            f"rank {rank}: there are {count} {kind} devices, numbered from 0" if count else f"rank {rank}: below 0"
        )
    if kind != "cpu":
        _backend(kind).set_device(rank)


def new_event() -> Event:
    """An event of this process's device; it costs no timing."""
    kind = current_kind()
    return _CpuEvent() if kind == "cpu" else cast(Event, _backend(kind).Event())


def new_stream() -> Any:
    """A stream beside the current one (``torch.npu.Stream`` or ``torch.cuda.Stream``); None on the CPU."""
    kind = current_kind()
    return None if kind == "cpu" else _backend(kind).Stream()


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Context in which ``stream`` is the current one; None, as ``new_stream`` gives it on the CPU, changes nothing."""
    return (
        nullcontext() if stream is None else cast(AbstractContextManager[Any], _backend(current_kind()).stream(stream))
    )


def synchronize() -> None:
    """Block until all work of the current device is done."""
    kind = current_kind()
    if kind != "cpu":
        _backend(kind).synchronize()


def facts(device: torch.device) -> DeviceFacts:
    """What is known of ``device``; asked of the driver once for each device.

    On Ascend the number of vector cores comes from Triton's active driver (``num_vectorcore``): torch_npu doesn't tell.
    """
    kind = kind_of(device)
    index = cast("int | None", device.index)  # torch types it as int, but "cuda" alone has none
    if index is None and kind != "cpu":
        index = _backend(kind).current_device()
    return _facts(kind, index)


@functools.cache
def _facts(kind: Kind, index: int | None) -> DeviceFacts:
    if kind == "cpu":
        return DeviceFacts("cpu", "cpu", _CPU_CORES, _CPU_BUFFER_BYTES, runs_triton=True)
    if kind == "cuda":
        found = torch.cuda.get_device_properties(index)
        shared = int(getattr(found, "shared_memory_per_multiprocessor", _CPU_BUFFER_BYTES))
        return DeviceFacts("cuda", found.name, int(found.multi_processor_count), shared, runs_triton=True)
    name = str(_backend("npu").get_device_name(index))
    if name.startswith(_WITHOUT_TRITON):
        return DeviceFacts("npu", name, 1, UNIFIED_BUFFER_BYTES, runs_triton=False)
    driver = importlib.import_module("triton.runtime.driver").driver
    cores = int(driver.active.utils.get_device_properties(index)["num_vectorcore"])
    return DeviceFacts("npu", name, cores, UNIFIED_BUFFER_BYTES, runs_triton=True)
