"""The transfer threads: every job ends once with one status per block, and what fails is that job or that block."""

import numpy as np
import pytest

from fixtures.clock import ManualClock
from fixtures.device_events import ScriptedEvent
from fixtures.gates import Gate
from fixtures.memory_store import MemoryStore
from fixtures.parts import Blocks
from fixtures.stores import FlakyStore, answering, changing, holding, raising, wrong_bytes
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.calls import State
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import NotRunning, Status
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, TransferJob
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.transfer.recving import KVCacheStoreRecvingThread
from vllm_ascend_ext.kv_pool.transfer.sending import KVCacheStoreSendingThread

LONG = 60.0
OK, MISSING, FAILED = Status.OK, Status.MISSING, Status.FAILED


class Fatal(BaseException):
    """What ends a thread."""


class Bench:
    """Both threads over one flaky store, and two groups of eight blocks of their own memory."""

    def __init__(self, *, checksum=False, lanes=2, clock=None):
        self.store = FlakyStore(MemoryStore())
        self.stats = Stats()
        self.clock = clock or ManualClock()
        self.client = StoreClient(self.store, self.stats, checksum=checksum, clock=self.clock)
        self.memories = [Blocks(8, 32), Blocks(8, 16)]
        for memory in self.memories:
            memory.bytes[:] = np.arange(8, dtype=np.uint8)[:, None] + 1
        common = {"lanes": lanes, "clock": self.clock, "set_device": self.store.set_device}
        self.sending = KVCacheStoreSendingThread(self.client, self.stats, **common)
        self.recving = KVCacheStoreRecvingThread(self.client, self.stats, **common)
        for thread in (self.sending, self.recving):
            thread.set_layouts(tuple(memory.layout() for memory in self.memories))
            thread.start(LONG)

    def job(self, *groups, req_id="a", job_id=1, ready=None):
        """A job for blocks of group 0, 1, ...; block b has the key ``k{group}-{b}``."""
        parts = [
            GroupBlocks(group, np.arange(len(ids)), np.asarray(ids, dtype=np.int64), [f"k{group}-{b}" for b in ids])
            for group, ids in enumerate(groups)
        ]
        return TransferJob(job_id, req_id, tuple(parts), ready)

    def settle(self, thread, job):
        return thread.settle(thread.submit(job, Deadline.after(LONG, self.clock)))

    def save(self, *groups, **options):
        return self.settle(self.sending, self.job(*groups, **options))

    def load(self, *groups, **options):
        return self.settle(self.recving, self.job(*groups, **options))

    def close(self):
        return self.sending.close(LONG) + self.recving.close(LONG)


@pytest.fixture(params=[False, True], ids=["plain", "checksum"])
def bench(request):
    subject = Bench(checksum=request.param)
    yield subject
    assert subject.close() == []


@pytest.fixture
def gate():
    with Gate() as opened_at_the_end:
        yield opened_at_the_end


