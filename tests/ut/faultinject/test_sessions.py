"""Sessions: unknown names are errors before the run, faults that never fire after it; threads count by their roles."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
from toy_worker import Store

import faultinject as fi


def run_thread(name: str, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_an_unknown_site_is_an_error_before_the_run() -> None:
    store = fi.wrap(Store(), "store")
    with (
        pytest.raises(fi.UnknownSite, match=r"no site 'store\.putt'; did you mean 'store\.put'"),
        fi.Session(fi.Fault("store.putt", fi.Kill())),
    ):
        pytest.fail("the session was entered")
    assert store.put("a", 1) == [0]


def test_with_declared_sites_wrapping_anything_else_is_an_error() -> None:
    with fi.Session(sites=["store.put"]) as session:
        with pytest.raises(fi.UnknownSite, match=r"'store\.undo'"):
            session.wrap(Store(), "store", ["put", "undo"])
        with pytest.raises(fi.UnknownSite, match=r"no site shop\.\*"):
            session.wrap(Store(), "shop")
        with pytest.raises(fi.UnknownSite, match=r"'Store\.put'"):
            session.patch(Store, "put")
    assert Store().put("a", 1) == [0]


def test_a_fault_that_never_fires_is_an_error_that_names_the_hits() -> None:
    store = fi.wrap(Store(), "store")
    with (
        pytest.raises(fi.NotFired, match=r"store\.put:\*:2:kill:transient.*Hits seen: store\.put:main:1"),
        fi.Session(fi.Fault("store.put", fi.Kill(), fi.Nth(2))),
    ):
        store.put("a", 1)


def test_an_error_of_the_body_is_not_hidden_by_not_fired() -> None:
    fi_store = fi.wrap(Store(), "store")
    with pytest.raises(KeyError), fi.Session(fi.Fault("store.put", fi.Kill())):
        raise KeyError(fi_store.values)


def test_sessions_cannot_be_nested_and_the_refused_one_leaves_no_trace() -> None:
    store = fi.wrap(Store(), "store")
    with fi.Session(fi.Fault("store.put", fi.Return(None))):
        with pytest.raises(fi.NestedSession), fi.Session():
            pytest.fail("the session was entered")
        assert store.put("a", 1) is None
    with fi.Session():
        assert store.put("a", 1) == [0]


def test_ordinals_are_counted_per_site_and_role() -> None:
    store = fi.wrap(Store(), "store")
    fault = fi.Fault("store.put", fi.Return(None), fi.Nth(2), role="send")
    with fi.Session(fault, roles={"send": "kv-send*"}) as session:
        answers = []
        store.put("m", 0)
        run_thread("kv-send-0", lambda: answers.append(store.put("a", 1)))
        run_thread("other-3", lambda: answers.append(store.put("b", 1)))
        run_thread("kv-send-1", lambda: answers.append(store.put("c", 1)))
    assert answers == [[0], [0], None]
    assert [(hit.role, hit.ordinal) for hit in session.hits] == [("main", 1), ("send", 1), ("other", 1), ("send", 2)]
    assert [str(hit) for hit in session.fired] == ["store.put:send:2 <- return-None"]


def test_threads_with_default_names_have_one_role_whatever_their_number() -> None:
    store = fi.wrap(Store(), "store")

    def serve() -> None:
        store.put("a", 1)

    with fi.Session() as session:
        for _ in range(3):
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join(10)
    assert {(hit.role, hit.ordinal) for hit in session.hits} == {("Thread-serve", n) for n in (1, 2, 3)}


def test_hits_are_counted_exactly_under_many_threads() -> None:
    store = fi.wrap(Store(), "store")
    fault = fi.Fault("store.put", fi.Drop(), fi.Nth(777), role="worker")
    with fi.Session(fault, roles={"worker": "w*"}) as session:
        threads = [
            threading.Thread(target=lambda: [store.put("a", n) for n in range(250)], name=f"w{i}") for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert session.counts == {("store.put", "worker"): 2000}
    assert Counter(hit.fault for hit in session.hits)[fault] == 1


def test_a_loop_that_polls_does_not_fill_the_log() -> None:
    store = fi.wrap(Store(), "store")
    with fi.Session(fi.Fault("store.put", fi.Drop(), fi.Nth(4000))) as session:
        answers = [store.put("a", 1) for _ in range(5000)]
    assert answers.count(None) == 1
    assert session.counts["store.put", "main"] == 5000
    assert len(session.hits) <= 1001


def test_a_fault_armed_later_counts_from_there() -> None:
    store = fi.wrap(Store(), "store")
    with fi.Session() as session:
        store.put("a", 1)
        fault = fi.Fault("store.put", fi.Drop(), fi.From(2))
        session.arm(fault)
        assert [store.put("a", 1) for _ in range(3)] == [[0], None, None]
        session.disarm(fault)
        assert store.put("a", 1) == [0]
        with pytest.raises(fi.UnknownSite):
            session.arm(fi.Fault("store.nothing", fi.Drop()))


def test_blocked_threads_go_on_when_released_and_end_with_the_session() -> None:
    store = fi.wrap(Store(), "store")
    outcomes: list[object] = []

    def put(key: str) -> None:
        try:
            outcomes.append(store.put(key, 1))
        except BaseException as exc:
            outcomes.append(type(exc))

    with fi.Session(fi.Fault("store.put", fi.Block(), fi.Always())) as session:
        first = threading.Thread(target=put, args=("late",))
        first.start()
        assert session.wait_blocked(1, timeout=10)
        assert store.values == {}
        assert session.release() == 1
        first.join(10)
        assert (outcomes, store.values) == ([[0]], {"late": 1})
        second = threading.Thread(target=put, args=("never",))
        second.start()
        assert session.wait_blocked(1, timeout=10)
    second.join(10)
    assert (outcomes, store.values) == ([[0], fi.Released], {"late": 1})


def test_errors_are_seen_from_loggers_that_do_not_propagate(caplog: pytest.LogCaptureFixture) -> None:
    quiet = logging.getLogger("faultinject_test.quiet")
    quiet.propagate = False
    store = fi.wrap(Store(), "store")
    with fi.Session(fi.Fault("store.put", fi.Drop())) as session:
        quiet.error("before the fault: says nothing about it")
        store.put("a", 1)
        assert session.visible_errors == []
        quiet.warning("a warning is not enough")
        quiet.error("put of %s failed", "a")
        assert session.visible_errors == ["faultinject_test.quiet: put of a failed"]


def test_a_logged_traceback_keeps_its_text_but_no_frames(caplog: pytest.LogCaptureFixture) -> None:
    with fi.Session():
        try:
            raise ValueError("some text")
        except ValueError:
            logging.getLogger("faultinject_test").exception("failed")
    (record,) = caplog.records
    assert record.exc_info is None
    assert "ValueError: some text" in (record.exc_text or "")
    assert "ValueError: some text" in caplog.text


def test_a_logged_object_is_not_kept_alive_by_the_record(caplog: pytest.LogCaptureFixture) -> None:
    class Thing:
        def __str__(self) -> str:
            return "a thing"

    thing = Thing()
    alive = weakref.ref(thing)
    with fi.Session() as session:
        logging.getLogger("faultinject_test").error("lost %s", thing)
    del thing
    assert alive() is None
    assert caplog.messages == ["lost a thing"]
    assert [str(record) for record in session.evidence.errors] == ["faultinject_test: lost a thing"]


def test_a_killed_thread_makes_no_noise(capfd: pytest.CaptureFixture[str]) -> None:
    store = fi.wrap(Store(), "store")
    with fi.Session(fi.Fault("store.put", fi.Kill())) as session:
        run_thread("victim", lambda: store.put("a", 1))
    assert [(death.thread, death.injected) for death in session.evidence.deaths] == [("victim", True)]
    assert capfd.readouterr() == ("", "")


def test_everything_that_a_session_replaces_is_put_back() -> None:
    def installed() -> tuple[object, ...]:
        return logging.Logger.callHandlers, threading.excepthook, threading.Thread.join, vars(Store)["put"]

    before = installed()
    with contextlib.suppress(RuntimeError), fi.Session() as session:
        session.patch(Store, "put")
        assert all(now is not then for now, then in zip(installed(), before, strict=True))
        raise RuntimeError
    assert installed() == before
