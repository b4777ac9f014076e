"""What every conformance test leans on: guard zones, poisoned results, one table of tolerances; knows no operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Impl:
    """An implementation under test."""

    name: str
    #: The `impl` argument that forces it.
    forced: str
    device: torch.device

    @property
    def on_device(self) -> bool:
        return self.device.type != "cpu"


#: Largest error of a value v against float64 from the same inputs: FLOAT32 * max(1, |v|) + ROUNDING * |v|.
#: The issue's figure for logits and logprobs: some ten float32 roundings, of a sum over the vocabulary included.
FLOAT32 = 1e-5
ROUNDING = {
    torch.float32: 0.0,
    # The result is rounded to the type, of 8 and 11 significant bits: half a unit in the last place. The float32
    # arithmetic before it can tip a result that lies next to a boundary to the other side, which costs the other half.
    # The interpreter truncates float32 to bfloat16 instead of rounding it: no more than one unit either.
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the table's tolerance everywhere; -inf and NaN in the same places; the same dtype and shape."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, e = actual.cpu().double(), expected.cpu().double()
    special = ~torch.isfinite(e)
    torch.testing.assert_close(torch.where(special, a, 0), torch.where(special, e, 0), rtol=0, atol=0, equal_nan=True)
    allowed = FLOAT32 * e.abs().clamp(min=1) + ROUNDING[expected.dtype] * e.abs()
    wrong = torch.nonzero(~special & ((a - e).abs() > allowed)).tolist()
    assert not wrong, "; ".join(f"{at}: {a[tuple(at)]} instead of {e[tuple(at)]}" for at in wrong[:5])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, except that one NaN is as good as another."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 3


@dataclass
class Guard:
    """Tensors that lie inside larger buffers whose every other element is poison, NaN or a huge id.

    A kernel that reads outside a tensor takes poison into its result; one that writes there is caught by ``check``.
    """

    device: torch.device
    _kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    #: Poisoned elements before and after a tensor; a multiple of 16 bytes, so that alignment is the tensor's own.
    ZONE = 64

    def place(self, tensor: torch.Tensor, gap: int = 0) -> torch.Tensor:
        """A copy of ``tensor`` on the device, its rows ``gap`` elements further apart than they are long."""
        shape = tuple(tensor.shape)
        strides, size = tuple(torch.empty(shape, device="meta").stride()), tensor.numel()
        if gap:
            strides, size = (shape[1] + gap, 1), shape[0] * (shape[1] + gap)
        buffer = torch.full((2 * self.ZONE + size,), _poison(tensor.dtype), dtype=tensor.dtype)
        inside = torch.zeros(buffer.shape, dtype=torch.bool)
        buffer.as_strided(shape, strides, self.ZONE).copy_(tensor)
        inside.as_strided(shape, strides, self.ZONE).fill_(True)
        placed = buffer.to(self.device)
        self._kept.append((placed, placed.clone(), inside.to(self.device)))
        return placed.as_strided(shape, strides, self.ZONE)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A poisoned tensor between guard zones."""
        return self.place(torch.full(shape, _poison(dtype), dtype=dtype))

    def check(self) -> None:
        """Nothing outside the tensors has changed."""
        for buffer, before, inside in self._kept:
            same = (buffer == before) | ((buffer != buffer) & (before != before))
            changed = torch.nonzero(~same & ~inside).flatten().tolist()
            assert not changed, f"written outside a tensor, at {[at - self.ZONE for at in changed[:8]]}"


@contextmanager
def guarded(impl: Impl) -> Iterator[Guard]:
    """A guard whose zones are checked at the end. Results that an operation allocates are guarded and poisoned too."""
    guard = Guard(impl.device)
    patch = pytest.MonkeyPatch()

    original = torch.Tensor.new_empty

    def new_empty(like: torch.Tensor, size: tuple[int, ...], **options: Any) -> torch.Tensor:
        # The operations give a dtype and nothing else; Triton's interpreter allocates too, for itself.
        return guard.empty(size, options["dtype"]) if set(options) == {"dtype"} else original(like, size, **options)

    patch.setattr(torch.Tensor, "new_empty", new_empty)
    try:
        yield guard
    finally:
        patch.undo()
    guard.check()


def assert_repeatable(run: Callable[[], Any], times: int = 20) -> None:
    """``run`` returns the same bits every time; it must start from the same inputs every time."""
    first = _flat(run())
    for _ in range(times - 1):
        for a, b in zip(_flat(run()), first, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _flat(results: Any) -> list[torch.Tensor]:
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [result.clone().cpu() for result in results if isinstance(result, torch.Tensor)]
