"""Stories of requests and faults, drawn and shrunk by Hypothesis: whatever happens, the four laws hold.

Each story drives a scheduler and the workers of all ranks through the small engine, which raises on a token computed on
wrong bytes, on a hook that a real engine would not survive, and on requests that never end. Faults strike single calls
or all of them; slow calls outlive their deadlines and return late. Time is a clock that only slow calls and steps move.
"""

import os
import shutil
import tempfile
import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fixtures.clock import ManualClock
from fixtures.engine import MiniEngine, State
from fixtures.gates import Gate
from fixtures.gva_stores import FlakyGvaStore, GvaPool, LaxGvaStore, StrictGvaStore
from fixtures.memory_store import MemoryStore
from fixtures.stores import FlakyStore, answering, changing, raising, wrong_bytes
from fixtures.world import World, make_setup, ranks
from vllm_ascend_ext.kv_pool.calls import Lanes
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming
from vllm_ascend_ext.kv_pool.worker import KVPoolWorker

BLOCK = 4
PREFIX = 24
"""Tokens that the prompts of a family have in common; the pool holds them from the start."""

TIMEOUT = 10.0
LAYERS = 2

ONE, TWO, FOUR = Topology(num_kv_heads=8), Topology(tp_size=2, num_kv_heads=2), Topology(tp_size=4, num_kv_heads=2)

SETTINGS = {
    "one rank": {"topology": ONE},
    "one rank in chunks": {"topology": ONE, "chunk": 6, "lanes": 1},
    "one rank asynchronously": {"topology": ONE, "load_async": True, "save_decode_cache": True},
    "two ranks": {"topology": TWO},
    "two ranks in chunks": {"topology": TWO, "chunk": 8},
    "two stages": {"topology": Topology(pp_size=2, num_kv_heads=8), "save_decode_cache": True},
    "two ranks asynchronously": {"topology": TWO, "load_async": True, "lanes": 1},
    "four ranks that take turns": {"topology": FOUR, "prefix_caching": False},
    "layer by layer": {"topology": ONE, "use_layerwise": True},
    "layer by layer in chunks": {"topology": ONE, "use_layerwise": True, "chunk": 6, "lanes": 1},
    "two ranks layer by layer": {"topology": TWO, "use_layerwise": True},
    "asynchronously layer by layer": {"topology": FOUR, "use_layerwise": True, "load_async": True},
    "by address": {"topology": ONE, "use_layerwise": True, "values": "lax"},
    "by address, strictly, in chunks": {"topology": ONE, "use_layerwise": True, "values": "strict", "chunk": 6},
    "two ranks by address": {"topology": TWO, "use_layerwise": True, "values": "strict"},
    "asynchronously by address": {"topology": TWO, "use_layerwise": True, "values": "lax", "load_async": True},
    "requests fail": {"topology": ONE, "policy": "fail"},
    "requests fail asynchronously": {"topology": FOUR, "policy": "fail", "load_async": True},
}
"""What an engine is like; each has its own stories."""


class Fatal(BaseException):
    """Ends the thread that it is raised on."""


def codes(change):
    """An answer without any work done: ``change`` of as many zeros as there are keys."""
    return lambda call: change([0] * len(call.keys))


FAULTS = {
    "raises": raising(OSError("down")),
    "raises after its work": raising(OSError("down"), after=True),
    "none": answering(None),
    "empty": answering([]),
    "short": changing(lambda answer: answer[:-1]),
    "long": changing(lambda answer: [*answer, 0]),
    "all unknown": codes(lambda zeros: [-1] * len(zeros)),
    "first fails": changing(lambda answer: [-1, *answer[1:]]),
    "last fails": changing(lambda answer: [*answer[:-1], -1]),
    "full": codes(lambda zeros: [int(Status.FULL)] * len(zeros)),
    "unavailable": codes(lambda zeros: [int(Status.UNAVAILABLE)] * len(zeros)),
    "no codes": changing(lambda answer: [None] * len(answer)),
    "text": answering("0000"),
}
LIES = {"wrong bytes": wrong_bytes, "nothing copied": codes(list)}
"""Of get alone: for an existence check or a put these would be lies that nobody can find out."""

LIES_AND_FAULTS = LIES | FAULTS
GET_FAULTS = st.sampled_from(sorted(LIES_AND_FAULTS))
PROMPTS = st.lists(
    st.tuples(st.sampled_from([24, 24, 20, 17, 8, 3]), st.sampled_from([9, 5, 1, 0]), st.integers(1, 6)),
    min_size=1,
    max_size=3,
)
"""Of each: tokens that its family has in common, tokens of its own, tokens to generate."""

