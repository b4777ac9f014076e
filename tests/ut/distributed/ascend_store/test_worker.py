"""One rank's hooks: no exception leaves them, each fault is reported once, nothing untrusted is saved."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.device_events import ScriptedEvent
from fixtures.engine import Request
from fixtures.footprint import footprint
from fixtures.gates import Gate
from fixtures.memory_store import MemoryStore
from fixtures.parts import Blocks, make_setup
from fixtures.stores import FlakyStore, answering, changing, holding, raising, wrong_bytes
from vllm_ascend_ext import device
from vllm_ascend_ext.kv_pool.calls import State
from vllm_ascend_ext.kv_pool.clock import MONOTONIC
from vllm_ascend_ext.kv_pool.errors import ConfigError, Status
from vllm_ascend_ext.kv_pool.groups import CacheGroup
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, lookup_path
from vllm_ascend_ext.kv_pool.requests import LoadSpec, PoolMetadata, ReqMeta, SaveSpec, WorkerReport
from vllm_ascend_ext.kv_pool.worker import KVPoolWorker, Transfers

LONG = 60.0
BLOCK = 4
BYTES = 64


class Fatal(BaseException):
    """What ends a thread."""


class Rank:
    """A started worker with 32 blocks in each group; block b of a fresh rank is filled with b + 1."""

    def __init__(self, tmp_path, *, store=None, new_event=device.new_event, clock=None, **setup):
        self.setup = make_setup(tmp_path, **setup)
        self.store = store or FlakyStore(MemoryStore())
        self.clock = clock or ManualClock()
        self.worker = KVPoolWorker(self.setup, self.store, new_event=new_event, clock=self.clock)
        self.worker.start()
        self.memories = [Blocks(32, BYTES) for _ in self.setup.groups]
        for memory in self.memories:
            memory.bytes[:] = np.arange(32, dtype=np.uint8)[:, None] + 1
        self.worker.register_kv_caches([memory.layout() for memory in self.memories])

    def step(self, *requests, finished=(), **meta):
        """All hooks of a step in vLLM's order; returns (transfers, errors, report)."""
        meta.setdefault("computed_blocks", tuple(np.empty(0, dtype=np.int64) for _ in self.setup.groups))
        orders = PoolMetadata(list(requests), **meta)
        worker = self.worker
        worker.handle_preemptions(orders)
        worker.start_load_kv(orders)
        worker.wait_for_save(orders)
        transfers = worker.get_finished(orders, finished)
        return transfers, worker.get_block_ids_with_load_errors(), worker.take_report()

    def overdue_step(self, gate, *requests):
        """A step whose call of the store stands before ``gate`` until it is given up."""
        with ThreadPoolExecutor(1) as threads:
            step = threads.submit(self.step, *requests)
            gate.wait_until_reached()
            self.clock.advance(max(self.setup.config.load_timeout, self.setup.config.save_timeout))
            return step.result(LONG)

    def fill(self, *names, blocks=(1, 2, 3, 4)):
        """Save the prompts of ``names`` from ``blocks``."""
        for number, name in enumerate(names, start=1000):
            _, _, report = self.step(save(number, name, 0, BLOCK * len(blocks), [list(blocks)] * len(self.memories)))
            assert report.saved_until == {number: (BLOCK * len(blocks), 1)}


def order(name, tables, load=None, save=None, prompt=None):
    hashes = Request(name, list(prompt or f"{name:64}".encode()), 64, 65, BLOCK).block_hashes
    return ReqMeta(name, tuple(np.asarray(table, dtype=np.int64) for table in tables), tuple(hashes), load, save)


def load(job_id, name, start, end, tables, is_async=False):
    return order(name, tables, load=LoadSpec(job_id, start, end, is_async))


def save(job_id, name, start, end, tables):
    return order(name, tables, save=SaveSpec(job_id, start, end))


