"""A rank's hooks, layer by layer: what fails is known at once, is reported once, and fails nothing else.

The clock stands still in most tests: a wait that ends has been ended by what happened, not by its deadline.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.device_events import ScriptedEvent
from fixtures.engine_memory import Request
from fixtures.footprint import footprint
from fixtures.gates import Gate
from fixtures.layer_rank import LAYERS, LayerRank
from fixtures.stores import answering, holding, raising
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.requests import PoolMetadata, ReqMeta


class Fatal(BaseException):
    """What ends a thread."""


KINDS = ["gva", "strict", "key"]


@pytest.fixture
def rank(tmp_path, request):
    subject = LayerRank(tmp_path, getattr(request, "param", "gva"), checksum=True)
    yield subject
    subject.worker.close()


@pytest.mark.parametrize("rank", KINDS, indirect=True)
def test_what_was_saved_is_loaded(rank):
    request = rank.saved()
    orders = rank.orders((request, 16, None))
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    errors, report = rank.finish(orders)
    assert rank.right(request, 16)
    assert (errors, report.failed_loads) == (set(), set())
    rank.check_given_back()


@pytest.mark.parametrize("rank", KINDS, indirect=True)
def test_a_layer_is_there_when_its_wait_ends_and_only_so_many_beyond(rank):
    """Prefetch depth 1: layer n + 1 comes when attention of layer n has begun, and not before."""
    request = rank.saved()
    orders = rank.orders((request, 16, None))
    rank.worker.start_load_kv(orders)
    for layer in range(LAYERS):
        rank.worker.wait_for_layer_load(orders, layer)
        assert rank.memory.first_wrong(request, layer, 16) is None
        for later in range(layer + 2, LAYERS):
            assert rank.memory.first_wrong(request, later, 16) == 0
        rank.worker.save_kv_layer(orders, layer)
    rank.finish(orders)


@pytest.mark.parametrize("rank", KINDS, indirect=True)
def test_the_save_hook_may_come_before_the_load_hook(rank):
    """vLLM calls start_load_kv behind the forward pass when there is nothing to load synchronously."""
    request = rank.request("a", [1, 2, 3, 4])
    errors, report = rank.save(request)
    assert errors == set()
    assert list(report.saved_until.values()) == [(16, 1)]


@pytest.mark.parametrize("rank", KINDS, indirect=True)
def test_layers_that_announce_nothing_are_saved_at_the_end(rank):
    request = rank.request("a", [1, 2, 3, 4])
    orders = rank.orders((request, None, (0, 16)))
    for layer in range(LAYERS):
        rank.memory.write(request, layer, 0, 16, garbage=False)
    rank.worker.start_load_kv(orders)
    assert list(rank.finish(orders)[1].saved_until.values()) == [(16, 1)]


class TestFailedLoad:
    """The clock stands still, and a layer's time-out is 30 s: every wait that ends here is ended by the failure."""

    @pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
    @pytest.mark.parametrize("fault", [raising(OSError("down")), answering(-3014), answering(None)])
    def test_ends_this_wait_and_every_later_one_and_names_the_blocks(self, rank, layer, fault):
        request = rank.saved()
        orders = rank.orders((request, 16, None))
        rank.store.script("batch_copy", *[lambda call: call()] * layer, fault)
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        errors, report = rank.finish(orders)
        assert errors == {11, 12, 13, 14}
        assert len(report.failed_loads) == 1
        assert rank.worker.stats.get("load_failed") == 1
        assert rank.worker.get_block_ids_with_load_errors() == set()
        rank.check_given_back()

    @pytest.mark.parametrize("layer", [0, LAYERS - 1])
    def test_of_one_block_leaves_the_others_alone(self, tmp_path, layer):
        rank = LayerRank(tmp_path, "key", checksum=True)
        first, second = rank.saved(), rank.saved("b", (5, 6, 7, 8))
        orders = rank.orders((first, 16, None), (second, 16, None))

        def lose_the_second(call):
            return [code if at != 1 else -1 for at, code in enumerate(call())]

        rank.store.script("get", *[lambda call: call()] * layer, lose_the_second)
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        errors, report = rank.finish(orders)
        assert errors == {12}
        assert len(report.failed_loads) == 1
        assert rank.right(second, 16)
        rank.worker.close()

    def test_of_one_request_leaves_the_others_alone(self, rank):
        """One bad address refuses the whole batch; it is taken apart."""
        first, second = rank.saved(), rank.saved("b", (5, 6, 7, 8))
        orders = rank.orders((first, 16, None), (second, 16, None))
        gva = str(rank.store.inner.batch_alloc([rank.pool.published()[0]], [1])[0])

        def refuse(call):
            return -3102 if gva in call.keys else call()

        rank.store.always("batch_copy", refuse)
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        assert rank.finish(orders)[0] == {11}
        assert rank.right(second, 16)

    def test_dead_thread(self, rank):
        request = rank.saved()
        orders = rank.orders((request, 16, None))
        rank.store.script("batch_copy", lambda call: call(), raising(Fatal()))
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        assert rank.finish(orders)[0] == {11, 12, 13, 14}
        again = rank.orders((request, 16, None))
        rank.worker.start_load_kv(again)
        rank.forward(again)
        assert rank.finish(again)[0] == {11, 12, 13, 14}
        assert rank.worker.stats.get("load_thread_failed") == 1

    def test_gate_that_can_not_open(self, tmp_path):
        """The device event fails: nobody stands before the gate until the deadline."""
        events = iter([ScriptedEvent(on_record=RuntimeError("device lost"))])
        rank = LayerRank(tmp_path, checksum=True)
        request = rank.saved()
        rank.worker._path._new_event = lambda: next(events, ScriptedEvent())
        orders = rank.orders((request, 16, None))
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        assert rank.finish(orders)[0] == {11, 12, 13, 14}
        assert rank.worker.stats.get("attention_gate_failed") == 1
        rank.worker.close()

    def test_copy_that_never_returns(self, tmp_path):
        """It is given up at the layer's deadline; what it does later touches no block, and it gives its leases back."""
        rank = LayerRank(tmp_path, checksum=True)
        request = rank.saved()
        orders = rank.orders((request, 16, None))
        with Gate() as gate:

            def never_return(call):
                rank.clock.advance(rank.setup.config.layer_timeout)
                gate.hold()
                return call()

            rank.store.script("batch_copy", never_return)
            rank.worker.start_load_kv(orders)
            rank.forward(orders)
            assert rank.finish(orders)[0] == {11, 12, 13, 14}
            assert rank.worker.stats.get("layer_wait_timed_out") == 1  # one deadline, not one for each layer
            before = [cache.copy() for cache in rank.memory.caches]
        rank.check_given_back()
        assert all(np.array_equal(old, cache) for old, cache in zip(before, rank.memory.caches, strict=True))
        rank.worker.close()

    @pytest.mark.parametrize("rank", ["gva", "key"], indirect=True)
    def test_nothing_is_saved_of_what_was_computed_on_it(self, rank):
        """A50, and of no request that shares one of the failed blocks."""
        request = rank.saved()
        long = rank.request("a", [*request.block_ids, 21, 22], tokens=24)
        sharing = rank.request("c", [11, 12, 23], tokens=12)
        other = rank.request("d", [24, 25], tokens=8)
        orders = rank.orders((long, 16, (16, 24)), (sharing, None, (8, 12)), (other, None, (0, 8)))
        rank.store.script("get" if rank.kind == "key" else "batch_copy", raising(OSError("down")))
        rank.worker.start_load_kv(orders)
        rank.forward(orders, [(long, 16, 24), (sharing, 8, 12), (other, 0, 8)])
        errors, report = rank.finish(orders)
        assert errors == {11, 12, 13, 14}
        jobs = [meta.save.job_id for meta in orders.requests]
        assert [report.saved_until[job] for job in jobs] == [(16, 1), (8, 1), (8, 1)]
        if rank.kind == "gva":
            assert len(rank.pool.published()) == 4 + 2
        rank.check_given_back()


