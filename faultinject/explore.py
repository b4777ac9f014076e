"""Exploration: every hit of every site, with every action, transient and persistent; knows nothing of pytest."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from faultinject.case import run_case
from faultinject.errors import BaselineNotClean, NotFired
from faultinject.fault import Fault, From, Nth
from faultinject.judge import Observation, Verdict, judge
from faultinject.plan import Plan
from faultinject.scenario import Scenario
from faultinject.session import Hit
from faultinject.site import Site
from faultinject.waiver import Waiver


@dataclass(frozen=True)
class Injection:
    """One run with a fault that fired, and what came of it. `site`, `role`, ... are those of the plan's last fault."""

    token: str
    site: str
    role: str
    ordinal: int
    action: str
    persistence: str
    verdict: Verdict
    seconds: float
    waiver: Waiver | None = None

    @property
    def failed(self) -> bool:
        return self.verdict.broken and self.waiver is None

    def __str__(self) -> str:
        return f"{self.verdict.outcome:<10}  {self.token}  {self.verdict.reason}"


@dataclass
class Exploration:
    """Everything that an exploration found.

    capped      (site, role) -> how many ordinals were seen, where that is more than were visited
    missed      tokens planned for a hit that was seen before but did not come again (the scenario isn't deterministic)
    no_effect   tokens whose action changed nothing (an empty list, truncated)
    too_deep    hits behind `max_faults` faults, which were not visited
    incomplete  why the exploration stopped before its end; empty if it did not
    balances    name -> (runs, taken, given back), over all runs
    explored    the sites whose first faults were explored
    """

    scenario: Scenario
    baseline: Observation = field(default_factory=Observation)
    injections: list[Injection] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    capped: dict[tuple[str, str], int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)
    too_deep: int = 0
    incomplete: str = ""
    balances: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    explored: tuple[str, ...] = ()
    runs: int = 0
    seconds: float = 0.0

    @property
    def broken(self) -> list[Injection]:
        """The injections that fail the exploration: broken and not waived."""
        return [injection for injection in self.injections if injection.failed]

    @property
    def ok(self) -> bool:
        return not self.broken and not self.incomplete

    def outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for injection in self.injections:
            counts[injection.verdict.outcome] = counts.get(injection.verdict.outcome, 0) + 1
        return counts


@dataclass(frozen=True)
class _Point:
    """A hit to strike, and the faults without which it doesn't exist."""

    site: str
    role: str
    ordinal: int
    opened_by: tuple[Fault, ...] = ()


