"""One case: a scenario run once with a plan, under the watchdog, between two leak checks; judges nothing."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from faultinject import watchdog
from faultinject.evidence import join
from faultinject.judge import Observation
from faultinject.leaks import Balance, LeakCheck, Ledger, queue_ledgers
from faultinject.plan import Plan
from faultinject.scenario import Scenario
from faultinject.session import Session

T = TypeVar("T")
FLOW = "faultinject-flow"
_AFTER_INTERRUPT = 2.0
_AFTER_HANG = 0.3  # seconds


class Run:
    """What a scenario gets as its first argument.

    deadline  time.monotonic() at which the watchdog strikes
    session   the armed session (hits, fired, blocked, wait_blocked)
    """

    def __init__(self, session: Session, leaks: LeakCheck, deadline: float) -> None:
        self.session = session
        self.deadline = deadline
        self._leaks = leaks
        self._seen: list[tuple[str, str]] = []
        self._cleanups: list[Callable[[], Any]] = []

    def wrap(self, obj: T, prefix: str, methods: Iterable[str] | None = None) -> T:
        """A stand-in for `obj` whose calls pass the sites `PREFIX.METHOD` (default: those declared)."""
        return self.session.wrap(obj, prefix, methods)

    def patch(self, target: Any, attr: str, *, site: str | None = None) -> None:
        """Make an attribute of a class, module or instance pass a site, until the case is over."""
        self.session.patch(target, attr, site=site)

    def lines(self, function: Callable[..., Any], *, site: str | None = None) -> None:
        """Make every line of a Python function that this thread or a later one runs a hit of `QUALNAME.lines`."""
        self.session.lines(function, site=site)

    def ledger(self, name: str, read: Callable[[], Any]) -> None:
        """A count (an int, a mapping of counts, or a collection) that must end as it is now."""
        self._leaks.ledgers.append(Ledger(name, read))

    def balance(self, name: str, read: Callable[[], tuple[int, int]]) -> None:
        """How often something was taken, and how often given back: equal at the end, and summed up in the matrix."""
        self._leaks.ledgers.append(Balance(name, read))

    def queue(self, name: str, queue: Any) -> None:
        """A queue that must end as full as it is now, with every item taken marked done."""
        self._leaks.ledgers.extend(queue_ledgers(name, queue))

    def files(self, name: str, directory: str | os.PathLike[str]) -> None:
        """A directory that must end with the entries that it has now (socket files, temporary files)."""
        self.ledger(name, lambda: os.listdir(directory))

    def saw(self, kind: str, detail: object = "") -> None:
        """The fault is visible: "result" and "exception" reached the main flow, others ("counter") tell of it."""
        self._seen.append((kind, str(detail)))

    def on_cleanup(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call `fn(*args)` when the body has ended or hangs: last in, first out, no fault armed, nothing blocked."""
        self._cleanups.append(lambda: fn(*args))

    def release(self) -> int:
        """Let the threads that a Block holds go on with their calls now; how many there were."""
        return self.session.release()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def injected(self) -> bool:
        """Whether a fault has fired so far."""
        return bool(self.session.fired)


