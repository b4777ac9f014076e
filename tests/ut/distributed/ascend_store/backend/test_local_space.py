"""Free space: whatever is taken and given back, every page is free or used exactly once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.backend import local_space as space

PAGES = 40
EVERYTHING = (np.array([0]), np.array([PAGES]))
used_pages = st.sets(st.integers(0, PAGES - 1))


def stretches(pages):
    """(starts, ends) of the runs in a set of pages."""
    mask = np.isin(np.arange(-1, PAGES + 1), list(pages)).astype(int)
    edges = np.diff(mask)
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def pages_in(free):
    return {page for start, end in zip(*free, strict=True) for page in range(start, end)}


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@settings(deadline=None)
@given(used_pages)
def test_carving_leaves_exactly_what_was_not_carved_out(used):
    pages = np.array(sorted(used), np.int64)
    left = space.carve(EVERYTHING, pages, np.ones(len(pages), np.int64))
    assert equal(left, stretches(set(range(PAGES)) - used))


@settings(deadline=None)
@given(used_pages, st.data())
def test_joining_makes_one_stretch_of_neighbours(used, data):
    given_back = data.draw(st.sets(st.sampled_from(sorted(used)))) if used else set()
    pages = np.array(sorted(given_back), np.int64)
    free = stretches(set(range(PAGES)) - used)
    assert equal(
        space.join(free, pages, np.ones(len(pages), np.int64)), stretches(set(range(PAGES)) - used | given_back)
    )


@settings(deadline=None)
@given(used_pages, st.lists(st.integers(1, 6), max_size=12))
def test_what_is_placed_lies_in_free_space_and_on_nothing_else(used, sizes):
    free = stretches(set(range(PAGES)) - used)
    sizes = np.array(sizes, np.int64)
    starts = space.fit(free, sizes)
    placed = [
        range(start, start + size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True) if start >= 0
    ]
    pages = [page for stretch in placed for page in stretch]
    assert len(set(pages)) == len(pages)
    assert set(pages) <= pages_in(free)
    left = space.carve(free, starts[starts >= 0], sizes[starts >= 0])
    refused = sizes[starts < 0]
    assert not len(refused) or (left[1] - left[0]).max(initial=0) < refused.min(), "there was room for it"


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 12))
def test_equal_lengths_are_placed_in_order_side_by_side(size, count):
    starts = space.fit(EVERYTHING, np.full(count, size, np.int64))
    room = PAGES // size
    assert starts.tolist() == [n * size if n < room else -1 for n in range(count)]


@settings(deadline=None)
@given(used_pages, used_pages)
def test_stretches_overlap_when_they_share_a_page(one, other):
    (starts, ends), (begins, stops) = stretches(one), stretches(other)
    shared = [bool(set(range(a, b)) & other) for a, b in zip(starts, ends, strict=True)]
    assert space.overlaps(starts, ends - starts, begins, stops - begins).tolist() == shared


def test_the_largest_choose_first():
    assert space.fit((np.array([0]), np.array([4])), np.array([2, 4, 1])).tolist() == [-1, 0, -1]
