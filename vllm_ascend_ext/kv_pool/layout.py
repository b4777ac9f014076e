"""Where each block of a group lies in device memory, as arrays only; must never know keys, requests or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.errors import ConfigError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockLayout:
    """One group's caches: segment s of block b is ``length[s]`` bytes at ``base[s] + b * stride[s]``.

    Segments are in layer order; ``per_layer`` of them belong to each layer (K and V apart, say). ``heads_first``: what
    a segment holds of one KV head is in one piece; otherwise what it holds of one token is. None: neither.
    """

    base: Sequence[int]
    length: Sequence[int]
    stride: Sequence[int]
    num_blocks: int
    per_layer: int = 1
    heads_first: bool | None = False
    _base: IntArray = field(init=False, repr=False, compare=False)
    _length: IntArray = field(init=False, repr=False, compare=False)
    _stride: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {"base": len(self.base), "length": len(self.length), "stride": len(self.stride)}
        if not self.base or len(set(sizes.values())) != 1:
            raise ConfigError(f"layout {sizes}: one entry per segment is needed in each, and at least one segment")
        if self.per_layer <= 0 or len(self.base) % self.per_layer:
            raise ConfigError(f"per_layer={self.per_layer}: must divide the {len(self.base)} segments")
        if self.num_blocks <= 0:
            raise ConfigError(f"num_blocks={self.num_blocks}: must be positive")
        for name in ("base", "length", "stride"):
            values = np.asarray(getattr(self, name), dtype=np.int64)
            if (values <= 0).any():
                raise ConfigError(f"{name}={list(getattr(self, name))}: addresses and sizes must be positive")
            object.__setattr__(self, f"_{name}", values)

    @property
    def num_layers(self) -> int:
        return len(self.base) // self.per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return int(self._length.sum())

    def addresses(self, block_ids: IntArray) -> tuple[IntArray, IntArray]:
        """(n, segments) addresses and lengths of ``n`` blocks; raises ConfigError for an id outside the cache."""
        self.check(block_ids)
        addresses = self._base[None, :] + block_ids[:, None] * self._stride[None, :]
        return addresses, np.broadcast_to(self._length, addresses.shape)

    def layer_addresses(self, block_ids: IntArray, layer: int) -> tuple[IntArray, IntArray]:
        """(n, per_layer) addresses and lengths of one layer of ``n`` blocks."""
        self.check(block_ids)
        part = slice(layer * self.per_layer, (layer + 1) * self.per_layer)
        addresses = self._base[None, part] + block_ids[:, None] * self._stride[None, part]
        return addresses, np.broadcast_to(self._length[part], addresses.shape)

    def layers(self, start: int, end: int) -> BlockLayout:
        """Layers ``start`` to ``end`` alone."""
        part = slice(start * self.per_layer, end * self.per_layer)
        return replace(self, base=self.base[part], length=self.length[part], stride=self.stride[part])

    def heads(self, part: int, parts: int, tokens: int) -> BlockLayout:
        """Part ``part`` of ``parts`` of every segment's KV heads, token by token if need be.

        The bytes come in the order in which a rank that has just these heads keeps them. ConfigError if a segment of
        ``tokens`` tokens can't be divided so.
        """
        runs = 1 if self.heads_first else tokens
        if self.heads_first is None:
            raise ConfigError("heads_first=None: caches in this layout can't be divided by KV heads")
        if any(length % (runs * parts) for length in self.length):
            raise ConfigError(f"length={list(self.length)}: must be a multiple of {runs} times {parts} shares of heads")
        base, length, stride = [], [], []
        for start, size, step in zip(self.base, self.length, self.stride, strict=True):
            share = size // (runs * parts)
            base += [start + run * share * parts + part * share for run in range(runs)]
            length += [share] * runs
            stride += [step] * runs
        return BlockLayout(base, length, stride, self.num_blocks, self.per_layer * runs, self.heads_first)

    def layer_base(self, layer: int) -> tuple[int, ...]:
        """Where the pieces of ``layer`` of block 0 lie: layers with the same ones share a buffer."""
        return tuple(self.base[layer * self.per_layer : (layer + 1) * self.per_layer])

    def layer_offset(self, layer: int) -> int:
        """Bytes of a block's value that stand before ``layer``."""
        return int(self._length[: layer * self.per_layer].sum())

    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of each segment's memory over all blocks, for registration with an engine."""
        span = (self.num_blocks - 1) * self._stride + self._length
        return list(zip(self._base.tolist(), span.tolist(), strict=True))

    def check(self, block_ids: IntArray) -> None:
        """Raise ConfigError for an id outside the cache."""
        if block_ids.size and (int(block_ids.min()) < 0 or int(block_ids.max()) >= self.num_blocks):
            raise ConfigError(f"block ids {block_ids.min()}..{block_ids.max()}: allowed are 0..{self.num_blocks - 1}")
