"""Hits: what every rank and every group can serve, and nothing at all when the store's answer can't be trusted."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fixtures.memory_store import MemoryStore
from fixtures.parts import make_setup
from fixtures.stores import FlakyStore, answering, changing, raising
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.hits import HitFinder
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming

HASHES = [bytes([number]) * 32 for number in range(8)]


class Finder:
    """A HitFinder on a store in which single keys can be made present."""

    def __init__(self, naming=Naming.BLOCK, *, setup=None, **options):
        self.setup = setup or make_setup(**options)
        self.store = FlakyStore(MemoryStore())
        self.stats = Stats()
        self.finder = HitFinder(self.setup, StoreClient(self.store, self.stats), self.stats, naming)
        self.database = ChunkedTokenDatabase(self.setup, naming)

    def keys(self, group=0, owner=0):
        return self.database.owner_keys(group, HASHES, 0)[owner]

    def fill(self, *keys):
        self.store.inner.values.update(dict.fromkeys(keys, b"x"))

    def hit(self, tokens=32, hbm=0, hashes=HASHES):
        return self.finder.hit(tokens, hashes, hbm)


def test_the_hit_is_the_unbroken_run_of_blocks_from_the_first_on():
    finder = Finder()
    keys = finder.keys()
    for present, hit in [((), 0), ((0,), 4), ((0, 1, 2), 12), ((0, 1, 3), 8), ((1, 2), 0), (range(8), 32)]:
        finder.store.inner.values.clear()
        finder.fill(*(keys[i] for i in present))
        assert finder.hit() == hit


def test_no_more_than_was_asked_for_is_answered():
    finder = Finder()
    finder.fill(*finder.keys())
    assert [finder.hit(tokens) for tokens in (0, 3, 4, 15, 16, 31, 32, 100)] == [0, 0, 4, 12, 16, 28, 32, 32]


def test_hashes_behind_the_tokens_asked_for_are_not_looked_up():
    finder = Finder()
    finder.hit(9)
    assert finder.store.calls("exists") == [finder.keys()[:2]]


def test_hex_text_and_raw_bytes_find_the_same():
    """A32: text is what comes through the wire."""
    finder = Finder()
    finder.fill(*finder.keys()[:3])
    assert finder.hit() == finder.hit(hashes=[block_hash.hex() for block_hash in HASHES]) == 12


class TestRanks:
    @pytest.mark.parametrize("naming", [Naming.BLOCK, Naming.GVA])
    def test_a_block_is_there_when_every_shard_of_it_is(self, naming):
        """A23: whatever the path, a key for each rank that owns a part, all of them different."""
        finder = Finder(naming, topology=Topology(tp_size=2, pp_size=2, pcp_size=2, dcp_size=2, num_kv_heads=2))
        owners = range(16)
        for missing in owners:
            finder.store.inner.values.clear()
            finder.fill(*itertools.chain(*(finder.keys(owner=owner) for owner in owners)))
            assert len(finder.store.inner.values) == 16 * len(HASHES)
            assert finder.hit() == 32
            del finder.store.inner.values[finder.keys(owner=missing)[3]]
            assert finder.hit() == 12

    def test_by_layer_it_is_there_when_every_layer_of_every_shard_is(self):
        """A23: both stages count their layers from 0."""
        topology = Topology(tp_size=2, pp_size=2, pcp_size=2, dcp_size=2, num_kv_heads=2)
        setup = replace(make_setup(topology=topology), stage_layers=((3,), (2,)))
        finder = Finder(Naming.LAYER, setup=setup)
        for part in (finder.finder, finder.database):
            part.set_layers([3])
        owners = range(2 * 2 * 2 * (3 + 2))  # PCP, DCP and head ranks, and the layers of both stages
        everything = [key for owner in owners for key in finder.keys(owner=owner)]
        assert len(set(everything)) == len(everything)
        for missing in owners:
            finder.store.inner.values.clear()
            finder.fill(*everything)
            assert finder.hit() == 32
            del finder.store.inner.values[finder.keys(owner=missing)[3]]
            assert finder.hit() == 12

    def test_a_stage_that_was_evicted_ends_the_hit(self):
        """A38: stage 0 has blocks 0 to 3, stage 1 has 0 and 1."""
        finder = Finder(topology=Topology(pp_size=2, num_kv_heads=8))
        finder.fill(*finder.keys(owner=0)[:4], *finder.keys(owner=1)[:2])
        assert finder.hit(16) == 8

    def test_ranks_with_the_same_heads_need_one_copy(self):
        finder = Finder(topology=Topology(tp_size=4, num_kv_heads=1))
        finder.fill(*finder.keys())
        assert finder.hit() == 32


class TestGroups:
    def test_the_hit_is_a_boundary_that_all_groups_can_serve(self):
        """A34, end to end: states are saved at 8 and 16 tokens, full attention up to 12."""
        finder = Finder(groups=(CacheGroup(4), CacheGroup(8, GroupKind.STATE)))
        finder.fill(*finder.keys(0)[:3], *finder.keys(1)[:2])
        assert finder.hit() == 8

    def test_a_sliding_window_needs_only_its_end(self):
        finder = Finder(groups=(CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, 5)))
        finder.fill(*finder.keys(0)[:4], finder.keys(1)[3])
        assert finder.hit() == 16


class TestHbm:
    def test_blocks_on_the_device_are_not_asked_for_and_count_as_there(self):
        finder = Finder()
        finder.fill(finder.keys()[2])
        assert finder.hit(hbm=8) == 12
        assert finder.store.calls("exists") == [finder.keys()[2:]]

    def test_when_all_is_on_the_device_nothing_is_asked(self):
        finder = Finder()
        assert finder.hit(16, hbm=16) == 16
        assert finder.hit(16, hbm=400) == 16
        assert finder.store.calls("exists") == []

    def test_only_full_attention_is_known_to_keep_its_first_blocks(self):
        finder = Finder(groups=(CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, 40)))
        finder.fill(*finder.keys(0), *finder.keys(1)[2:])
        assert finder.hit(hbm=8) == 0, "the window reaches back to blocks that the device may have dropped"


class TestFailures:
    """A31: an answer that failed for any key is 0, never the part that was reached."""

    @pytest.mark.parametrize(
        "action",
        [
            raising(OSError("down")),
            answering(None),
            answering([]),
            changing(lambda codes: codes[:-1]),
            changing(lambda codes: [*codes, 1]),
            changing(lambda codes: [*codes[:-1], None]),
            changing(lambda codes: [*codes[:-1], -1]),
            changing(lambda codes: [*codes[:-1], 2]),
            answering([int(Status.UNAVAILABLE)] * 20),
        ],
        ids=["raises", "none", "empty", "short", "long", "none-inside", "unknown", "two", "unavailable"],
    )
    def test_a_failed_check_is_no_hit_and_is_counted(self, action, caplog):
        groups = (CacheGroup(4), CacheGroup(4), CacheGroup(8))
        finder = Finder(groups=groups)
        finder.fill(*itertools.chain(*(finder.keys(group) for group in range(3))))
        finder.store.script("exists", action)
        assert finder.hit() == 0
        assert finder.stats.get("lookup_exists_failed") == 1
        assert len([record for record in caplog.records if "lookup_exists_failed" in record.message]) == 1
        finder.store.check_all_played()

    def test_an_engine_that_is_left_alone_has_no_hits(self):
        finder = Finder()
        finder.fill(*finder.keys())
        finder.finder._client.breaker.trip()
        assert finder.hit() == 0
        assert finder.store.calls("exists") == []


def test_numpy_answers_are_understood():
    finder = Finder()
    finder.store.script("exists", answering(np.asarray([1, 1, 0, 1, 1, 1, 1, 1])))
    assert finder.hit() == 8
