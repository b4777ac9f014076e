"""Layouts: block b of segment s is exactly the bytes that an engine would find there, and no id leaves the cache."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.layout import BlockLayout


def ids(*values):
    return np.asarray(values, dtype=np.int64)


@settings(deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gap=st.integers(0, 3),
    data=st.data(),
)
def test_a_block_is_where_the_memory_has_it(num_blocks, lengths, gap, data):
    caches = [np.random.default_rng(i).integers(0, 256, (num_blocks, n + gap), np.uint8) for i, n in enumerate(lengths)]
    layout = BlockLayout(
        [cache.ctypes.data for cache in caches], lengths, [cache.shape[1] for cache in caches], num_blocks
    )
    block_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=4))
    addresses, sizes = layout.addresses(ids(*block_ids))
    assert addresses.shape == sizes.shape == (len(block_ids), len(lengths))
    for row, block in enumerate(block_ids):
        for segment, cache in enumerate(caches):
            found = ctypes.string_at(int(addresses[row, segment]), int(sizes[row, segment]))
            assert found == cache[block, : lengths[segment]].tobytes()
    assert layout.block_bytes == sum(lengths)


def test_layers_are_runs_of_segments_in_order():
    layout = BlockLayout([1000, 2000, 3000, 4000], [16, 8, 16, 8], [64, 32, 64, 32], 10, per_layer=2)
    assert layout.num_layers == 2
    addresses, sizes = layout.layer_addresses(ids(3, 0), 1)
    assert addresses.tolist() == [[3000 + 3 * 64, 4000 + 3 * 32], [3000, 4000]]
    assert sizes.tolist() == [[16, 8], [16, 8]]
    assert [layout.layer_offset(layer) for layer in range(3)] == [0, 24, 48]


def test_the_layers_of_a_block_make_up_the_block():
    layout = BlockLayout([1000, 2000, 3000, 4000], [16, 8, 24, 8], [64, 32, 64, 32], 10, per_layer=2)
    block = ids(7)
    whole = np.hstack(layout.addresses(block))
    layers = [layout.layer_addresses(block, layer) for layer in range(layout.num_layers)]
    assert np.hstack([np.hstack(part) for part in zip(*layers, strict=True)]).tolist() == whole.tolist()
    assert layout.layer_offset(layout.num_layers) == layout.block_bytes


def test_ranges_reach_from_the_first_byte_to_the_last():
    assert BlockLayout([1000, 5000], [16, 8], [64, 32], 10).ranges() == [(1000, 9 * 64 + 16), (5000, 9 * 32 + 8)]


@pytest.mark.parametrize("block", [-1, 10, 1 << 40])
def test_an_id_outside_the_cache_is_refused(block):
    layout = BlockLayout([1000], [16], [16], 10)
    with pytest.raises(ConfigError, match=r"allowed are 0\.\.9"):
        layout.addresses(ids(3, block))
    with pytest.raises(ConfigError, match=r"allowed are 0\.\.9"):
        layout.layer_addresses(ids(block), 0)


def test_no_blocks_have_no_addresses():
    addresses, sizes = BlockLayout([1000, 2000], [16, 16], [16, 16], 10).addresses(ids())
    assert addresses.shape == sizes.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([], [], [], 1), "at least one segment"),
        (([1], [1, 2], [1], 1), "one entry per segment"),
        (([1], [1], [1, 2], 1), "one entry per segment"),
        (([1], [1], [1], 0), "num_blocks=0"),
        (([1], [1], [1], -1), "num_blocks=-1"),
        (([0], [1], [1], 1), "base="),
        (([1], [0], [1], 1), "length="),
        (([1], [1], [-1], 1), "stride="),
        (([1, 2, 3], [1, 1, 1], [1, 1, 1], 1, 2), "per_layer=2"),
        (([1], [1], [1], 1, 0), "per_layer=0"),
    ],
)
def test_a_layout_that_can_not_be_is_refused_by_name(arguments, named):
    with pytest.raises(ConfigError, match=named):
        BlockLayout(*arguments)
