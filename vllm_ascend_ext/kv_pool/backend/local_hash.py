"""A hash index from 128-bit digests to slots, in shared memory; must never know what a slot means.

Open addressing with linear probing over int32 buckets: 0 is empty, -1 a tombstone, anything else slot + 1. All calls
take whole batches; their loops run once per probe step, not once per key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""(keys, 2): 128 bits of a key each."""
Numbers = npt.NDArray[np.int32]

_TOMBSTONE = -1
_WINDOW = np.arange(4)


def buckets_for(keys: int) -> int:
    """Three to six buckets a key, so that half full is far away right after the index was made anew."""
    return 1 << max(4, (3 * keys).bit_length())


class HashIndex:
    """``buckets`` with the ``digests`` of the slots, and the ``places`` of the slots in it (in force while the bucket
    says the same). ``shape`` is (number of buckets in use, those not empty)."""

    def __init__(self, buckets: Numbers, digests: Digests, places: Numbers, shape: Ints) -> None:
        self._buckets = buckets
        self._digests = digests
        self._names = _whole(digests)
        self._places = places
        self._shape = shape

    def find(self, digests: Digests) -> Ints:
        """The slot of each digest, -1 where there is none. Looks at a window of buckets of each at a time."""
        slots = np.full(len(digests), -1, np.int64)
        pending, place, wanted = np.arange(len(digests)), self._home(digests), _whole(digests)
        while len(pending):
            entry = self._buckets[(place[:, None] + _WINDOW) & int(self._shape[0] - 1)]
            filled = np.flatnonzero(entry > 0)  # far fewer than all: their digests lie anywhere in memory
            row, who = entry.ravel()[filled] - 1, filled // len(_WINDOW)
            same = self._names[row] == wanted[who]
            who = who[same]
            slots[pending[who]] = row[same]
            on = (entry != 0).all(axis=1)
            if not on.any():
                break
            on[who] = False
            pending, place, wanted = pending[on], place[on] + len(_WINDOW), wanted[on]
        return slots

    def insert(self, slots: Ints) -> bool:
        """Enter slots whose digests are not in the index; False, and nothing done, if it must be made anew first."""
        size, filled = self._shape.tolist()
        if 2 * (filled + len(slots)) > size:
            return False
        place = self._home(self._digests[slots])
        while len(slots):
            window = (place[:, None] + _WINDOW) & (size - 1)
            entry = self._buckets[window]
            first = (entry <= 0).argmax(axis=1)
            each = np.arange(len(slots))
            bucket, entry = window[each, first], entry[each, first]
            room = entry <= 0  # False: none in this window
            self._places[slots] = bucket
            self._buckets[bucket[room]] = slots[room] + 1  # of several for one bucket, the last one stays
            lost = self._buckets[bucket] != slots + 1
            self._shape[1] += int((~lost & (entry == 0)).sum())
            place = place + np.where(room, 0, len(_WINDOW))
            slots, place = slots[lost], place[lost]
        return True

    def delete(self, slots: Ints) -> None:
        """Take slots out; those that aren't in are left alone."""
        places = self._places[slots]
        self._buckets[places[self._buckets[places] == slots + 1]] = _TOMBSTONE

    def make_anew(self, slots: Ints) -> None:
        """Hold exactly ``slots``, in as many buckets as they need."""
        size = buckets_for(len(slots))
        self._buckets[: max(size, int(self._shape[0]))] = 0
        self._shape[:] = size, 0
        self.insert(slots)

    def _home(self, digests: Digests) -> Ints:
        home: Ints = (digests[:, 0] & np.uint64(self._shape[0] - 1)).astype(np.int64)
        return home


def _whole(digests: Digests) -> npt.NDArray[np.void]:
    """One 16-byte item per digest: numpy compares these far faster than pairs."""
    return np.ascontiguousarray(digests).view("V16").ravel()
