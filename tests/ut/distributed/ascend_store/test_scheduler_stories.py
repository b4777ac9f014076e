"""Whatever order the hooks come in, and whatever the workers report, the scheduler raises nothing and forgets in time.

An exception out of a hook would end a real engine for every request. Reports may be late, repeated, partial, of jobs
that nobody knows; ids come again; requests end and are preempted at any point.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.engine import Request
from fixtures.parts import FixedLookup, make_setup
from vllm_ascend_ext.kv_pool.groups import CacheGroup
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.requests import ScheduledRequest, ScheduledStep, WorkerReport
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler

BLOCK = 4
IDS = st.sampled_from("abc")
ENGINES = {
    "one rank": {},
    "two ranks": {"topology": Topology(tp_size=2, num_kv_heads=2)},
    "asynchronously": {"load_async": True},
    "layers share buffers": {"use_layerwise": True, "layerwise_num_shared_buffers": 2},
    "two groups": {"groups": (CacheGroup(4), CacheGroup(8))},
    "consumer": {"kv_role": "kv_consumer", "consumer_is_to_load": True},
}
HITS = st.sampled_from([0, 4, 8, 12, 16, 20, -4, 3, None, "8"])


class Hooks:
    """Calls the scheduler's hooks with what an engine could give them; remembers which jobs were ever ordered."""

    def __init__(self, options):
        self.setup = make_setup(**options)
        self.hit = 0
        self.scheduler = KVPoolScheduler(self.setup, FixedLookup(lambda asked: self.hit))
        self.requests = {}
        self.jobs = [99]

    def request(self, name):
        return self.requests.setdefault(name, Request(name, list(range(16)), 12, 20, BLOCK))

    def tables(self, tokens):
        return tuple(list(range(1, -(-tokens // group.block_size) + 1)) for group in self.setup.groups)

    def ask(self, name, hit, local):
        self.hit = hit
        offered, is_async = self.scheduler.get_num_new_matched_tokens(self.request(name), local)
        assert 0 <= offered < 16
        assert not is_async or offered

    def allocate(self, name, external):
        self.scheduler.update_state_after_alloc(self.request(name), self.tables(16), external)

    def step(self, parts, preempted):
        for name, (before, n) in parts.items():
            self.request(name).num_computed_tokens = before + n
        views = [ScheduledRequest(name, before, n, self.tables(before + n)) for name, (before, n) in parts.items()]
        meta = self.scheduler.build_connector_meta(ScheduledStep(views, preempted))
        for order in meta.requests:
            self.jobs += [part.job_id for part in (order.load, order.save) if part is not None]

    def report(self, saved, failed, used, sent):
        pick = [self.jobs[which % len(self.jobs)] for which in range(len(self.jobs))]
        jobs = {pick[which % len(pick)]: (until, ranks) for which, until, ranks in saved}
        self.scheduler.update_connector_output(
            WorkerReport(jobs, {pick[w % len(pick)] for w in failed}, {pick[w % len(pick)] for w in used}), sent
        )

    def take_blocks(self, name):
        """A preemption that the scheduler hears of with the next step, if at all."""
        self.request(name).num_computed_tokens = 0

    def finish(self, name):
        self.requests.pop(name, None)  # the next one of this id is another
        assert self.scheduler.request_finished(name) in (True, False)

    def end(self):
        """Every request ends, and every rank reports everything once more."""
        for name in "abc":
            self.finish(name)
        for _ in range(3):
            self.step({}, frozenset("abc"))
            everything = dict.fromkeys(self.jobs, (0, self.setup.topology.world_size))
            self.scheduler.update_connector_output(WorkerReport(everything, set(), set(self.jobs)), "abc")
            self.scheduler.finish_loads("abc")
        assert self.scheduler.holds_nothing


WHICH = st.lists(st.integers(0, 50), max_size=3)
PARTS = st.dictionaries(IDS, st.tuples(st.integers(0, 15), st.integers(1, 9)), max_size=3)
ACTS = st.one_of(
    st.tuples(st.just("ask"), IDS, HITS, st.sampled_from([0, 4, 8])),
    st.tuples(st.just("allocate"), IDS, st.sampled_from([0, 4, 8, 15])),
    st.tuples(st.just("step"), PARTS, st.frozensets(IDS, max_size=2)),
    st.tuples(
        st.just("report"),
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 3)), max_size=3),
        WHICH,
        WHICH,
        st.lists(IDS, max_size=2),
    ),
    st.tuples(st.just("take_blocks"), IDS),
    st.tuples(st.just("finish"), IDS),
)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=150, deadline=None)
@given(acts=st.lists(ACTS, max_size=25))
def test_no_order_of_hooks_and_no_report_raises_and_in_the_end_nothing_is_held(engine, acts):
    hooks = Hooks(ENGINES[engine])
    for name, *arguments in acts:
        getattr(hooks, name)(*arguments)
    hooks.end()
