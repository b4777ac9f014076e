"""The suite must turn red for a broken pool: each test puts one old fault back, and says which outcome shows it.

The faults are those that were found in pools that people run. What is put back is small, and it is the fault itself:
the pool around it is today's, so that what turns red is the law and not a stand-in.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from faultinject import Block, Do, Raise, Site
from fixtures.engine import Request
from fixtures.pool_sites import ROLES
from fixtures.story import Story
from fixtures.world import make_setup
from vllm_ascend_ext.kv_pool.backend.client import Answer, StoreClient
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.jobs import JobResult, TransferJob
from vllm_ascend_ext.kv_pool.lookup import LookupKeyClient, LookupKeyServer, lookup_path
from vllm_ascend_ext.kv_pool.lookup.client import _Channel
from vllm_ascend_ext.kv_pool.observe import Stats
from vllm_ascend_ext.kv_pool.requests import ScheduledRequest, ScheduledStep, WorkerReport
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler
from vllm_ascend_ext.kv_pool.transfer.sending import KVCacheStoreSendingThread
from vllm_ascend_ext.kv_pool.transfer.worker_thread import KVCacheTransferThread, Ticket

pytestmark = pytest.mark.fault

PROMPT = range(14)


def tried(body: Callable[[fi.Run], Any], site: Site, deadline: float = 6.0) -> Callable[..., Any]:
    """A scenario with one site, explored once as the pool is and once with the old fault in it."""
    return fi.scenario(name="broken", sites=[site], roles=ROLES, deadline=deadline, expects=(), max_faults=1)(body)


def save(folder: Path) -> Callable[[fi.Run], Any]:
    return lambda run: Story(run, folder).play(lambda world: world.engine.add("a", PROMPT))


def load(folder: Path, **options: Any) -> Callable[[fi.Run], Any]:
    def body(run: fi.Run) -> Any:
        story = Story(run, folder)
        story.fill(PROMPT, **options)
        return story.play(lambda world: world.engine.add("a", PROMPT), **options)

    return body


class SilentThread:
    """As transfer threads used to be: a bare queue, a loop that dies of the first error, and nobody who is told."""

    def __init__(self, owner: KVCacheTransferThread, job: TransferJob) -> None:
        self.queue: queue.Queue[TransferJob] = queue.Queue()
        self.queue.put(job)
        self.result: JobResult | None = None
        self.owner = owner
        threading.Thread(target=self.serve, name="kv-save-old", daemon=True).start()

    def serve(self) -> None:
        self.result = self.owner._handle_request(self.queue.get(timeout=5), Fence())
        self.queue.task_done()

    def wait(self) -> JobResult:
        self.queue.join()
        assert self.result is not None
        return self.result


class OldTicket(Ticket):
    def __init__(self, job: TransferJob, thread: SilentThread) -> None:
        super().__init__(job, None)
        self.result = thread.wait  # type: ignore[method-assign]


def test_thread_that_dies_silently_is_a_hang(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site("sending.handle", (Raise(OSError),))
    assert fault_control.as_is(tried(save(tmp_path), site)) == {"contained"}
    monkeypatch.setattr(
        KVCacheStoreSendingThread, "submit", lambda self, job, deadline: OldTicket(job, SilentThread(self, job))
    )
    assert fault_control.broken(tried(save(tmp_path), site, deadline=3.0)) == {"hang"}


def test_late_answer_taken_for_a_later_question_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A REQ socket that is used again after a time-out."""
    import zmq

    def ask(self: LookupKeyClient, frames: list[bytes], deadline: Deadline) -> list[bytes]:
        if self._channel is None:
            assert self._context is not None
            self._channel = _Channel(self._context, self.path, self._wake_read)
            self._channel._socket.setsockopt(zmq.REQ_RELAXED, 1)  # or the second send would fail
        return self._channel.exchange(frames, deadline)

    def body(run: fi.Run) -> list[int]:
        path = lookup_path(tmp_path, 0, 0)
        answers = run.wrap(_Answers(), "handler")
        server = LookupKeyServer(path, lambda asked: answers.hit(asked.token_len), handler_timeout_s=5.0)
        patience = 0.5 if run.session.plan.faults else 20.0  # without a fault nobody waits, however busy the machine is
        client = LookupKeyClient(path, timeout_s=patience, backoff_s=1e-9, stats=Stats())
        run.on_cleanup(server.close)
        run.on_cleanup(client.close)
        server.start()
        first = client.lookup(4, [b"a"])
        run.release()  # the answer to the first question comes now
        answers.wait_until_given(1)
        second = client.lookup(8, [b"b", b"c"])
        assert second in (0, 8), f"the answer to another question was taken: {second}"
        client.close()
        server.close()
        return [first, second]

    site = Site("handler.hit", (Block(after=True),), max_ordinals=1)
    assert fault_control.as_is(tried(body, site)) <= {"contained"}
    monkeypatch.setattr(LookupKeyClient, "_ask", ask)
    monkeypatch.setattr(LookupKeyClient, "_begin_backoff", lambda *args: None)
    drop = LookupKeyClient._drop_channel
    monkeypatch.setattr(LookupKeyClient, "_drop_channel", lambda self: drop(self) if self._closed else None)
    assert "wrong_data" in fault_control.broken(tried(body, site))


