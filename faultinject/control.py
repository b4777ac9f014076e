"""Positive controls: code that is broken on purpose must turn red, and the matrix shows it; knows no pytest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from faultinject.explore import explore
from faultinject.scenario import Scenario


@dataclass
class Control:
    """One bug put back into the code: what comes of a scenario without it and with it.

    As the fixture ``fault_control`` it is named after the test, and what it found stands in the fault matrix:

        def test_lost_wakeup_is_a_hang(fault_control, monkeypatch):
            assert fault_control.as_is(a_scenario) == {"contained"}
            monkeypatch.setattr(Queue, "notify", lambda self: None)
            assert fault_control.broken(a_scenario) == {"hang"}

    ``before`` and ``after`` count the injections by outcome; ``sites`` are those that faults were injected at.
    """

    name: str
    sites: list[str] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def as_is(self, scenario: Scenario | Callable[..., Any]) -> set[str]:
        """Explore the scenario while the code is as it is; the outcomes. ValueError if nothing was injected."""
        return self._explore(scenario, self.before)

    def broken(self, scenario: Scenario | Callable[..., Any]) -> set[str]:
        """The same with the bug put back."""
        return self._explore(scenario, self.after)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _explore(self, scenario: Scenario | Callable[..., Any], counts: dict[str, int]) -> set[str]:
        found = explore(scenario)
        if not found.injections:
            raise ValueError(f"{self.name}: scenario {found.scenario.name!r} injected nothing, so it shows nothing")
        for injection in found.injections:
            outcome = injection.verdict.outcome
            counts[outcome] = counts.get(outcome, 0) + 1
        self.sites += [site for site in found.scenario.sites if site not in self.sites]
        return set(counts)