MOST = 20
"""Requests in a story."""


class BoundedLookup:
    """The first rank's hits with a deadline, as the look-up server and its client give them."""

    def __init__(self, worker, clock):
        self._worker, self._clock = worker, clock
        self._lanes = Lanes("lookup", clock=clock)
        self._lanes.start(60.0)

    def lookup(self, token_len, hashes, group_ids, hbm_hit_tokens, request_id="-"):
        deadline = Deadline.after(TIMEOUT, self._clock)
        return self._lanes.run("hit", lambda: self._worker.hits.hit(token_len, hashes, hbm_hit_tokens), deadline)

    def close(self):
        return self._lanes.close(60.0)


class MemoryValues:
    """What is in a store that is read and written by key."""

    has_gva = False
    loads, saves = ("get",), ("put",)
    others = ("exists", "remove")
    faults = LIES_AND_FAULTS

    def __init__(self):
        self._store = MemoryStore()

    def client(self):
        self._store.reopen()
        return self._store

    def flaky(self):
        return FlakyStore(self.client())

    def keys(self):
        return sorted(self._store.values)

    def value(self, key):
        return self._store.values.get(key)

    def take_out(self, key):
        return self._store.values.pop(key)

    evict = take_out

    def put_back(self, key, value):
        self._store.values[key] = value

    def spoil(self, key, byte):
        value = bytearray(self._store.values[key])
        value[byte % len(value)] ^= 0x10
        self._store.values[key] = bytes(value)

    def check(self, workers):
        """Nothing but the values is left in it."""


class GvaValues:
    """What is in a store that is read and written by global address."""

    has_gva = True
    loads = ("batch_get_key_info", "batch_add_lease", "batch_copy")
    saves = ("batch_alloc", "batch_copy", "batch_write_finish")
    others = ("exists", "remove", "batch_remove_lease")
    faults: ClassVar = {
        **FAULTS,
        "unavailable": codes(lambda zeros: [-3014] * len(zeros)),
        "full": codes(list),
        # What follows would be lies that nobody can find out: a lease given and denied, a save that copied nothing.
        **dict.fromkeys(("first fails", "last fails"), codes(lambda zeros: [-3102] * len(zeros))),
        **dict.fromkeys(LIES, raising(OSError("down"))),
    }

    def __init__(self, kind):
        self._kind = kind
        self._pool = GvaPool(1 << 18)

    def client(self):
        return self._kind(self._pool)

    def flaky(self):
        return FlakyGvaStore(self.client())

    def keys(self):
        return sorted(self._pool.published())

    def value(self, key):
        blob = self._pool.blobs.get(key)
        if blob is None or not blob.published:
            return None
        return self._pool.arena[blob.offset : blob.offset + blob.size].tobytes()

    def take_out(self, key):
        return self._pool.blobs.pop(key)

    def evict(self, key):
        self._pool.evict(key)

    def put_back(self, key, blob):
        self._pool.blobs[key] = blob

    def spoil(self, key, byte):
        blob = self._pool.blobs[key]
        self._pool.arena[blob.offset + byte % blob.size] ^= 0x10

    def check(self, workers):
        """Leases acquired are leases released, no write is open for the pool, and nothing was done that none may do."""
        for path in [worker._path for worker in workers]:
            path.recving._lanes.wait_until(lambda path=path: not path.recving.leases.held, 60.0)
            path.sending._lanes.wait_until(lambda path=path: path.sending.writes.is_empty, 60.0)
            assert not path.recving.leases.held
            assert path.sending.writes.is_empty
        owed = sum(len(worker._path.recving.leases.debts) for worker in workers)
        assert self._pool.ledger()["leases"] <= owed
        assert not self._pool.violations


VALUES = {
    "memory": MemoryValues,
    "lax": lambda: GvaValues(LaxGvaStore),
    "strict": lambda: GvaValues(StrictGvaStore),
}


