"""A crew has one leader at a time, does every piece of work once, and is not stopped by work that never ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from vllm_ascend_ext.kv_pool.clock import MONOTONIC
from vllm_ascend_ext.kv_pool.errors import Cancelled
from vllm_ascend_ext.kv_pool.lookup.crew import Crew, Work

PATIENCE = 60.0


class Source:
    """Work from a queue; checks that one thread at a time waits for it."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Work | None] = queue.Queue()
        self.leaders = threading.Lock()
        self.asked = threading.Semaphore(0)
        self.fatal: list[BaseException] = []

    def lead(self) -> Work | None:
        assert self.leaders.acquire(blocking=False), "two threads lead at once"
        self.asked.release()
        try:
            return self.queue.get(timeout=PATIENCE)
        finally:
            self.leaders.release()

    def put(self, run: Callable[[], None], refuse: Callable[[BaseException], object] = print) -> Work:
        work = Work(run, refuse)
        self.queue.put(work)
        return work


@contextmanager
def crew_of(source: Source, size: int = 2, max_stuck: int = 2) -> Iterator[Crew]:
    crew = Crew("crew", source.lead, source.fatal.append, size=size, max_stuck=max_stuck, clock=MONOTONIC)
    crew.start(PATIENCE)
    try:
        yield crew
    finally:
        source.queue.put(None)
        assert crew.close(PATIENCE) == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_piece_of_work_is_done_once(size: int) -> None:
    source = Source()
    done: list[int] = []
    all_done = threading.Semaphore(0)

    def piece(number: int) -> Callable[[], None]:
        def run() -> None:
            done.append(number)
            all_done.release()

        return run

    with crew_of(source, size):
        for number in range(2000):
            source.put(piece(number))
        for _ in range(2000):
            assert all_done.acquire(timeout=PATIENCE)
    assert sorted(done) == list(range(2000))
    assert source.fatal == []


def test_as_many_as_its_size_work_at_once_and_what_comes_then_waits() -> None:
    source = Source()
    together, fourth = threading.Barrier(4), threading.Event()

    def meet() -> None:
        together.wait(PATIENCE)

    with crew_of(source, size=3):
        for _ in range(3):
            source.put(meet)
        source.put(fourth.set)
        together.wait(PATIENCE)  # passes only when three are at work at once
        assert fourth.wait(PATIENCE)


class Holder:
    """Work that stays inside until it is let go."""

    def __init__(self) -> None:
        self.inside, self.gate = threading.Event(), threading.Event()

    def run(self) -> None:
        self.inside.set()
        self.gate.wait(PATIENCE)


def test_a_thread_that_was_given_up_is_replaced_until_too_many_are_stuck() -> None:
    source = Source()
    refused: queue.Queue[BaseException] = queue.Queue()
    holders = [Holder(), Holder()]
    with crew_of(source, size=1, max_stuck=2) as crew:
        for holder in holders:
            work = source.put(holder.run)
            assert holder.inside.wait(PATIENCE)
            crew.give_up(work, Cancelled("overdue"))
        source.put(lambda: pytest.fail("was done"), refused.put)
        assert "stuck" in str(refused.get(timeout=PATIENCE))
        for holder in holders:
            holder.gate.set()
    assert source.fatal == []


def test_work_that_was_given_up_before_it_began_is_never_done() -> None:
    source = Source()
    holder, done = Holder(), threading.Event()
    with crew_of(source, size=1) as crew:
        source.put(holder.run)
        assert holder.inside.wait(PATIENCE)
        never = source.put(lambda: pytest.fail("was done"))
        source.put(done.set)
        for _ in range(4):  # whoever leads comes for more once it has put them both aside
            assert source.asked.acquire(timeout=PATIENCE)
        crew.give_up(never, Cancelled("overdue"))
        holder.gate.set()
        assert done.wait(PATIENCE)
    assert source.fatal == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_thread_that_came_back_as_it_was_given_up_takes_no_lead_with_it(size: int) -> None:
    for _ in range(20):
        source = Source()
        done = threading.Event()
        holders = [Holder() for _ in range(size)]
        with crew_of(source, size, max_stuck=size + 1) as crew:
            late = source.put(done.set)
            assert done.wait(PATIENCE)
            crew.give_up(late, Cancelled("overdue"))  # too late: its thread waits for its turn, or leads
            for holder in holders:
                source.put(holder.run)
                assert holder.inside.wait(PATIENCE)
            while source.asked.acquire(blocking=False):
                pass
            source.put(lambda: None)
            assert source.asked.acquire(timeout=PATIENCE), "nobody leads"
            for holder in holders:
                holder.gate.set()
        assert source.fatal == []


@pytest.mark.parametrize("cause", [RuntimeError("injected"), SystemExit(1)], ids=repr)
def test_what_lead_or_work_raises_is_fatal_and_told_once(cause: BaseException) -> None:
    def die() -> NoReturn:
        raise cause

    source = Source()
    told = threading.Event()
    causes: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        causes.append(error)
        told.set()
        source.queue.put(None)

    crew = Crew("crew", source.lead, on_fatal, size=2, max_stuck=2, clock=MONOTONIC)
    crew.start(PATIENCE)
    source.put(die)
    assert told.wait(PATIENCE)
    assert crew.close(PATIENCE) == []
    assert causes == [cause]