@pytest.fixture
def rank(tmp_path):
    subject = Rank(tmp_path)
    yield subject
    assert subject.worker.close() == []


@pytest.fixture
def gate():
    with Gate() as opened_at_the_end:
        yield opened_at_the_end


class TestSyncLoads:
    def test_what_was_saved_is_there_when_the_hook_returns(self, rank):
        rank.fill("a")
        _, errors, report = rank.step(load(1, "a", 0, 16, [[11, 12, 13, 14]]))
        assert (errors, report) == (set(), WorkerReport(used_loads={1}))
        assert [int(rank.memories[0][b][0]) for b in (11, 12, 13, 14)] == [2, 3, 4, 5]

    def test_only_what_the_device_does_not_have_is_loaded(self, rank):
        rank.fill("a")
        rank.step(load(1, "a", 8, 15, [[11, 12, 13, 14]]))
        assert [int(rank.memories[0][b][0]) for b in (11, 12, 13, 14)] == [12, 13, 4, 5]

    def test_a_block_that_did_not_arrive_is_reported_exactly_once_and_only_it(self, rank):
        """A45, through the whole worker."""
        rank.fill("a")
        rank.store.script("get", changing(lambda codes: [codes[0], -1, codes[2]]))
        _, errors, report = rank.step(load(1, "a", 0, 12, [[11, 12, 13]]))
        assert errors == {12}
        assert report.failed_loads == {1}
        assert rank.step()[1:] == (set(), WorkerReport())

    @pytest.mark.parametrize("tp_rank", range(4))
    def test_so_it_is_whatever_the_rank_rotates(self, tmp_path, tp_rank):
        rank = Rank(tmp_path, topology=Topology(tp_size=4, tp_rank=tp_rank, num_kv_heads=4))
        rank.fill("a")
        victim = next(key for key in rank.store.inner.values if key.endswith(order("a", []).block_hashes[1].hex()))
        del rank.store.inner.values[victim]
        assert rank.step(load(1, "a", 0, 12, [[11, 12, 13]]))[1] == {12}
        rank.worker.close()

    @pytest.mark.parametrize(
        "action",
        [raising(OSError("down")), answering(None), answering([0]), answering([]), wrong_bytes, answering([7] * 9)],
    )
    def test_a_call_that_fails_as_a_whole_fails_all_its_blocks_and_no_other_request(self, rank, action):
        rank.fill("a", "b")
        rank.store.script("get", action)
        _, errors, report = rank.step(load(1, "a", 0, 12, [[11, 12, 13]]), load(2, "b", 0, 12, [[21, 22, 23]]))
        failed = next(iter(report.failed_loads))
        assert report.failed_loads == {failed}
        assert errors == ({11, 12, 13} if failed == 1 else {21, 22, 23})
        assert rank.worker.stats.get("load_failed") == 1

    def test_a_load_that_outlives_its_deadline_fails_and_its_late_bytes_go_nowhere(self, tmp_path, gate):
        rank = Rank(tmp_path)
        rank.fill("a")
        rank.store.script("get", holding(gate))
        _, errors, _ = rank.overdue_step(gate, load(1, "a", 0, 8, [[11, 12]]))
        assert errors == {11, 12}
        before = rank.memories[0].bytes.copy()
        gate.open()
        gate.wait_until_passed()
        assert rank.worker.close() == []
        assert (rank.memories[0].bytes == before).all()

    @pytest.mark.parametrize(
        "nonsense",
        [
            load(1, "a", 0, 400, [[11, 12]]),  # more tokens than hashes or blocks
            load(1, "a", 0, 8, [[11, 99]]),  # a block that the cache does not have
            load(1, "a", 0, 12, [[11, 12]]),  # a table that is too short
        ],
    )
    def test_orders_that_make_no_sense_fail_that_request_and_raise_nothing(self, rank, nonsense):
        rank.fill("a", "b")
        _, errors, report = rank.step(nonsense, load(2, "b", 0, 8, [[21, 22]]))
        assert report.failed_loads == {1}
        assert errors == set(nonsense.block_ids[0].tolist())
        assert int(rank.memories[0][21][0]) == 2

    def test_a_thread_that_ended_fails_this_load_and_the_next_at_once(self, rank):
        rank.fill("a")
        rank.store.script("get", raising(Fatal("device lost")))
        assert rank.step(load(1, "a", 0, 8, [[11, 12]]))[1] == {11, 12}
        assert rank.step(load(2, "a", 0, 8, [[13, 14]]))[1] == {13, 14}
        assert rank.worker.stats.get("load_thread_failed") == 1