class TestSaving:
    def test_what_is_saved_can_be_loaded_into_other_blocks(self, bench):
        assert bench.save([1, 2], [3]).ok
        for memory in bench.memories:
            memory.bytes[:] = 0
        job = bench.job([1, 2], [3])
        moved = TransferJob(2, "b", tuple(GroupBlocks(p.group, p.indices, p.block_ids + 4, p.keys) for p in job.parts))
        assert bench.settle(bench.recving, moved).ok
        assert (bench.memories[0][5] == 2).all()
        assert (bench.memories[0][6] == 3).all()
        assert (bench.memories[1][7] == 4).all()
        assert not bench.memories[0][[1, 2, 3, 4, 7]].any()

    def test_only_missing_blocks_are_put_with_their_own_bytes(self, bench):
        """A40: of blocks 1 to 4 the first and the third are in the store."""
        bench.save([1, 3])
        result = bench.save([1, 2, 3, 4])
        assert bench.store.calls("put")[1] == ["k0-2", "k0-4"]
        assert result.ok
        assert result.stored == [[False, True, False, True]]
        bench.memories[0].bytes[:] = 0
        assert bench.load([1, 2, 3, 4]).ok
        assert [int(bench.memories[0][b][0]) for b in (1, 2, 3, 4)] == [2, 3, 4, 5]

    def test_what_is_all_there_is_not_put_and_done(self, bench):
        """A01."""
        bench.save([1, 2], [3])
        result = bench.save([1, 2], [3])
        assert result.ok
        assert result.stored == [[False, False], [False]]
        assert len(bench.store.calls("put")) == 2

    def test_a_job_without_blocks_is_done(self, bench):
        """A01 (a)."""
        result = bench.save([], [])
        assert result.ok
        assert bench.store.calls("exists") == bench.store.calls("put") == []

    @pytest.mark.parametrize("method", ["exists", "put"])
    def test_a_call_that_raises_fails_its_group_and_the_job_ends(self, bench, method):
        """A01 (b), (c)."""
        error = OSError("down")
        bench.store.script(method, raising(error))
        result = bench.save([1, 2], [3])
        assert result.statuses == [[FAILED, FAILED], [OK]]
        assert result.cause is error
        assert result.stored == [[False, False], [True]]

    def test_blocks_that_were_not_stored_are_not_called_stored(self, bench):
        bench.store.script("put", answering([0, int(Status.FULL), -1]))
        result = bench.save([1, 2, 3])
        assert result.statuses == [[OK, Status.FULL, FAILED]]
        assert result.stored == [[True, False, False]]

    def test_a_short_answer_stores_nothing(self, bench):
        bench.store.script("put", changing(lambda codes: codes[:-1]))
        result = bench.save([1, 2])
        assert result.statuses == [[FAILED, FAILED]]
        assert result.stored == [[False, False]]

    def test_a_put_that_says_missing_has_failed(self, bench):
        bench.store.script("put", answering([int(MISSING)]))
        assert bench.save([1]).statuses == [[FAILED]]

    def test_a_key_whose_presence_is_unknown_is_not_put(self, bench):
        bench.store.script("exists", answering([0, -1, 1]))
        result = bench.save([1, 2, 3])
        assert bench.store.calls("put") == [["k0-1"]]
        assert result.statuses == [[OK, FAILED, OK]]
        assert result.stored == [[True, False, False]]

    def test_blocks_are_read_only_after_the_device_is_done_with_them(self, bench, gate):
        event = ScriptedEvent(on_synchronize=gate)
        ticket = bench.sending.submit(bench.job([1], ready=event), Deadline.after(LONG, bench.clock))
        gate.wait_until_reached()
        assert bench.store.calls("exists") == []
        gate.open()
        assert bench.sending.settle(ticket).ok
        assert event.synchronized

    def test_a_device_that_fails_fails_the_job_and_nothing_is_put(self, bench):
        result = bench.save([1], ready=ScriptedEvent(on_synchronize=RuntimeError("device lost")))
        assert result.statuses == [[FAILED]]
        assert bench.store.calls("put") == []
        assert bench.save([1]).ok


class TestLoading:
    def test_the_block_that_did_not_arrive_is_the_one_that_is_named(self, bench):
        """A45."""
        bench.save([1, 2, 3])
        bench.store.script("get", changing(lambda codes: [codes[0], -1, codes[2]]))
        result = bench.load([1, 2, 3])
        assert result.statuses == [[OK, FAILED, OK]]
        assert [int(p.block_ids[i]) for p, i, _ in result.failures()] == [2]

    @pytest.mark.parametrize("rotation", range(5))
    def test_it_is_named_whatever_the_order_of_asking(self, bench, rotation):
        bench.save([1, 2, 3])
        del bench.store.inner.values["k0-2"]
        bench.recving.rotation = rotation
        assert bench.load([1, 2, 3]).statuses == [[OK, MISSING, OK]]
        asked = [f"k0-{block}" for block in (1, 2, 3)]
        assert bench.store.calls("get") == [asked[rotation % 3 :] + asked[: rotation % 3]]

    def test_a_group_whose_get_raises_fails_alone(self, bench):
        bench.save([1], [2])
        error = OSError("down")
        bench.store.script("get", raising(error))
        result = bench.load([1], [2])
        assert result.statuses == [[FAILED], [OK]]
        assert result.cause is error

    def test_blocks_that_the_cache_does_not_have_fail_the_job_before_a_byte_moves(self, bench):
        bench.save([1], [2])
        result = bench.load([1, 8], [2])
        assert result.statuses == [[FAILED, FAILED], [FAILED]]
        assert "0..7" in str(result.cause)
        assert bench.store.calls("get") == []

    def test_a_load_of_nothing_is_done(self, bench):
        assert bench.load([], []).ok


def test_wrong_bytes_are_corrupt_and_nothing_else_is():
    bench = Bench(checksum=True)
    bench.save([1], [2])
    bench.store.script("get", wrong_bytes)
    result = bench.load([1], [2])
    assert result.statuses == [[Status.CORRUPT], [OK]]
    bench.close()