class _Explorer:
    def __init__(self, scenario: Scenario, budget: float | None, report: Callable[[Injection], None] | None) -> None:
        self.scenario = scenario
        self.found = Exploration(scenario)
        self.end = None if budget is None else time.monotonic() + budget
        self.report = report
        self.known: set[tuple[str, str, int]] = set()
        self.order = {name: index for index, name in enumerate(scenario.sites)}

    def run(self, plan: Plan) -> Observation:
        self.found.runs += 1
        seen = run_case(self.scenario, plan)
        self.note_capped(seen)
        for name, (taken, given_back) in seen.balances.items():
            runs, before, back = self.found.balances.get(name, (0, 0, 0))
            self.found.balances[name] = (runs + 1, before + taken, back + given_back)
        return seen

    def baseline(self) -> None:
        """Twice: the first run also makes what lives as long as the process (pools, caches, descriptors)."""
        self.run(Plan())
        seen = self.run(Plan())
        problems = baseline_problems(seen)
        if problems:
            raise BaselineNotClean(f"scenario {self.scenario.name!r} without any fault: " + "; ".join(problems))
        self.found.baseline = seen
        self._count_hits(seen)

    def _count_hits(self, seen: Observation) -> None:
        for (site, _), count in seen.counts.items():
            self.found.hits[site] = self.found.hits.get(site, 0) + count

    def points(self, hits: Iterable[Hit], opened_by: tuple[Fault, ...]) -> list[_Point]:
        """The hits not seen before, in an order that doesn't depend on how threads interleave."""
        fresh = {(hit.site, hit.role, hit.ordinal) for hit in hits if hit.fault is None} - self.known
        self.known |= fresh
        points = []
        for site, role, ordinal in sorted(fresh, key=lambda key: (self.order[key[0]], key[1], key[2])):
            if ordinal <= (self.scenario.sites[site].max_ordinals or self.scenario.max_ordinals):
                points.append(_Point(site, role, ordinal, opened_by))
        return points

    def note_capped(self, seen: Observation) -> None:
        for (site, role), count in seen.counts.items():
            if count > (self.scenario.sites[site].max_ordinals or self.scenario.max_ordinals):
                self.found.capped[site, role] = max(count, self.found.capped.get((site, role), 0))

    def singles(self, first_sites: Iterable[str] | None) -> None:
        """Breadth first; a run that shows hits nobody saw before (a retry, a roll-back) adds them behind its faults."""
        only = None if first_sites is None else set(first_sites)
        start = self.points(self.found.baseline.hits, ())
        queue = deque(point for point in start if only is None or point.site in only)
        while queue:
            point = queue.popleft()
            for fault in _faults(point, self.scenario.sites[point.site]):
                if self.out_of_budget(f"{len(queue)} hits not visited"):
                    return
                plan = Plan((*point.opened_by, fault))
                seen = self.inject(plan)
                if seen is None:
                    continue
                behind = self.points(seen.hits, plan.faults)
                if len(plan.faults) < self.scenario.max_faults:
                    queue.extend(behind)
                else:
                    self.found.too_deep += len(behind)

    def pairs(self, first_sites: Iterable[str] | None) -> None:
        """Two transient faults at different hits, picked with a fixed seed: the same ones in every run."""
        only = None if first_sites is None else set(first_sites)
        singles = [
            Fault(site, action, Nth(ordinal), role)
            for site, role, ordinal in sorted(self.known, key=lambda key: (self.order[key[0]], key[1], key[2]))
            for action in self.scenario.sites[site].actions
            if not action.benign and (not action.roles or role in action.roles)
        ]
        firsts = [fault for fault in singles if only is None or fault.site in only]
        chance = random.Random(f"{self.scenario.name}/{sorted(only or ())}")
        tried: set[str] = set()
        for _ in range(20 * self.scenario.pairs):
            if len(tried) == self.scenario.pairs or not firsts or self.out_of_budget("two-fault combinations left"):
                return
            plan = Plan((chance.choice(firsts), chance.choice(singles)))
            first, second = plan.faults
            token = plan.token("")
            if (first.site, first.role, first.when) != (second.site, second.role, second.when) and token not in tried:
                tried.add(token)
                self.inject(plan, optional=True)

    def out_of_budget(self, left: str) -> bool:
        if self.end is None or time.monotonic() < self.end:
            return False
        self.found.incomplete = f"the time budget ran out after {len(self.found.injections)} injections, {left}"
        return True

    def inject(self, plan: Plan, *, optional: bool = False) -> Observation | None:
        """Run `plan`; None if its last fault did not fire where planned. A hit that doesn't come gets a second run."""
        token = plan.token(self.scenario.name)
        for _ in range(1 if optional else 2):
            seen = self.run(plan)
            planned = [hit for hit in seen.hits if _planned(plan.faults[-1], hit)]
            if any(hit.fault == plan.faults[-1] for hit in planned):
                self._judge(plan, token, seen)
                return seen
            if planned:
                self.found.no_effect.append(token)
                return None
        if not optional:
            self.found.missed.append(token)
        return None

    def _judge(self, plan: Plan, token: str, seen: Observation) -> None:
        last = plan.faults[-1]
        verdict = judge(
            seen,
            self.scenario.laws,
            benign=all(fault.action.benign for fault in plan.faults),
            same_result=_equal(seen.result, self.found.baseline.result),
        )
        waiver = next((w for w in self.scenario.waivers if w.matches(token) and w.outcome == verdict.outcome), None)
        site, role, ordinal, action, persistence = last.token.split(":")
        injection = Injection(token, site, role, int(ordinal), action, persistence, verdict, seen.seconds, waiver)
        self.found.injections.append(injection)
        for site, _ in seen.counts:
            self.found.hits.setdefault(site, 0)
        if self.report is not None:
            self.report(injection)


