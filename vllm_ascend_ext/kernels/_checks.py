"""Checks of an operation's arguments that read no tensor's contents; must never know an operation.

Each raises TypeError (not a tensor, wrong dtype) or ValueError (wrong shape, stride or device) and names the argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)

#: A dimension that may have any size.
ANY = -1


def tensor(
    name: str,
    value: object,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check one tensor argument and return it.

    ``shape`` gives the expected sizes, ``ANY`` where any will do; the elements of a row must lie side by side;
    ``like`` is a tensor whose device it must share.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: a {type(value).__name__} was passed; a tensor is expected")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: dtype {str(value.dtype).removeprefix('torch.')}; allowed are {allowed}")
    if value.dim() != len(shape) or any(want not in (ANY, have) for have, want in zip(value.shape, shape, strict=True)):
        expected = ", ".join("any" if size == ANY else str(size) for size in shape)
        raise ValueError(f"{name}: shape {tuple(value.shape)}; expected ({expected})")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name}: on {value.device}; the other tensors are on {like.device}")
    if value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: stride {value.stride(-1)} in its last dimension; it must be 1")
    return value


def at_least(name: str, size: int, least: int, what: str) -> None:
    """Raise ValueError unless ``size`` is at least ``least``."""
    if size < least:
        raise ValueError(f"{name}: {what} is {size}; at least {least} is needed")