class TestAsyncLoads:
    def test_it_is_named_once_when_it_has_ended(self, rank, gate):
        rank.fill("a")
        rank.store.script("get", holding(gate))
        transfers, _, _ = rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        assert transfers == Transfers(set(), set(), set())
        gate.open()
        rank.worker.wait_for_loads(LONG)
        transfers, errors, report = rank.step()
        assert transfers == Transfers(set(), {"a"}, set())
        assert (errors, report) == (set(), WorkerReport())
        assert rank.step()[0] == Transfers(set(), set(), set())

    def test_a_failed_one_is_named_in_the_step_that_reports_its_blocks(self, rank):
        rank.fill("a")
        rank.store.script("get", answering([0, -1]))
        meta = load(1, "a", 0, 8, [[11, 12]], is_async=True)
        seen = [rank.step(meta)]
        rank.worker.wait_for_loads(LONG)
        seen.append(rank.step())
        named = [step for step in seen if step[0].finished_recving]
        assert len(named) == 1
        _, errors, report = named[0]
        assert 12 in errors
        assert report.failed_loads == {1}

    def test_one_that_outlives_its_deadline_is_named_as_received_and_failed(self, rank, gate):
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        rank.clock.advance(rank.setup.config.load_timeout)
        transfers, errors, report = rank.step()
        assert transfers.finished_recving == {"a"}
        assert errors == {11, 12}
        assert report.failed_loads == {1}

    def test_an_aborted_one_is_given_up_and_named_exactly_once(self, rank, gate):
        """A02."""
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        transfers, _, _ = rank.step(finished=["a"])
        assert transfers.finished_recving == {"a"}
        rank.memories[0][11] = 200  # its next owner
        gate.open()
        gate.wait_until_passed()
        assert rank.step(finished=["a"])[0].finished_recving == set()
        assert rank.worker.close() == []
        assert (rank.memories[0][11] == 200).all()

    def test_one_that_failed_before_its_request_was_aborted_is_told_of(self, rank, gate):
        """Nobody needs its blocks any more; that the store failed is news all the same."""
        rank.store.script("get", holding(gate))  # and there is nothing to get
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        gate.open()
        rank.worker.wait_for_loads(LONG)
        transfers, errors, _ = rank.step(finished=["a"])
        assert transfers.finished_recving == {"a"}
        assert errors == set()
        assert rank.worker.stats.get("load_failed") == 1

    def test_one_that_is_aborted_before_it_was_ordered_is_named_too(self, rank):
        """A02: vLLM waits for it whatever the worker has done."""
        rank.fill("a")
        transfers, _, _ = rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True), finished=["a"])
        assert transfers.finished_recving == {"a"}
        assert rank.step()[0].finished_recving == set()

    def test_one_of_a_preempted_request_is_ended_before_its_blocks_are_handed_on(self, rank, gate):
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        meta = PoolMetadata(preempted=frozenset({"a"}))
        rank.worker.handle_preemptions(meta)
        rank.memories[0][11] = 200
        gate.open()
        gate.wait_until_passed()
        assert rank.worker.close() == []
        assert (rank.memories[0][11] == 200).all()

    def test_a_late_one_of_an_old_life_does_not_touch_the_new_one(self, rank, gate):
        """Counts are kept per job."""
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        assert rank.step(finished=["a"])[0].finished_recving == {"a"}
        named = [rank.step(load(2, "a", 0, 8, [[13, 14]], is_async=True))[0].finished_recving]
        gate.open()
        rank.worker.wait_for_loads(LONG)
        named += [rank.step()[0].finished_recving for _ in range(2)]
        assert [name for names in named for name in names] == ["a"]
        assert rank.worker.take_report() == WorkerReport()
        assert int(rank.memories[0][13][0]) == 2

    def test_without_loads_nobody_waits_for_them(self, rank):
        rank.worker.wait_for_loads(LONG)
        assert rank.step(idle=True)[0] == Transfers(set(), set(), set())

    def test_a_step_without_work_waits_a_moment_for_the_load_that_the_engine_waits_for(self, rank, gate):
        """Engines poll in empty steps, and one that does nothing else takes the loading thread its time."""
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        with ThreadPoolExecutor(1) as threads:
            step = threads.submit(rank.step, idle=True)
            gate.open()
            assert step.result(LONG)[0].finished_recving == {"a"}

    def test_that_moment_ends(self, tmp_path, gate):
        rank = Rank(tmp_path, clock=MONOTONIC)
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        assert rank.step(idle=True)[0].finished_recving == set()
        gate.open()
        assert rank.worker.close() == []

    def test_a_step_with_work_does_not_wait(self, rank, gate):
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        assert rank.step()[0].finished_recving == set()  # by a clock that stands still
        gate.open()


