"""Cases from public bug reports (their ids are those of the collection), each end to end through the small engine.

The parts that they concern have tests of their own, which name the same ids.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest

from fixtures.engine import EngineDied, Request, State
from fixtures.gates import Gate
from fixtures.memory_store import MemoryStore
from fixtures.parts import GENEROUS
from fixtures.stores import FlakyStore, answering, changing, holding, raising
from fixtures.world import World, make_setup
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.hits import HitFinder
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase

PROMPT = list(range(18))


class Bench:
    """One pool for engines one after the other; every end of an engine is checked."""

    def __init__(self, folder):
        self.folder = folder
        self.inner = MemoryStore()
        self.store = FlakyStore(self.inner)
        self.worlds = []

    def open(self, **options):
        self.inner.reopen()
        world = World.open(self.store, self.folder, **{**GENEROUS, **options})
        self.worlds.append(world)
        return world.engine

    def fill(self, *prompts, **options):
        engine = self.open(**options)
        for number, prompt in enumerate(prompts or [PROMPT]):
            engine.add(f"fill{number}", prompt)
        engine.run()
        self.end(engine)

    def end(self, engine):
        """Nothing is left, and only right bytes are in the pool. Returns how each request ended."""
        engine.run()
        engine.check_idle()
        world = self.worlds.pop()
        assert world.close() == []
        self.inner.reopen()
        world.audit(self.inner, engine.requests.values())
        return {name: request.state for name, request in engine.requests.items()}


@pytest.fixture
def bench(tmp_path):
    subject = Bench(tmp_path)
    yield subject
    for world in subject.worlds:
        world.close()


@pytest.fixture
def gate():
    with Gate() as opened_at_the_end:
        yield opened_at_the_end


@pytest.mark.parametrize("fault", ["all exist", "put raises", "exists raises", "put refuses"])
def test_a01_blocks_kept_for_a_save_come_back_whatever_becomes_of_it(bench, fault):
    """A01: the completion of a save that put nothing was never reported, and KV usage climbed to 100 %."""
    if fault == "all exist":
        bench.fill()
    else:
        method = "exists" if fault == "exists raises" else "put"
        refusal = answering([int(Status.FULL)] * 4) if fault == "put refuses" else raising(OSError("down"))
        bench.store.script(method, *[refusal] * 4)
    puts = len(bench.store.calls("put"))
    engine = bench.open(consumer_is_to_load=False)
    engine.add("a", PROMPT)
    assert bench.end(engine) == {"a": State.DONE}
    if fault == "all exist":
        assert len(bench.store.calls("put")) == puts


def test_a01_a_request_without_a_full_block_keeps_nothing(bench):
    """A01 (a): no key at all."""
    engine = bench.open()
    engine.add("a", [1, 2, 3])
    assert bench.end(engine) == {"a": State.DONE}
    assert bench.store.calls("put") == []


@pytest.mark.parametrize("arrived", [False, True])
def test_a02_an_abort_during_an_asynchronous_load_gives_every_block_back(bench, gate, arrived):
    """A02: the end of an aborted load was filtered out, and its blocks were kept for ever."""
    bench.fill()
    bench.store.script("get", holding(gate))
    engine = bench.open(load_async=True)
    engine.add("busy", range(500, 503), 30)  # an engine with nothing to compute would wait for the load
    request = engine.add("a", PROMPT)
    engine.step()
    gate.wait_until_reached()
    if arrived:
        gate.open()
        engine.workers[0].wait_for_loads(60.0)
    engine.abort("a")
    engine.step()
    assert not any(request.tables), "its blocks are free, though the call may still be stuck"
    gate.open()
    assert bench.end(engine) == {"busy": State.DONE, "a": State.ABORTED}


def test_a03_a_hit_that_is_loaded_asynchronously_is_not_saved_beside(bench):
    """A03: saved and loaded at once, freed twice, and an unknown id later."""
    bench.fill(PROMPT[:8])
    engine = bench.open(load_async=True)
    engine.add("a", PROMPT, 3)
    engine.step()
    tracker = engine.scheduler._trackers["a"]
    assert not tracker.save_jobs
    assert bench.end(engine) == {"a": State.DONE}
    assert bench.store.calls("put")[-1] != bench.store.calls("put")[0]


def test_a06_the_end_of_a_preempted_request_is_survived(bench):
    """A06: a request that the tracker had forgotten was finished, and the engine died."""
    engine = bench.open(engine={"chunk": 8})
    engine.add("a", PROMPT)
    engine.step()
    engine.preempt("a")
    engine.abort("a")
    engine.add("b", PROMPT)
    assert bench.end(engine) == {"a": State.ABORTED, "b": State.DONE}


@pytest.mark.parametrize("method", ["exists", "put"])
def test_a09_a_job_that_raises_holds_nobody_up(bench, method):
    """A09: an exception between get() and task_done() had join() wait for ever; the second of three raises."""
    bench.store.script(method, changing(list), raising(OSError("down")))
    engine = bench.open(lanes=1)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        engine.add(name, range(first, first + 9))
    assert set(bench.end(engine).values()) == {State.DONE}


def test_a10_a_device_that_can_not_be_bound_ends_the_start(bench):
    """A10: the starter waited for the ready event for ever."""
    bench.store.script("set_device", raising(OSError("no device 3")))
    with pytest.raises(OSError, match="no device 3"):
        bench.open()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_a12_what_a_step_saves_is_a_hit_when_the_step_is_over(bench, gate):
    """A12: saves outlived wait_for_save, prefixes stopped hitting, and blocks were read after their release."""
    bench.store.script("put", holding(gate))
    engine = bench.open()
    engine.add("a", PROMPT)
    stepper = threading.Thread(target=engine.step)
    stepper.start()
    gate.wait_until_reached()
    assert stepper.is_alive()
    gate.open()
    stepper.join(60)
    assert engine.workers[0].hits.hit(16, engine.requests["a"].block_hashes, 0) == 16
    puts = len(bench.store.calls("put"))
    bench.end(engine)
    assert len(bench.store.calls("put")) == puts


@pytest.mark.parametrize("fault", [raising(OSError("down")), changing(lambda codes: codes[:1]), answering(None)])
def test_a31_a_failed_existence_check_is_no_hit_at_all(bench, fault):
    """A31: the offset that was reached so far was answered."""
    bench.fill()
    engine = bench.open()
    bench.store.script("exists", fault)
    request = engine.add("a", PROMPT)
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 0


@pytest.mark.parametrize("scale", [1, 2, 8])
def test_a32_hashes_have_one_form_on_both_sides_of_the_lookup(bench, scale):
    """A32: hex text was hashed on one side and raw bytes on the other, and nothing ever hit."""
    options = {"groups": (CacheGroup(4 * scale),), "hash_unit": 4}
    prompt = range(4 * scale * 2 + 1)
    bench.fill(prompt, **options)
    engine = bench.open(**options)
    request = engine.add("a", prompt)
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 8 * scale


def test_a34_groups_resume_at_a_common_boundary(bench):
    """A34: the least of the groups' own hits is not a boundary that all can serve."""
    options = {"groups": (CacheGroup(4), CacheGroup(8, GroupKind.STATE)), "hash_unit": 4}
    bench.fill(range(25), engine={"chunk": 8}, **options)  # states behind 8, 16 and 24 tokens
    database = ChunkedTokenDatabase(make_setup(bench.folder, **options))
    engine = bench.open(**options)
    request = engine.add("a", range(25))
    states = database.keys(1, request.block_hashes, np.arange(3))
    for key in states[1:]:
        bench.inner.values.pop(key, None)
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 8


