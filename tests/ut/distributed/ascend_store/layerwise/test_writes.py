"""Every key that was allocated is finished once: with 0 if its bytes are there and may be seen, else with its code."""

import threading

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.gva_stores import FlakyGvaStore, GvaPool, LaxGvaStore, StrictGvaStore
from fixtures.stores import answering, changing, raising
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import UNKNOWN_CODE, GvaClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, TransferJob
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.gva import OpenWrites, WriteBook
from vllm_ascend_ext.kv_pool.layerwise.step import LayerSave
from vllm_ascend_ext.kv_pool.observe import Stats

OK, FAILED, FULL, REFUSED = Status.OK, Status.FAILED, Status.FULL, Status.REFUSED
SIZES = [8, 8]


class Stop(BaseException):
    """Ends a thread."""


class Bench:
    def __init__(self, kind=StrictGvaStore):
        self.pool = GvaPool(1 << 12)
        self.store = FlakyGvaStore(kind(self.pool))
        self.stats = Stats()
        self.client = GvaClient(StoreClient(self.store, self.stats, clock=ManualClock()))
        self.book = WriteBook(self.client)

    def save(self, *jobs):
        """A save of jobs, each given as the keys of its blocks in group 0, 1, ..."""
        plan = LayerPlan(((0, 0), (1, 0)), (None, None), (False, False))
        made = []
        for number, groups in enumerate(jobs):
            parts = tuple(
                GroupBlocks(group, np.arange(len(keys)), np.arange(len(keys)) + 1, list(keys))
                for group, keys in enumerate(groups)
            )
            made.append(TransferJob(number, f"r{number}", parts))
        return LayerSave(made, plan, threading.Condition(threading.RLock()), [])

    def writes(self):
        return OpenWrites(self.client, self.book, self.stats)

    def write(self, save):
        """As if every layer of every block that is to be copied had been."""
        for rows in save.rows:
            for row in rows.to_copy().tolist():
                self.pool.blobs[rows.keys[row]].written[:] = True

    def run(self, save, spoil=lambda save: None):
        with self.writes() as writes:
            writes.open(save, SIZES)
            self.write(save)
            spoil(save)
            writes.publish(save)
        save.end()
        return [save.result(job).statuses for job in range(len(save.jobs))]

    def check_closed(self):
        assert self.pool.ledger()["open_writes"] == 0
        assert self.book.is_empty
        assert self.pool.violations == []


@pytest.fixture
def bench():
    return Bench()


def test_what_was_written_is_published(bench):
    save = bench.save([["a", "b"], ["c"]])
    assert bench.run(save) == [[[OK, OK], [OK]]]
    assert bench.pool.published() == ["a", "b", "c"]
    assert save.result(0).stored == [[True, True], [True]]
    assert sorted(bench.store.finished) == [("a", 0), ("b", 0), ("c", 0)]
    bench.check_closed()


def test_a_block_that_is_there_is_neither_opened_nor_counted_as_stored(bench):
    bench.run(bench.save([["a"]]))
    save = bench.save([["a", "b"]])
    assert bench.run(save) == [[[OK, OK]]]
    assert save.result(0).stored == [[False, True]]
    assert bench.store.calls("batch_alloc")[-1] == ["b"]
    bench.check_closed()


def test_a14_what_was_not_allocated_is_neither_copied_nor_finished_nor_remembered(bench):
    bench.store.script("batch_alloc", lambda call: [*bench.store.inner.batch_alloc(["a"], [8]), 0, -3016])
    save = bench.save([["a", "b", "c"]])
    with bench.writes() as writes:
        writes.open(save, SIZES)
        assert save.rows[0].to_copy().tolist() == [0]
        assert (save.rows[0].gvas[1:] == 0).all()
        bench.write(save)
        writes.publish(save)
    save.end()
    assert save.result(0).statuses == [[OK, FULL, FAILED]]
    assert bench.store.finished == [("a", 0)]
    assert bench.run(bench.save([["a", "b", "c"]])) == [[[OK, OK, OK]]]  # asked again for b and c, and answered
    assert bench.store.calls("batch_alloc")[-1] == ["b", "c"]
    bench.check_closed()


def test_a18_a_copy_that_fails_for_one_key_drops_that_key_with_its_first_code(bench):
    save = bench.save([["k1", "k2"]])

    def spoil(save):
        save.fail(save.rows[0], np.asarray([1]), np.asarray([REFUSED]), np.asarray([-3102]))
        save.fail(save.rows[0], np.asarray([1]), np.asarray([FAILED]), np.asarray([-1]))

    assert bench.run(save, spoil) == [[[OK, REFUSED]]]
    assert bench.store.finished == [("k1", 0), ("k2", -3102)]
    assert bench.pool.published() == ["k1"]
    assert bench.run(bench.save([["k1", "k2"]])) == [[[OK, OK]]]
    bench.check_closed()