class TestSeveralGroups:
    """A48: both groups use the same block ids, and vLLM can't take single blocks back."""

    @pytest.fixture
    def rank(self, tmp_path):
        subject = Rank(tmp_path, groups=(CacheGroup(4), CacheGroup(4)))
        yield subject
        assert subject.worker.close() == []

    def test_a_block_of_one_group_fails_the_request_and_no_block_ids(self, rank):
        rank.fill("a", "b", blocks=(7, 8))
        rank.store.script("get", changing(lambda codes: [-1, codes[1]]))
        transfers, errors, report = rank.step(load(1, "a", 0, 8, [[17, 18], [17, 18]], is_async=True))
        while not transfers.finished_recving:
            rank.worker.wait_for_loads(LONG)
            transfers, errors, report = rank.step()
        assert transfers == Transfers(set(), {"a"}, {"a"})
        assert errors == set()
        assert report.failed_loads == {1}

    def test_the_other_group_of_the_same_id_can_still_be_saved(self, rank):
        rank.fill("a", blocks=(7, 8))
        rank.store.script("get", changing(lambda codes: [-1, -1]))
        rank.step(load(1, "a", 0, 8, [[17, 18], [21, 22]], is_async=True))
        rank.worker.wait_for_loads(LONG)
        rank.step()
        _, _, report = rank.step(save(2, "c", 0, 8, [[1, 2], [17, 18]]))
        assert report.saved_until == {2: (8, 1)}
        _, _, report = rank.step(save(3, "d", 0, 8, [[17, 2], [1, 2]]))
        assert report.saved_until == {3: (0, 1)}