class TestFailedSave:
    @pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
    @pytest.mark.parametrize("rank", ["gva", "strict"], indirect=True)
    def test_is_rolled_back_and_fails_no_request(self, rank, layer):
        rank.store.script("batch_copy", *[lambda call: call()] * layer, raising(OSError("down")))
        errors, report = rank.save(rank.request("a", [1, 2, 3, 4]))
        assert errors == set()
        assert list(report.saved_until.values()) == [(0, 1)]
        assert rank.pool.published() == []
        rank.check_given_back()

    def test_event_that_is_never_reached(self, tmp_path):
        """The device hangs: the save is given up, the step goes on, and nothing is published later."""
        gate = Gate()
        rank = LayerRank(tmp_path, checksum=True, new_event=lambda: ScriptedEvent(on_synchronize=gate))
        request = rank.request("a", [1, 2, 3, 4])
        orders = rank.orders((request, None, (0, 16)))
        with gate, ThreadPoolExecutor(1) as threads:
            rank.forward(orders, [(request, 0, 16)])
            gate.wait_until_reached()
            finishing = threads.submit(rank.finish, orders)
            while not wait([finishing], 0.001).done:  # its deadline is made in there
                rank.clock.advance(rank.setup.config.save_timeout)
            _, report = finishing.result()
            assert list(report.saved_until.values()) == [(0, 1)]
        rank.check_given_back()
        assert rank.pool.published() == []
        rank.worker.close()

    def test_event_that_can_not_be_recorded(self, tmp_path):
        rank = LayerRank(
            tmp_path, checksum=True, new_event=lambda: ScriptedEvent(on_record=RuntimeError("device lost"))
        )
        _, report = rank.save(rank.request("a", [1, 2, 3, 4]))
        assert list(report.saved_until.values()) == [(0, 1)]
        assert rank.worker.stats.get("layer_event_failed") > 0
        rank.check_given_back()
        rank.worker.close()

    @pytest.mark.parametrize("rank", ["gva", "key"], indirect=True)
    def test_the_same_prefix_is_saved_again_by_the_next_step(self, rank):
        request = rank.request("a", [1, 2, 3, 4])
        rank.store.script("put" if rank.kind == "key" else "batch_alloc", raising(OSError("down")))
        assert list(rank.save(request)[1].saved_until.values()) == [(0, 1)]
        assert list(rank.save(request)[1].saved_until.values()) == [(16, 1)]
        rank.check_given_back()


