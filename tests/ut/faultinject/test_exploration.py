"""Exploration: each ordinal, each action, transient and persistent; what only exists after a fault is reached, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from toy_worker import Store, Worker

import faultinject as fi
from faultinject.matrix import Matrix


def tokens(found: fi.Exploration) -> list[str]:
    return [injection.token for injection in found.injections]


def report(run: fi.Run, failures: int) -> None:
    if failures:
        run.saw("counter", failures)


def put_all(keys: str, *actions: fi.Action, **settings: Any) -> Callable[..., Any]:
    """Each key is put once; failures are counted."""

    @fi.scenario(name="puts", sites=[fi.Site("store.put", actions or (fi.Raise(OSError),))], **settings)
    def scenario(run: fi.Run) -> None:
        store, failures = run.wrap(Store(), "store"), 0
        for key in keys:
            try:
                failures += store.put(key, 1) != [0]
            except OSError:
                failures += 1
        report(run, failures)

    return scenario


def retry(attempts: int, **settings: Any) -> Callable[..., Any]:
    """One put, tried again a few times, and undone if that is in vain."""

    @fi.scenario(
        name="retry",
        sites=[fi.Site("store.put", (fi.Raise(OSError),)), fi.Site("store.undo", (fi.Raise(KeyError),))],
        **settings,
    )
    def scenario(run: fi.Run) -> None:
        store, failures = run.wrap(Store(), "store"), 0
        for _ in range(attempts):
            try:
                store.put("a", 1)
                break
            except OSError:
                failures += 1
        else:
            try:
                store.undo("a")
            except KeyError:
                failures += 1
        report(run, failures)

    return scenario


def test_every_ordinal_action_and_persistence_once() -> None:
    found = fi.explore(put_all("abc", fi.Raise(OSError), fi.Empty()))
    assert tokens(found) == [
        f"puts:store.put:main:{ordinal}:{action}:{persistence}"
        for ordinal in (1, 2, 3)
        for action in ("raise-OSError", "empty")
        for persistence in ("transient", "persistent")
    ]
    assert found.outcomes() == {"contained": 12}
    assert found.runs == 14, "two without a fault, and one each"


def test_transient_is_one_hit_and_persistent_all_from_there() -> None:
    found = fi.explore(put_all("abcd"))
    reasons = {f"{i.ordinal}:{i.persistence}": i.verdict.reason for i in found.injections}
    assert reasons == {f"{n}:transient": "counter: 1" for n in (1, 2, 3, 4)} | {
        f"{n}:persistent": f"counter: {5 - n}" for n in (1, 2, 3, 4)
    }


def test_hits_that_only_exist_after_a_fault_are_reached() -> None:
    found = fi.explore(retry(3))
    assert found.baseline.counts == {("store.put", "main"): 1}
    first, second = "store.put:main:1:raise-OSError", "store.put:main:2:raise-OSError"
    third, undo = "store.put:main:3:raise-OSError", "store.undo:main:1:raise-KeyError"
    assert tokens(found) == [
        f"retry:{first}:transient",
        f"retry:{first}:persistent",
        f"retry:{first}:transient+{second}:transient",
        f"retry:{first}:transient+{second}:persistent",
        f"retry:{first}:persistent+{undo}:transient",
        f"retry:{first}:persistent+{undo}:persistent",
        f"retry:{first}:transient+{second}:transient+{third}:transient",
        f"retry:{first}:transient+{second}:transient+{third}:persistent",
    ]
    assert found.hits == {"store.put": 1, "store.undo": 0}


def test_the_order_is_the_same_however_threads_interleave() -> None:
    @fi.scenario(
        sites=[fi.Site("store.put", (fi.Raise(OSError), fi.Drop())), fi.Site("store.undo", (fi.Drop(),))],
        roles={"worker": "toy-worker*", "other": "other*"},
    )
    def race(run: fi.Run) -> None:
        store = run.wrap(Store(), "store")
        worker = Worker(store)
        other = threading.Thread(target=lambda: [store.undo("x") for _ in range(3)], name="other-1")
        other.start()
        results = [worker.submit(key, 1) for key in "ab"]
        failures = sum(result.exception() is not None for result in results)
        other.join()
        worker.close()
        report(run, failures or run.injected)

    runs = [tokens(fi.explore(race)) for _ in range(5)]
    assert len(runs[0]) == 2 * 2 * 2 + 3 * 2 + 2 * 2, "two puts, three undos, and the undo after each failed put"
    assert all(run == runs[0] for run in runs)


def test_too_many_ordinals_are_capped_and_the_cap_is_told() -> None:
    found = fi.explore(put_all("a" * 50, max_ordinals=4))
    assert len(found.injections) == 4 * 2
    assert found.capped == {("store.put", "main"): 50}
    assert fi.explore(put_all("abc", max_ordinals=3)).capped == {}


def test_hits_behind_too_many_faults_are_not_visited_and_that_is_told() -> None:
    shallow, deep = fi.explore(retry(6, max_faults=3)), fi.explore(retry(6, max_faults=6))
    assert max(token.count("+") for token in tokens(shallow)) == 2
    assert max(token.count("+") for token in tokens(deep)) == 5
    assert (shallow.too_deep, deep.too_deep) == (1, 0)


def test_actions_without_effect_do_not_count() -> None:
    @fi.scenario(sites=[fi.Site("source.get", (fi.Truncate(),))])
    def drain(run: fi.Run) -> None:
        class Source:
            def get(self, page: int) -> list[int]:
                return [[1, 2], []][page]

        source = run.wrap(Source(), "source")
        report(run, 2 - sum(len(source.get(page)) for page in (0, 1)))

    found = fi.explore(drain)
    assert tokens(found) == [
        "drain:source.get:main:1:truncate:transient",
        "drain:source.get:main:1:truncate:persistent",
    ]
    assert found.no_effect == [
        "drain:source.get:main:2:truncate:transient",
        "drain:source.get:main:2:truncate:persistent",
    ]


def test_hits_that_do_not_come_again_are_told() -> None:
    runs = iter(range(1000))

    @fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError),))])
    def forgetful(run: fi.Run) -> None:
        if next(runs) < 2:  # the warm-up and the baseline only
            run.wrap(Store(), "store").put("a", 1)

    found = fi.explore(forgetful)
    assert found.injections == []
    assert found.missed == [f"forgetful:store.put:main:1:raise-OSError:{kind}" for kind in ("transient", "persistent")]


def test_an_action_can_be_kept_to_some_roles() -> None:
    @fi.scenario(sites=[fi.Site("store.put", (fi.Drop(), fi.Kill(roles=("worker",))))], roles={"worker": "toy-worker*"})
    def both(run: fi.Run) -> None:
        store = run.wrap(Store(), "store")
        worker = Worker(store)
        failed = [store.put("m", 1) is None, worker.submit("a", 1).exception() is not None]
        worker.close()
        report(run, sum(failed))

    struck = {(injection.role, injection.action) for injection in fi.explore(both).injections}
    assert struck == {("main", "drop"), ("worker", "drop"), ("worker", "kill")}


def test_pairs_are_two_faults_and_the_same_ones_every_time() -> None:
    alone = tokens(fi.explore(put_all("abc")))
    first, second = (tokens(fi.explore(put_all("abc", pairs=3))) for _ in range(2))
    assert first == second
    assert first[: len(alone)] == alone
    extra = first[len(alone) :]
    assert len(set(extra)) == 3
    assert all(token.count("+") == 1 for token in extra)


def test_a_budget_that_runs_out_makes_the_result_incomplete() -> None:
    found = fi.explore(put_all("abc"), budget=1e-9)
    assert not found.ok
    assert "the time budget ran out after 0 injections" in found.incomplete
    assert fi.explore(put_all("abc"), budget=1000).ok


def test_it_goes_on_after_a_broken_injection() -> None:
    @fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError),))], deadline=2, grace=0.2)
    def hangs_once(run: fi.Run) -> None:
        store = run.wrap(Store(), "store")
        failures = []
        for number in range(3):
            try:
                store.put("a", 1)
            except OSError:
                failures.append(number)
        if failures == [1]:
            threading.Event().wait()
        report(run, len(failures))

    outcomes = [injection.verdict.outcome for injection in fi.explore(hangs_once).injections]
    assert outcomes == ["contained", "contained", "hang", "contained", "contained", "contained"]


def test_replay_runs_one_injection_and_judges_it_alike() -> None:
    scenario = retry(3)
    found = fi.explore(scenario)
    declared = scenario.__faultinject__  # type: ignore[attr-defined]
    for injection in found.injections:
        again, seen = fi.replay(scenario, fi.Token.parse(injection.token).plan(declared.sites))
        assert [(i.token, i.verdict) for i in again.injections] == [(injection.token, injection.verdict)]
        assert seen.fired


def test_replay_of_a_hit_that_does_not_come_is_an_error() -> None:
    scenario = put_all("a")
    plan = fi.Plan((fi.Fault("store.put", fi.Raise(OSError), fi.Nth(9), "main"),))
    with pytest.raises(fi.NotFired, match=r"Hits seen: store\.put:main:1"):
        fi.replay(scenario, plan)


def test_only_faults_that_start_at_the_given_sites() -> None:
    both = fi.explore(retry(2))
    puts = fi.explore(retry(2), first_sites=["store.put"])
    undos = fi.explore(retry(2), first_sites=["store.undo"])
    assert tokens(puts) == tokens(both)
    assert tokens(undos) == [], "no undo without a failed put"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: put_all("a", deadline=0), ValueError, "deadline 0 must be above 0"),
        (lambda: put_all("a", grace=-1), ValueError, "grace -1 must be above 0"),
        (lambda: put_all("a", max_ordinals=0), ValueError, "max_ordinals 0"),
        (lambda: put_all("a", max_faults=0), ValueError, "max_faults 0"),
        (lambda: put_all("a", tempo=3), TypeError, "tempo"),
        (lambda: fi.scenario(sites=[])(lambda run: None), ValueError, "scenario name '<lambda>'"),
        (lambda: fi.scenario(sites=[], name="none")(lambda run: None), ValueError, "at least one site"),
        (lambda: fi.scenario(sites=["a"], name="s")(lambda: None), TypeError, "a parameter `run`"),
        (lambda: fi.explore(lambda run: None), TypeError, "is not a scenario"),
    ],
)
def test_bad_declarations_are_refused_by_name(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_site_that_a_scenario_does_not_declare_is_an_error_not_an_outcome() -> None:
    @fi.scenario(sites=["store.put"])
    def typo(run: fi.Run) -> None:
        run.wrap(Store(), "store", ["put", "undo"])

    with pytest.raises(fi.UnknownSite, match=r"'store\.undo'"):
        fi.explore(typo)


@pytest.mark.parametrize("order", [("contained", "leak"), ("leak", "contained")])
def test_of_an_injection_that_several_items_ran_the_worst_outcome_counts(order: tuple[str, str]) -> None:
    """A site that another site's faults open is explored by both items: the one that is well hides nothing."""

    def summary(outcome: str) -> dict[str, Any]:
        injection = {"token": "s:a:main:1:drop:transient", "site": "a", "action": "drop", "outcome": outcome}
        nothing: dict[str, Any] = {"waivers": [], "capped": [], "missed": [], "no_effect": [], "balances": {}}
        return {
            **nothing,
            "scenario": "s",
            "sites": ["a"],
            "explored": ["a"],
            "hits": {"a": 1},
            "injections": [{**injection, "reason": "", "waived": False}],
            "too_deep": 0,
            "incomplete": "",
            "runs": 1,
            "seconds": 1.0,
        }

    matrix = Matrix()
    for outcome in order:
        matrix.add(summary(outcome))
    assert matrix.outcomes["leak"] == 1
    assert len(matrix.broken) == len(matrix.injections) == 1