class TestSaves:
    def test_when_the_hook_returns_it_is_in_the_store(self, rank):
        """A12: a look-up right after is a full hit, and no put comes later."""
        meta = save(1, "a", 0, 16, [[1, 2, 3, 4]])
        orders = PoolMetadata([meta])
        rank.worker.wait_for_save(orders)
        assert rank.worker.hits.hit(16, meta.block_hashes, 0) == 16
        assert len(rank.store.calls("put")) == 1
        rank.step()
        assert len(rank.store.calls("put")) == 1

    def test_a_slow_put_is_waited_for(self, tmp_path, gate):
        """A12: the put that is still under way has the hook wait."""
        rank = Rank(tmp_path)
        rank.store.script("put", holding(gate))
        saver = threading.Thread(target=rank.worker.wait_for_save, args=(PoolMetadata([save(1, "a", 0, 8, [[1, 2]])]),))
        saver.start()
        gate.wait_until_reached()
        assert saver.is_alive()
        gate.open()
        saver.join(LONG)
        assert rank.worker.take_report().saved_until == {1: (8, 1)}
        rank.worker.close()

    def test_an_overdue_put_never_reads_a_block_after_the_hook_has_returned(self, tmp_path, gate):
        rank = Rank(tmp_path)
        rank.store.script("put", holding(gate))
        _, _, report = rank.overdue_step(gate, save(1, "a", 0, 8, [[1, 2]]))
        assert report.saved_until == {1: (0, 1)}
        rank.memories[0].bytes[:] = 0xEE
        gate.open()
        gate.wait_until_passed()
        assert rank.worker.close() == []
        assert rank.store.inner.values == {}

    @pytest.mark.parametrize(
        ("codes", "until"),
        [([0, 0, 0, 0], 16), ([0, 0, -1, 0], 8), ([2, 0, 0, 0], 0), ([0, 0, 0, 2], 12), ([0, 0], 0)],
    )
    def test_it_got_as_far_as_the_unbroken_run(self, rank, codes, until):
        rank.store.script("put", answering(codes))
        _, _, report = rank.step(save(1, "a", 0, 16, [[1, 2, 3, 4]]))
        assert report.saved_until == {1: (until, 1)}

    def test_a_failed_save_fails_no_request(self, rank):
        rank.store.script("put", raising(OSError("full")))
        transfers, errors, report = rank.step(save(1, "a", 0, 8, [[1, 2]]))
        assert transfers == Transfers(set(), set(), set())
        assert errors == set()
        assert report.failed_loads == set()

    @pytest.mark.parametrize("stage", ["new", "record"])
    def test_a_device_without_events_saves_nothing_and_says_so(self, tmp_path, stage):
        def new_event():
            if stage == "new":
                raise RuntimeError("no events left")
            return ScriptedEvent(on_record=RuntimeError("stream broken"))

        rank = Rank(tmp_path, new_event=new_event)
        _, _, report = rank.step(save(1, "a", 0, 8, [[1, 2]]), save(2, "b", 0, 8, [[3, 4]]))
        assert report.saved_until == {1: (0, 1), 2: (0, 1)}
        assert rank.worker.stats.get("save_failed") == 1
        assert rank.store.calls("put") == []
        rank.worker.close()

    def test_nothing_is_read_before_the_device_is_done(self, tmp_path):
        events: list[ScriptedEvent] = []

        def new_event():
            events.append(ScriptedEvent())
            return events[-1]

        rank = Rank(tmp_path, new_event=new_event)
        rank.step(save(1, "a", 0, 8, [[1, 2]]))
        assert [event.synchronized for event in events] == [True]
        rank.step()
        assert len(events) == 1, "a step that saves nothing needs none"
        rank.worker.close()

    def test_orders_that_make_no_sense_stop_no_other_save(self, rank):
        """One request's fault stays that request's."""
        _, _, report = rank.step(
            save(1, "a", 0, 8, [[1, 2]]), save(2, "b", 0, 400, [list(range(1, 30))]), save(3, "c", 0, 8, [[5, 6]])
        )
        assert report.saved_until == {1: (8, 1), 2: (0, 1), 3: (8, 1)}

    def test_ranks_with_the_same_heads_take_turns(self, tmp_path):
        store = FlakyStore(MemoryStore())
        ranks = [
            Rank(tmp_path / str(i), store=store, topology=Topology(tp_size=2, tp_rank=i, num_kv_heads=1))
            for i in range(2)
            if not (tmp_path / str(i)).mkdir()
        ]
        for rank in ranks:
            assert rank.step(save(1, "a", 0, 16, [[1, 2, 3, 4]]))[2].saved_until == {1: (16, 1)}
        assert [len(keys) for keys in store.calls("put")] == [2, 2]
        assert ranks[0].worker.hits.hit(16, order("a", []).block_hashes, 0) == 16
        for rank in ranks:
            rank.worker.close()


