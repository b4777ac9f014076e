"""The pytest plugin: items, options, the matrix and its merging over processes, in pytest runs of their own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import faultinject as fi
import logging, pytest, threading
from toy_worker import Store, Worker

def put(run, store, key="a"):
    try:
        return store.put(key, 1)
    except OSError:
        logging.getLogger("test").error("put failed")
"""

GOOD = (
    HEAD
    + """
@fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError), fi.Delay(0.0))), fi.Site("store.undo", (fi.Kill(),))])
def test_save(run):
    store = run.wrap(Store(), "store")
    for key in "ab":
        put(run, store, key)
    store.undo("a")

@fi.scenario(name="get", sites=[fi.Site("store.put", (fi.Raise(OSError),))])
def test_other(run, tmp_path):
    assert tmp_path.is_dir()
    run.balance("loans", lambda: (2, 2))
    put(run, run.wrap(Store(), "store"))
"""
)

BROKEN = (
    HEAD
    + """
@fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError), fi.Drop()))])
def test_save(run):
    store = run.wrap(Store(), "store")
    try:
        store.put("a", 1)
        put(run, store, "b")
    except OSError:
        pass
"""
)


@pytest.fixture(autouse=True)
def _setting(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    others = "-p no:hypothesispytest -p no:asyncio -p no:timeout"  # each run would load them anew
    pytester.makeini(f"[pytest]\naddopts = --strict-markers --strict-config {others}\nfilterwarnings = error\n")
    pytester.syspathinsert(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def matrix_of(pytester: pytest.Pytester, name: str = "build/fault-matrix.json") -> dict[str, Any]:
    content = json.loads((pytester.path / name).read_text())
    assert isinstance(content, dict)
    return content


def without_times(matrix: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in matrix.items() if key not in ("seconds", "busy_seconds")}


def test_one_item_per_scenario_and_site(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    result = pytester.runpytest_inprocess("-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_save?store.put? PASSED (8 injections)*",
            "test_it.py::test_save?store.undo? PASSED (2 injections)*",
            "test_it.py::test_other?store.put? PASSED (2 injections)*",
            "*fault matrix*",
            "site        action         ordinals  contained  surfaced  hang  leak  swallowed  wrong data",
            "store.put   raise-OSError         3          6",
            "store.put   delay                 2          4",
            "store.undo  kill                  1                    2",
            "12 injections in 18 runs: 10 contained, 2 surfaced, 0 hang, 0 leak, 0 swallowed, 0 wrong_data",
            "loans: 8 taken, 8 given back, in 4 runs",
            "written to *fault-matrix.json and fault-matrix.html",
        ]
    )


def test_without_v_the_summary_has_one_line_per_site(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(
        [
            "site        ordinals  contained  surfaced  hang  leak  swallowed  wrong data",
            "store.put          3         10",
            "store.undo         1                    2",
        ],
        consecutive=True,
    )


def test_the_matrix_has_the_agreed_form(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    pytester.runpytest_inprocess("--fault-target=toy")
    matrix = matrix_of(pytester)
    assert matrix["target"] == "toy"
    assert matrix["injections"] == 12
    zero = {"hang": 0, "leak": 0, "swallowed": 0, "wrong_data": 0}
    assert matrix["outcomes"] == {"contained": 10, "surfaced": 2, **zero}
    assert matrix["sites"] == [
        {
            "site": "store.put",
            "reached": True,
            "hits": 3,
            "cells": {
                "raise-OSError": {"contained": 6, "surfaced": 0, **zero, "ordinals": 3},
                "delay": {"contained": 4, "surfaced": 0, **zero, "ordinals": 2},
            },
        },
        {
            "site": "store.undo",
            "reached": True,
            "hits": 1,
            "cells": {"kill": {"contained": 0, "surfaced": 2, **zero, "ordinals": 1}},
        },
    ]
    assert matrix["waivers"] == []
    assert matrix["balances"] == [{"name": "loans", "runs": 4, "taken": 8, "given_back": 8}]
    assert matrix["seconds"] > 0
    assert matrix["scenarios"] == ["save", "get"]


def test_the_page_stands_alone_and_is_well_formed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=BROKEN)
    pytester.runpytest_inprocess("--fault-matrix=out/m.json", "--fault-target=<b>toy</b>")
    text = (pytester.path / "out" / "m.html").read_text()
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name in ("src", "href")], "nothing is loaded from elsewhere"
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(text)
    assert open_tags == []
    assert "&lt;b&gt;toy&lt;/b&gt;" in text
    assert "save:store.put:main:1:raise-OSError:transient" in text
    assert "<b>6</b>swallowed<small>nothing shows the fault</small>" in text
    assert matrix_of(pytester, "out/m.json")["outcomes"]["swallowed"] == 6


def test_a_broken_item_lists_each_injection_with_its_token(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=BROKEN)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "BrokenInjections: 6 of 8 injections broken",
            "swallowed * save:store.put:main:1:raise-OSError:transient *",
            "swallowed * save:store.put:main:2:drop:persistent *",
            "replay one with: pytest --fault-replay TOKEN",
        ]
    )


