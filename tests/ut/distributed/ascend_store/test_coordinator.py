"""The coordinator: a hit is a boundary that every group can resume from, and a load brings all that it needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.parts import make_setup
from vllm_ascend_ext.kv_pool.coordinator import NULL_BLOCK, AscendStoreCoordinator
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind

SLIDING, STATE = GroupKind.SLIDING, GroupKind.STATE


def coordinator(*groups, unit=4):
    return AscendStoreCoordinator(make_setup(groups=groups, hash_unit=unit))


def blocks(count, *indices):
    present = np.zeros(count, dtype=np.bool_)
    present[list(indices)] = True
    return present


def needed_blocks(group, end):
    """The law, token by token: which blocks must be there for the token at ``end`` to be computed."""
    if group.kind is STATE:
        return {end // group.block_size - 1}
    first = 0 if group.kind is GroupKind.FULL else max(end - group.window + 1, 0)
    return {token // group.block_size for token in range(first, end)}


def proving_blocks(group, end):
    """Of a draft model's group, the block behind ``end`` too: what the last one holds depends on the token after it."""
    return needed_blocks(group, end) | ({end // group.block_size} if group.is_draft else set())


def groups_of(draw_sizes=(4, 8, 12)):
    full = st.builds(CacheGroup, st.sampled_from(draw_sizes), is_draft=st.booleans())
    windows = st.integers(2, 40)
    sliding = st.builds(CacheGroup, st.sampled_from(draw_sizes), st.just(SLIDING), windows, is_draft=st.booleans())
    state = st.builds(CacheGroup, st.sampled_from(draw_sizes), st.just(STATE))
    return st.lists(st.one_of(full, sliding, state), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)
@given(groups=groups_of(), max_tokens=st.integers(0, 100), data=st.data())
def test_a_hit_is_the_longest_boundary_at_which_every_group_has_all_that_it_needs(groups, max_tokens, data):
    present = []
    for group in groups:
        count = data.draw(st.integers(0, max_tokens // group.block_size + 1))
        present.append(np.asarray(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_))
    setup = make_setup(groups=groups)
    servable = [
        end
        for end in range(setup.granularity, max_tokens + 1, setup.granularity)
        if all(
            all(index < len(have) and have[index] for index in proving_blocks(group, end))
            for group, have in zip(groups, present, strict=True)
        )
    ]
    assert AscendStoreCoordinator(setup).hit(present, max_tokens) == max(servable, default=0)


@settings(deadline=None)
@given(groups=groups_of(), start=st.integers(0, 10), steps=st.integers(1, 10))
def test_a_load_brings_what_the_boundary_needs_and_the_device_does_not_have(groups, start, steps):
    setup = make_setup(groups=groups)
    begin, end = start * setup.granularity, (start + steps) * setup.granularity
    subject = AscendStoreCoordinator(setup)
    for number, group in enumerate(groups):
        loaded = set(subject.load_blocks(number, begin, end).tolist())
        assert loaded == {index for index in needed_blocks(group, end) if index >= begin // group.block_size}


def test_a_load_that_ends_inside_a_block_brings_that_block():
    """A41: a prompt that is wholly in the pool is loaded up to one token before its end."""
    subject = coordinator(CacheGroup(4))
    assert subject.load_blocks(0, 4, 15).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("full", "states", "hit"),
    [
        ((1, 2, 3), ((4,),), 0),
        (tuple(range(1, 12)), ((8,), (4,), (4, 8, 12)), 0),
        (tuple(range(1, 12)), ((4, 8), (4,), (4, 8, 12)), 4),
    ],
)
def test_the_hit_is_a_common_boundary_and_not_the_least_of_the_groups_own_hits(full, states, hit):
    """A34, in units of 1k tokens: full attention in blocks of 1, states that were saved every 4."""
    groups = (CacheGroup(1), *(CacheGroup(4, STATE) for _ in states))
    present = [
        blocks(12, *(end - 1 for end in full)),
        *(blocks(3, *(end // 4 - 1 for end in saved)) for saved in states),
    ]
    assert coordinator(*groups, unit=1).hit(present, 12) == hit


def test_a_draft_models_last_block_is_not_enough_for_its_own_end():
    subject = coordinator(CacheGroup(4), CacheGroup(4, is_draft=True))
    assert subject.hit([blocks(3, 0, 1, 2), blocks(3, 0, 1, 2)], 12) == 8
    assert subject.hit([blocks(4, 0, 1, 2), blocks(4, 0, 1, 2, 3)], 16) == 12
    assert subject.hit([blocks(1, 0), blocks(1, 0)], 4) == 0


class TestStores:
    def test_full_attention_stores_every_whole_block(self):
        table = np.arange(10, 14)
        assert coordinator(CacheGroup(4)).store_blocks(0, 0, 15, table).tolist() == [0, 1, 2]

    def test_what_is_stored_already_is_not_stored_again(self):
        assert coordinator(CacheGroup(4)).store_blocks(0, 8, 16, np.arange(4)).tolist() == [2, 3]

    def test_blocks_that_the_table_does_not_have_are_not_stored(self):
        assert coordinator(CacheGroup(4)).store_blocks(0, 0, 16, np.arange(2)).tolist() == [0, 1]

    def test_a_sliding_window_stores_what_it_still_has(self):
        table = np.asarray([NULL_BLOCK, NULL_BLOCK, 5, 6])
        assert coordinator(CacheGroup(4, SLIDING, 8)).store_blocks(0, 0, 16, table).tolist() == [2, 3]

    def test_a_state_is_stored_only_where_all_groups_end_a_block(self):
        subject = coordinator(CacheGroup(4, STATE), CacheGroup(8))
        assert subject.store_blocks(0, 0, 16, np.asarray([1, 2, 3, 4])).tolist() == [1, 3]

    def test_the_null_block_is_never_stored_as_a_state(self):
        subject = coordinator(CacheGroup(4, STATE))
        assert subject.store_blocks(0, 0, 12, np.asarray([NULL_BLOCK, 7, NULL_BLOCK])).tolist() == [1]

    def test_full_attention_has_no_null_blocks_to_look_for(self):
        assert coordinator(CacheGroup(4)).store_blocks(0, 0, 8, np.asarray([3, 9])).tolist() == [0, 1]


def test_no_tokens_are_no_hit():
    assert coordinator(CacheGroup(4)).hit([blocks(3, 0, 1, 2)], 3) == 0
    assert coordinator(CacheGroup(4)).hit([blocks(0)], 0) == 0


def test_an_answer_for_the_wrong_number_of_groups_is_refused():
    with pytest.raises(ValueError, match="zip"):
        coordinator(CacheGroup(4)).hit([blocks(1, 0), blocks(1, 0)], 4)
