"""Where layers share buffers, a step loads all that was computed and saves all that it computes."""

from itertools import count

import pytest

from fixtures.engine_memory import Request
from fixtures.gva_stores import GvaPool, LaxGvaStore, StrictGvaStore
from fixtures.parts import GENEROUS, make_setup
from fixtures.world import World
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.orders import Orders
from vllm_ascend_ext.kv_pool.requests import LoadSpec, ScheduledRequest
from vllm_ascend_ext.kv_pool.reuse import reuse_orders
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming

REUSE = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}


def step(before, tokens, hit=None):
    """The jobs of one step of a request of 18 tokens in blocks of 4."""
    setup = make_setup(**REUSE)
    request = Request("r", list(range(18)), 18, 20, 4)
    meta = reuse_orders(setup, request, ScheduledRequest("r", before, tokens, ([1, 2, 3, 4, 5],)), hit, count(1))
    orders = Orders(setup, ChunkedTokenDatabase(setup, Naming.GVA))
    return orders.load_job(meta) if meta.load else None, orders.save_job(meta)


def test_the_first_step_loads_nothing_and_saves_all_it_computes():
    load, save = step(0, 10)
    assert load is None
    (part,) = save.parts
    assert part.block_ids.tolist() == [1, 2, 3]
    assert part.partial
    assert part.keys[-1].endswith("@partial@r@0@2@10@0")


def test_a_step_that_ends_with_a_block_saves_no_part_of_one():
    (part,) = step(0, 8)[1].parts
    assert part.block_ids.tolist() == [1, 2]
    assert not part.partial


def test_the_next_step_loads_what_the_last_one_saved_and_saves_from_the_block_that_it_goes_on_in():
    _, saved = step(0, 10)
    load, save = step(10, 4)
    assert load.parts[0].keys == saved.parts[0].keys
    assert load.parts[0].block_ids.tolist() == [1, 2, 3]
    assert load.parts[0].resident == 3  # layers with a buffer of their own have it all
    assert save.parts[0].block_ids.tolist() == [3, 4]
    assert save.parts[0].keys[-1].endswith("@partial@r@0@3@14@0")


def test_a_hit_is_loaded_into_every_layer():
    load, save = step(8, 10, LoadSpec(7, 4, 8, False))
    (part,) = load.parts
    assert load.job_id == 7
    assert part.block_ids.tolist() == [1, 2]
    assert part.resident == 1  # what vLLM's own prefix cache had
    assert not part.partial
    assert save.parts[0].block_ids.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"groups": (CacheGroup(4), CacheGroup(4))},
        {"groups": (CacheGroup(4, GroupKind.SLIDING, 8),)},
        {"topology": Topology(2, num_kv_heads=2)},
    ],
)
def test_what_it_can_not_be_done_with_is_refused(options):
    with pytest.raises(ConfigError, match="layerwise_num_shared_buffers=2"):
        make_setup(**REUSE, **options)


def test_loads_are_never_asynchronous():
    """There is no room for them before the step that uses them."""
    assert not make_setup(**REUSE, load_async=True).load_async
    assert make_setup(load_async=True).load_async


@pytest.mark.parametrize("kind", [LaxGvaStore, StrictGvaStore])
@pytest.mark.parametrize("buffers", [(0, 1, 2, 1, 2), (0, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("chunk", [5, 100])
def test_an_engine_computes_right_on_buffers_that_its_layers_share(tmp_path, kind, buffers, chunk):
    pool = GvaPool(1 << 17)
    for loaded in (0, 12):
        world = World.open(
            lambda: kind(pool),
            tmp_path,
            engine={"layers": 5, "buffers": buffers, "chunk": chunk},
            **GENEROUS,
            **REUSE,
        )
        engine = world.engine
        engine.add("a", range(14), output=4)
        engine.add("b", [*range(9), *range(50, 60)], output=3)
        engine.run(80)
        engine.check_idle()
        assert engine.requests["a"].loaded_tokens == loaded
        assert engine.invalid_blocks == 0
        auditor = kind(pool)
        assert world.audit(auditor, engine.requests.values()) == 4 + 5
        auditor.close()
        assert world.close() == []
        assert pool.ledger() == {"open_writes": 0, "leases": 0}
        assert pool.violations == []


def test_parts_of_blocks_do_not_pile_up(tmp_path):
    """Each step saves a new one; the one before is taken out once it was loaded."""
    pool = GvaPool(1 << 17)
    world = World.open(
        lambda: LaxGvaStore(pool), tmp_path, engine={"layers": 2, "buffers": (0, 0)}, **GENEROUS, **REUSE
    )
    world.engine.add("a", range(13), output=10)
    world.engine.run(80)
    lanes = world.workers[0]._path.recving._lanes
    assert lanes.wait_until(lambda: sum("@partial@" in key for key in pool.published()) <= 1, 60.0)
    world.close()


def test_a_block_that_the_store_has_lost_is_computed_anew(tmp_path):
    pool = GvaPool(1 << 17)
    world = World.open(
        lambda: StrictGvaStore(pool), tmp_path, engine={"layers": 2, "buffers": (0, 0)}, **GENEROUS, **REUSE
    )
    engine = world.engine
    engine.before_step = lambda number: pool.evict(pool.published()[1]) if number == 2 else None
    engine.add("a", range(14), output=4)
    engine.run(80)
    engine.check_idle()
    assert engine.invalid_blocks == 1
    assert engine.requests["a"].state.value == "done"
    world.close()