def test_replay_runs_just_that_injection(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=BROKEN,
        test_more=GOOD.replace("def test_save", "def test_more").replace("def test_other", "def test_most"),
    )
    token = "save:store.put:main:2:drop:transient"
    result = pytester.runpytest_inprocess("--fault-replay", token)
    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines([f"swallowed * {token} *", "hits:", "  store.put:main:1", "  store.put:main:2 <- drop"])
    assert not (pytester.path / "build").exists(), "a replay does not overwrite the matrix"
    good = "save:store.put:main:2:raise-OSError:transient"
    pytester.runpytest_inprocess("--fault-replay", good).assert_outcomes(passed=1, deselected=3)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("nonsense", "*replay token 'nonsense'*"),
        (
            "other:store.put:main:1:drop:transient",
            "*no collected test is scenario 'other' with site 'store.put'*'save'*",
        ),
        ("save:store.gone:main:1:drop:transient", "*no collected test is scenario 'save' with site 'store.gone'*"),
    ],
)
def test_replay_of_nothing_is_a_usage_error(pytester: pytest.Pytester, token: str, message: str) -> None:
    pytester.makepyfile(test_it=BROKEN)
    result = pytester.runpytest_inprocess("--fault-replay", token)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_replay_of_an_unknown_action_or_hit_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=BROKEN)
    result = pytester.runpytest_inprocess("--fault-replay", "save:store.put:main:1:sing:transient")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["UnknownAction: *no action 'sing', only *'drop'*"])
    result = pytester.runpytest_inprocess("--fault-replay", "save:store.put:main:9:drop:transient")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["NotFired: *never fired. Hits seen: store.put:main:1, store.put:main:2"])


CONTROL = (
    GOOD
    + """
def put_quietly(run, store, key="a"):
    try:
        return store.put(key, 1)
    except OSError:
        pass

def once(run):
    put(run, run.wrap(Store(), "store"))

def test_an_error_that_nobody_logs_is_swallowed(fault_control, monkeypatch):
    save = fi.scenario(name="once", sites=[fi.Site("store.put", (fi.Raise(OSError),))])(once)
    assert fault_control.as_is(save) == {"contained"}
    monkeypatch.setitem(globals(), "put", put_quietly)
    assert fault_control.broken(save) == {"swallowed"}

def test_nothing_shown(fault_control):
    nothing = fi.scenario(name="nothing", sites=[fi.Site("store.undo", (fi.Drop(),))])(once)
    with pytest.raises(ValueError, match="nothing shown: scenario 'nothing' injected nothing"):
        fault_control.as_is(nothing)
"""
)


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_a_positive_control_stands_in_the_matrix(pytester: pytest.Pytester, workers: list[str]) -> None:
    pytester.makepyfile(test_it=CONTROL)
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=5)
    name = "an error that nobody logs is swallowed"
    matrix = matrix_of(pytester)
    assert [control for control in matrix["controls"] if control["after"]] == [
        {"name": name, "sites": ["store.put"], "before": {"contained": 2}, "after": {"swallowed": 2}}
    ]
    assert matrix["outcomes"]["swallowed"] == 0, "what is broken on purpose is not counted against the code"
    result.stdout.fnmatch_lines(["a bug put back *", f"{name} *store.put *2 contained *2 swallowed"])
    assert f"<th>{name}</th>" in (pytester.path / "build" / "fault-matrix.html").read_text()