class _Answers:
    """Right answers, and an event after the first was given."""

    def __init__(self) -> None:
        self.given = 0
        self._condition = threading.Condition()

    def hit(self, tokens: int) -> int:
        with self._condition:
            self.given += 1
            self._condition.notify_all()
        return tokens

    def wait_until_given(self, count: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.given >= count, timeout=10)


def test_zip_over_a_short_answer_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the failures that the answer names are looked at; what it leaves out counts as loaded."""

    def get(self: StoreClient, keys: Any, addrs: Any, sizes: Any, fence: Any) -> Answer:
        statuses = [Status.OK] * len(keys)
        for index, code in zip(range(len(keys)), self.backend.get(keys, addrs, sizes, fence), strict=False):
            statuses[index] = Status(code)
        return Answer(statuses)

    def nothing(call: Any, keys: Any, addrs: Any, sizes: Any, fence: Any) -> list[int]:
        return []

    site = Site("store.get", (Do(nothing, "empty-and-nothing-copied"),))
    options = {"checksum": False}
    assert fault_control.as_is(tried(load(tmp_path, **options), site)) == {"surfaced"}
    monkeypatch.setattr(StoreClient, "get", get)
    assert fault_control.broken(tried(load(tmp_path, **options), site)) == {"wrong_data"}


def test_failed_put_announced_as_stored_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def put(self: StoreClient, keys: Any, addrs: Any, sizes: Any, fence: Any) -> Answer:
        self.backend.put(keys, addrs, sizes, fence)
        return Answer([Status.OK] * len(keys))

    def refuse(call: Any, keys: Any, addrs: Any, sizes: Any, fence: Any) -> list[int]:
        return [int(Status.FULL)] * len(keys)

    site = Site("store.put", (Do(refuse, "refuse"),))
    assert fault_control.as_is(tried(save(tmp_path), site)) == {"contained"}
    monkeypatch.setattr(StoreClient, "put", put)
    assert fault_control.broken(tried(save(tmp_path), site)) == {"wrong_data"}


def test_hit_offered_again_after_its_load_failed_is_a_hang(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site("store.get", (Raise(OSError),), max_ordinals=1)
    assert fault_control.as_is(tried(load(tmp_path, load_async=True), site)) == {"surfaced"}
    monkeypatch.setattr(KVPoolScheduler, "_load_failed", lambda self, job_id: None)
    assert "hang" in fault_control.broken(tried(load(tmp_path, load_async=True), site))


def test_unbounded_wait_is_a_hang(fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wait_for(self: Deadline, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        while not predicate():
            condition.wait()
        return True

    site = Site("store.put", (Block(),))
    assert fault_control.as_is(tried(save(tmp_path), site)) == {"contained"}
    monkeypatch.setattr(Deadline, "wait_for", wait_for)
    assert fault_control.broken(tried(save(tmp_path), site, deadline=3.0)) == {"hang"}


class Reports:
    """The way of a rank's report to the scheduler."""

    def __init__(self, scheduler: KVPoolScheduler) -> None:
        self._scheduler = scheduler

    def deliver(self, report: WorkerReport) -> None:
        self._scheduler.update_connector_output(report)


def test_counts_by_bare_request_id_are_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report of the life before a preemption comes late, and is counted for the new life."""
    setup = replace(make_setup(tmp_path), enable_kv_events=False)

    def body(run: fi.Run) -> None:
        scheduler = KVPoolScheduler(setup, _NoHits(), num_ranks=1)
        request = Request("a", list(PROMPT), len(PROMPT), len(PROMPT) + 1, setup.hash_unit)
        late: list[WorkerReport] = []
        reports = run.wrap(Reports(scheduler), "reports")
        scheduler.get_num_new_matched_tokens(request, 0)
        step = ScheduledStep([ScheduledRequest("a", 0, 14, ([1, 2, 3, 4],))])
        old = scheduler.build_connector_meta(step).requests[0].save
        assert old is not None
        answer = WorkerReport({old.job_id: (old.end_token, 1)})
        run_late = [r for r in (reports.deliver(answer),) if r == "late"]
        late += [answer] * len(run_late)
        scheduler.build_connector_meta(ScheduledStep(preempted=frozenset({"a"})))
        scheduler.get_num_new_matched_tokens(request, 0)
        new = scheduler.build_connector_meta(step).requests
        for report in late:
            run.saw("counter", "a report came late")
            scheduler.update_connector_output(report)
        under_way = bool(new)
        kept = scheduler.request_finished("a")
        assert kept == under_way, "a save is under way, and its blocks would be handed on"

    site = Site("reports.deliver", (Do(lambda call, report: "late", "late"),))
    assert fault_control.as_is(tried(body, site)) == {"contained"}
    monkeypatch.setattr(KVPoolScheduler, "_save_reported", _count_by_request)
    assert fault_control.broken(tried(body, site)) == {"wrong_data"}


def _count_by_request(self: KVPoolScheduler, job_id: int, saved_until: int, ranks: int) -> None:
    """Any report ends whatever the request has under way."""
    for tracker in self._trackers.values():
        for save in tracker.save_jobs.values():
            tracker.saved_tokens = save.end_token
        tracker.save_jobs.clear()


class _NoHits:
    def lookup(self, token_len: int, hashes: Any, group_ids: Any, hbm_hit_tokens: int, request_id: str) -> int:
        return 0

    def close(self) -> list[str]:
        return []