class TestNothingUntrustedIsPublished:
    """A50."""

    def test_a_request_whose_load_failed_saves_nothing_in_that_step(self, rank):
        rank.fill("a", blocks=(1, 2))
        rank.store.inner.values.popitem()
        _, errors, report = rank.step(
            order("a", [[11, 12, 13, 14]], load=LoadSpec(1, 0, 8, False), save=SaveSpec(2, 8, 16)),
            save(3, "b", 0, 8, [[21, 22]]),
        )
        assert errors == {12}
        assert report.saved_until == {2: (8, 1), 3: (8, 1)}
        assert len(rank.store.calls("put")) == 2, "one to fill, one of b"
        assert rank.worker.stats.get("saves_skipped_after_failed_load") == 1

    def test_nor_does_one_that_shares_a_failed_block(self, rank):
        rank.fill("a", blocks=(1, 2))
        rank.store.inner.values.popitem()
        _, _, report = rank.step(load(1, "a", 0, 8, [[11, 12]]), save(2, "b", 0, 12, [[11, 12, 13]]))
        assert report.saved_until == {2: (0, 1)}

    def test_nor_one_that_shares_a_block_computed_on_it(self, rank):
        rank.fill("a", blocks=(1, 2))
        rank.store.inner.values.popitem()
        rank.step(load(1, "a", 0, 8, [[11, 12, 13, 14]]))
        _, _, report = rank.step(save(2, "b", 0, 4, [[14]]))
        assert report.saved_until == {2: (0, 1)}

    def test_it_lasts_until_the_blocks_are_computed_anew(self, rank):
        rank.fill("a", blocks=(1, 2))
        rank.store.inner.values.popitem()
        rank.step(load(1, "a", 0, 8, [[11, 12]]))
        assert rank.step(save(2, "a", 0, 8, [[11, 12]]))[2].saved_until == {2: (0, 1)}
        _, _, report = rank.step(save(3, "a", 0, 8, [[11, 12]]), computed_blocks=(np.asarray([12]),))
        assert report.saved_until == {3: (8, 1)}

    def test_or_loaded_anew(self, rank):
        rank.fill("a", "b", blocks=(1, 2))
        rank.store.script("get", answering([-1, -1]))
        rank.step(load(1, "a", 0, 8, [[11, 12]]))
        rank.step(load(2, "b", 0, 8, [[11, 12]]))
        assert rank.step(save(3, "b", 0, 8, [[11, 12]]))[2].saved_until == {3: (8, 1)}

    def test_reading_the_errors_does_not_make_the_blocks_right(self, rank):
        rank.fill("a", blocks=(1, 2))
        rank.store.script("get", answering([-1, -1]))
        orders = PoolMetadata([load(1, "a", 0, 8, [[11, 12]])])
        rank.worker.start_load_kv(orders)
        assert rank.worker.get_block_ids_with_load_errors() == {11, 12}
        assert rank.step(save(2, "a", 0, 8, [[11, 12]]))[2].saved_until == {2: (0, 1)}