def test_a36_each_group_is_cut_by_its_own_block_size(bench):
    """A36: all groups were cut by one block size."""
    options = {"groups": (CacheGroup(16), CacheGroup(8)), "hash_unit": 8}
    bench.fill(range(33), **options)
    of_group = [sum(f"@group:{group}@" in key for key in bench.inner.values) for group in (0, 1)]
    assert of_group == [2, 4]
    engine = bench.open(**options)
    request = engine.add("a", range(33))
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 32


def test_a38_a_block_that_one_stage_has_lost_ends_the_hit(bench):
    """A38: stage 0 has blocks 0 to 3, stage 1 has 0 and 1."""
    options = {"topology": Topology(pp_size=2, num_kv_heads=8)}
    bench.fill(range(17), **options)
    engine = bench.open(**options)
    request = engine.add("a", range(17))
    for key in list(bench.inner.values):
        if "@pp_rank:1@" in key and any(key.endswith(h.hex()) for h in request.block_hashes[2:]):
            del bench.inner.values[key]
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 8


def test_a40_only_missing_blocks_are_put(bench):
    """A40: everything behind the first missing key was put again."""
    bench.fill(range(16))
    engine = bench.open()
    request = engine.add("a", range(16))
    gone = [key for key in bench.inner.values if any(key.endswith(request.block_hashes[i].hex()) for i in (1, 3))]
    for key in gone:
        del bench.inner.values[key]
    assert bench.end(engine) == {"a": State.DONE}
    assert sorted(bench.store.calls("put")[-1]) == sorted(gone)


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("length", [16, 17, 19])
def test_a41_a_prompt_that_is_wholly_pooled_leaves_something_to_compute(bench, load_async, length):
    """A41: the engine's own assertion fires when nothing is left."""
    bench.fill(range(length))
    engine = bench.open(load_async=load_async)
    request = engine.add("a", range(length), 2)
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == min(16, length - 1)


