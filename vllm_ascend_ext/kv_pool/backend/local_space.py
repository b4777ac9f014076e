"""Which stretches of an arena are free and where new values go; must never know what lies there.

Pure functions over sorted arrays of disjoint half-open stretches [start, end), all in pages, none touching another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Stretches = tuple[Ints, Ints]
"""(starts, ends), int64 arrays of one length, ascending."""


def join(free: Stretches, starts: Ints, lengths: Ints) -> Stretches:
    """``free`` with more stretches added to it; neighbours become one."""
    begins = np.concatenate((free[0], starts))
    ends = np.concatenate((free[1], starts + lengths))
    begins.sort()
    ends.sort()
    # disjoint stretches keep their partners when both sides are sorted; a start that equals the end before it is a seam
    seam = begins[1:] == ends[:-1]
    return begins[np.concatenate(([True], ~seam))[: len(begins)]], ends[np.concatenate((~seam, [True]))[: len(ends)]]


def carve(free: Stretches, starts: Ints, lengths: Ints) -> Stretches:
    """``free`` without the given stretches, which lie within it."""
    begins = np.concatenate((free[0], starts + lengths))
    ends = np.concatenate((free[1], starts))
    begins.sort()
    ends.sort()
    left = begins < ends
    return begins[left], ends[left]


def fit(free: Stretches, pages: Ints) -> Ints:
    """A start in ``free`` for each wanted length, -1 for those that find none.

    The largest lengths choose first, equal ones in the order given, each the lowest place: so a batch of blocks lies
    in one piece where it can, and is copied in one.
    """
    offsets = np.full(len(pages), -1, np.int64)
    if not len(free[0]) or not len(pages):
        return offsets
    sizes = pages[:1] if (pages == pages[0]).all() else np.unique(pages)[::-1]
    if len(sizes) == 1 and (free[1][0] - free[0][0]) >= len(pages) * sizes[0]:
        in_a_row: Ints = free[0][0] + np.arange(len(pages)) * sizes[0]
        return in_a_row
    for size in sizes:
        wanted = np.flatnonzero(pages == size)
        rooms = np.minimum((free[1] - free[0]) // size, len(wanted))
        before = np.cumsum(rooms) - rooms
        taken = np.clip(len(wanted) - before, 0, rooms)
        place = np.repeat(np.arange(len(taken)), taken)
        nth = np.arange(len(place)) - before[place]
        chosen = free[0][place] + nth * size
        offsets[wanted[: len(chosen)]] = chosen
        if size != sizes[-1]:
            free = carve(free, chosen, np.full(len(chosen), size))
    return offsets


def overlaps(starts: Ints, lengths: Ints, used: Ints, used_lengths: Ints) -> npt.NDArray[np.bool_]:
    """Which of the stretches share a page with one of the ``used`` ones, which are disjoint."""
    order = np.argsort(used)
    begins, ends = used[order], (used + used_lengths)[order]
    first = np.searchsorted(ends, starts, "right")  # the first one that ends behind our start
    shared: npt.NDArray[np.bool_] = np.append(begins, np.iinfo(np.int64).max)[first] < starts + lengths
    return shared
