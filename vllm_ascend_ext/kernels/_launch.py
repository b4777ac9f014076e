"""Chooses what runs an operation and sizes its launch; must never know what an operation computes.

Order of choice: the ``impl`` argument, the environment variable VLLM_ASCEND_EXT_IMPL, the tensor's device. A choice
that was forced and can't run raises RuntimeError and says why; nothing falls back in silence.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..device import DeviceFacts, facts
from . import _triton

Impl = Literal["reference", "interpret", "triton"]
Body = Literal["npu", "cuda"]

IMPL_VARIABLE = "VLLM_ASCEND_EXT_IMPL"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """What a kernel is launched for."""

    #: Which form of a kernel is launched, where there are two.
    body: Body
    #: True in Triton's interpreter, which takes small tiles and no compile options.
    interpreted: bool
    #: Vector cores or multiprocessors.
    cores: int

    def options(self, *, num_warps: int, num_stages: int = 3, multibuffer: bool = True) -> dict[str, Any]:
        """Compile options of a launch: each backend refuses the other's."""
        if self.interpreted:
            return {}
        if self.body == "npu":
            return {"multibuffer": multibuffer}
        return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


#: Which body the interpreter runs: the conformance suite runs both.
interpreted_body: contextvars.ContextVar[Body] = contextvars.ContextVar("interpreted_body", default="npu")


def choose(tensor: torch.Tensor, impl: str | None) -> Target | None:
    """What is to run an operation on ``tensor``: a target for the kernels, or None for the reference.

    Raises ValueError for an unknown implementation, RuntimeError for one that was asked for and can't run here.
    """
    forced, origin = (impl, "impl") if impl is not None else (os.environ.get(IMPL_VARIABLE) or None, IMPL_VARIABLE)
    if forced not in (None, "reference", "interpret", "triton"):
        raise ValueError(f"{origin} {forced!r}: allowed are 'reference', 'interpret' and 'triton'")
    if forced == "reference":
        return None
    device = facts(tensor.device)
    reason = why_not(forced or ("triton" if device.kind != "cpu" else "interpret"), device)
    if not reason:
        body: Body = interpreted_body.get() if device.kind == "cpu" else device.kind
        return Target(body, interpreted=device.kind == "cpu", cores=device.cores)
    if forced:
        raise RuntimeError(f"{origin} asks for {forced!r}, which can't run on {device.name}: {reason}")
    if device.kind == "cpu":
        return None
    if not device.runs_triton:
        _say_once(f"{device.name} runs no Triton kernels: the sampler operations use the slow PyTorch reference")
        return None
    raise RuntimeError(f"the kernels can't run on {device.name}: {reason}; {IMPL_VARIABLE}=reference does without them")


def why_not(impl: str, device: DeviceFacts) -> str:
    """Why ``impl`` ("interpret" or "triton") can't run on ``device`` in this process; empty if it can."""
    if _triton.MISSING:
        return _triton.MISSING
    if impl == "interpret":
        if device.kind != "cpu":
            return "the interpreter takes CPU tensors only"
        return "" if _triton.INTERPRETED else "TRITON_INTERPRET=1 wasn't set when the kernels were imported"
    if device.kind == "cpu":
        return "compiled kernels need an NPU or a GPU"
    if _triton.INTERPRETED:
        return "TRITON_INTERPRET=1 was set when the kernels were imported"
    return "" if device.runs_triton else "this chip runs no Triton kernels"


@functools.cache
def _say_once(message: str) -> None:
    _log.warning("%s", message)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def vector_elements(stride: int, element_bytes: int) -> int:
    """How many elements a row stride is known to be a multiple of: 16 bytes' worth, or 1 if a row can start anywhere.

    A compile-time constant of the kernels: they load 16 bytes a thread where every row starts on such a bound.
    """
    most = 16 // element_bytes
    return most if stride % most == 0 else 1


@functools.lru_cache(maxsize=4096)
def split_rows(rows: int, tiles: int, programs: int, most: int) -> int:
    """In how many pieces each row of ``tiles`` tiles is cut so that ``programs`` programs end soonest.

    Counts the tiles of the busiest program, and half a tile for each piece that it begins; at most ``most`` pieces.
    """
    best = min(
        range(1, max(1, min(tiles, most)) + 1),
        key=lambda pieces: (cdiv(rows * pieces, programs) * (2 * cdiv(tiles, pieces) + 1), pieces),
    )
    return cdiv(tiles, cdiv(tiles, best))


def plan(rows: int, tiles: int, programs: int, tiles_per_piece: int) -> tuple[int, int]:
    """(pieces that each row of ``tiles`` tiles is cut into, programs to launch) for ``programs`` that run at a time.

    With ``tiles_per_piece`` 0 as many programs are launched as run at a time, and rows are cut so that they end
    together. Else, for devices that start a program as soon as another ends, pieces are of that many tiles, or shorter
    if there wouldn't be enough of them, and each has a program of its own.
    """
    if tiles_per_piece == 0:
        pieces = split_rows(rows, tiles, programs, tiles)
        return pieces, min(rows * pieces, programs)
    pieces = min(tiles, max(cdiv(tiles, tiles_per_piece), cdiv(programs, rows)))
    return pieces, rows * pieces