class TestAbortedStep:
    @pytest.mark.parametrize("rank", KINDS, indirect=True)
    @pytest.mark.parametrize("layers", range(LAYERS + 1))
    def test_is_closed_as_a_whole_by_the_next_one(self, rank, layers):
        """Nothing of it is published or held, what it had not loaded is reported, and the next step is as any other."""
        loading = rank.saved()
        saving = rank.request("b", [5, 6, 7, 8])
        aborted = rank.orders((loading, 16, None), (saving, None, (0, 16)))
        rank.worker.start_load_kv(aborted)
        rank.forward(aborted, [(saving, 0, 16)], range(layers))
        again = rank.orders((saving, None, (0, 16)))
        rank.forward(again, [(saving, 0, 16)])
        rank.worker.start_load_kv(again)
        errors, report = rank.finish(again)
        assert errors == ({11, 12, 13, 14} if not rank.right(loading, 16) else errors)
        assert report.saved_until[again.requests[0].save.job_id] == (16, 1) or rank.kind != "key"
        rank.check_given_back()
        if rank.kind != "key":
            assert rank.pool.violations == []

    def test_is_closed_by_the_end_of_the_pool(self, rank):
        request = rank.request("b", [5, 6, 7, 8])
        orders = rank.orders((request, None, (0, 16)))
        rank.forward(orders, [(request, 0, 16)], range(2))
        assert rank.worker.close() == []
        assert rank.pool.published() == []
        assert rank.pool.ledger() == {"open_writes": 0, "leases": 0}


class TestExpiredLease:
    def test_what_was_copied_after_its_end_is_not_trusted(self, tmp_path):
        """The lax engine copies on; without digests nothing else would tell."""
        clock = ManualClock()
        rank = LayerRank(tmp_path, checksum=False, clock=clock, lease_ttl=40.0)
        request = rank.saved()
        orders = rank.orders((request, 16, None))

        def slow(call):
            clock.advance(41.0)
            return call()

        rank.store.script("batch_copy", slow)
        rank.worker.start_load_kv(orders)
        rank.forward(orders)
        assert rank.finish(orders)[0] == {11, 12, 13, 14}
        rank.worker.close()


def test_orders_that_make_no_sense_fail_their_request_alone(rank):
    good = rank.saved()
    bad = rank.request("z", [15, 16, 17, 18])
    orders = rank.orders((bad, 16, None), (good, 16, None))
    orders.requests[0] = ReqMeta("z", orders.requests[0].block_ids, (), orders.requests[0].load)  # no hashes
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    errors, report = rank.finish(orders)
    assert errors == {15, 16, 17, 18}
    assert report.failed_loads == {orders.requests[0].load.job_id}
    assert rank.right(good, 16)


