"""Line sites: a fault between any two statements, in the thread that runs them; tracing ends with the case."""

from __future__ import annotations

import sys
import threading

import pytest
from toy_worker import Store, Worker

import faultinject as fi


class Account:
    """Moves an amount in two statements; an exception between them loses it, unless it is `careful`."""

    def __init__(self, careful: bool) -> None:
        self.here, self.there, self.careful = 10, 0, careful

    def move(self) -> None:
        before = self.here, self.there
        try:
            self.here -= 1
            self.there += 1
        except BaseException:
            if self.careful:
                self.here, self.there = before
            raise


def move(careful: bool) -> fi.Exploration:
    @fi.scenario(sites=[fi.LineSite("Account.move.lines", [fi.Raise(MemoryError)])])
    def scenario(run: fi.Run) -> None:
        account = Account(careful)
        run.lines(Account.move)
        try:
            account.move()
        finally:
            if account.here + account.there != 10:
                raise fi.WrongData(f"{account.here} + {account.there}")

    return fi.explore(scenario)


def test_an_exception_between_two_statements() -> None:
    outcomes = [(injection.ordinal, injection.verdict.outcome) for injection in move(careful=False).injections]
    assert outcomes == [(1, "surfaced"), (2, "surfaced"), (3, "surfaced"), (4, "wrong_data")]
    assert move(careful=True).ok


def test_lines_of_a_thread_with_where_they_are() -> None:
    @fi.scenario(
        sites=[fi.LineSite("Worker.put.lines", [fi.Raise(RuntimeError), fi.Kill()]), "store.put"],
        roles={"worker": "toy-worker*"},
    )
    def scenario(run: fi.Run) -> None:
        run.lines(Worker.put)
        worker = Worker(run.wrap(Store(), "store"))
        try:
            if worker.submit("a", 1).exception() is not None:
                run.saw("result", "failed")
        finally:
            worker.close()

    found = fi.explore(scenario, first_sites=["Worker.put.lines"])
    assert found.ok
    assert {injection.role for injection in found.injections} == {"worker"}
    assert {injection.persistence for injection in found.injections} == {"transient"}
    first = found.baseline.hits[0]
    assert str(first).startswith("Worker.put.lines:worker:1 at toy_worker.py:")
    assert len(found.injections) >= 8, "at least four lines, two actions"


def test_tracing_ends_with_the_session() -> None:
    before = sys.gettrace(), threading.gettrace()
    with fi.Session() as session:
        session.lines(Account.move)
        session.lines(Worker.put)
        Account(True).move()
        assert session.counts == {("Account.move.lines", "main"): 4}
    assert (sys.gettrace(), threading.gettrace()) == before
    Account(True).move()
    assert session.counts == {("Account.move.lines", "main"): 4}


def test_bad_line_sites_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'len\.lines'.*no Python lines"), fi.Session() as session:
        session.lines(len)
    with (
        pytest.raises(fi.FaultInjectError, match=r"'Account\.move\.lines': faults at lines can't persist"),
        fi.Session(sites=["Account.move.lines"]) as session,
    ):
        session.lines(Account.move)
    with pytest.raises(fi.UnknownSite, match=r"'Worker\.put\.lines'"), fi.Session(sites=["other"]) as session:
        session.lines(Worker.put)