@pytest.mark.parametrize("error", [OSError("copy failed"), Stop()])
def test_an_aborted_save_drops_what_it_had_opened(bench, error):
    def spoil(save):
        raise error

    with pytest.raises(type(error)):
        bench.run(bench.save([["a"], ["b"]]), spoil)
    assert sorted(bench.store.finished) == [("a", UNKNOWN_CODE), ("b", UNKNOWN_CODE)]
    assert bench.pool.published() == []
    bench.check_closed()


RAW = [None, [], [1], [1, 1, 1, 1], 7, "12"]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("raw", RAW, ids=repr)
def test_an_allocation_that_can_not_be_read_rolls_back_what_its_request_opened(bench, raw, group):
    """In all groups, and no other request's."""
    healthy = [lambda call: call()] * group
    bench.store.script("batch_alloc", *healthy, changing(lambda gvas: raw))
    save = bench.save([["a", "b"], ["c", "d"]], [["e"], ["f"]])
    assert bench.run(save) == [[[FAILED] * 2, [FAILED] * 2], [[OK], [OK]]]
    assert bench.pool.published() == ["e", "f"]
    bench.check_closed()


@pytest.mark.parametrize("after", [False, True])
def test_so_does_one_that_raises(bench, after):
    bench.store.script("batch_alloc", lambda call: call(), raising(OSError("down"), after=after))
    save = bench.save([["a"], ["b"]], [["c"], []])
    assert bench.run(save) == [[[FAILED], [FAILED]], [[OK], []]]
    bench.check_closed()


def test_a_failed_look_at_what_is_there_fails_its_request_and_opens_nothing(bench):
    bench.store.script("exists", raising(OSError("down")))
    assert bench.run(bench.save([["a"], []], [["b"], []])) == [[[FAILED], []], [[OK], []]]
    assert bench.store.calls("batch_alloc") == [["b"]]
    bench.check_closed()


def test_nothing_is_published_of_a_request_that_was_dropped(bench):
    """A50: its blocks were computed on what did not arrive."""
    save = bench.save([["a"], []], [["b"], []])
    statuses = bench.run(save, lambda save: save.drop(0))
    assert statuses == [[[Status.CANCELLED], []], [[OK], []]]
    assert bench.pool.published() == ["b"]
    bench.check_closed()


def test_of_two_requests_with_one_key_one_writes_and_both_share_what_becomes_of_it(bench):
    save = bench.save([["a", "b"], []], [["a", "c"], []])
    assert bench.run(save) == [[[OK, OK], []], [[OK, OK], []]]
    assert [save.result(job).stored for job in (0, 1)] == [[[True, True], []], [[False, True], []]]
    failing = bench.save([["d"], []], [["d"], []])
    assert bench.run(failing, lambda save: save.drop(0)) == [[[Status.CANCELLED], []], [[Status.CANCELLED], []]]
    bench.check_closed()


def test_what_a_stuck_save_has_open_is_not_opened_by_another(bench):
    """Its late rollback would drop what the other one has published."""
    stuck = bench.save([["a"], []])
    with bench.writes() as writes:
        writes.open(stuck, SIZES)
        assert bench.run(bench.save([["a", "b"], []])) == [[[REFUSED, OK], []]]
    assert bench.pool.published() == ["b"]
    bench.check_closed()


class TestFinish:
    @pytest.mark.parametrize("raw", [None, [], [0], [0, 0, 0], 0, "00", [False, False], ["0", None]], ids=repr)
    def test_an_answer_that_can_not_be_read_is_no_success(self, bench, raw):
        """The engine had published both: they stay, and are found the next time."""
        bench.store.script("batch_write_finish", changing(lambda codes: raw))
        assert bench.run(bench.save([["a", "b"]])) == [[[FAILED, FAILED]]]
        assert bench.pool.published() == ["a", "b"]
        assert bench.run(bench.save([["a", "b"]])) == [[[OK, OK]]]
        bench.check_closed()

    @pytest.mark.parametrize("fault", [raising(OSError("down")), answering([-3000, -3000]), answering(None)])
    def test_a_write_that_the_engine_did_not_finish_is_dropped(self, bench, fault):
        bench.store.script("batch_write_finish", fault)
        (statuses,) = bench.run(bench.save([["a", "b"]]))
        assert OK not in statuses[0]
        assert bench.pool.published() == []
        assert bench.stats.get("write_finish_failed") == 1
        bench.check_closed()

    def test_so_is_one_of_an_engine_that_is_left_alone_after_it(self, bench):
        """That it is unavailable opens the breaker, and that keeps the pool from asking, but not from giving back."""
        bench.store.script("batch_write_finish", answering([-3014, -3014]))
        (statuses,) = bench.run(bench.save([["a", "b"]]))
        assert statuses == [[Status.UNAVAILABLE] * 2]
        assert bench.pool.published() == []
        bench.check_closed()

    def test_a_refusal_is_one_keys_alone(self, bench):
        def refuse_first(call):
            return [-3000, *bench.store.inner.batch_write_finish(["b"], [0])]

        bench.store.script("batch_write_finish", refuse_first)
        assert bench.run(bench.save([["a", "b"]])) == [[[Status.INVALID, OK]]]
        assert bench.pool.published() == ["b"]
        bench.check_closed()

    def test_a_thread_that_dies_in_the_call_leaves_no_write_open(self, bench):
        bench.store.script("batch_write_finish", raising(Stop()))
        with pytest.raises(Stop):
            bench.run(bench.save([["a"]]))
        bench.check_closed()