class _Case:
    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        self.scenario = scenario
        self.leaks = LeakCheck()
        self.session = Session(plan, sites=scenario.sites, roles=scenario.roles, strict=False, quiet=True)
        self.seen = Observation()
        self.run = Run(self.session, self.leaks, time.monotonic() + scenario.deadline)
        self.body_done = threading.Event()
        self.cleanup_errors: list[str] = []
        self.visible: list[str] | None = None
        context = contextvars.copy_context()
        self.flow = threading.Thread(target=context.run, args=(self._flow,), name=FLOW, daemon=True)
        self.ours = {self.flow}

    # The flow's thread: the body, then the cleanups.
    def _flow(self) -> None:
        try:
            self.seen.result = self.scenario.body(self.run)
        except BaseException as exc:
            self.seen.error = exc
        self._end()
        self.body_done.set()
        self._clean_up()

    def _end(self) -> None:
        """Nothing that becomes visible only because the session frees a blocked thread counts as visible."""
        errors = self.session.visible_errors
        if self.session.end():
            self.visible = errors

    def _clean_up(self) -> None:
        cleanups = self.run._cleanups
        while cleanups:
            try:
                cleanups.pop()()
            except BaseException as exc:
                self.cleanup_errors.append(f"cleanup failed: {type(exc).__name__}: {exc}")

    # The watching thread.
    def execute(self) -> Observation:
        started = time.monotonic()
        with self.session:
            self.session.roles.main.add(self.flow)
            self.flow.start()
            try:
                self._watch()
            except BaseException:  # KeyboardInterrupt: free everything, then let it stop the run
                self.session.end()
                end = time.monotonic() + _AFTER_INTERRUPT
                threads = self.leaks.new_threads()
                watchdog.give_up([thread for thread in threads if not join(thread, max(end - time.monotonic(), 0.0))])
                raise
        self.leaks.ledgers.clear()  # a ledger that refers to the run would keep the objects under test in a cycle
        self.seen.seconds = time.monotonic() - started
        return self.seen

    def _watch(self) -> None:
        scenario = self.scenario
        self.body_done.wait(scenario.deadline)
        if not self.body_done.is_set():
            self._hang(f"the flow did not end within {scenario.deadline} s", [*self.leaks.new_threads()])
            self._end()
            cleaner = watchdog.run_bounded("faultinject-cleanup", self._clean_up, time.monotonic() + self.grace)
            self.ours.update({cleaner} if cleaner else ())
        end = time.monotonic() + self.grace
        if not join(self.flow, end - time.monotonic()) and not self.seen.hang:
            self._hang(f"a cleanup did not end within {scenario.grace} s", [self.flow])
        self._look_for_threads(end)
        self._collect()
        watchdog.give_up([thread for thread in self.ours if thread.is_alive()])

    @property
    def grace(self) -> float:
        """After a hang little is worth waiting for: what it can still free is freed at once."""
        return min(self.scenario.grace, _AFTER_HANG) if self.seen.hang else self.scenario.grace

    def _hang(self, reason: str, threads: list[threading.Thread]) -> None:
        self.seen.hang = reason
        self.seen.stacks = watchdog.stacks(threads)
        names = ", ".join(hit.site for hit in self.session.fired) or "nothing"
        print(f"faultinject: {self.scenario.name}: {reason} (injected: {names})", file=sys.stderr)
        print(watchdog.fresh_stacks(), file=sys.stderr)

    def _look_for_threads(self, end: float) -> None:
        """A thread that somebody waited for, or that is inside a site, is stuck; any other one is left over."""
        alive = self.leaks.wait_threads(self.ours, end)
        joined = self.session.evidence.joined
        stuck = [thread for thread in alive if thread in joined or self.session.inside(thread)]
        if stuck and not self.seen.hang:
            names = ", ".join(thread.name for thread in stuck)
            self._hang(f"thread {names} did not end within {self.scenario.grace} s of the flow", alive)
        elif alive and not self.seen.stacks:
            self.seen.stacks = watchdog.stacks(alive)
        self.seen.leaks += [f"threads: {thread.name} is still alive" for thread in alive if thread not in stuck]
        self.ours.update(alive)

    def _collect(self) -> None:
        session, seen = self.session, self.seen
        if seen.error is not None:
            seen.error_text = _take_text(seen.error)
        seen.leaks += [str(leak) for leak in self.leaks.wait_clean(time.monotonic() + self.grace)]
        seen.leaks += self.cleanup_errors
        seen.balances = self.leaks.balances()
        seen.seen = list(self.run._seen)
        if not session.plan.faults:
            seen.log_errors = [str(record) for record in session.evidence.errors]
        else:
            seen.log_errors = session.visible_errors if self.visible is None else self.visible
        seen.deaths = [f"{death.thread}: {death.error}" for death in session.evidence.deaths]
        seen.hits, seen.fired, seen.counts = session.hits, session.fired, session.counts


def _take_text(error: BaseException) -> str:
    """The traceback as text; its frames are let go, or what they hold would look leaked."""
    text = "".join(traceback.format_exception(error))
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exc = pending.pop()
        if exc is None or id(exc) in seen:
            continue
        seen.add(id(exc))
        if exc.__traceback__ is not None:
            traceback.clear_frames(exc.__traceback__)
            exc.__traceback__ = None
        pending += [exc.__cause__, exc.__context__]
    return text


def run_case(scenario: Scenario, plan: Plan) -> Observation:
    """Run `scenario` once with `plan` armed. Raises what is not for the judge (`Laws.not_judged`)."""
    seen = _Case(scenario, plan).execute()
    if isinstance(seen.error, scenario.laws.not_judged):
        raise seen.error
    return seen
