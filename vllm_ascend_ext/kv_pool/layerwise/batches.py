"""Addresses of one layer of many blocks, on the device and in the store, as arrays; must never know requests or keys.

A block's value in the store is its segments in layer order, as ``layout.BlockLayout`` has them; with checksums, one
digest per layer follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ascend_ext.kv_pool.checksum import DIGEST_BYTES
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.layout import BlockLayout, IntArray


@dataclass(frozen=True)
class LayerPlan:
    """The layers in the order of the forward pass.

    ``places[l]``: group of layer l and its number in that group. ``previous[l]``: the last layer before it that is kept
    in the same device buffer, or None. ``shared[l]``: whether any other layer is kept there.
    """

    places: tuple[tuple[int, int], ...] = ()
    previous: tuple[int | None, ...] = ()
    shared: tuple[bool, ...] = ()

    @classmethod
    def of(cls, layouts: Sequence[BlockLayout], places: Sequence[tuple[int, int]] | None = None) -> LayerPlan:
        """The plan of ``layouts``; without ``places`` one group follows the other. ConfigError if they don't fit."""
        all_places = [(group, layer) for group, layout in enumerate(layouts) for layer in range(layout.num_layers)]
        order = all_places if places is None else [(group, layer) for group, layer in places]
        if sorted(order) != all_places:
            raise ConfigError(f"places={list(order)}: each layer of {all_places} is needed exactly once")
        buffers = [(group, layouts[group].layer_base(layer)) for group, layer in order]
        uses = Counter(buffers)
        last: dict[tuple[int, tuple[int, ...]], int] = {}
        previous: list[int | None] = []
        for number, buffer in enumerate(buffers):
            previous.append(last.get(buffer))
            last[buffer] = number
        return cls(tuple(order), tuple(previous), tuple(uses[buffer] > 1 for buffer in buffers))

    @property
    def shares_buffers(self) -> bool:
        return any(self.shared)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Ranges:
    """(pieces, blocks) arrays: where each piece of each block lies in the store and on the device; and each piece's
    length.

    Pieces come first because numpy is several times faster along a long last axis.
    """

    gvas: IntArray
    addrs: IntArray
    lengths: IntArray

    @property
    def blocks(self) -> int:
        return int(self.gvas.shape[1])

    def with_piece(self, gvas: IntArray, addrs: IntArray, length: int) -> Ranges:
        """One more piece of ``length`` bytes for each block."""
        return Ranges(np.vstack((self.gvas, gvas)), np.vstack((self.addrs, addrs)), np.append(self.lengths, length))

    def sizes(self) -> IntArray:
        """(pieces, blocks): the pieces' lengths."""
        return np.broadcast_to(self.lengths[:, None], self.addrs.shape)

    def flat(self, start: int, stop: int) -> tuple[IntArray, IntArray, IntArray]:
        """Blocks ``start`` to ``stop`` as flat arrays of addresses and sizes, one entry per piece."""
        part = slice(start, stop)
        sizes = np.repeat(self.lengths, min(stop, self.blocks) - start)
        return self.gvas[:, part].ravel(), self.addrs[:, part].ravel(), sizes

    def split(self, limit: int) -> Ranges:
        """The same bytes in pieces of at most ``limit``."""
        if int(self.lengths.max(initial=0)) <= limit:
            return self
        cuts = [np.arange(0, length, limit) for length in self.lengths.tolist()]
        piece = np.repeat(np.arange(len(cuts)), [len(offsets) for offsets in cuts])
        offset = np.concatenate(cuts)
        lengths = np.minimum(self.lengths[piece] - offset, limit)
        return Ranges(self.gvas[piece] + offset[:, None], self.addrs[piece] + offset[:, None], lengths)


class LayerBatchBuilder:
    """One group's addresses, layer by layer. ``digests``: a digest per layer stands behind the block's bytes."""

    def __init__(self, layout: BlockLayout, *, digests: bool = False) -> None:
        self.layout = layout
        self.value_bytes = layout.block_bytes + (DIGEST_BYTES * layout.num_layers if digests else 0)
        layers = (layout.num_layers, layout.per_layer, 1)
        lengths = np.asarray(layout.length, dtype=np.int64)
        self._base = np.asarray(layout.base, dtype=np.int64).reshape(layers)
        self._stride = np.asarray(layout.stride, dtype=np.int64).reshape(layers)
        self._length = lengths.reshape(layers[:2])
        self._offset = (np.cumsum(lengths) - lengths).reshape(layers)

    def build(self, layer: int, block_ids: IntArray, gvas: IntArray) -> Ranges:
        """The ranges of ``layer`` of the blocks ``block_ids``, whose values begin at ``gvas``; both (n,)."""
        addrs = block_ids * self._stride[layer] + self._base[layer]
        return Ranges(gvas + self._offset[layer], addrs, self._length[layer])

    def digest_gvas(self, layer: int, gvas: IntArray) -> IntArray:
        """(n,): where each block's digest of ``layer`` lies in the store."""
        return gvas + (self.layout.block_bytes + DIGEST_BYTES * layer)
