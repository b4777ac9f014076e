"""Turns the arguments of a store call into arrays, telling what can be used; must never know where values lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from vllm_ascend_ext.kv_pool.backend.local_hash import Digests, Ints

MAX_KEY = 256
_MAX_SEGMENT = 1 << 43
"""No value is longer, and a sum of so many bytes doesn't overflow."""


@dataclass(frozen=True)
class Keys:
    """The usable keys of a call: their positions in it, and XXH3-128 of each (as bytes, as uint64 pairs).

    No cryptographic digest is needed: a key ends in the engine's own hash of the tokens, so nobody picks its bytes.
    """

    at: Ints
    names: list[bytes]
    digests: Digests

    @classmethod
    def of(cls, keys: Sequence[str]) -> Keys:
        try:
            text = list(map(str.encode, keys))
            usable = all(0 < length <= MAX_KEY for length in set(map(len, text)))
        except (TypeError, UnicodeEncodeError):
            usable = False
        at = np.arange(len(keys))
        if not usable:  # some of them, at least: look at each
            at = np.flatnonzero([isinstance(key, str) and 0 < len(key) <= MAX_KEY for key in keys])
            text = [keys[n].encode("utf-8", "surrogatepass") for n in at.tolist()]
        names = list(map(xxh3_128_digest, text))
        return cls(at, names, np.frombuffer(b"".join(names), np.uint64).reshape(-1, 2))

    def take(self, chosen: Ints) -> Keys:
        """Some of the rows, given in ascending order."""
        if len(chosen) == len(self.names):
            return self
        return Keys(self.at[chosen], [self.names[n] for n in chosen.tolist()], self.digests[chosen])

    def first_of_each(self) -> tuple[Ints, Ints]:
        """(rows where a key comes up for the first time; for each row which of those it equals)."""
        everyone = np.arange(len(self.names))
        if len(set(self.names)) == len(self.names):
            return everyone, everyone
        places: dict[bytes, int] = {}
        twin = np.array([places.setdefault(name, len(places)) for name in self.names], np.int64)
        return np.unique(twin, return_index=True)[1], twin

    def turns(self) -> Iterator[Ints]:
        """All rows, in as few groups of distinct keys as there are; each key's rows in their order."""
        left = np.arange(len(self.names))
        while len(left):
            first, _ = self.take(left).first_of_each()
            yield left[first]
            left = np.delete(left, first)


@dataclass(frozen=True)
class Rows:
    """The usable rows of a put or get: keys, (rows, segments) addresses and lengths, total bytes."""

    keys: Keys
    addrs: Ints
    sizes: Ints
    totals: Ints

    @classmethod
    def of(cls, keys: Sequence[str], addrs: Any, sizes: Any) -> Rows:
        """A usable row has a key, at least one byte, no null pointer, and no length below 0 or beyond all reason."""
        usable = Keys.of(keys)
        starts, lengths = numbers(addrs, 2), numbers(sizes, 2)
        if starts is None or lengths is None or starts.shape != lengths.shape or len(starts) != len(keys):
            starts = lengths = np.zeros((len(keys), 1), np.int64)
        totals = lengths.sum(axis=1)
        if len(usable.at) < len(keys):
            starts, lengths, totals = starts[usable.at], lengths[usable.at], totals[usable.at]
        rows = cls(usable, starts, lengths, totals)
        if len(totals) and starts.min() > 0 and lengths.min() > 0 and lengths.max() <= _MAX_SEGMENT:
            return rows
        possible = ((lengths > 0) & (starts > 0) & (lengths <= _MAX_SEGMENT)) | (lengths == 0)
        sound = np.asarray(possible).all(axis=1) & (totals > 0)
        return rows.take(np.flatnonzero(sound))

    def take(self, chosen: Ints) -> Rows:
        """Some of the rows, given in ascending order."""
        if len(chosen) == len(self.totals):
            return self
        return Rows(self.keys.take(chosen), self.addrs[chosen], self.sizes[chosen], self.totals[chosen])


def numbers(values: Any, dimensions: int = 1) -> Ints | None:
    """``values`` as an int64 array of that many dimensions, None if they aren't that."""
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.ndim != dimensions:
        return None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and int(array.max()) >= 1 << 63):
        return None
    return array.astype(np.int64, copy=False)
