"""Faults: every action does what its name says, every trigger strikes where it should, and names fit into tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import faultinject as fi


class Source:
    """Returns what it is told, and counts its calls."""

    def __init__(self, result: Any) -> None:
        self.result, self.calls = result, 0

    def get(self, *args: Any) -> Any:
        self.calls += 1
        return args or self.result


def strike(action: fi.Action, result: Any, *args: Any) -> tuple[Any, int]:
    source = Source(result)
    proxy = fi.wrap(source, "source", ["get"])
    with fi.Session(fi.Fault("source.get", action)):
        return proxy.get(*args), source.calls


@pytest.mark.parametrize(
    ("action", "name", "result", "changed", "calls"),
    [
        (fi.Return(0), "return-0", [1], 0, 0),
        (fi.Return([None, -1]), "return-None--1", [1], [None, -1], 0),
        (fi.Return({}, label="nothing"), "nothing", [1], {}, 0),
        (fi.Drop(), "drop", [1], None, 0),
        (fi.NoneResult(), "none", [1], None, 1),
        (fi.Truncate(), "truncate", [1, 2], [1], 1),
        (fi.Truncate(), "truncate", b"ab", b"a", 1),
        (fi.Extend(), "extend", (1, 2), (1, 2, 2), 1),
        (fi.Extend(), "extend", [], [0], 1),
        (fi.Empty(), "empty", "text", "", 1),
        (fi.Empty(), "empty", {"a": 1}, {}, 1),
        (fi.Mutate(lambda codes: [-1 for _ in codes], "negative"), "negative", [0, 0], [-1, -1], 1),
        (fi.Delay(0.0), "delay", [1], [1], 1),
        (fi.Delay(0.0, after=True), "delay-after", [1], [1], 1),
    ],
)
def test_actions_that_return(action: fi.Action, name: str, result: Any, changed: Any, calls: int) -> None:
    assert action.name == name
    assert strike(action, result) == (changed, calls)


def test_do_replaces_the_call_and_can_make_it() -> None:
    short = fi.Do(lambda call, *args: call(*args[:-1]), "short-args")
    assert strike(short, None, 1, 2, 3) == ((1, 2), 1)


@pytest.mark.parametrize(
    ("action", "name", "error", "calls"),
    [
        (fi.Raise(OSError), "raise-OSError", OSError, 0),
        (fi.Raise(OSError, (5, "input/output error")), "raise-OSError", OSError, 0),
        (fi.Raise(KeyboardInterrupt, after=True), "raise-KeyboardInterrupt-after", KeyboardInterrupt, 1),
        (fi.Kill(), "kill", fi.ThreadKilled, 0),
        (fi.Kill(after=True), "kill-after", fi.ThreadKilled, 1),
    ],
)
def test_actions_that_raise(action: fi.Action, name: str, error: type[BaseException], calls: int) -> None:
    source = Source([1])
    proxy = fi.wrap(source, "source", ["get"])
    assert action.name == name
    with fi.Session(fi.Fault("source.get", action)), pytest.raises(error):
        proxy.get()
    assert source.calls == calls


def test_arrays_get_longer_and_shorter_by_whole_entries() -> None:
    numpy = pytest.importorskip("numpy")
    codes = numpy.array([0, 7])
    assert strike(fi.Extend(), codes)[0].tolist() == [0, 7, 7]
    assert strike(fi.Truncate(), codes)[0].tolist() == [0]
    assert strike(fi.Empty(), codes)[0].tolist() == []


@pytest.mark.parametrize("make", [fi.Truncate, fi.Extend, fi.Empty])
def test_an_action_that_does_not_fit_the_result_is_the_planner_s_mistake(make: Callable[[], fi.Action]) -> None:
    proxy = fi.wrap(Source(5), "source", ["get"])
    with (
        pytest.raises(fi.ActionMismatch, match=r"source\.get:main:1.*int"),
        fi.Session(fi.Fault("source.get", make())),
        contextlib.suppress(Exception),  # even if the code under test hides it
    ):
        proxy.get()


def test_a_change_that_changes_nothing_did_not_fire() -> None:
    proxy = fi.wrap(Source([]), "source", ["get"])
    with pytest.raises(fi.NotFired), fi.Session(fi.Fault("source.get", fi.Truncate())) as session:
        assert proxy.get() == []
    assert [hit.fault for hit in session.hits] == [None]


@pytest.mark.parametrize(
    ("when", "struck"),
    [
        (fi.Nth(), [1]),
        (fi.Nth(3), [3]),
        (fi.From(4), [4, 5, 6]),
        (fi.Always(), [1, 2, 3, 4, 5, 6]),
        (fi.Randomly(1.0, seed=1), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_triggers(when: fi.Trigger, struck: list[int]) -> None:
    proxy = fi.wrap(Source(1), "source", ["get"])
    with fi.Session(fi.Fault("source.get", fi.Return(None), when)):
        assert [n for n in range(1, 7) if proxy.get() is None] == struck


def test_a_random_trigger_depends_on_its_seed_alone() -> None:
    def struck(seed: int) -> list[int]:
        return [n for n in range(1, 200) if fi.Randomly(0.3, seed).strikes(n, "site:role")]

    assert struck(1) == struck(1) != struck(2)
    assert 30 < len(struck(1)) < 90


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fi.Nth(0), "ordinal 0"),
        (lambda: fi.From(-1), "ordinal -1"),
        (lambda: fi.Randomly(0, 1), "p 0"),
        (lambda: fi.Mutate(str, "two words"), "'two words'"),
        (lambda: fi.Kill(label="a:b"), "'a:b'"),
        (lambda: fi.Waiver("*", "soon", "leak"), "issue 'soon'"),
        (lambda: fi.Waiver("*", "#1", "contained"), "outcome 'contained'"),
    ],
)
def test_bad_values_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "plan",
    [
        fi.Plan((fi.Fault("store.put", fi.Raise(OSError), fi.Nth(2), "send"),)),
        fi.Plan((fi.Fault("store.put", fi.Kill(), fi.From(1), "main"), fi.Fault("store.get", fi.Drop()))),
        fi.Plan((fi.Fault("store.get", fi.Drop(), fi.Randomly(0.25, 9), "main"),)),
    ],
)
def test_a_token_reads_back_as_the_plan(plan: fi.Plan) -> None:
    sites = {
        "store.put": fi.Site("store.put", (fi.Raise(OSError), fi.Kill())),
        "store.get": fi.Site("store.get", (fi.Drop(),)),
    }
    token = plan.token("save[tp2]")
    assert "\n" not in token
    parsed = fi.Token.parse(token)
    assert (parsed.scenario, parsed.site) == ("save[tp2]", plan.faults[0].site)
    assert parsed.plan(sites) == plan


@pytest.mark.parametrize(
    "text", ["", "save", "save:put:main:1:kill", "save:put:main:x:kill:transient", "save:put:main:1:kill:sometimes"]
)
def test_a_token_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(fi.BadToken, match="replay token"):
        fi.Token.parse(text)


def test_a_token_of_another_site_or_action_is_refused() -> None:
    sites = {"put": fi.Site("put", (fi.Kill(),))}
    with pytest.raises(fi.UnknownSite, match="no site 'get'"):
        fi.Token.parse("save:get:main:1:kill:transient").plan(sites)
    with pytest.raises(fi.UnknownAction, match="no action 'drop'"):
        fi.Token.parse("save:put:main:1:drop:transient").plan(sites)