def test_an_asynchronous_load_whose_orders_make_no_sense_fails_as_a_whole(rank):
    orders = rank.orders((rank.request("z", [15, 16, 17, 18]), 16, None))
    request = ReqMeta("z", orders.requests[0].block_ids, (), orders.requests[0].load)  # no hashes
    result = rank.worker._path.submit_load(request, Deadline.after(60.0)).result()
    assert [int(part.block_ids[at]) for part, at, _ in result.failures()] == [15, 16, 17, 18]


def test_a_save_whose_orders_make_no_sense_is_told_of_and_leaves_the_others_alone(rank, caplog):
    good, bad = rank.request("a", [1, 2, 3, 4]), rank.request("z", [5, 6, 7, 8])
    orders = rank.orders((bad, None, (0, 16)), (good, None, (0, 16)))
    orders.requests[0] = ReqMeta("z", orders.requests[0].block_ids, (), None, orders.requests[0].save)  # no hashes
    rank.forward(orders, [(good, 0, 16), (bad, 0, 16)])
    errors, report = rank.finish(orders)
    assert errors == set()
    assert report.saved_until[orders.requests[1].save.job_id] == (16, 1)
    assert report.saved_until[orders.requests[0].save.job_id] == (0, 1)
    assert "save_failed [requests: z]" in caplog.text
    rank.check_given_back()


def test_a_block_outside_the_cache_is_never_written_to(rank):
    request = rank.saved()
    request.tables = ([11, 12, 13, 99],)
    orders = rank.orders((request, 16, None))
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    assert rank.finish(orders)[0] == {11, 12, 13, 99}


def test_corrupt_values_are_reported_and_taken_out(rank):
    request = rank.saved()
    spoiled = rank.pool.published()[1]
    rank.pool.spoil(spoiled)
    orders = rank.orders((request, 16, None))
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    assert rank.finish(orders)[0] == {12}
    rank.check_given_back()
    rank.worker._path.recving._lanes.wait_until(lambda: spoiled not in rank.pool.published(), 60.0)
    assert spoiled not in rank.pool.published()


@pytest.mark.parametrize("rank", ["gva", "key"], indirect=True)
def test_evicted_between_look_up_and_load(rank):
    request = rank.saved()
    if rank.kind == "key":
        gone = next(iter(rank.store.inner.values))
        rank.store.inner.remove([gone])
    else:
        assert rank.pool.evict(rank.pool.published()[0])
    orders = rank.orders((request, 16, None))
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    assert rank.finish(orders)[0] == {11}
    rank.check_given_back()


@pytest.mark.parametrize("rank", KINDS, indirect=True)
def test_thousands_of_requests_leave_nothing_behind(rank):
    """Two hundred first, for what is made only once; steps that are aborted and calls that fail are among them."""
    copying, fresh = "put" if rank.kind == "key" else "batch_copy", itertools.count()

    def serve(count):
        for number in range(count):
            request = Request(f"r{number}", [next(fresh) for _ in range(8)], 8, 8, 4, tables=([1, 2],))
            if number % 5 == 0:
                rank.store.script("exists" if number % 2 else copying, raising(OSError("down")))
            rank.save(request, 8)
            request.tables = ([11, 12],)
            orders = rank.orders((request, 8, None))
            rank.worker.start_load_kv(orders)
            if number % 7:  # else the step is aborted here
                rank.forward(orders)
                rank.finish(orders)
            for key in rank.published():
                rank.evict(key)
        rank.worker.wait_for_save(PoolMetadata())
        rank.worker.get_block_ids_with_load_errors()
        rank.worker.take_report()
        rank.check_given_back()
        rank.worker.stats.take()
        rank.store.check_all_played()

    serve(200)
    before = footprint(rank.worker, without=[rank.store])
    serve(1000)
    assert footprint(rank.worker, without=[rank.store]) - before < 10_000  # one more lane takes 2,000


def test_a_step_whose_cleaning_up_is_stuck_does_not_keep_the_next_ones_waiting(tmp_path):
    """remove_lease never returns: after a while that is said, and its lane is given to others."""
    clock = ManualClock()
    rank = LayerRank(tmp_path, checksum=True, clock=clock)
    request = rank.saved()
    with Gate() as gate:
        rank.store.always("batch_remove_lease", holding(gate))
        for _ in range(4):
            orders = rank.orders((request, 16, None))
            rank.worker.start_load_kv(orders)
            rank.forward(orders)
            assert rank.finish(orders)[0] == set()
            clock.advance(1000)
        assert rank.worker.stats.get("giving_back_overdue") == 3
    rank.worker.close()
