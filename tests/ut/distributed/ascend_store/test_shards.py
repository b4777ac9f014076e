"""Engines that split a model differently read what the other saved: same keys, same bytes, for every rank of both."""

from itertools import product
from typing import ClassVar

import numpy as np
import pytest

from fixtures.memory_store import MemoryStore
from fixtures.parts import GENEROUS, make_setup
from fixtures.world import World
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.shards import Sharding
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, as_indices

HASHES = [bytes([n]) * 32 for n in range(4)]


def keys_of_all_ranks(topology, **config):
    """{key: how many ranks have it} of block 0, as it is saved."""
    found = {}
    for tp, pp in product(range(topology.tp_size), range(topology.pp_size)):
        rank = Topology(topology.tp_size, tp, topology.pp_size, pp, num_kv_heads=topology.num_kv_heads)
        database = ChunkedTokenDatabase(make_setup(topology=rank, **config))
        for shard in range(database.num_shards(0)):
            for key in database.keys(0, HASHES, as_indices([0]), shard):
                found[key] = found.get(key, 0) + 1
    return found


def asked(topology, **config):
    """The keys of block 0 that a look-up asks for."""
    return {keys[0] for keys in ChunkedTokenDatabase(make_setup(topology=topology, **config)).owner_keys(0, HASHES, 0)}


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"),
    [(4, 2, 4), (2, 4, 4), (1, 4, 4), (8, 2, 4), (1, 8, 4), (2, 8, 8), (4, 1, 1), (2, 2, 2)],
)
def test_both_sides_have_the_same_keys_and_look_for_them(prefill, decode, heads):
    saver = Topology(prefill, num_kv_heads=heads)
    loader = Topology(decode, num_kv_heads=heads)
    saved = keys_of_all_ranks(saver, kv_role="kv_producer", decode_tp_size=decode)
    loaded = keys_of_all_ranks(loader, kv_role="kv_consumer", prefill_tp_size=prefill)
    assert saved.keys() == loaded.keys()
    assert len(saved) == min(heads, max(prefill, decode))
    assert asked(saver, kv_role="kv_producer", decode_tp_size=decode) == set(saved)
    assert asked(loader, kv_role="kv_consumer", prefill_tp_size=prefill) == set(saved)


def test_the_finer_split_is_that_of_an_engine_which_knows_no_other():
    """So a prefilling engine of vllm-ascend, which only the decoding one has to adapt to, is met as it is."""
    finer = keys_of_all_ranks(Topology(4, num_kv_heads=4))
    assert keys_of_all_ranks(Topology(2, num_kv_heads=4), kv_role="kv_consumer", prefill_tp_size=4) == finer


def test_stages_of_the_prefilling_pipeline_have_their_own_keys():
    saved = keys_of_all_ranks(Topology(pp_size=2, num_kv_heads=1), kv_role="kv_producer")
    loaded = keys_of_all_ranks(Topology(num_kv_heads=1), kv_role="kv_consumer", prefill_pp_size=2)
    assert saved == loaded
    assert len(saved) == 2


