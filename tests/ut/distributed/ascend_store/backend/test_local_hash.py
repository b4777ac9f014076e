"""The hash index against a dictionary, with digests that all want the same few buckets."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.backend.local_hash import HashIndex, buckets_for

SLOTS = 40


def crowded_index():
    """An index whose digests begin at one of three buckets, next to the end of the array."""
    size = buckets_for(SLOTS)
    digests = np.empty((SLOTS, 2), np.uint64)
    digests[:, 0] = (size - 2 + np.arange(SLOTS) % 3) % size
    digests[:, 1] = np.arange(SLOTS)
    return HashIndex(np.zeros(size, np.int32), digests, np.zeros(SLOTS, np.int32), np.array([16, 0])), digests


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, SLOTS - 1))), max_size=12))
def test_what_was_entered_is_found_and_nothing_else(changes):
    index, digests = crowded_index()
    held = set()
    for enter, slots in changes:
        batch = np.array(sorted(slots - held if enter else slots), np.int64)
        if enter:
            held |= slots
            if not index.insert(batch):
                index.make_anew(np.array(sorted(held), np.int64))
        else:
            held -= slots
            index.delete(batch)
        expected = [slot if slot in held else -1 for slot in range(SLOTS)]
        assert index.find(digests).tolist() == expected


def test_digests_must_agree_in_all_their_bits():
    index, digests = crowded_index()
    index.insert(np.array([0]))
    almost = digests[:1].copy()
    almost[0, 1] ^= np.uint64(1 << 63)
    assert index.find(np.vstack((almost, digests[:1]))).tolist() == [-1, 0]


def test_a_full_index_asks_to_be_made_anew():
    index, digests = crowded_index()
    assert not index.insert(np.arange(SLOTS))
    assert (index.find(digests) == -1).all()
    index.make_anew(np.arange(SLOTS))
    assert index.find(digests).tolist() == list(range(SLOTS))
