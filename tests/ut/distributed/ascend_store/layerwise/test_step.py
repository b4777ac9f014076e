"""A transfer ends once, with a status for each block, and what a stuck call does later changes nothing of it."""

import threading

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.device_events import ScriptedEvent
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, Status
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, TransferJob
from vllm_ascend_ext.kv_pool.layerwise.batches import LayerPlan
from vllm_ascend_ext.kv_pool.layerwise.gate import StepEnded
from vllm_ascend_ext.kv_pool.layerwise.step import LayerLoad, LayerSave, LayerStep
from vllm_ascend_ext.kv_pool.requests import PoolMetadata

OK, FAILED, TIMEOUT, CANCELLED = Status.OK, Status.FAILED, Status.TIMEOUT, Status.CANCELLED
PLAN = LayerPlan(((0, 0), (0, 1), (0, 2), (0, 3)), (None, None, 0, 1), (True,) * 4)
OWN = LayerPlan(((0, 0), (0, 1), (0, 2), (0, 3)), (None,) * 4, (False,) * 4)


def job(number, *keys):
    ids = np.arange(len(keys), dtype=np.int64) + 10 * number
    return TransferJob(number, f"r{number}", (GroupBlocks(0, np.arange(len(keys)), ids, list(keys)),))


def load(*jobs, plan=OWN, **options):
    return LayerLoad(jobs, plan, threading.Condition(threading.RLock()), **options)


def save(*jobs, plan=OWN):
    return LayerSave(jobs, plan, threading.Condition(threading.RLock()), [])


def now():
    return Deadline.after(0, ManualClock())


def fail(transfer, row, status, code=0):
    transfer.fail(transfer.rows[0], np.asarray([row]), np.asarray([status]), np.asarray([code]))


class TestEnd:
    def test_blocks_that_arrived_are_right_and_others_keep_their_first_failure(self):
        subject = load(job(0, "a", "b"), job(1, "c"))
        fail(subject, 1, Status.MISSING)
        fail(subject, 1, FAILED)
        subject.arrived()
        assert subject.result(0).statuses == [[OK, Status.MISSING]]
        assert subject.result(1).statuses == [[OK]]

    @pytest.mark.parametrize(
        ("cause", "status"),
        [
            (DeadlineExceeded(""), TIMEOUT),
            (Cancelled(""), CANCELLED),
            (ClosedError(""), CANCELLED),
            (OSError(), FAILED),
        ],
    )
    def test_what_is_not_done_fails_with_the_cause(self, cause, status):
        subject = load(job(0, "a", "b"))
        fail(subject, 0, Status.CORRUPT)
        subject.end(cause)
        result = subject.result(0)
        assert result.statuses == [[Status.CORRUPT, status]]
        assert result.cause is cause

    def test_only_the_first_end_counts(self):
        subject = load(job(0, "a"))
        subject.end(DeadlineExceeded("too late"))
        subject.arrived()
        fail(subject, 0, Status.CORRUPT)
        assert subject.result(0).statuses == [[TIMEOUT]]

    def test_every_wait_for_it_ends(self):
        subject = load(job(0, "a"), depth=1)
        subject.end(OSError("down"))
        for signal in (subject.finished, *subject.loaded):
            signal.wait(now())
        for gate in subject.gates:
            with pytest.raises(StepEnded):
                gate.wait(now())

    def test_every_wait_for_a_save_ends(self):
        subject = save(job(0, "a"))
        subject.end(OSError("down"))
        for signal in (subject.finished, *subject.saved):
            signal.wait(now())
        with pytest.raises(StepEnded):
            subject.commit.wait(now())

    def test_a_dropped_job_is_given_up_alone(self):
        subject = save(job(0, "a", "b"), job(1, "c"))
        subject.drop(0)
        subject.complete()
        assert subject.result(0).statuses == [[CANCELLED, CANCELLED]]
        assert subject.result(1).statuses == [[OK]]

    def test_a_block_is_stored_only_when_all_of_it_is(self):
        subject = save(job(0, "a", "b"))
        subject.rows[0].stored[:] = True
        fail(subject, 1, FAILED)
        subject.complete()
        assert subject.result(0).stored == [[True, False]]

    def test_failed_says_whether_anything_has(self):
        subject = load(job(0, "a"))
        assert not subject.failed
        subject.fail(subject.rows[0], np.asarray([0]), np.asarray([OK]))
        assert not subject.failed
        fail(subject, 0, FAILED)
        assert subject.failed