class TestLayouts:
    def layout(self, layers=4, heads_first=False):
        return BlockLayout([1000 * (n + 1) for n in range(layers)], [48] * layers, [48] * layers, 8, 1, heads_first)

    def test_token_by_token_where_tokens_come_first(self):
        """3 tokens of 16 bytes, of which each share has 4."""
        part = self.layout(1).heads(1, 4, 3)
        addresses, sizes = part.addresses(np.asarray([0, 2]))
        assert addresses.tolist() == [[1004, 1020, 1036], [1100, 1116, 1132]]
        assert sizes.tolist() == [[4, 4, 4]] * 2

    def test_in_one_piece_where_heads_come_first(self):
        part = self.layout(1, heads_first=True).heads(1, 4, 3)
        assert part.addresses(np.asarray([0]))[0].tolist() == [[1012]]
        assert part.block_bytes == 12

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_the_parts_are_the_whole(self, heads_first):
        layout = self.layout(2, heads_first)
        every = []
        for part in range(4):
            addresses, sizes = layout.heads(part, 4, 3).addresses(np.asarray([5]))
            for start, size in zip(addresses[0].tolist(), sizes[0].tolist(), strict=True):
                every += range(start, start + size)
        whole = [
            byte for start in layout.addresses(np.asarray([5]))[0][0].tolist() for byte in range(start, start + 48)
        ]
        assert sorted(every) == sorted(whole)

    def test_what_can_not_be_divided_is_refused(self):
        with pytest.raises(ConfigError, match="multiple of 3 times 5"):
            self.layout().heads(0, 5, 3)
        with pytest.raises(ConfigError, match="heads_first=None"):
            self.layout(heads_first=None).heads(0, 4, 3)

    @pytest.mark.parametrize(
        ("layers", "partition", "sizes"),
        [(4, None, [2, 2]), (5, None, [3, 2]), (5, "1,4", [1, 4])],
    )
    def test_layers_are_divided_among_the_stages(self, layers, partition, sizes):
        setup = make_setup(
            topology=Topology(num_kv_heads=1),
            kv_role="kv_consumer",
            prefill_pp_size=2,
            prefill_pp_layer_partition=partition,
        )
        parts = Sharding.of(setup, 0).layouts(self.layout(layers), 4)
        assert [part.num_layers for part in parts] == sizes
        assert [base for part in parts for base in part.base] == list(self.layout(layers).base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": Topology(2, num_kv_heads=6), "decode_tp_size": 4}, "can't be divided among 4 ranks"),
        ({"topology": Topology(num_kv_heads=4), "decode_tp_size": 2, "use_layerwise": True}, "without use_layerwise"),
        (
            {"topology": Topology(num_kv_heads=4), "decode_tp_size": 2, "groups": (CacheGroup(4), CacheGroup(8))},
            "one KV-cache group",
        ),
        (
            {"topology": Topology(pp_size=2, num_kv_heads=1), "kv_role": "kv_consumer", "prefill_pp_size": 2},
            "without pipeline parallelism",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ChunkedTokenDatabase(make_setup(**options))


@pytest.mark.parametrize("partition", ["1", "1,2,3", "0,4", "a,b", ""])
def test_a_partition_that_can_not_be_read_is_refused(partition):
    setup = make_setup(
        topology=Topology(num_kv_heads=1),
        kv_role="kv_consumer",
        prefill_pp_size=2,
        prefill_pp_layer_partition=partition,
    )
    with pytest.raises(ConfigError, match="prefill_pp_layer_partition"):
        Sharding.of(setup, 0)


def test_a_partition_of_another_number_of_layers_is_refused():
    setup = make_setup(
        topology=Topology(num_kv_heads=1),
        kv_role="kv_consumer",
        prefill_pp_size=2,
        prefill_pp_layer_partition="1,1",
    )
    with pytest.raises(ConfigError, match="must add up to the 4 layers"):
        Sharding.of(setup, 0).layouts(BlockLayout([1, 2, 3, 4], [1] * 4, [1] * 4, 2), 4)


class TestStates:
    """A recurrent state is sharded over all ranks, however few KV heads the attention layers have."""

    SETUP: ClassVar = {"groups": (CacheGroup(4), CacheGroup(8, GroupKind.STATE)), "hash_unit": 4}

    def database(self, tp, rank, dcp=1):
        topology = Topology(tp, rank, dcp_size=dcp, dcp_rank=rank % dcp, num_kv_heads=1)
        return ChunkedTokenDatabase(make_setup(topology=topology, **self.SETUP))

    @pytest.mark.parametrize("dcp", [1, 2])
    def test_every_rank_saves_its_own_under_a_key_of_its_own(self, dcp):
        ranks = [self.database(2, rank, dcp) for rank in range(2)]
        keys = [database.keys(1, HASHES, database.own_share(as_indices([0, 1]), 1)) for database in ranks]
        assert len({key for own in keys for key in own}) == 4
        wanted = {key for owner in ranks[0].owner_keys(1, HASHES, 0) for key in owner}
        assert wanted == {key for own in keys for key in own}

    def test_attention_is_shared_all_the_same(self):
        ranks = [self.database(2, rank) for rank in range(2)]
        assert [database.own_share(as_indices([0, 1, 2]), 0).tolist() for database in ranks] == [[0, 2], [1]]


FOUR = {"layers": 3, "shares": 4}
PRODUCER, CONSUMER = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer", "consumer_is_to_load": True}


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (
            {**PRODUCER, "topology": Topology(4, num_kv_heads=4), "decode_tp_size": 2, "engine": FOUR},
            {**CONSUMER, "topology": Topology(2, num_kv_heads=4), "prefill_tp_size": 4, "engine": FOUR},
        ),
        (
            {**PRODUCER, "topology": Topology(1, num_kv_heads=4), "decode_tp_size": 8, "engine": FOUR},
            {**CONSUMER, "topology": Topology(8, num_kv_heads=4), "prefill_tp_size": 1, "engine": FOUR},
        ),
        (
            {**PRODUCER, "topology": Topology(1, num_kv_heads=1), "decode_tp_size": 2},
            {**CONSUMER, "topology": Topology(2, num_kv_heads=1), "prefill_tp_size": 1},
        ),
        (
            {**PRODUCER, "topology": Topology(pp_size=2, num_kv_heads=1), "engine": {"layers": 2}},
            {**CONSUMER, "topology": Topology(num_kv_heads=1), "prefill_pp_size": 2, "engine": {"layers": 4}},
        ),
    ],
    ids=["tp 4 to 2", "tp 1 to 8", "MLA, tp 1 to 2", "pp 2 to 1"],
)
def test_one_engine_computes_on_what_the_other_has_saved(tmp_path, saver, loader):
    store = MemoryStore()
    for options, loaded in ((saver, 0), (loader, 28)):
        store.reopen()
        world = World.open(store, tmp_path, **{**GENEROUS, **options})
        request = world.engine.add("a", range(30))
        world.engine.run()
        world.engine.check_idle()
        assert request.loaded_tokens == loaded
        assert world.close() == []