class TestContract:
    @pytest.mark.parametrize("role", ["sending", "recving"])
    def test_an_exception_fails_that_job_and_the_next_is_served(self, bench, role):
        """A09: the job in the middle raises; nobody waits for ever, and the third is done."""
        thread = getattr(bench, role)
        bench.save([1, 2, 3])
        jobs = [bench.job([1]), bench.job([99]), bench.job([3])]
        tickets = [thread.submit(job, Deadline.after(LONG, bench.clock)) for job in jobs]
        bench.store.inner.values.pop("k0-99", None)
        results = [thread.settle(ticket) for ticket in tickets]
        assert [result.ok for result in results] == [True, False, True]
        assert thread.state is State.RUNNING

    @pytest.mark.parametrize(("role", "method"), [("sending", "exists"), ("recving", "get")])
    def test_what_ends_the_thread_ends_its_jobs_and_is_told_to_the_next_caller(self, bench, role, method, caplog):
        thread = getattr(bench, role)
        cause = Fatal("device lost")
        bench.store.script(method, raising(cause))
        result = bench.settle(thread, bench.job([1]))
        assert result.statuses == [[FAILED]]
        assert result.cause.__cause__ is cause
        refused = bench.settle(thread, bench.job([2]))
        assert refused.statuses == [[FAILED]]
        assert isinstance(refused.cause, NotRunning)
        assert refused.cause.__cause__ is cause
        assert thread.state is State.FAILED
        assert bench.stats.get(f"{thread.role}_thread_failed") == 1
        assert sum("thread_failed" in record.message for record in caplog.records) == 1

    @pytest.mark.parametrize("error", [OSError("no device 3"), Fatal("driver")])
    def test_a_device_that_can_not_be_bound_is_raised_by_start(self, error):
        """A10."""
        store = FlakyStore(MemoryStore())
        store.script("set_device", raising(error))
        client = StoreClient(store, Stats())
        thread = KVCacheStoreRecvingThread(client, Stats(), lanes=1, clock=ManualClock(), set_device=store.set_device)
        with pytest.raises(type(error)):
            thread.start(LONG)
        assert thread.close(LONG) == []

    def test_before_the_start_a_job_is_refused_at_once_with_a_status_per_block(self):
        thread = KVCacheStoreSendingThread(StoreClient(MemoryStore(), Stats()), Stats(), lanes=1, clock=ManualClock())
        job = TransferJob(1, "a", (GroupBlocks(0, np.arange(2), np.arange(2), ["x", "y"]),))
        ticket = thread.submit(job, Deadline.after(LONG))
        assert ticket.ended
        assert ticket.result().statuses == [[FAILED, FAILED]]
        ticket.cancel()
        assert ticket.result().statuses == [[FAILED, FAILED]]

    def test_a_job_that_fails_is_counted_and_logged_once_with_its_request(self, bench, caplog):
        bench.load([1, 2], req_id="req-7")
        assert bench.stats.get("load_failed") == 1
        (record,) = [record for record in caplog.records if "load_failed" in record.message]
        assert "req-7" in record.message
        assert "2 of 2 blocks: {'MISSING': 2}" in record.message

    def test_a_stuck_call_does_not_stall_other_jobs_and_trips_the_breaker_when_overdue(self, bench, gate):
        bench.save([1, 2])
        bench.store.script("get", holding(gate))
        stuck = bench.recving.submit(bench.job([1], req_id="stuck"), Deadline.after(1.0, bench.clock))
        gate.wait_until_reached()
        assert bench.load([2]).ok
        bench.clock.advance(1.0)
        assert bench.recving.settle(stuck).statuses == [[Status.TIMEOUT]]
        assert not bench.client.breaker.allows()

    def test_late_bytes_never_land_in_a_block_that_was_given_back(self, bench, gate):
        bench.save([1, 2])
        bench.store.script("get", holding(gate))
        ticket = bench.recving.submit(bench.job([1, 2]), Deadline.after(LONG, bench.clock))
        gate.wait_until_reached()
        ticket.cancel()
        assert ticket.ended
        bench.memories[0][1] = 77  # its next owner
        bench.memories[0][2] = 78
        gate.open()
        gate.wait_until_passed()
        assert bench.recving.close(LONG) == []
        assert (bench.memories[0][1] == 77).all()
        assert (bench.memories[0][2] == 78).all()
        assert ticket.result().statuses == [[Status.CANCELLED] * 2]

    def test_a_late_put_never_reads_a_block_that_was_given_back(self, bench, gate):
        bench.store.script("put", holding(gate))
        ticket = bench.sending.submit(bench.job([1]), Deadline.after(LONG, bench.clock))
        gate.wait_until_reached()
        ticket.cancel()
        bench.memories[0][1] = 99
        gate.open()
        gate.wait_until_passed()
        assert bench.sending.close(LONG) == []
        assert bench.store.inner.values == {}