def test_processes_of_xdist_make_one_matrix(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    pytester.runpytest_subprocess("--fault-matrix=one.json").assert_outcomes(passed=3)
    result = pytester.runpytest_subprocess("-n2", "-v", "--fault-matrix=two.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*PASSED (8 injections)*", "12 injections in 18 runs: 10 contained, 2 surfaced, *"])
    one, two = (without_times(matrix_of(pytester, name)) for name in ("one.json", "two.json"))
    for matrix in (one, two):  # which item ends first is up to the processes
        matrix["sites"].sort(key=lambda row: row["site"])
        matrix["scenarios"].sort()
    assert one == two


def test_an_unreached_site_is_listed_and_can_fail_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD.replace('    store.undo("a")\n', ""))
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["store.undo  never reached", "sites never reached: store.undo"])
    assert matrix_of(pytester)["unreached"] == ["store.undo"]
    result = pytester.runpytest_inprocess("--fault-fail-unreached")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: sites never reached: store.undo"])


def test_so_can_a_site_that_is_reached_without_a_fault(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD.replace("fi.Kill()", 'fi.Kill(roles=("nobody",))'))
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["sites reached, and no fault injected: store.undo"])
    assert matrix_of(pytester)["untried"] == ["store.undo"]
    assert pytester.runpytest_inprocess("--fault-fail-unreached").ret == pytest.ExitCode.TESTS_FAILED
    assert pytester.runpytest_inprocess("--fault-fail-unreached", "-k", "store.put").ret == pytest.ExitCode.OK


WAIVED = BROKEN.replace("fi.Drop()))])", 'fi.Drop()))], waivers=[fi.Waiver({0!r}, issue="#7", outcome={1!r})])')


def test_a_waived_injection_does_not_fail_but_stays_in_the_matrix(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=WAIVED.format("save:store.put:*", "swallowed"))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["swallowed (waived)  save:store.put:main:1:drop:persistent*"])
    matrix = matrix_of(pytester)
    assert matrix["outcomes"]["swallowed"] == 6
    assert [(w["issue"], w["matched"], w["waived"]) for w in matrix["waivers"]] == [("#7", 8, 6)]


def test_a_waiver_is_for_its_outcome_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=WAIVED.format("save:store.put:*", "leak"))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)


def test_a_waiver_whose_injections_all_pass_fails_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=WAIVED.format("save:store.put:main:2:raise-OSError:transient", "swallowed")
        .replace("        pass", '        logging.getLogger("test").error("put failed")')
        .replace("fi.Drop()", "fi.Delay(0.0)")
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: waiver save:store.put:main:2:raise-OSError:transient (#7): all 1 injections pass*"]
    )


def test_a_waiver_that_matches_nothing_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=WAIVED.format("save:gone:*", "swallowed"))
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["waiver save:gone:* (#7) matched no injection"])


def test_out_of_budget_fails_and_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    result = pytester.runpytest_inprocess("--fault-budget=0.000001", "-k", "test_other")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(["*incomplete: the time budget ran out after 0 injections*"])
    result.stdout.fnmatch_lines(["FAILED: incomplete: get: the time budget ran out*"])


def test_the_cap_on_ordinals_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=GOOD)
    result = pytester.runpytest_inprocess("--fault-max-ordinals=1")
    result.stdout.fnmatch_lines(["capped: save: store.put was hit 2 times in role main; *"])
    assert matrix_of(pytester)["capped"] == [{"scenario": "save", "site": "store.put", "role": "main", "seen": 2}]


@pytest.mark.parametrize("option", ["--fault-budget=0", "--fault-budget=-1", "--fault-max-ordinals=0"])
def test_bad_options_are_refused(pytester: pytest.Pytester, option: str) -> None:
    result = pytester.runpytest_inprocess(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option.partition('=')[0]} *must be above 0"])


