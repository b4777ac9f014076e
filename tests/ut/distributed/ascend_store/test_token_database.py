"""Keys of a request's blocks: each block by its own size and its own hash, each saved by exactly one of its holders."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.parts import make_setup
from vllm_ascend_ext.kv_pool.groups import CacheGroup
from vllm_ascend_ext.kv_pool.keys import Topology, hash_hex
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, as_indices

HASHES = [bytes([number]) * 32 for number in range(16)]


def test_each_group_has_blocks_of_its_own_size():
    """A36: 256 tokens, hashes of 16 tokens; group 0 in blocks of 128, group 1 of 64."""
    database = ChunkedTokenDatabase(make_setup(groups=(CacheGroup(128), CacheGroup(64)), hash_unit=16))
    assert [database.num_blocks(group, HASHES) for group in (0, 1)] == [2, 4]
    ends = {0: (8, 16), 1: (4, 8, 12, 16)}
    for group, last in ends.items():
        keys = database.keys(group, HASHES, as_indices(range(len(last))))
        assert [key.rsplit("@", 1)[1] for key in keys] == [HASHES[end - 1].hex() for end in last]
        assert all(f"@group:{group}@" in key for key in keys)


@settings(deadline=None)
@given(scale=st.sampled_from([1, 2, 8]), as_text=st.booleans())
def test_keys_do_not_depend_on_the_form_of_the_hashes(scale, as_text):
    """A32: raw bytes from the scheduler's own process, hex text through the look-up's wire."""
    database = ChunkedTokenDatabase(make_setup(groups=(CacheGroup(4 * scale),)))
    hashes = [hash_hex(block_hash) for block_hash in HASHES] if as_text else HASHES
    indices = as_indices(range(len(HASHES) // scale))
    assert database.keys(0, hashes, indices) == database.keys(0, HASHES, indices)
    assert database.owner_keys(0, hashes, 0) == [database.keys(0, HASHES, indices)]


def test_only_the_blocks_that_are_asked_for_have_keys():
    database = ChunkedTokenDatabase(make_setup())
    every = database.keys(0, HASHES, as_indices(range(16)))
    assert database.keys(0, HASHES, as_indices([3, 1])) == [every[3], every[1]]
    assert database.keys(0, HASHES, as_indices([])) == []
    assert database.owner_keys(0, HASHES, 14) == [every[14:]]
    assert database.owner_keys(0, HASHES, 99) == [[]]


def test_a_block_without_a_hash_has_no_key():
    with pytest.raises(IndexError):
        ChunkedTokenDatabase(make_setup()).keys(0, HASHES, as_indices([16]))


@pytest.mark.parametrize("scale", [1, 2])
def test_the_hash_of_a_block_is_the_one_in_its_key(scale):
    database = ChunkedTokenDatabase(make_setup(groups=(CacheGroup(4 * scale),)))
    for index in range(16 // scale):
        (key,) = database.keys(0, HASHES, as_indices([index]))
        assert key.endswith(database.hash_of(0, HASHES, index).hex())


@pytest.mark.parametrize(
    "topology",
    [
        Topology(num_kv_heads=8),
        Topology(tp_size=4, num_kv_heads=4),
        Topology(tp_size=4, num_kv_heads=2),
        Topology(tp_size=8, num_kv_heads=1),
        Topology(tp_size=4, num_kv_heads=2, dcp_size=2),
        Topology(tp_size=8, num_kv_heads=1, dcp_size=2),
        Topology(tp_size=2, num_kv_heads=2, pp_size=2, pcp_size=2),
    ],
    ids=str,
)
def test_every_shard_of_every_block_is_saved_by_exactly_one_rank(topology):
    """Ranks with the same bytes take turns; ranks with different bytes never do. A23: every DCP rank saves its own."""
    indices = as_indices(range(9))
    saved: dict[str, int] = {}
    for tp, pp, pcp in product(range(topology.tp_size), range(topology.pp_size), range(topology.pcp_size)):
        rank = replace(topology, tp_rank=tp, pp_rank=pp, pcp_rank=pcp, dcp_rank=tp % topology.dcp_size)
        database = ChunkedTokenDatabase(make_setup(topology=rank))
        for key in database.keys(0, HASHES, database.own_share(indices)):
            saved[key] = saved.get(key, 0) + 1
    asked = ChunkedTokenDatabase(make_setup(topology=topology)).owner_keys(0, HASHES[:9], 0)
    assert saved == {key: 1 for owner in asked for key in owner}


def test_a_share_keeps_the_order_of_the_blocks():
    database = ChunkedTokenDatabase(make_setup(topology=Topology(tp_size=2, tp_rank=1, num_kv_heads=1)))
    assert database.own_share(np.asarray([1, 2, 3, 5])).tolist() == [1, 3, 5]