@pytest.mark.parametrize("load_async", [False, True])
def test_a45_the_block_that_did_not_arrive_is_reported_and_only_it(bench, load_async):
    """A45: the asynchronous thread kept failures in a set of its own, and the request went on with unread blocks."""
    bench.fill()
    engine = bench.open(load_async=load_async)
    engine.add("a", PROMPT)
    bench.store.script("get", changing(lambda codes: [0, -1, 0, 0]))
    assert bench.end(engine) == {"a": State.DONE}
    assert engine.invalid_blocks == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("group", [0, 1])
def test_a48_a_failed_block_of_one_group_fails_that_request_alone(bench, policy, group):
    """A48: flat block ids of a request with two groups invalidated another group's block, or killed the engine."""
    options = {"groups": (CacheGroup(4), CacheGroup(4))}
    bench.fill(range(9), range(100, 109), **options)
    engine = bench.open(engine={"policy": policy}, **options)
    a, b = engine.add("a", range(9)), engine.add("b", range(100, 109))
    victim = next(
        key for key in bench.inner.values if f"@group:{group}@" in key and key.endswith(a.block_hashes[1].hex())
    )
    value = bench.inner.values[victim]
    bench.inner.values[victim] = value[:-20] + bytes([value[-20] ^ 1]) + value[-19:]
    ended = bench.end(engine)
    assert ended == {"a": State.DONE if policy == "recompute" else State.FAILED, "b": State.DONE}
    assert (a.loaded_tokens, b.loaded_tokens) == (8, 8)


@pytest.mark.parametrize("topology", [Topology(num_kv_heads=8), Topology(tp_size=2, num_kv_heads=2)], ids=str)
def test_a50_nothing_of_a_step_whose_load_failed_is_published(bench, topology):
    """A50: a save after a failed load put wrong bytes into the pool; the other requests of the batch still save."""
    bench.fill(PROMPT[:8], topology=topology)
    engine = bench.open(topology=topology)
    bench.store.script("get", *[answering([0, -1])] * topology.world_size)
    a, _ = engine.add("a", PROMPT), engine.add("b", range(100, 109))
    engine.step()
    put = [key for keys in bench.store.calls("put")[topology.world_size :] for key in keys]
    assert put, "the other request is saved"
    assert not any(key.endswith(h.hex()) for key in put for h in a.block_hashes)
    assert set(bench.end(engine).values()) == {State.DONE}


@pytest.mark.parametrize(
    "other",
    [{"kv_dtype": "float8_e4m3fn"}, {"block_sizes": (4, 4)}, {"model_path": "elsewhere/tiny"}, {"extra": "rope"}],
)
def test_a55_engines_whose_bytes_differ_never_read_each_others(bench, other):
    """A55: keys left out what changes the bytes."""
    bench.fill()
    own = make_setup(bench.folder)
    theirs = replace(own, identity=replace(own.identity, **other))
    hashes = Request("a", list(PROMPT), 18, 19, 4).block_hashes
    assert finder(bench, own).hit(16, hashes, 0) == 16
    assert finder(bench, theirs).hit(16, hashes, 0) == 0


def test_a55_values_with_and_without_digests_are_not_mixed_up(bench):
    """A55: the digest is a part of the value."""
    bench.fill()
    engine = bench.open(checksum=False)
    request = engine.add("a", PROMPT)
    assert bench.end(engine) == {"a": State.DONE}
    assert request.loaded_tokens == 0


def test_the_small_engine_dies_of_what_kills_a_real_one(bench):
    """Without this the tests above could not fail."""
    engine = bench.open()
    engine.add("a", PROMPT)
    engine.scheduler.get_num_new_matched_tokens = lambda request, computed: (request.num_tokens, False)
    with pytest.raises(EngineDied):
        engine.run()


def finder(bench, setup):
    bench.inner.reopen()
    return HitFinder(setup, StoreClient(bench.inner, Stats()), Stats())