def _planned(fault: Fault, hit: Hit) -> bool:
    """Whether `hit` is the one that an exploration planned `fault` for: the first that it can strike."""
    return (hit.site, hit.role, hit.ordinal) == (fault.site, fault.role, getattr(fault.when, "n", None))


def _faults(point: _Point, site: Site) -> Iterator[Fault]:
    for action in site.actions:
        if not action.roles or point.role in action.roles:
            yield Fault(point.site, action, Nth(point.ordinal), point.role)
            if site.persistent:
                yield Fault(point.site, action, From(point.ordinal), point.role)


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def baseline_problems(seen: Observation) -> list[str]:
    """What makes a run without any fault unfit to compare with."""
    problems = [f"it hangs: {seen.hang}\n{seen.stacks}"] if seen.hang else []
    if seen.error is not None:
        problems.append(f"it raises\n{seen.error_text}")
    problems += [f"it leaks {leak}" for leak in seen.leaks]
    problems += [f"it logs an error: {line}" for line in seen.log_errors]
    problems += [f"it calls saw({kind!r}, {detail!r})" for kind, detail in seen.seen]
    problems += [f"a thread dies: {death}" for death in seen.deaths]
    return problems


def as_scenario(scenario: Scenario | Callable[..., Any]) -> Scenario:
    """The declaration of a function decorated with `scenario`. Raises TypeError for any other callable."""
    declared = getattr(scenario, "__faultinject__", scenario)
    if not isinstance(declared, Scenario):
        raise TypeError(f"{scenario!r} is not a scenario: decorate it with @faultinject.scenario(sites=[...])")
    return declared


def explore(
    scenario: Scenario | Callable[..., Any],
    *,
    first_sites: Iterable[str] | None = None,
    budget: float | None = None,
    report: Callable[[Injection], None] | None = None,
) -> Exploration:
    """Run `scenario` without a fault, then once for every (site, role, ordinal, action) that it shows, until no new hit
    turns up. Never stops at a broken injection.

    first_sites  explore only faults whose first site is one of these (hits that such a fault opens may be anywhere)
    budget       seconds; when they are over the result says `incomplete`
    report       called after each injection

    Raises BaselineNotClean, or what is wrong with the declaration (`FaultInjectError`).
    """
    started = time.monotonic()
    explorer = _Explorer(as_scenario(scenario), budget, report)
    explorer.baseline()
    explorer.singles(first_sites)
    if explorer.scenario.pairs and not explorer.found.incomplete:
        explorer.pairs(first_sites)
    explorer.found.explored = tuple(explorer.scenario.sites if first_sites is None else first_sites)
    explorer.found.seconds = time.monotonic() - started
    return explorer.found


def replay(scenario: Scenario | Callable[..., Any], plan: Plan) -> tuple[Exploration, Observation]:
    """Run the baseline and `plan` alone. Raises NotFired if the plan's last fault doesn't fire."""
    explorer = _Explorer(as_scenario(scenario), None, None)
    explorer.baseline()
    seen = explorer.run(plan)
    if not any(hit.fault == plan.faults[-1] for hit in seen.fired):
        raise NotFired(f"{plan.token(explorer.scenario.name)} never fired. Hits seen: {', '.join(map(str, seen.hits))}")
    explorer._judge(plan, plan.token(explorer.scenario.name), seen)
    return explorer.found, seen
