"""The watchdog: whatever hangs, the case is judged, what is blocked is freed, and the session goes on and can end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from toy_worker import Store

import faultinject as fi
from faultinject.case import run_case
from faultinject.session import strangers
from faultinject.watchdog import stacks

FAULT = fi.Plan((fi.Fault("store.put", fi.Raise(OSError)),))


def declare(body: Callable[[fi.Run, Store], Any], **settings: Any) -> fi.Scenario:
    @fi.scenario(name="case", sites=["store.put"], **{"deadline": 0.3, "grace": 0.3, **settings})
    def scenario(run: fi.Run) -> Any:
        return body(run, run.wrap(Store(), "store"))

    declared = scenario.__faultinject__  # type: ignore[attr-defined]
    assert isinstance(declared, fi.Scenario)
    return declared


def well(run: fi.Run, store: Store) -> str:
    return "well"


def assert_goes_on() -> None:
    """The next case is not touched by what the last one left behind."""
    seen = run_case(declare(well, deadline=10.0), fi.Plan())
    assert (seen.result, seen.hang, seen.leaks, seen.log_errors, seen.deaths, seen.hits) == ("well", "", [], [], [], [])


def test_the_stacks_of_all_threads_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def waits_for_something(run: fi.Run, store: Store) -> None:
        threading.Event().wait()

    seen = run_case(declare(waits_for_something), FAULT)
    printed = capfd.readouterr().err
    assert seen.hang == "the flow did not end within 0.3 s"
    assert "faultinject: case: the flow did not end within 0.3 s (injected: nothing)\nAll stacks:\n" in printed
    assert "--- faultinject-flow daemon" in printed
    assert "in waits_for_something" in printed
    assert "in waits_for_something" in seen.stacks
    assert_goes_on()


def test_cleanups_run_although_the_flow_hangs_and_can_end_it() -> None:
    gate, ended = threading.Event(), threading.Event()

    def waits_for_its_cleanup(run: fi.Run, store: Store) -> None:
        run.on_cleanup(gate.set)
        gate.wait()
        ended.set()

    assert run_case(declare(waits_for_its_cleanup), FAULT).hang
    assert ended.is_set()
    assert_goes_on()


def test_a_flow_that_the_session_blocks_is_freed() -> None:
    def puts(run: fi.Run, store: Store) -> None:
        store.put("a", 1)

    plan = fi.Plan((fi.Fault("store.put", fi.Block()),))
    seen = run_case(declare(puts), plan)
    assert seen.hang
    assert isinstance(seen.error, fi.Released), "the flow did end"
    assert_goes_on()


def polls_for_ever(stop: threading.Event, stubborn: bool) -> Callable[[], None]:
    """A loop that only an exception can end; a stubborn one survives it a few times."""

    def loop() -> None:
        lives = 3 if stubborn else 0
        while True:
            try:
                while not stop.wait(0.001):
                    pass
                return
            except BaseException:
                if not lives:
                    raise
                lives -= 1

    return loop


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_a_worker_that_polls_for_ever_is_ended(daemon: bool, joined: bool) -> None:
    started: list[threading.Thread] = []

    def leaves_a_thread(run: fi.Run, store: Store) -> None:
        thread = threading.Thread(target=polls_for_ever(threading.Event(), False), name="poller", daemon=daemon)
        thread.start()
        started.append(thread)
        if joined:
            thread.join(0.01)

    seen = run_case(declare(leaves_a_thread), FAULT)
    assert ("thread poller did not end" in seen.hang) == joined
    assert (seen.leaks == ["threads: poller is still alive"]) == (not joined)
    assert "in loop" in seen.stacks
    started[0].join(10)
    assert not started[0].is_alive()
    assert_goes_on()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_worker_that_will_not_die_does_not_disturb_what_follows(daemon: bool) -> None:
    """It waits in C code and catches everything: it is left behind, and ends at the next site that it passes."""
    go, outcome = threading.Event(), []

    def leaves_a_thread(run: fi.Run, store: Store) -> None:
        def wait_then_put() -> None:
            while not go.is_set():
                try:
                    go.wait()
                except BaseException as exc:
                    outcome.append(type(exc))
            try:
                outcome.append(store.put("late", 1))
            except BaseException as exc:
                outcome.append(type(exc))

        threading.Thread(target=wait_then_put, name="undead", daemon=daemon).start()

    assert run_case(declare(leaves_a_thread), FAULT).leaks == ["threads: undead is still alive"]
    (undead,) = [thread for thread in threading.enumerate() if thread.name == "undead"]
    assert undead in strangers
    assert_goes_on()
    assert "undead" not in stacks()
    go.set()
    undead.join(10)
    assert outcome[-1] is fi.Released


def test_the_deaths_and_logs_of_leftovers_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()

    def leaves_a_thread(run: fi.Run, store: Store) -> None:
        threading.Thread(target=lambda: go.wait() and 1 // 0, name="leftover", daemon=True).start()

    run_case(declare(leaves_a_thread), FAULT)
    (leftover,) = [thread for thread in threading.enumerate() if thread.name == "leftover"]
    capfd.readouterr()

    def ends_it(run: fi.Run, store: Store) -> str:
        go.set()
        leftover.join(10)
        return "ended"

    seen = run_case(declare(ends_it, deadline=20.0), fi.Plan())
    assert (seen.result, seen.deaths, seen.leaks) == ("ended", [], [])
    assert capfd.readouterr().err == ""


def test_an_interrupt_frees_everything_and_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the watchdog waits: threads that the session blocks must end before it goes up."""
    blocked: list[threading.Thread] = []

    def blocks(run: fi.Run, store: Store) -> None:
        thread = threading.Thread(target=lambda: store.put("a", 1), name="blocked")
        thread.start()
        blocked.append(thread)
        assert run.session.wait_blocked()
        threading.Event().wait()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and timeout == 77.0:
                while not blocked or not blocked[0].is_alive():
                    super().wait(0.001)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr("faultinject.case.threading.Event", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_case(declare(blocks, deadline=77.0), fi.Plan((fi.Fault("store.put", fi.Block()),)))
    monkeypatch.undo()
    blocked[0].join(10)
    assert not blocked[0].is_alive()
    assert_goes_on()


def test_many_hangs_leave_the_session_usable() -> None:
    """A hang at every hit: each is judged for itself, and the threads of none pile up."""

    @fi.scenario(name="fragile", sites=[fi.Site("store.put", (fi.Raise(OSError), fi.Kill()))], deadline=0.7, grace=0.2)
    def fragile(run: fi.Run) -> None:
        store, done = run.wrap(Store(), "store"), threading.Event()

        def work() -> None:
            for key in "abc":
                store.put(key, 1)
            done.set()

        threading.Thread(target=work, name="worker", daemon=True).start()
        run.on_cleanup(done.set)
        done.wait()

    before = threading.active_count()
    found = fi.explore(fragile)
    assert found.outcomes() == {"hang": 12}
    assert threading.active_count() == before
    assert_goes_on()


UNDER_A_TRACER = """
import sys, threading
from faultinject.watchdog import give_up

lock = threading.Lock()
lock.acquire()
stuck = threading.Thread(target=lock.acquire, daemon=True)
stuck.start()
sys.settrace(lambda *_: None)
give_up([stuck])
print((lambda: "went on")())
"""


def test_a_thread_that_never_takes_its_exception_stops_nobody_who_is_traced() -> None:
    """CPython 3.11 spins at the start of a traced function while somebody's exception waits to be taken."""
    done = subprocess.run([sys.executable, "-c", UNDER_A_TRACER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
