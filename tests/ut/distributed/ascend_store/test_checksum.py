"""Digests: the right bytes under the right key are known, and nothing else is."""

import numpy as np
import pytest

from fixtures.parts import Blocks
from vllm_ascend_ext.kv_pool.checksum import DIGEST_BYTES, Trailers
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

KEYS = ["a", "b", "c"]


@pytest.fixture
def memory():
    blocks = Blocks(3, 32)
    blocks.bytes[:] = np.random.default_rng(0).integers(0, 256, blocks.bytes.shape, np.uint8)
    return blocks


def where(blocks, segments=1):
    """(addresses, sizes) of all blocks, each in ``segments`` equal parts."""
    size = blocks.bytes.shape[1] // segments
    starts = np.asarray([[b.ctypes.data + s * size for s in range(segments)] for b in blocks.bytes])
    return starts, np.full_like(starts, size)


def test_what_was_written_is_verified(memory):
    trailers = Trailers(KEYS)
    assert trailers.write(*where(memory), open_fence())
    assert trailers.verify(*where(memory), open_fence()).tolist() == [True, True, True]


@pytest.mark.parametrize("byte", [0, 15, 31])
def test_one_changed_bit_is_found_and_only_in_its_key(memory, byte):
    trailers = Trailers(KEYS)
    trailers.write(*where(memory), open_fence())
    memory[1][byte] ^= 1
    assert trailers.verify(*where(memory), open_fence()).tolist() == [True, False, True]


def test_the_right_bytes_under_another_key_are_wrong(memory):
    """An engine that mixes up two keys' values must not get away with it."""
    trailers = Trailers(KEYS)
    trailers.write(*where(memory), open_fence())
    memory.bytes[[0, 1]] = memory.bytes[[1, 0]]
    room, _ = trailers.append_to(*where(memory))
    digests = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 48).from_address(int(room[0, -1]))).reshape(3, 16)
    digests[[0, 1]] = digests[[1, 0]]  # the digests travel with the values
    assert trailers.verify(*where(memory), open_fence()).tolist() == [False, False, True]


def test_a_value_is_its_bytes_in_order_however_they_are_cut(memory):
    trailers = Trailers(KEYS)
    trailers.write(*where(memory, segments=4), open_fence())
    assert trailers.verify(*where(memory), open_fence()).all()


def test_a_digest_that_never_came_is_not_that_of_zero_bytes():
    """A store that says success and copies nothing leaves zeros in both."""
    blocks = Blocks(3, 32)
    assert not Trailers(KEYS).verify(*where(blocks), open_fence()).any()


def test_a_digest_is_one_more_segment_of_its_own(memory):
    addrs, sizes = Trailers(KEYS).append_to(*where(memory, segments=2))
    assert addrs.shape == sizes.shape == (3, 3)
    assert sizes[:, -1].tolist() == [DIGEST_BYTES] * 3
    assert np.diff(addrs[:, -1]).tolist() == [DIGEST_BYTES] * 2
    assert addrs[:, :-1].tolist() == where(memory, segments=2)[0].tolist()


def test_nothing_is_read_behind_a_revoked_fence(memory):
    fence = Fence()
    fence.revoke(Deadline.after(1.0))
    trailers = Trailers(KEYS)
    assert not trailers.write(*where(memory), fence)
    assert trailers.verify(*where(memory), fence) is None
