"""Every way to split a model, on every path: what the ranks save is what the ranks of the next engine compute on.

The small engine compares each byte on each rank. A block of which one rank's part is gone is not there for any of them.
"""

from dataclasses import replace

import pytest

from fixtures.gva_stores import GvaPool, LaxGvaStore, StrictGvaStore
from fixtures.memory_store import MemoryStore
from fixtures.parts import GENEROUS
from fixtures.world import World
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.keys import Topology

PROMPT = range(30)
LAYERS = 2
ONE_GROUP = (CacheGroup(4),)

TOPOLOGIES = {
    "tp 2": Topology(2, num_kv_heads=2),
    "tp 4, 2 heads": Topology(4, num_kv_heads=2),  # put_step 2: neighbours take turns
    "tp 4, MLA": Topology(4, num_kv_heads=1),
    "pp 2": Topology(pp_size=2, num_kv_heads=8),
    "pcp 2": Topology(pcp_size=2, num_kv_heads=8),
    "tp 2, dcp 2, MLA": Topology(2, dcp_size=2, num_kv_heads=1),
    "tp 4, dcp 2, MLA": Topology(4, dcp_size=2, num_kv_heads=1),  # shards and replicas at once
    "tp 4, 2 heads, dcp 2": Topology(4, dcp_size=2, num_kv_heads=2),
    "all of them": Topology(2, pp_size=2, pcp_size=2, dcp_size=2, num_kv_heads=1),
}


class Pool:
    """A store of one sort, and the keys in it."""

    def __init__(self, path):
        self.path = path
        self.memory = MemoryStore()
        self.gva = GvaPool(1 << 18)

    @property
    def layerwise(self):
        return self.path != "whole"

    def client(self):
        if self.path in ("whole", "key"):
            self.memory.reopen()
            return self.memory
        return (LaxGvaStore if self.path == "lax" else StrictGvaStore)(self.gva)

    def published(self):
        return list(self.memory.values) if self.path in ("whole", "key") else self.gva.published()

    def evict(self, key):
        assert self.memory.values.pop(key) if self.path in ("whole", "key") else self.gva.evict(key)


def engine(pool, folder, topology, groups=ONE_GROUP, **options):
    """A world of one engine; its ranks share a client, as those of one process would, or have their own."""
    client = pool.client() if pool.path in ("whole", "key") else None
    return World.open(
        client if client is not None else pool.client,
        folder,
        **{**GENEROUS, "use_layerwise": pool.layerwise, **options},
        topology=topology,
        groups=groups,
        stage_layers=((LAYERS,) * len(groups),) * topology.pp_size,
        engine={"layers": LAYERS, "prefix_caching": False, "chunk": 8 if len(groups) > 1 else 1 << 30},
    )


def serve(pool, folder, topology, **options):
    """One engine's whole life; what its request loaded, and how many blocks of it are in the store with right bytes."""
    world = engine(pool, folder, topology, **options)
    request = world.engine.add("a", PROMPT)
    world.engine.run()
    world.engine.check_idle()
    assert not world.engine.invalid_blocks + world.engine.failed_loads
    audited = world.audit(pool.client(), [request])
    assert world.close() == []
    return request, audited


@pytest.mark.parametrize("path", ["whole", "key", "lax", "strict"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_what_one_engine_has_saved_the_next_one_computes_on(tmp_path, topology, path):
    pool = Pool(path)
    request, audited = serve(pool, tmp_path, topology)
    assert request.loaded_tokens == 0
    assert audited == 7 * topology.world_size
    parts = len(list(topology.owners())) * (LAYERS if path == "key" else 1)
    assert len(pool.published()) == 7 * parts, "each part is in the store once, whoever has it"
    request, _ = serve(pool, tmp_path, topology)
    assert request.loaded_tokens == 28


@pytest.mark.parametrize("path", ["whole", "key", "strict"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_block_that_one_rank_has_lost_is_there_for_none(tmp_path, topology, path):
    """A23, A38."""
    pool = Pool(path)
    request, _ = serve(pool, tmp_path, topology)
    third = request.block_hashes[2].hex()
    victims = sorted(key for key in pool.published() if third in key)
    assert len(victims) == len(list(topology.owners())) * (LAYERS if path == "key" else 1)
    pool.evict(victims[-1])
    request, _ = serve(pool, tmp_path, topology)
    assert request.loaded_tokens == 8
    assert sorted(key for key in pool.published() if third in key) == victims, "it was saved anew"


@pytest.mark.parametrize("path", ["whole", "key", "strict"])
@pytest.mark.parametrize("name", ["tp 2", "tp 4, MLA", "pp 2", "pcp 2", "tp 2, dcp 2, MLA"])
def test_so_it_is_with_several_groups(tmp_path, name, path):
    """Full attention, a window and a recurrent state; of the last each rank has a part, however few heads there are."""
    topology = TOPOLOGIES[name]
    groups = (CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, window=6), CacheGroup(8, GroupKind.STATE))
    pool = Pool(path)
    for loaded in (0, 24):
        request, _ = serve(pool, tmp_path, topology, groups=groups)
        assert request.loaded_tokens == loaded


@pytest.mark.parametrize("path", ["whole", "key", "strict"])
def test_engines_that_split_blocks_otherwise_find_nothing(tmp_path, path):
    """A23, A55: what a rank of two has is not what the only rank has, and nobody takes it for that."""
    pool = Pool(path)
    whole = Topology(num_kv_heads=2)
    serve(pool, tmp_path, whole)
    for other in ({"pcp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "dcp_size": 2, "num_kv_heads": 1}):
        request, _ = serve(pool, tmp_path, replace(whole, **other))
        assert request.loaded_tokens == 0