class TestLaxEngine:
    def test_a_key_that_was_just_dropped_is_not_to_be_had_and_nothing_is_published_for_it(self):
        """MemCache gives 0 then, copies to the old address all the same, and would publish what nobody wrote."""
        bench = Bench(LaxGvaStore)
        bench.run(bench.save([["a"]]), lambda save: save.drop(0))
        assert bench.run(bench.save([["a"]])) == [[[FULL]]]
        assert bench.pool.published() == []
        assert bench.run(bench.save([["a"]])) == [[[OK]]]
        bench.check_closed()


# -- what the store does not take back ---------------------------------------------------------------------------------


def leave_open(bench, *keys):
    """A save of ``keys`` that the store refuses to finish, and to drop."""
    bench.store.script("batch_write_finish", *[answering([-1] * len(keys))] * 2)
    assert OK not in bench.run(bench.save([list(keys)]))[0][0]
    assert bench.pool.ledger()["open_writes"] == len(keys)


def test_a_write_that_the_store_did_not_take_back_is_dropped_when_it_does_as_it_is_told_again(bench):
    leave_open(bench, "a", "b")
    assert bench.book.debts == ["a", "b"]
    assert bench.run(bench.save([["c"]])) == [[[OK]]]
    assert bench.book.debts == []
    assert bench.pool.published() == ["c"]
    bench.check_closed()


def test_a_write_that_is_owed_and_saved_anew_is_not_dropped():
    bench = Bench(LaxGvaStore)  # whose answer for an unfinished write is its address
    leave_open(bench, "a", "b")
    assert bench.run(bench.save([["a"]])) == [[[OK]]]
    assert bench.pool.published() == ["a"]
    assert bench.store.finished[-1] == ("b", UNKNOWN_CODE)
    bench.check_closed()


def test_where_an_unfinished_write_can_not_be_opened_anew_it_can_once_it_was_dropped(bench):
    leave_open(bench, "a")
    assert bench.run(bench.save([["a"]], [["b"]])) == [[[FULL]], [[OK]]]
    assert bench.run(bench.save([["a"]])) == [[[OK]]]
    bench.check_closed()


def test_a_write_that_is_owed_is_left_alone_while_somebody_writes_it(bench):
    leave_open(bench, "a")
    assert bench.book.claim("a")
    bench.book.settle()
    assert bench.book.debts == ["a"]
    assert bench.pool.ledger()["open_writes"] == 1
    bench.book.release(["a"])
    bench.book.settle()
    assert bench.book.debts == []
    bench.check_closed()


def test_a_write_whose_end_nobody_heard_of_is_not_taken_back(bench):
    """It was published, and the answer got lost, twice: a settled debt must not take the value away."""
    bench.store.script("batch_write_finish", raising(OSError("lost"), after=True))
    bench.store.script("exists", answering([0]), raising(OSError("lost")))
    assert bench.run(bench.save([["a"]])) == [[[FAILED]]]
    assert bench.book.debts == ["a"]
    bench.book.settle()
    assert bench.pool.published() == ["a"]
    assert bench.book.debts == []
    bench.check_closed()


def test_a_thread_that_ends_in_the_middle_leaves_its_writes_to_the_next(bench):
    bench.store.script("batch_write_finish", answering([-1]), raising(Stop()), raising(Stop()))
    with pytest.raises(Stop):
        bench.run(bench.save([["a"]]))
    assert bench.book.debts == ["a"]
    bench.book.settle()
    bench.check_closed()


def test_a_write_that_the_store_never_takes_back_is_forgotten_in_the_end(bench):
    leave_open(bench, "a")
    attempts = 0
    while bench.book.debts:
        bench.store.script("batch_write_finish", answering([-1]))
        bench.book.settle()
        attempts += 1
    assert attempts == 8


def test_no_attempt_counts_while_the_store_takes_nothing():
    bench = Bench(LaxGvaStore)
    for _ in range(20):
        leave_open(bench, "a")
    assert bench.book.debts == ["a"]
    assert bench.run(bench.save([["b"]])) == [[[OK]]]
    bench.check_closed()
