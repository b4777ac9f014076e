"""The pytest plugin: one item per (scenario, site), replay, budget, and the matrix at the end; explores nothing."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from faultinject import matrix as matrix_module
from faultinject.control import Control
from faultinject.errors import BadToken, FaultInjectError
from faultinject.explore import Exploration, explore, replay
from faultinject.fault import slug
from faultinject.html import page
from faultinject.judge import OUTCOMES, Observation
from faultinject.matrix import Matrix
from faultinject.plan import Token
from faultinject.scenario import Scenario

_FOUND = pytest.StashKey[dict[str, Any]]()
_CONTROL = pytest.StashKey[Control]()
_DEFAULT_MATRIX = "build/fault-matrix.json"
_SHOWN = 30  # broken injections in the terminal summary
_CAPTURED = 60  # lines of captured output with a failed item


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faultinject", "fault injection")
    group.addoption("--fault-replay", metavar="TOKEN", help="run only the injection that TOKEN names")
    group.addoption(
        "--fault-matrix",
        metavar="PATH",
        help=f"write the fault matrix as JSON to PATH and as a page beside it (default: {_DEFAULT_MATRIX})",
    )
    group.addoption("--fault-fail-unreached", action="store_true", help="fail if a site was never reached or tried")
    group.addoption("--fault-max-ordinals", type=int, metavar="N", help="visit at most N ordinals of a site and role")
    group.addoption("--fault-target", default="", metavar="NAME", help="what is being tested, for the matrix")
    group.addoption(
        "--fault-budget", type=float, metavar="SECONDS", help="time for one item; running out of it fails it"
    )


def pytest_configure(config: pytest.Config) -> None:
    text = config.getoption("--fault-replay")
    try:
        token = Token.parse(text) if text else None
    except BadToken as exc:
        raise pytest.UsageError(str(exc)) from None
    for option in ("--fault-max-ordinals", "--fault-budget"):
        value = config.getoption(option)
        if value is not None and not value > 0:
            raise pytest.UsageError(f"{option} {value}: must be above 0")
    config.pluginmanager.register(_Plugin(config, token), "faultinject-session")


class BrokenInjections(Exception):
    """Ends an item whose exploration failed; its text is the whole report."""


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    """The context of a scenario, for functions decorated with `@faultinject.scenario`."""
    raise pytest.UsageError(f"{request.node.nodeid}: the `run` fixture is for @faultinject.scenario functions only")


@pytest.fixture
def fault_control(request: pytest.FixtureRequest) -> Control:
    """A positive control, named after the test: `as_is` and `broken` explore a scenario, and the matrix shows both."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    control: Control = request.node.stash.setdefault(_CONTROL, Control(name))
    return control


def declared(item: object) -> Scenario | None:
    return getattr(getattr(item, "function", None), "__faultinject__", None)