class Pool(RuleBasedStateMachine):
    options: dict

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.before = set(threading.enumerate())
        self.clock = ManualClock()
        self.values = VALUES[self.options.get("values", "memory")]()
        self.store = self.values.flaky()
        self.gates: list[Gate] = []
        self.corrupted: dict[str, bytes] = {}
        self.number = 0
        self.world: World | None = None

    # -- the engine -------------------------------------------------------------------------------------------------

    @initialize(faults=st.lists(GET_FAULTS, max_size=2), prompts=PROMPTS)
    def start(self, faults, prompts):
        """The pool holds the prefixes of both families, and the first loads of them may fail."""
        options = dict(self.options)
        self.engine_options = {
            "policy": options.pop("policy", "recompute"),
            "chunk": options.pop("chunk", 1 << 30),
            "prefix_caching": options.pop("prefix_caching", True),
            "num_blocks": 200,
            "layers": LAYERS,
        }
        options.pop("values", None)
        self.setup_ = make_setup(
            self.folder,
            load_timeout=TIMEOUT,
            save_timeout=TIMEOUT,
            store_backoff=1.5,
            start_timeout=60.0,
            close_timeout=60.0,
            **options,
        )
        self.open()
        for family in range(2):
            self.engine.add(f"fill{family}", range(100 * family, 100 * family + PREFIX))
        self.finish_engine()
        self.open()
        self.store.script(self.values.loads[-1], *(self.values.faults[fault] for fault in faults))
        self.arrive(0, prompts, 1)

    def open(self):
        self.store.inner = self.values.client()
        workers = []
        for topology in ranks(self.setup_.topology):
            worker = KVPoolWorker(replace(self.setup_, topology=topology), self.store, clock=self.clock)
            worker.start()
            workers.append(worker)
            # An idle engine waits for a load with the clock, which stands still while a call is being held.
            wait = worker.wait_for_loads
            worker.wait_for_loads = lambda timeout, wait=wait: None if self.gates else wait(timeout)
        scheduler = KVPoolScheduler(self.setup_, BoundedLookup(workers[0], self.clock))
        self.world = World(self.setup_, MiniEngine(self.setup_, scheduler, workers, **self.engine_options), workers)

    @property
    def engine(self):
        return self.world.engine

    def database(self, setup):
        database = ChunkedTokenDatabase(setup, Naming.of(setup.config.use_layerwise, self.values.has_gva))
        database.set_layers([LAYERS])
        return database

    def live(self):
        return [request for request in self.engine.requests.values() if request.live]

    # -- what requests do -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.number < MOST)
    @rule(family=st.integers(0, 1), prompts=PROMPTS, steps=st.integers(0, 2))
    def arrive(self, family, prompts, steps):
        for shared, own, output in prompts:
            self.number += 1
            first, alone = 100 * family, 1000 * self.number
            prompt = [*range(first, first + shared), *range(alone, alone + own)]
            self.engine.add(f"r{self.number}", prompt, output)
        self.steps(steps)

    @precondition(lambda self: self.number < MOST)
    @rule(
        fault=GET_FAULTS,
        on_ranks=st.integers(1, 2),
        family=st.integers(0, 1),
        prompts=PROMPTS,
        then=st.sampled_from(["go on", "go on", "abort", "preempt"]),
        which=st.integers(0, 3),
    )
    def arrive_to_a_load_that_fails(self, fault, on_ranks, family, prompts, then, which):
        """On the first rank that loads, or on the first two; then one of the requests may go."""
        method = self.values.loads[which % len(self.values.loads)]
        self.store.script(method, *[self.values.faults[fault]] * on_ranks)
        self.arrive(family, prompts, 1)
        if then != "go on":
            getattr(self, then)(which)
        self.steps(1)

    @rule(count=st.integers(1, 3))
    def steps(self, count):
        for _ in range(count):
            self.clock.advance(1.0)
            self.engine.step()
            self.check_announced()

    @rule(how=st.sampled_from(["abort", "preempt"]), which=st.integers(0, 20))
    def go_away(self, how, which):
        getattr(self, how)(which)

    def abort(self, which):
        if live := self.live():
            self.engine.abort(live[which % len(live)].request_id)

    def preempt(self, which):
        if running := [request for request in self.live() if request.state is State.RUNNING]:
            self.engine.preempt(running[which % len(running)].request_id)

    @rule()
    def restart(self):
        """A new engine on the same pool."""
        self.finish_engine()
        self.open()

    # -- what goes wrong --------------------------------------------------------------------------------------------

    def method(self, which):
        methods = sorted({*self.values.loads, *self.values.saves, *self.values.others})
        return methods[which % len(methods)]

    @rule(
        which=st.integers(0, 20),
        fault=st.sampled_from(sorted(FAULTS)),
        calls=st.sampled_from([1, 2, 6, 20]),
        steps=st.integers(0, 2),
    )
    def fail(self, which, fault, calls, steps):
        self.store.script(self.method(which), *[self.values.faults[fault]] * calls)
        self.steps(steps)

    @precondition(lambda self: len(self.gates) < 3)
    @rule(which=st.integers(0, 20))
    def outlive_the_deadline(self, which):
        gate = Gate()
        self.gates.append(gate)

        def slow(call):
            """Time goes on while this call does not: each deadline that somebody has set passes."""
            while not gate.opened_within(0.01):
                self.clock.advance(TIMEOUT)
            return call()

        self.store.script(self.method(which), slow)

    @precondition(lambda self: self.gates)
    @rule()
    def return_late(self):
        self.gates.pop(0).open()

    @rule(which=st.integers(0, 20), chance=st.integers(0, 3))
    def end_a_thread(self, which, chance):
        methods = [*self.values.loads, *self.values.saves]
        if not chance:
            self.store.script(methods[which % len(methods)], raising(Fatal("device lost")))

    @rule(which=st.integers(0, 1000), several=st.booleans())
    def evict(self, which, several):
        if keys := self.values.keys():
            for key in keys[which % len(keys) :: 3] if several else [keys[which % len(keys)]]:
                self.values.evict(key)

    @rule(which=st.integers(0, 1000), byte=st.integers(0, 1000))
    def corrupt(self, which, byte):
        if keys := self.values.keys():
            key = keys[which % len(keys)]
            self.values.spoil(key, byte)
            self.corrupted[key] = self.values.value(key)

    # -- laws -------------------------------------------------------------------------------------------------------

    @invariant()
    def only_right_bytes_are_in_the_pool(self):
        if self.world is None:
            return
        hidden = {key: self.values.take_out(key) for key in self.still_corrupted()}
        self.world.audit(self.values.client(), self.engine.requests.values())
        for key, value in hidden.items():
            self.values.put_back(key, value)

    def still_corrupted(self):
        return [key for key, value in self.corrupted.items() if self.values.value(key) == value]

    def check_announced(self):
        """A block is announced as stored only if it is there."""
        for worker in self.world.workers:
            database = self.database(replace(self.setup_, topology=worker.topology))
            for event in worker.take_stored():
                missing = [name for name in database.names_of(event.group, event.block_hash) if not self.has(name)]
                assert not missing, f"announced as stored, but not there: {missing}"

    def has(self, key):
        return self.values.value(key) is not None

    def finish_engine(self):
        """Every request ends although the faults go on, and nothing is left of any."""
        self.release()
        self.engine.run(max_steps=300)
        self.engine.check_idle()
        self.only_right_bytes_are_in_the_pool()
        self.values.check(self.world.workers)
        assert self.world.close() == []
        self.world = None

    def release(self):
        while self.gates:
            self.gates.pop().open()

    def teardown(self):
        try:
            if self.world is not None:
                families = {request.all_token_ids[0]: request for request in self.engine.requests.values()}
                self.finish_engine()
                self.store = self.values.flaky()  # all is well again
                self.clock.advance(1000.0)
                self.check_hits(families.values())
        finally:
            self.release()
            if self.world is not None:
                self.world.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        assert not [thread for thread in set(threading.enumerate()) - self.before if thread.name.startswith("kv-")]

    def check_hits(self, requests):
        """What the pool holds, as the model sees it, is what a new request gets, and it computes right on it."""
        for key in self.still_corrupted():
            self.values.take_out(key)
        for number, request in enumerate(requests):
            self.open()
            database = self.database(self.setup_)
            owners = database.owner_keys(0, request.block_hashes, 0)
            there = np.asarray([[self.has(key) for key in owner] for owner in owners]).all(axis=0)
            blocks = int(np.append(~there, True).argmax())
            probe = self.engine.add(f"probe{number}", request.all_token_ids)
            self.engine.run()
            assert probe.state is State.DONE
            assert probe.loaded_tokens == min(blocks * BLOCK, probe.num_prompt_tokens - 1)
            self.finish_engine()


STORIES = settings(
    max_examples=int(os.environ.get("STATEFUL_EXAMPLES", "20")),
    stateful_step_count=15,
    deadline=None,
    derandomize="STATEFUL_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""Quick and always the same; with STATEFUL_EXAMPLES set, that many new ones of each kind of engine."""


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_whatever_happens_the_laws_hold(kind):
    machine = type(f"Pool{kind.title().replace(' ', '')}", (Pool,), {"options": SETTINGS[kind]})
    run_state_machine_as_test(machine, settings=STORIES)
