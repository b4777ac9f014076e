"""Triton, or a stand-in that says that it is missing; must never know a kernel or a device.

The operations are defined in files that hold their kernels. Those files must import without Triton, because the
reference needs none; so kernels are declared through the ``triton`` and ``tl`` of this module.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__ = ["INTERPRETED", "MISSING", "get_element", "insert_slice", "tl", "triton"]

#: Why compiled kernels can't run in this process; empty if they can.
MISSING = ""

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    MISSING = "Triton isn't installed (pip install triton on NVIDIA, triton-ascend on Ascend)"

    class _Absent:
        """Takes the place of a Triton module: whatever a kernel file names is inert, and a launch is refused."""

        def jit(self, fn: Any = None, **_options: Any) -> Any:
            return self.jit if fn is None else self

        def __call__(self, *_args: Any) -> Any:
            return self

        def __getattr__(self, _name: str) -> Any:
            return self

        def __getitem__(self, _grid: Any) -> Any:
            raise RuntimeError(MISSING)

    triton = _Absent()
    tl = _Absent()


@triton.jit
def _probe() -> None:
    pass


#: Whether kernels declared in this process run in Triton's interpreter: TRITON_INTERPRET=1 was set when they were.
INTERPRETED: bool = type(_probe).__name__ == "InterpretedFunction"


@triton.jit
def _get_element(src, indices):
    """What the Ascend operation of this name does to a 1-D block: its element at ``indices[0]``."""
    return tl.sum(tl.where(tl.arange(0, src.shape[0]) == indices[0], src, 0), axis=0)


@triton.jit
def _insert_slice(whole, part, offsets, sizes, strides):
    """What the Ascend operation of this name does to a 1-D block, for a part of one element."""
    return tl.where(tl.arange(0, whole.shape[0]) == offsets[0], part, whole)


def _ascend(name: str, definition: Any) -> Any:
    """triton-ascend's operation on single elements of a block in the Unified Buffer; its definition elsewhere.

    It lives in triton.language (3.2.0) or in an extension module (later versions). Elsewhere the definition is only
    ever run by the interpreter.
    """
    if MISSING:
        return definition
    try:
        extension = importlib.import_module("triton.language.extra.cann.extension")
    except ImportError:
        extension = tl
    return getattr(extension, name, None) or getattr(tl, name, definition)


get_element = _ascend("get_element", _get_element)
insert_slice = _ascend("insert_slice", _insert_slice)