class _Plugin:
    """State of one pytest process; on xdist workers it only runs items, and the reports carry what they found."""

    def __init__(self, config: pytest.Config, token: Token | None) -> None:
        self.config = config
        self.token = token
        self.matrix = Matrix(target=config.getoption("--fault-target"))
        self.started = time.monotonic()
        self.written: Path | None = None
        self.is_worker = hasattr(config, "workerinput")

    # ------------------------------------------------------------------------------------------------------- collection

    @pytest.hookimpl(tryfirst=True)  # so that the site is the first part of the item's id
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        scenario = getattr(metafunc.function, "__faultinject__", None)
        if scenario is not None:
            metafunc.parametrize("run", list(scenario.sites), indirect=False, ids=list(scenario.sites))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.token is None:
            return
        chosen = [item for item in items if self._fits(item, self.token)]
        if not chosen:
            names = sorted({scenario_of(item).name for item in items if declared(item) is not None})
            raise pytest.UsageError(
                f"--fault-replay: no collected test is scenario {self.token.scenario!r} with site {self.token.site!r}; "
                f"scenarios collected: {names or 'none'}"
            )
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @staticmethod
    def _fits(item: pytest.Item, token: Token) -> bool:
        return declared(item) is not None and scenario_of(item).name == token.scenario and site_of(item) == token.site

    # ------------------------------------------------------------------------------------------------------------ items

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if declared(pyfuncitem) is None:
            return None
        scenario = self._bind(pyfuncitem)
        if self.token is not None:
            found, seen = replay(scenario, self.token.plan(scenario.sites))
            _print_replay(found, seen)
        else:
            found = explore(scenario, first_sites=[site_of(pyfuncitem)], budget=self.config.getoption("--fault-budget"))
        pyfuncitem.stash[_FOUND] = matrix_module.summarize(found)
        if not found.ok:
            raise BrokenInjections(_failure(found))
        return True

    def _bind(self, item: pytest.Function) -> Scenario:
        """The item's scenario with its body closed over the item's fixtures."""
        scenario = scenario_of(item)
        fixtures = {name: item.funcargs[name] for name in item._fixtureinfo.argnames if name != "run"}
        function: Callable[..., Any] = item.obj
        most = self.config.getoption("--fault-max-ordinals")
        scenario = dataclasses.replace(
            scenario,
            body=lambda run: function(run=run, **fixtures),
            laws=dataclasses.replace(
                scenario.laws,
                law_errors=(*scenario.laws.law_errors, pytest.fail.Exception),
                not_judged=(*scenario.laws.not_judged, pytest.skip.Exception, pytest.exit.Exception),
            ),
        )
        return scenario if most is None else scenario.limited(most)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and _CONTROL in item.stash:
            report.__dict__["faultinject_control"] = item.stash[_CONTROL].as_json()
        if call.when != "call" or declared(item) is None:
            return report
        if _FOUND in item.stash:
            report.__dict__["faultinject"] = item.stash[_FOUND]  # plain data: xdist carries it to the controller
        if call.excinfo is not None and isinstance(call.excinfo.value, BrokenInjections | FaultInjectError):
            report.longrepr = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"
        if self.token is None:
            report.sections = [(name, _shortened(content)) for name, content in report.sections]
        return report

    # ---------------------------------------------------------------------------------------------------------- results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        summary = getattr(report, "faultinject", None)
        if summary is not None and not self.is_worker:
            self.matrix.add(summary)
        control = getattr(report, "faultinject_control", None)
        if control is not None and report.passed and not self.is_worker:
            self.matrix.controls.append(control)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        summary = getattr(report, "faultinject", None)
        if summary is None or report.when != "call" or not (report.passed or report.failed):
            return None
        word = f"{'PASSED' if report.passed else 'FAILED'} ({len(summary['injections'])} injections)"
        return ("passed", ".", word) if report.passed else ("failed", "F", word)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker or not self.matrix.hits:
            return
        gaps = self.config.getoption("--fault-fail-unreached") and (self.matrix.unreached or self.matrix.untried)
        if session.exitstatus == pytest.ExitCode.OK and (gaps or self.matrix.passing_waivers):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        given = self.config.getoption("--fault-matrix")
        if self.matrix.injections and (given or self.token is None):
            self.written = (
                self.config.invocation_params.dir / given if given else self.config.rootpath / _DEFAULT_MATRIX
            )
            self.written.parent.mkdir(parents=True, exist_ok=True)
            content = self.matrix.as_json(time.monotonic() - self.started)
            self.written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            self.written.with_suffix(".html").write_text(page(content), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.matrix.hits and not self.matrix.controls:
            return
        terminalreporter.section("fault matrix")
        lines = matrix_module.controls_table(self.matrix)
        if self.matrix.hits:
            by_action = self.config.get_verbosity() > 0
            lines = [*matrix_module.table(self.matrix, by_action=by_action), *lines]
            lines += _footer(self.matrix, bool(self.config.getoption("--fault-fail-unreached")))
        for line in lines:
            terminalreporter.line(line)
        if self.written is not None:
            terminalreporter.line(f"written to {self.written} and {self.written.with_suffix('.html').name}")


def scenario_of(item: pytest.Item) -> Scenario:
    """The item's scenario; a further parametrization becomes part of its name, so that tokens stay unique."""
    scenario = declared(item)
    assert scenario is not None
    rest = item.callspec.id.removeprefix(site_of(item)).lstrip("-")  # type: ignore[attr-defined]
    return dataclasses.replace(scenario, name=f"{scenario.name}[{slug(rest)}]") if rest else scenario


def site_of(item: pytest.Item) -> str:
    return str(item.callspec.params["run"])  # type: ignore[attr-defined]


def _shortened(captured: str) -> str:
    """The end of what hundreds of injections printed and logged; a replay shows what belongs to one."""
    lines = captured.splitlines(keepends=True)
    left_out = len(lines) - _CAPTURED
    return captured if left_out <= 0 else f"[{left_out} lines left out]\n" + "".join(lines[left_out:])


def _print_replay(found: Exploration, seen: Observation) -> None:
    injection = found.injections[-1]
    print(f"{injection}\nhits:")
    for hit in seen.hits:
        print(f"  {hit}")
    for title, lines in (("ERROR log", seen.log_errors), ("saw", seen.seen), ("thread deaths", seen.deaths)):
        for line in lines:
            print(f"{title}: {line}")
    if injection.verdict.details:
        print(injection.verdict.details)


def _failure(found: Exploration) -> str:
    lines = [f"{len(found.broken)} of {len(found.injections)} injections broken"]
    if found.incomplete:
        lines.append(f"incomplete: {found.incomplete}")
    lines += [str(injection) for injection in found.broken]
    lines.append("replay one with: pytest --fault-replay TOKEN")
    details: dict[str, str] = {}  # the first injection of each kind
    for injection in found.broken:
        details.setdefault(injection.verdict.details, injection.token)
    for detail, token in [pair for pair in details.items() if pair[0]][:3]:
        lines += ["", f"== {token}", detail]
    return "\n".join(lines)


def _footer(matrix: Matrix, fail_unreached: bool) -> list[str]:
    counts = ", ".join(f"{matrix.outcomes[outcome]} {outcome}" for outcome in OUTCOMES)
    lines = [f"{len(matrix.injections)} injections in {matrix.runs} runs: {counts}"]
    for name, (runs, taken, given_back) in sorted(matrix.balances.items()):
        lines.append(f"{name}: {taken} taken, {given_back} given back, in {runs} runs")
    broken = matrix.broken
    for entry in broken[:_SHOWN]:
        lines.append(f"{entry['outcome']}{' (waived)' * entry['waived']}  {entry['token']}  {entry['reason']}")
    if len(broken) > _SHOWN:
        lines.append(f"... and {len(broken) - _SHOWN} more broken injections, see the matrix")
    if matrix.unreached:
        lines.append(f"{'FAILED: ' * fail_unreached}sites never reached: {', '.join(matrix.unreached)}")
    if matrix.untried:
        lines.append(f"{'FAILED: ' * fail_unreached}sites reached, and no fault injected: {', '.join(matrix.untried)}")
    for waiver in matrix.passing_waivers:
        name = f"{waiver['pattern']} ({waiver['issue']})"
        lines.append(f"FAILED: waiver {name}: all {waiver['matched']} injections pass, remove it")
    for waiver in matrix.idle_waivers:
        lines.append(f"waiver {waiver['pattern']} ({waiver['issue']}) matched no injection")
    for (scenario, site, role), seen in sorted(matrix.capped.items()):
        lines.append(f"capped: {scenario}: {site} was hit {seen} times in role {role}; not all were visited")
    if matrix.too_deep:
        lines.append(f"{matrix.too_deep} hits that only come after max_faults faults were not visited")
    if matrix.missed:
        some = ", ".join(sorted(matrix.missed)[:5])
        lines.append(f"{len(matrix.missed)} planned hits did not come again (not deterministic?): {some}")
    if matrix.no_effect:
        lines.append(f"{len(matrix.no_effect)} actions had no effect at their hit and don't count")
    return lines + [f"FAILED: incomplete: {text}" for text in matrix.incomplete]