class TestEvents:
    def test_only_what_this_rank_put_is_announced_with_its_tokens_and_its_parent(self, tmp_path):
        rank = Rank(tmp_path, enable_kv_events=True)
        rank.store.script("put", answering([0, int(Status.FULL), 0]))
        meta = order("a", [[1, 2, 3]], save=SaveSpec(1, 0, 12))
        meta = ReqMeta(meta.req_id, meta.block_ids, meta.block_hashes, None, meta.save, tuple(range(100, 112)))
        rank.step(meta)
        stored = rank.worker.take_stored()
        assert [(event.block_hash, event.parent_hash, event.token_ids) for event in stored] == [
            (meta.block_hashes[0], None, (100, 101, 102, 103)),
            (meta.block_hashes[2], meta.block_hashes[1], (108, 109, 110, 111)),
        ]
        assert {(event.group, event.block_size) for event in stored} == {(0, 4)}
        assert rank.worker.take_stored() == []
        rank.worker.close()

    @pytest.mark.parametrize("failure", [raising(OSError()), answering(None), answering([0])])
    def test_a_failed_put_is_not_announced(self, tmp_path, failure):
        rank = Rank(tmp_path, enable_kv_events=True)
        rank.store.script("put", failure)
        rank.step(save(1, "a", 0, 8, [[1, 2]]))
        assert rank.worker.take_stored() == []
        rank.worker.close()

    def test_without_events_nothing_is_kept(self, rank):
        rank.fill("a")
        assert rank.worker.take_stored() == []


class TestSent:
    def test_each_request_is_named_as_sent_once_however_often_it_is_in_the_orders(self, rank):
        kept = frozenset({"a", "b"})
        assert rank.step(delayed_free=kept)[0].finished_sending == {"a", "b"}
        assert rank.step(delayed_free=kept | {"c"})[0].finished_sending == {"c"}
        assert rank.step()[0].finished_sending == set()
        assert rank.step(delayed_free=frozenset({"a"}))[0].finished_sending == {"a"}, "the id has come again"


class TestLookups:
    def test_a_store_that_is_too_slow_for_one_is_not_asked_by_the_next_ones(self, rank, gate):
        """Or every look-up would cost the deadline, one after the other, and so would every request."""
        rank.fill("a")
        asked = len(rank.store.calls("exists"))
        hashes = order("a", []).block_hashes
        config = rank.setup.config

        def slow(call):
            rank.clock.advance(config.lookup_timeout)
            gate.hold()
            return call()

        rank.store.script("exists", slow)
        path = lookup_path(config.rpc_base_path, config.lookup_rpc_port, rank.setup.dp_rank)
        with closing(LookupKeyClient(path, LONG)) as client:
            assert [client.lookup(16, hashes) for _ in range(3)] == [0, 0, 0]
            assert len(rank.store.calls("exists")) == asked + 1
            gate.open()
            gate.wait_until_passed()
            assert client.lookup(16, hashes) == 0, "that it came in the end does not make it quick"
            assert len(rank.store.calls("exists")) == asked + 1
            rank.clock.advance(config.store_backoff)
            assert client.lookup(16, hashes) == 16
        assert rank.worker.stats.get("lookup_handler_timeouts") == 1


