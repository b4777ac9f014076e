"""Requests that share the blocks of a failed load: vLLM has one of them compute the blocks anew, and no other waits.

All were found by driving the pool through an engine that keeps vLLM's rules; each computed on wrong bytes, or left
wrong bytes in the pool for good.
"""

import pytest

from fixtures.engine import State
from fixtures.memory_store import MemoryStore
from fixtures.parts import GENEROUS
from fixtures.stores import FlakyStore, answering
from fixtures.world import World
from vllm_ascend_ext.kv_pool.keys import Topology

PREFIX = list(range(24))
TWO_RANKS, TWO_STAGES = Topology(tp_size=2, num_kv_heads=2), Topology(pp_size=2, num_kv_heads=8)
RANKS = [Topology(num_kv_heads=8), TWO_RANKS, Topology(tp_size=2, num_kv_heads=1), TWO_STAGES]


class Shared:
    """Six blocks of a prefix are in the pool; "a" and "b" have it in common and come in the same step."""

    def __init__(self, folder, topology, **engine):
        self.inner = MemoryStore()
        filler = World.open(self.inner, folder, topology=topology, **GENEROUS)
        filler.engine.add("fill", PREFIX)
        filler.engine.run()
        filler.close()
        self.inner.reopen()
        self.store = FlakyStore(self.inner)
        self.world = World.open(self.store, folder, topology=topology, engine=engine, **GENEROUS)
        self.engine = self.world.engine
        self.store.script("get", answering([-1] * 6))
        self.engine.add("a", [*PREFIX, 100], 2)
        self.engine.add("b", [*PREFIX, *range(200, 208)], 2)

    def end(self):
        """Everything ends, on right bytes, and only right bytes are in the pool."""
        self.engine.run()
        self.engine.check_idle()
        self.store.check_all_played()
        self.world.close()
        self.inner.reopen()
        self.world.audit(self.inner, self.engine.requests.values())
        return {name: request.state for name, request in self.engine.requests.items()}


@pytest.fixture
def share(tmp_path):
    made = []

    def make(topology, **engine):
        made.append(Shared(tmp_path, topology, **engine))
        return made[-1]

    yield make
    for shared in made:
        shared.world.close()


@pytest.fixture(params=RANKS, ids=str)
def topology(request):
    return request.param


def test_both_end_well(share, topology):
    shared = share(topology)
    assert set(shared.end().values()) == {State.DONE}


@pytest.mark.parametrize("chunk", [4, 8, 12])
def test_while_the_first_computes_them_chunk_by_chunk_the_other_does_not_run_ahead(share, topology, chunk):
    shared = share(topology, chunk=chunk)
    assert set(shared.end().values()) == {State.DONE}


def test_when_the_first_is_aborted_the_other_computes_them(share, topology):
    shared = share(topology)
    shared.engine.step()
    shared.engine.abort("a")
    assert shared.end() == {"a": State.ABORTED, "b": State.DONE}


def test_when_the_first_is_preempted_the_other_computes_them(share, topology):
    shared = share(topology)
    shared.engine.step()
    shared.engine.preempt("a")
    assert set(shared.end().values()) == {State.DONE}


def test_when_policy_fails_the_first_the_other_fails_too_and_nothing_is_left(share, topology):
    shared = share(topology, policy="fail")
    assert set(shared.end().values()) == {State.FAILED}


def test_a_rank_whose_own_load_was_well_saves_nothing_of_what_another_rank_computed_on_rubbish(share):
    """Ranks exchange what they compute: a load that fails on one of them spoils the step of all."""
    shared = share(Topology(tp_size=2, num_kv_heads=2))
    shared.engine.step()
    assert shared.store.calls("put") == []
    shared.end()
    assert shared.store.calls("put") != []


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("topology", [TWO_RANKS, TWO_STAGES], ids=str)
def test_a_request_that_loses_its_blocks_between_two_steps_and_then_ends_saves_nothing(tmp_path, topology, layerwise):
    """vLLM does that when its prefix cache is reset: the scheduler hears of the preemption with the next step, and of
    the end before. What it had put off saving lies in blocks that are others' by then."""
    store, options = MemoryStore(), {**GENEROUS, "topology": topology, "use_layerwise": layerwise}
    options["stage_layers"] = ((2,),) * topology.pp_size
    for name in ("fill", "a"):
        store.reopen()
        world = World.open(store, tmp_path, **options)
        engine = world.engine
        request = engine.add(name, PREFIX if name == "fill" else [*PREFIX, *range(200, 209)], 2)
        if name == "a":
            engine.step()
            assert request.loaded_tokens == len(PREFIX)
            engine.preempt("a")
            engine.abort("a")
        engine.run()
        engine.check_idle()
        world.close()
        store.reopen()
        world.audit(store, engine.requests.values())
