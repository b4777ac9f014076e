"""Copies under a fence: the right bytes, in order, in bounded chunks, and not one more once the fence is revoked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.backend.copier import CHUNK_BYTES, HostCopier, copy_fenced
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence


class Recorder:
    """Copies like HostCopier, and remembers the sizes of every call."""

    def __init__(self) -> None:
        self.calls = []

    def to_host(self, host, blocks, sizes):
        self.calls.append(list(sizes))
        HostCopier().to_host(host, blocks, sizes)

    def from_host(self, host, blocks, sizes):
        self.calls.append(list(sizes))
        HostCopier().from_host(host, blocks, sizes)


class CountedFence(Fence):
    def __init__(self, grants):
        super().__init__()
        self._grants = grants

    def hold(self):
        self._revoked = self._grants <= 0
        self._grants -= 1
        return super().hold()


def ranges(source, target, pieces):
    """(host, blocks, sizes) for copying pieces (from, to, length) between two arrays."""
    source_at, target_at, sizes = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    return target.ctypes.data + target_at, source.ctypes.data + source_at, sizes


LONG = HostCopier.RELEASE_BYTES
ROOM = CHUNK_BYTES + 2 * LONG
NOISE = np.random.default_rng(0).integers(1, 256, ROOM, np.uint8)


@settings(deadline=None, max_examples=60)
@given(
    saving=st.booleans(),
    begin=st.integers(0, 24),
    to=st.integers(0, 24),
    length=st.one_of(
        st.integers(1, 64),
        st.integers(LONG - 9, LONG + 17),
        st.sampled_from([2 * LONG, CHUNK_BYTES, CHUNK_BYTES + 1, CHUNK_BYTES + LONG]),
    ),
)
def test_any_alignment_and_any_length(saving, begin, to, length):
    expected, target = np.zeros(ROOM, np.uint8), np.zeros(ROOM, np.uint8)
    host, blocks, sizes = ranges(NOISE, target, [(begin, to, length)])
    if not saving:
        host, blocks = blocks, host
    assert copy_fenced(HostCopier(), saving, host, blocks, sizes, open_fence()) == length
    expected[to : to + length] = NOISE[begin : begin + length]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("saving", [True, False])
def test_scattered_pieces_arrive_where_they_belong(saving):
    source = np.random.default_rng(1).integers(0, 256, 4000, np.uint8)
    target = np.zeros(4000, np.uint8)
    pieces = [(3000, 0, 100), (0, 100, 7), (50, 2000, 0), (500, 3999, 1)]
    host, blocks, sizes = ranges(source, target, pieces)
    if not saving:
        host, blocks = blocks, host
    assert copy_fenced(HostCopier(), saving, host, blocks, sizes, open_fence()) == 108
    expected = np.zeros(4000, np.uint8)
    for begin, to, length in pieces:
        expected[to : to + length] = source[begin : begin + length]
    assert np.array_equal(target, expected)


def test_long_and_short_pieces_in_one_call():
    target = np.zeros(ROOM, np.uint8)
    pieces = [(0, 8, LONG), (LONG + 3, 2 * LONG, 5), (2 * LONG, 3 * LONG + 1, LONG + 1)]
    assert copy_fenced(HostCopier(), True, *ranges(NOISE, target, pieces), open_fence()) == 2 * LONG + 6
    for begin, to, length in pieces:
        assert np.array_equal(target[to : to + length], NOISE[begin : begin + length])
    assert np.count_nonzero(target) == 2 * LONG + 6


def test_neighbours_are_copied_in_one_piece():
    source, target = np.arange(400, dtype=np.uint8), np.zeros(400, np.uint8)
    recorder = Recorder()
    copy_fenced(recorder, True, *ranges(source, target, [(n * 100, n * 100, 100) for n in range(4)]), open_fence())
    assert recorder.calls == [[400]]
    assert np.array_equal(target, source)


def test_neighbours_on_one_side_only_are_not():
    source, target = np.arange(200, dtype=np.uint8), np.zeros(300, np.uint8)
    recorder = Recorder()
    copy_fenced(recorder, True, *ranges(source, target, [(0, 0, 100), (100, 200, 100)]), open_fence())
    assert recorder.calls == [[100, 100]]


def test_no_more_than_two_chunks_are_copied_under_one_hold():
    size = 3 * CHUNK_BYTES + 17
    source = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    recorder = Recorder()
    pieces = [(0, 0, CHUNK_BYTES - 5), (CHUNK_BYTES - 5, CHUNK_BYTES - 5, size - CHUNK_BYTES + 5)]
    assert copy_fenced(recorder, True, *ranges(source, target, pieces), open_fence()) == size
    assert len(recorder.calls) > 1
    assert max(map(sum, recorder.calls)) < 2 * CHUNK_BYTES
    assert np.array_equal(target, source)


@pytest.mark.parametrize("grants", [0, 1, 2])
def test_nothing_is_copied_behind_a_revoked_fence(grants):
    size = 4 * CHUNK_BYTES
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    done = copy_fenced(HostCopier(), True, *ranges(source, target, [(0, 0, size)]), CountedFence(grants))
    assert done == grants * CHUNK_BYTES
    assert target[:done].all()
    assert not target[done:].any()


def test_nothing_at_all_asks_no_fence():
    nothing = np.zeros(0, np.int64)
    assert copy_fenced(HostCopier(), True, nothing, nothing, nothing, CountedFence(0)) == 0