class TestStartAndClose:
    @pytest.mark.parametrize("which", ["save thread", "load thread"])
    def test_a_thread_that_does_not_start_leaves_nothing_behind(self, tmp_path, which):
        """A10."""
        store = FlakyStore(MemoryStore())
        if which == "load thread":
            store.script("set_device", lambda call: call())
        store.script("set_device", raising(OSError("no device 3")))
        worker = KVPoolWorker(make_setup(tmp_path), store)
        with pytest.raises(OSError, match="no device 3"):
            worker.start()
        assert store.calls("close") == [[]]
        assert worker.close() == []
        assert list(tmp_path.iterdir()) == []

    def test_a_socket_directory_that_is_missing_leaves_nothing_behind(self, tmp_path):
        store = FlakyStore(MemoryStore())
        worker = KVPoolWorker(make_setup(tmp_path / "nowhere"), store)
        with pytest.raises(ConfigError, match="nowhere"):
            worker.start()
        assert store.calls("close") == [[]]

    def test_only_the_first_rank_answers_lookups(self, tmp_path):
        for number, topology in enumerate([Topology(tp_size=2, tp_rank=1, num_kv_heads=2), Topology(num_kv_heads=2)]):
            folder = tmp_path / str(number)
            folder.mkdir()
            rank = Rank(folder, topology=topology)
            assert bool(list(folder.iterdir())) is topology.is_first
            rank.worker.close()
            assert list(folder.iterdir()) == []

    def test_the_number_of_layouts_is_that_of_the_groups(self, rank):
        with pytest.raises(ConfigError, match="2 given, 1 KV-cache groups configured"):
            rank.worker.register_kv_caches([rank.memories[0].layout()] * 2)

    def test_the_engine_is_told_which_memory_takes_part(self, tmp_path):
        told = []

        class Registering(MemoryStore):
            def register_buffer(self, addresses, lengths):
                told.extend(zip(addresses, lengths, strict=True))

        rank = Rank(tmp_path, store=FlakyStore(Registering()))
        memory = rank.memories[0].bytes
        assert told == [(memory.ctypes.data, memory.nbytes)]
        rank.worker.close()

    def test_close_is_idempotent_and_says_what_is_stuck(self, tmp_path, gate):
        rank = Rank(tmp_path, topology=Topology(tp_size=2, tp_rank=1, num_kv_heads=2))  # it serves no look-ups
        rank.fill("a")
        rank.store.script("get", holding(gate))
        rank.step(load(1, "a", 0, 8, [[11, 12]], is_async=True))
        gate.wait_until_reached()
        with ThreadPoolExecutor(1) as threads:
            closing, loads = threads.submit(rank.worker.close), rank.worker._path.recving._lanes
            with loads._condition:
                assert loads._condition.wait_for(lambda: loads.state is State.CLOSING, LONG)
            while loads.state is State.CLOSING:  # its deadline may be made only now
                rank.clock.advance(rank.setup.config.close_timeout)
            assert closing.result(LONG) == ["load of a (job 1)"]
        assert rank.worker.stats.get("close_stuck") == 1
        gate.open()
        gate.wait_until_passed()
        rank.worker.close()

    def test_after_close_every_hook_still_returns(self, rank):
        rank.fill("a")
        rank.worker.close()
        _, errors, report = rank.step(load(1, "a", 0, 8, [[11, 12]]), save(2, "b", 0, 8, [[1, 2]]))
        assert errors == {11, 12}
        assert report.saved_until == {2: (0, 1)}

    def test_before_start_loads_fail_and_saves_save_nothing(self, tmp_path):
        setup = make_setup(tmp_path)
        worker = KVPoolWorker(setup, MemoryStore())
        worker.register_kv_caches([Blocks(32, BYTES).layout()])
        orders = PoolMetadata([load(1, "a", 0, 8, [[11, 12]])])
        worker.start_load_kv(orders)
        assert worker.get_block_ids_with_load_errors() == {11, 12}
        worker.close()

    def test_lookups_can_be_served_again(self, tmp_path):
        rank = Rank(tmp_path)
        rank.worker.restart_lookups()
        assert list(tmp_path.iterdir())
        rank.worker.close()
        assert list(tmp_path.iterdir()) == []


def test_ten_thousand_requests_leave_nothing_behind(tmp_path):
    rank = Rank(tmp_path, checksum=False)
    rank.store.inner = MemoryStore(capacity_bytes=64 * BYTES)

    def serve(count):
        for number in range(count):
            name, table = f"r{number}", [[1 + number % 8, 9 + number % 8]]
            steps = [[save(2 * number, name, 0, 8, table)]]
            if number % 3 == 0:
                steps.append([load(2 * number + 1, name, 0, 8, table, is_async=number % 2 == 0)])
            for orders in steps:
                rank.step(*orders, finished=[name] if number % 4 == 0 else (), delayed_free=frozenset({name}))
        for _ in range(3):
            rank.worker.wait_for_loads(LONG)
            rank.step()
        rank.worker.stats.take()  # of its observations a thousand of each kind wait to be taken, no more

    serve(200)
    before = footprint(rank.worker, without=[rank.store])
    serve(10_000)
    assert footprint(rank.worker, without=[rank.store]) - before < 10_000  # a byte a request; one more lane takes 2,000
    assert rank.worker.close() == []
