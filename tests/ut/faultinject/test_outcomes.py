"""Each outcome is provoked for real, by a toy worker that has the matching bug; a worker without bugs shows none."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_worker import Store, Worker, left_open

import faultinject as fi

logger = logging.getLogger("test_outcomes")


@pytest.fixture(autouse=True)
def _close_what_the_bugs_left_open() -> Iterator[None]:
    yield
    while left_open:
        left_open.pop().close()


def save(*bugs: str, actions: tuple[fi.Action, ...] = (fi.Raise(OSError),), **settings: Any) -> Callable[..., Any]:
    """One item through a worker with these bugs, which must be in the store or reported as failed."""

    @fi.scenario(
        name="save",
        sites=[fi.Site("store.put", actions)],
        roles={"worker": "toy-worker*"},
        **{"deadline": 2.0, "grace": 0.5, **settings},
    )
    def scenario(run: fi.Run) -> list[int]:
        store = Store()
        worker = Worker(run.wrap(store, "store"), bugs)
        run.queue("items", worker.queue)
        run.ledger("held keys", lambda: worker.held)
        try:
            answer = [worker.submit("a", 1).result()]
        except Exception as exc:
            run.saw("result", repr(exc))
            answer = []
        finally:
            worker.close()
        if store.values not in ({}, {"a": 1}):
            raise fi.WrongData(f"the store holds {store.values}")
        return answer

    return scenario


def outcomes(scenario: Callable[..., Any]) -> dict[str, str]:
    """Outcome and reason by `ACTION:PERSISTENCE`."""
    found = fi.explore(scenario)
    assert not found.missed
    return {f"{i.action}:{i.persistence}": f"{i.verdict.outcome}: {i.verdict.reason}" for i in found.injections}


def test_a_worker_without_bugs_contains_or_surfaces_everything() -> None:
    found = fi.explore(save(actions=(fi.Raise(OSError), fi.Kill(), fi.NoneResult(), fi.Drop(), fi.Delay())))
    assert found.ok
    assert found.outcomes() == {"surfaced": 8, "contained": 2}


def only_outcome(scenario: Callable[..., Any]) -> tuple[str, str]:
    """Of the transient fault, with its reason and details."""
    found = fi.explore(scenario)
    assert len({injection.verdict.outcome for injection in found.injections}) == 1
    verdict = found.injections[0].verdict
    return verdict.outcome, f"{verdict.reason}\n{verdict.details}"


def test_hang_of_the_flow() -> None:
    outcome, text = only_outcome(save("dies", deadline=0.5))
    assert outcome == "hang"
    assert "the flow did not end within 0.5 s" in text
    assert "in scenario" in text, "the stacks show where"


def test_hang_of_a_worker_thread() -> None:
    outcome, text = only_outcome(save("stuck"))
    assert outcome == "hang"
    assert "thread toy-worker-1 did not end within 0.5 s" in text
    assert "in serve" in text, "the stacks show where"


def test_leaked_thread() -> None:
    outcome, text = only_outcome(save("forgotten"))
    assert outcome == "leak"
    assert "threads: toy-worker-1 is still alive" in text
    assert "in serve" in text, "the stacks show where"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are read from /proc")
def test_leaked_descriptor() -> None:
    outcome, text = only_outcome(save("fd"))
    assert outcome == "leak"
    assert "descriptors: " in text
    assert "pipe:" in text


def test_leaked_zmq_socket() -> None:
    pytest.importorskip("zmq")
    outcome, text = only_outcome(save("zmq"))
    assert outcome == "leak"
    assert "zmq: <zmq.Socket(zmq.PAIR)" in text


def test_leaked_zmq_context_but_not_one_that_was_there_or_is_closed() -> None:
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()  # never had a socket: no descriptor tells of it
    left_open.append(SimpleNamespace(close=context.term))

    def body(run: fi.Run, store: Store) -> None:
        zmq.Context().term()
        try:
            store.put("a", 1)
        except OSError as exc:
            left = zmq.Context()
            left_open.append(SimpleNamespace(close=left.term))
            run.saw("exception", exc)

    outcome, text = only_outcome(flow(body))
    assert outcome == "leak"
    assert text.startswith("zmq: <zmq.Context() at ")


def test_items_left_in_a_queue() -> None:
    def body(run: fi.Run, store: Store) -> None:
        items: queue.SimpleQueue[int] = queue.SimpleQueue()
        run.queue("items", items)
        items.put(1)
        try:
            store.put("a", 1)
        except OSError as exc:
            run.saw("exception", exc)
        else:
            items.get()

    assert only_outcome(flow(body)) == ("leak", "items items: 1, was 0 at the start\n")


def test_items_taken_from_a_queue_and_never_marked_done() -> None:
    @fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError),))], grace=0.2)
    def scenario(run: fi.Run) -> None:
        items: queue.Queue[int] = queue.Queue()
        run.queue("items", items)
        store = run.wrap(Store(), "store")
        items.put(1)
        try:
            store.put("a", items.get())
            items.task_done()
        except OSError as exc:
            run.saw("exception", exc)

    assert only_outcome(scenario) == ("leak", "items unfinished tasks: 1, was 0 at the start\n")


def test_files_left_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "before").touch()

    def body(run: fi.Run, store: Store) -> None:
        run.files("sockets", tmp_path)
        left = tmp_path / f"left-{len(os.listdir(tmp_path))}"
        left.touch()
        try:
            store.put("a", 1)
            left.unlink()
        except OSError as exc:
            run.saw("exception", exc)

    assert only_outcome(flow(body)) == ("leak", "sockets: left over {'left-1': 1}\n")


def test_leaked_ledger_entry() -> None:
    outcome, text = only_outcome(save("ledger"))
    assert outcome == "leak"
    assert "held keys: left over {'a': 1}" in text


def test_swallowed() -> None:
    outcome, text = only_outcome(save("silent"))
    assert outcome == "swallowed"
    assert "no ERROR log record, no saw(), no exception" in text


class Lender:
    """Lends and takes back; `keeps` are those that it never sees again."""

    def __init__(self, *, keeps: int = 0) -> None:
        self.taken = self.given_back = 0
        self._keeps = keeps

    def lend(self, store: Store) -> None:
        self.taken += 1
        try:
            store.put("a", 1)
        finally:
            self.given_back += self.taken > self._keeps


def lending(keeps: int) -> Callable[..., Any]:
    def body(run: fi.Run, store: Store) -> None:
        lender = Lender(keeps=keeps if run.session.plan.faults else 0)
        run.balance("loans", lambda: (lender.taken, lender.given_back))
        for _ in range(3):
            with contextlib.suppress(OSError):
                lender.lend(store)
        if run.injected:
            run.saw("counter", "put failed")

    return flow(body, max_faults=1)


def test_what_is_given_back_as_often_as_it_is_taken_is_no_leak_and_is_summed_up() -> None:
    found = fi.explore(lending(0))
    assert {injection.verdict.outcome for injection in found.injections} == {"contained"}
    assert found.balances == {"loans": (found.runs, 3 * found.runs, 3 * found.runs)}


def test_what_is_not_given_back_is_a_leak_and_shows_in_the_sums() -> None:
    found = fi.explore(lending(1))
    assert {injection.verdict.outcome for injection in found.injections} == {"leak"}
    assert "loans: 3 taken, 2 given back" in found.injections[0].verdict.reason
    runs, taken, given_back = found.balances["loans"]
    assert taken - given_back == len(found.injections) == runs - 2


def test_a_balance_that_can_not_be_read_is_a_leak() -> None:
    def body(run: fi.Run, store: Store) -> None:
        run.balance("loans", lambda: (1, 1) if not run.session.plan.faults else (1 / 0, 1))  # type: ignore[return-value]
        loudly(run, store)

    found = fi.explore(flow(body))
    assert "the balance can't be read: ZeroDivisionError" in found.injections[0].verdict.reason


def test_wrong_data() -> None:
    outcome, text = only_outcome(save("wrong"))
    assert outcome == "wrong_data"
    assert "the store holds {'a': 2}" in text


def flow(body: Callable[[fi.Run, Store], Any], *actions: fi.Action, **settings: Any) -> Callable[..., Any]:
    """A scenario without threads: `body` with a store whose put is the only site."""

    @fi.scenario(
        name="flow", sites=[fi.Site("store.put", actions or (fi.Raise(OSError),))], **{"grace": 0.2, **settings}
    )
    def scenario(run: fi.Run) -> Any:
        return body(run, run.wrap(Store(), "store"))

    return scenario


def quietly(run: fi.Run, store: Store) -> None:
    with contextlib.suppress(OSError):
        store.put("a", 1)


def loudly(run: fi.Run, store: Store) -> None:
    try:
        store.put("a", 1)
    except OSError:
        logger.error("put failed")


def test_contained_needs_an_error_record_not_a_warning() -> None:
    assert outcomes(flow(loudly))["raise-OSError:transient"] == "contained: ERROR log: test_outcomes: put failed"

    def warns(run: fi.Run, store: Store) -> None:
        try:
            store.put("a", 1)
        except OSError:
            logger.warning("put failed")

    assert outcomes(flow(warns))["raise-OSError:transient"].startswith("swallowed")
    assert outcomes(flow(quietly))["raise-OSError:transient"].startswith("swallowed")


def test_a_counter_is_enough() -> None:
    def counts(run: fi.Run, store: Store) -> None:
        try:
            store.put("a", 1)
        except OSError:
            run.saw("counter", "put_errors 1")

    assert outcomes(flow(counts))["raise-OSError:transient"] == "contained: counter: put_errors 1"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit, fi.ThreadKilled])
def test_any_exception_that_leaves_the_flow_surfaces(error: type[BaseException]) -> None:
    def body(run: fi.Run, store: Store) -> None:
        store.put("a", 1)

    action = fi.Raise(error)
    assert outcomes(flow(body, action))[f"{action.name}:transient"] == f"surfaced: {error.__name__}: injected"


def test_with_expects_another_exception_breaks_a_law_but_a_base_exception_must_pass() -> None:
    def body(run: fi.Run, store: Store) -> None:
        store.put("a", 1)

    found = outcomes(flow(body, fi.Raise(OSError), fi.Raise(KeyError), fi.Kill(), expects=OSError))
    assert found["raise-OSError:transient"] == "surfaced: OSError: injected"
    assert found["raise-KeyError:transient"] == "wrong_data: KeyError: 'injected'"
    assert found["kill:transient"] == "surfaced: ThreadKilled: injected"


def test_a_benign_action_must_leave_the_result_as_it_was() -> None:
    def body(run: fi.Run, store: Store) -> object:
        return store.put("a", 1)

    assert outcomes(flow(body, fi.Delay(0.0)))["delay:transient"].startswith("contained: benign")
    other = fi.Return([1], label="other", benign=True)
    assert outcomes(flow(body, other))["other:transient"].startswith("swallowed")


@pytest.mark.parametrize(
    ("bugs", "worst"),
    [(("wrong", "ledger"), "wrong_data"), (("ledger", "silent"), "leak"), (("stuck", "wrong", "ledger"), "hang")],
)
def test_of_several_problems_the_worst_is_the_outcome_and_the_others_are_told(
    bugs: tuple[str, ...], worst: str
) -> None:
    outcome, text = only_outcome(save(*bugs))
    assert outcome == worst
    assert worst == "leak" or "also" in text


def test_a_dead_thread_alone_is_not_visible() -> None:
    def body(run: fi.Run, store: Store) -> None:
        thread = threading.Thread(target=lambda: store.put("a", 1), name="victim")
        thread.start()
        thread.join()

    found = outcomes(flow(body, fi.Kill(), fi.Raise(OSError)))
    assert found["kill:transient"].startswith("swallowed")
    assert "a thread died: victim: OSError: injected" in found["raise-OSError:transient"]


def test_what_becomes_visible_only_because_the_session_frees_a_thread_does_not_count() -> None:
    def body(run: fi.Run, store: Store) -> None:
        def work() -> None:
            try:
                store.put("a", 1)
            except BaseException:
                logger.error("put failed")

        thread = threading.Thread(target=work)
        thread.start()
        if run.session.plan.faults:
            assert run.session.wait_blocked()
        run.on_cleanup(thread.join)

    assert outcomes(flow(body, fi.Block()))["block:transient"].startswith("swallowed")


def test_late_data_of_a_blocked_call_can_be_provoked() -> None:
    def body(run: fi.Run, store: Store) -> None:
        thread = threading.Thread(target=lambda: store.put("a", 1))
        thread.start()
        if run.session.plan.faults:
            assert run.session.wait_blocked()
            assert store.values == {}
            assert run.release() == 1
        thread.join()
        assert store.values == {"a": 1}
        if run.injected:
            run.saw("counter", "late")

    assert outcomes(flow(body, fi.Block())) == {
        "block:transient": "contained: counter: late",
        "block:persistent": "contained: counter: late",
    }


def test_a_cleanup_that_fails_is_a_leak() -> None:
    def body(run: fi.Run, store: Store) -> None:
        loudly(run, store)
        if run.injected:
            run.on_cleanup(lambda: os.fspath(5))  # type: ignore[call-overload]

    assert outcomes(flow(body))["raise-OSError:transient"].startswith("leak: cleanup failed: TypeError")


def test_a_cleanup_that_hangs_is_a_hang() -> None:
    def body(run: fi.Run, store: Store) -> None:
        loudly(run, store)
        if run.injected:
            run.on_cleanup(threading.Event().wait)

    assert outcomes(flow(body))["raise-OSError:transient"].startswith("hang: a cleanup did not end within 0.2 s")


def test_garbage_is_no_leak() -> None:
    """A descriptor in a reference cycle, and one held by the frames of an exception, are given back once looked for."""

    class Holder:
        def __init__(self) -> None:
            self.ends = socket.socketpair()
            self.me = self

        def __del__(self) -> None:
            for end in self.ends:
                end.close()

    def body(run: fi.Run, store: Store) -> None:
        Holder()
        held = Holder()
        store.put("a", 1)
        del held

    was_on = gc.isenabled()
    gc.disable()
    try:
        assert outcomes(flow(body))["raise-OSError:transient"] == "surfaced: OSError: injected"
    finally:
        if was_on:
            gc.enable()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda run: 1 // 0, "ZeroDivisionError"),
        (lambda run: logger.error("always"), "it logs an error: test_outcomes: always"),
        (lambda run: run.saw("counter", 1), r"it calls saw\('counter', '1'\)"),
        (lambda run: run.ledger("ledger", iter(range(99)).__next__), r"it leaks ledger: \d+, was 0"),
        (lambda run: threading.Thread(target=sys.exit, args=("no",)).start(), None),
    ],
)
def test_a_baseline_that_is_not_clean_is_refused(problem: Callable[[fi.Run], object], message: str | None) -> None:
    def body(run: fi.Run, store: Store) -> None:
        problem(run)
        store.put("a", 1)

    if message is None:  # ending a thread by SystemExit is how threads may end
        assert fi.explore(flow(body, fi.Drop())).injections
        return
    with pytest.raises(fi.BaselineNotClean, match=message):
        fi.explore(flow(body))


def test_a_thread_that_dies_in_the_baseline_is_refused() -> None:
    def body(run: fi.Run, store: Store) -> None:
        thread = threading.Thread(target=lambda: 1 // 0, name="broken")
        thread.start()
        thread.join()

    with pytest.raises(fi.BaselineNotClean, match="a thread dies: broken: ZeroDivisionError"):
        fi.explore(flow(body))