def test_a_parameter_becomes_part_of_the_scenario_s_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=BROKEN.replace("@fi", '@pytest.mark.parametrize("tp", [1, 2], ids="tp={}".format)\n@fi').replace(
            "(run)", "(run, tp)"
        )
    )
    result = pytester.runpytest_inprocess("-v")
    result.assert_outcomes(failed=2)
    assert matrix_of(pytester)["scenarios"] == ["save[tp-1]", "save[tp-2]"]
    result = pytester.runpytest_inprocess("--fault-replay", "save[tp-2]:store.put:main:1:drop:transient")
    result.assert_outcomes(failed=1, deselected=1)


def test_scenarios_can_be_methods_and_can_skip(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=HEAD
        + """
class TestIt:
    word = "skipped"

    @fi.scenario(sites=["store.put"])
    def test_skips(self, run):
        pytest.skip(self.word)

    @fi.scenario(sites=[fi.Site("store.put", (fi.Drop(),))])
    def test_fails(self, run):
        with pytest.raises(OSError):
            put(run, run.wrap(Store(), "store"))
"""
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*BaselineNotClean: scenario 'fails'*", "*DID NOT RAISE*", "SKIPPED*skipped"])


def test_pytest_assertions_count_as_wrong_data(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=HEAD
        + """
@fi.scenario(sites=[fi.Site("store.put", (fi.Drop(),))])
def test_data(run):
    codes = run.wrap(Store(), "store").put("a", 1)
    assert codes == [0]
"""
    )
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["wrong_data * data:store.put:main:1:drop:transient *assert None == *"])


def test_what_hundreds_of_injections_printed_is_cut_and_a_replay_shows_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=BROKEN.replace(
            "    try:\n        store", '    print("line\\n" * 50 + str(run.session.plan))\n    try:\n        store'
        )
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["[[]450 lines left out[]]"])
    result = pytester.runpytest_inprocess("--fault-replay", "save:store.put:main:1:drop:transient")
    result.stdout.no_fnmatch_line("*lines left out*")


def test_the_run_fixture_is_for_scenarios_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="def test_it(run): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the `run` fixture is for @faultinject.scenario functions only*"])


def test_without_scenarios_the_plugin_is_silent(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="def test_it(): pass")
    result = pytester.runpytest_inprocess("--fault-fail-unreached")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*fault matrix*")
    assert not (pytester.path / "build").exists()


STUCK = (
    HEAD
    + """
from concurrent.futures import ThreadPoolExecutor

@fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError),))], deadline=2, grace=0.2)
def test_hang(run):
    store, never = run.wrap(Store(), "store"), threading.Event()
    pool = ThreadPoolExecutor(1)
    if put(run, store) is None:
        threading.Thread(target=never.wait, name="stuck").start()
        pool.submit(never.wait)
        never.wait()
    pool.shutdown()

@fi.scenario(sites=[fi.Site("store.put", (fi.Raise(OSError),))])
def test_well(run):
    put(run, run.wrap(Store(), "store"))
"""
)


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_threads_that_never_end_stop_neither_the_session_nor_its_exit(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    pytester.makepyfile(test_it=STUCK)
    result = pytester.runpytest_subprocess(*workers, timeout=60)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["hang * hang:store.put:main:1:raise-OSError:transient *"])


def test_ctrl_c_stops_the_run(pytester: pytest.Pytester) -> None:
    started = pytester.path / "started"
    os.mkfifo(started)
    pytester.makepyfile(
        test_it=HEAD
        + f"""
from pathlib import Path

@fi.scenario(sites=[fi.Site("store.put", (fi.Block(),))], deadline=100)
def test_waits(run):
    store = run.wrap(Store(), "store")
    thread = threading.Thread(target=store.put, args=("a", 1))
    thread.start()
    if run.session.plan.faults:
        run.session.wait_blocked()
        Path({str(started)!r}).write_text("blocked")
    thread.join()

def test_after():
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(pytester.path)]
    heed = functools.partial(
        signal.signal, signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=pytester.path, preexec_fn=heed) as process:
        try:
            assert started.read_text() == "blocked"
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in output
    assert "1 passed" not in output
