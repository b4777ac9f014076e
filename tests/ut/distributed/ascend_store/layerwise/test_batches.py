"""Addresses of one layer are those that a plain loop over blocks and pieces gives, however they are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerBatchBuilder, LayerPlan
from vllm_ascend_ext.kv_pool.layout import BlockLayout

DIGEST = 16


@st.composite
def caches(draw):
    """(layout, block ids, global addresses of their values)."""
    layers, per_layer = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    segments = layers * per_layer
    length = [draw(st.integers(1, 64)) for _ in range(segments)]
    stride = [size + draw(st.integers(0, 16)) for size in length]
    base = [1 + number * 100_000 for number in range(segments)]
    ids = draw(st.lists(st.integers(0, 99), max_size=6))
    gvas = [draw(st.integers(1, 1 << 40)) for _ in ids]
    layout = BlockLayout(base, length, stride, 100, per_layer)
    return layout, np.asarray(ids, dtype=np.int64), np.asarray(gvas, dtype=np.int64)


def expected(layout, layer, ids, gvas):
    """{(global address, device address, bytes)} of every byte range, by the definition of the value's layout."""
    found = []
    for block, gva in zip(ids.tolist(), gvas.tolist(), strict=True):
        for piece in range(layer * layout.per_layer, (layer + 1) * layout.per_layer):
            at = gva + sum(layout.length[:piece])
            found.append((at, layout.base[piece] + block * layout.stride[piece], layout.length[piece]))
    return sorted(found)


@given(caches(), st.data())
def test_every_layer_of_every_block_has_its_place(cache, data):
    layout, ids, gvas = cache
    layer = data.draw(st.integers(0, layout.num_layers - 1))
    ranges = LayerBatchBuilder(layout).build(layer, ids, gvas)
    assert ranges.blocks == len(ids)
    flat = ranges.flat(0, len(ids))
    assert sorted(zip(*(part.tolist() for part in flat), strict=True)) == expected(layout, layer, ids, gvas)


@given(caches(), st.integers(1, 4))
def test_cutting_by_blocks_loses_and_doubles_nothing(cache, step):
    layout, ids, gvas = cache
    ranges = LayerBatchBuilder(layout).build(0, ids, gvas)
    parts = [ranges.flat(start, start + step) for start in range(0, len(ids), step)]
    joined = sorted(entry for part in parts for entry in zip(*(column.tolist() for column in part), strict=True))
    assert joined == expected(layout, 0, ids, gvas)


@given(caches(), st.integers(1, 40))
def test_cutting_by_bytes_covers_the_same_bytes_in_short_pieces(cache, limit):
    layout, ids, gvas = cache
    whole = LayerBatchBuilder(layout).build(0, ids, gvas)
    cut = whole.split(limit)
    gva, addr, size = (column.tolist() for column in cut.flat(0, len(ids)))
    assert all(0 < bytes_ <= limit for bytes_ in size)
    covered = sorted((g + i, a + i) for g, a, n in zip(gva, addr, size, strict=True) for i in range(n))
    wanted = sorted((g + i, a + i) for g, a, n in expected(layout, 0, ids, gvas) for i in range(n))
    assert covered == wanted


def test_digests_stand_behind_the_block_one_for_each_layer():
    layout = BlockLayout([100, 200, 300, 400], [8, 4, 8, 4], [8, 4, 8, 4], 10, per_layer=2)
    builder = LayerBatchBuilder(layout, digests=True)
    gvas = np.asarray([1000, 5000])
    assert builder.value_bytes == 24 + 2 * DIGEST
    assert builder.digest_gvas(0, gvas).tolist() == [1024, 5024]
    assert builder.digest_gvas(1, gvas).tolist() == [1040, 5040]
    ranges = builder.build(1, np.asarray([0, 3]), gvas)
    more = ranges.with_piece(builder.digest_gvas(1, gvas), np.asarray([7, 8]), DIGEST)
    gva, addr, size = (column.tolist() for column in more.flat(0, 2))
    assert (gva[-2:], addr[-2:], size[-2:]) == ([1040, 5040], [7, 8], [DIGEST] * 2)


class TestPlan:
    LAYOUT = BlockLayout([10, 20], [1, 1], [1, 1], 4)

    def test_one_group_follows_the_other_if_nothing_is_said(self):
        plan = LayerPlan.of([self.LAYOUT, self.LAYOUT])
        assert plan.places == ((0, 0), (0, 1), (1, 0), (1, 1))
        assert len(plan) == 4

    def test_the_order_of_the_forward_pass_counts(self):
        assert LayerPlan.of([self.LAYOUT], [(0, 1), (0, 0)]).places == ((0, 1), (0, 0))

    @pytest.mark.parametrize("places", [[(0, 0)], [(0, 0), (0, 0)], [(0, 0), (0, 1), (0, 2)], [(1, 0), (0, 0)]])
    def test_each_layer_is_needed_once(self, places):
        with pytest.raises(ConfigError, match="exactly once"):
            LayerPlan.of([self.LAYOUT], places)

    def test_layers_in_one_buffer_follow_each_other(self):
        layout = BlockLayout([10, 20, 30, 20, 30, 20], [1] * 6, [1] * 6, 4)
        plan = LayerPlan.of([layout])
        assert plan.previous == (None, None, None, 1, 2, 3)
        assert plan.shared == (False, True, True, True, True, True)
        assert plan.shares_buffers

    def test_groups_do_not_share_buffers_though_their_tensors_overlap(self):
        """In a hybrid model's pool a block belongs to one group at a time."""
        assert not LayerPlan.of([self.LAYOUT, self.LAYOUT]).shares_buffers