class TestLoad:
    @pytest.mark.parametrize(("depth", "gated"), [(1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (4, []), (9, []), (None, [])])
    def test_so_many_layers_are_loaded_ahead_of_attention(self, depth, gated):
        subject = load(job(0, "a"), depth=depth)
        assert [layer for layer in range(4) if subject.gate_of(layer) is not None] == gated
        for layer in gated:
            assert subject.gate_of(layer) is subject.gates[layer - depth]

    def test_it_is_hopeless_when_no_block_is_left(self):
        subject = load(job(0, "a", "b"))
        fail(subject, 0, FAILED)
        assert not subject.hopeless
        fail(subject, 1, FAILED)
        assert subject.hopeless

    def test_as_one_the_first_failure_is_the_end(self):
        subject = load(job(0, "a", "b"), as_one=True)
        fail(subject, 0, FAILED)
        assert subject.hopeless

    def test_as_one_no_block_has_arrived_if_one_has_failed(self):
        """The copying stops there: of the others nobody knows whether all of their layers came."""
        subject = load(job(0, "a", "b"), as_one=True)
        fail(subject, 0, Status.MISSING)
        subject.arrived()
        assert subject.result(0).statuses == [[Status.MISSING, CANCELLED]]
        well = load(job(0, "a", "b"), as_one=True)
        well.arrived()
        assert well.result(0).ok

    def test_it_is_hopeless_once_it_is_over(self):
        subject = load(job(0, "a"))
        subject.end(OSError())
        assert subject.hopeless

    def test_resident_blocks_are_loaded_only_into_layers_that_share_a_buffer(self):
        parts = (GroupBlocks(0, np.arange(3), np.arange(3), ["a", "b", "c"], resident=2),)
        shared = load(TransferJob(0, "r", parts), plan=PLAN)
        assert shared.rows[0].to_copy().tolist() == [0, 1, 2]
        assert shared.rows[0].to_copy(resident=False).tolist() == [2]
        own = load(TransferJob(0, "r", parts))
        assert own.rows[0].to_copy().tolist() == [2]
        own.arrived()
        assert own.result(0).ok


class TestStep:
    def test_closing_it_ends_every_wait_of_both_directions(self):
        step = LayerStep(PoolMetadata(), OWN)
        step.load = LayerLoad([job(0, "a")], OWN, step.condition, depth=1)
        step.save = LayerSave([job(1, "b")], OWN, step.condition, step.computed)
        step.close(Cancelled("over"))
        assert step.load.result(0).statuses == step.save.result(0).statuses == [[CANCELLED]]
        for signal in step.computed:
            with pytest.raises(StepEnded):
                signal.wait(now())
        step.close(Cancelled("again"))

    def test_a_buffer_may_be_written_when_what_was_there_is_computed_and_saved(self):
        step = LayerStep(PoolMetadata(), PLAN)
        step.save = LayerSave([job(0, "a")], PLAN, step.condition, step.computed)
        event = ScriptedEvent()
        step.wait_for_buffer(1, now())  # the first one in its buffer
        with pytest.raises(DeadlineExceeded):
            step.wait_for_buffer(2, now())
        step.computed[0].set(event)
        with pytest.raises(DeadlineExceeded):
            step.wait_for_buffer(2, now())
        step.save.saved[0].set(None)
        step.wait_for_buffer(2, now())
        assert event.synchronized

    def test_a_save_that_failed_keeps_no_buffer(self):
        step = LayerStep(PoolMetadata(), PLAN)
        step.save = LayerSave([job(0, "a")], PLAN, step.condition, step.computed)
        step.computed[0].set(ScriptedEvent())
        step.save.end(OSError("down"))
        step.wait_for_buffer(2, now())

    def test_without_a_save_the_computation_is_waited_for_all_the_same(self):
        step = LayerStep(PoolMetadata(), PLAN)
        with pytest.raises(DeadlineExceeded):
            step.wait_for_buffer(3, now())
        step.computed[1].set(ScriptedEvent())
        step.wait_for_buffer(3, now())
