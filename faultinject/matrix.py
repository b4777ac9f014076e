"""The fault matrix: site x action -> counts of outcomes, merged over items and processes; knows no pytest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from faultinject.explore import Exploration
from faultinject.judge import BROKEN, OUTCOMES, WORST_FIRST


def summarize(found: Exploration) -> dict[str, Any]:
    """One exploration as plain data that may cross processes."""
    return {
        "scenario": found.scenario.name,
        "sites": list(found.scenario.sites),
        "explored": list(found.explored),
        "hits": dict(found.hits),
        "injections": [
            {
                "token": injection.token,
                "site": injection.site,
                "action": injection.action,
                "outcome": injection.verdict.outcome,
                "reason": injection.verdict.reason[:300],
                "waived": injection.waiver is not None,
            }
            for injection in found.injections
        ],
        "waivers": [
            {"pattern": waiver.pattern, "issue": waiver.issue, "outcome": waiver.outcome, **_use(found, waiver)}
            for waiver in found.scenario.waivers
        ],
        "capped": [[site, role, seen] for (site, role), seen in sorted(found.capped.items())],
        "too_deep": found.too_deep,
        "missed": list(found.missed),
        "no_effect": list(found.no_effect),
        "incomplete": found.incomplete,
        "balances": {name: list(counts) for name, counts in found.balances.items()},
        "runs": found.runs,
        "seconds": found.seconds,
    }


def _use(found: Exploration, waiver: Any) -> dict[str, int]:
    matching = [injection for injection in found.injections if waiver.matches(injection.token)]
    return {"matched": len(matching), "waived": sum(injection.waiver == waiver for injection in matching)}


@dataclass
class Matrix:
    """Summaries merged. An injection counts once, whichever items ran it (a site opened by two sites' faults)."""

    target: str = ""
    injections: dict[str, dict[str, Any]] = field(default_factory=dict)
    hits: dict[str, dict[str, int]] = field(default_factory=dict)
    explored: dict[str, set[str]] = field(default_factory=dict)
    waivers: dict[tuple[str, str, str, str], dict[str, Any]] = field(default_factory=dict)
    capped: dict[tuple[str, str, str], int] = field(default_factory=dict)
    too_deep: int = 0
    missed: list[str] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    balances: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    controls: list[dict[str, Any]] = field(default_factory=list)
    runs: int = 0
    busy_seconds: float = 0.0

    def add(self, summary: dict[str, Any]) -> None:
        scenario = summary["scenario"]
        for injection in summary["injections"]:  # of one that several items ran, the worst counts
            known = self.injections.setdefault(injection["token"], injection)
            if WORST_FIRST.index(injection["outcome"]) < WORST_FIRST.index(known["outcome"]):
                self.injections[injection["token"]] = injection
        self.explored.setdefault(scenario, set()).update(summary["explored"])
        hits = self.hits.setdefault(scenario, dict.fromkeys(summary["sites"], -1))
        for site, count in summary["hits"].items():
            hits[site] = max(hits.get(site, -1), count)
        for waiver in summary["waivers"]:
            key = (scenario, waiver["pattern"], waiver["issue"], waiver["outcome"])
            known = self.waivers.setdefault(key, {"scenario": scenario, **waiver, "matched": 0, "waived": 0})
            known["matched"] += waiver["matched"]
            known["waived"] += waiver["waived"]
        for site, role, seen in summary["capped"]:
            self.capped[scenario, site, role] = max(seen, self.capped.get((scenario, site, role), 0))
        self.too_deep += summary["too_deep"]
        self.missed += summary["missed"]
        self.no_effect += summary["no_effect"]
        if summary["incomplete"]:
            self.incomplete.append(f"{scenario}: {summary['incomplete']}")
        for name, (runs, taken, given_back) in summary["balances"].items():
            before = self.balances.get(name, (0, 0, 0))
            self.balances[name] = (before[0] + runs, before[1] + taken, before[2] + given_back)
        self.runs += summary["runs"]
        self.busy_seconds += summary["seconds"]

    @property
    def outcomes(self) -> dict[str, int]:
        return _count(injection["outcome"] for injection in self.injections.values())

    @property
    def broken(self) -> list[dict[str, Any]]:
        """Broken injections, waived ones included, the worst outcome first, then in the order of their tokens."""
        broken = [injection for injection in self.injections.values() if injection["outcome"] in BROKEN]
        return sorted(broken, key=lambda injection: (WORST_FIRST.index(injection["outcome"]), injection["token"]))

    @property
    def unreached(self) -> list[str]:
        """Declared sites that no run of any scenario hit."""
        return [row["site"] for row in self.sites() if not row["reached"]]

    @property
    def untried(self) -> list[str]:
        """Explored sites that were hit although no fault could be injected: their actions are for other roles."""
        explored = set().union(*self.explored.values())
        return [row["site"] for row in self.sites() if row["hits"] and not row["cells"] and row["site"] in explored]

    @property
    def passing_waivers(self) -> list[dict[str, Any]]:
        """Waivers whose injections all ran and none needed it: the issue may be closed, and the waiver must go."""
        return [waiver for waiver in self._judged_waivers() if waiver["matched"] and not waiver["waived"]]

    @property
    def idle_waivers(self) -> list[dict[str, Any]]:
        """Waivers that matched no injection at all."""
        return [waiver for waiver in self._judged_waivers() if not waiver["matched"]]

    def _judged_waivers(self) -> list[dict[str, Any]]:
        """Those of scenarios that were explored as a whole; of a selection (`-k`) nothing can be said."""
        return [
            waiver
            for waiver in self.waivers.values()
            if self.explored[waiver["scenario"]] >= self.hits[waiver["scenario"]].keys()
        ]

    def sites(self) -> list[dict[str, Any]]:
        """One row per declared site: `hits` of the runs without faults, summed over scenarios, and cells by action."""
        names = dict.fromkeys(site for hits in self.hits.values() for site in hits)
        return [self._row(site) for site in names]

    def _row(self, site: str) -> dict[str, Any]:
        counts = [hits[site] for hits in self.hits.values() if site in hits]
        mine = [injection for injection in self.injections.values() if injection["site"] == site]
        cells = {}
        for action in dict.fromkeys(injection["action"] for injection in mine):
            chosen = [injection for injection in mine if injection["action"] == action]
            ordinals = {
                tuple(injection["token"].split(":")[:1] + injection["token"].split(":")[-4:-2]) for injection in chosen
            }
            cells[action] = {**_count(injection["outcome"] for injection in chosen), "ordinals": len(ordinals)}
        return {
            "site": site,
            "reached": any(count >= 0 for count in counts),
            "hits": sum(count for count in counts if count > 0),
            "cells": cells,
        }

    def as_json(self, seconds: float) -> dict[str, Any]:
        return {
            "target": self.target,
            "injections": len(self.injections),
            "outcomes": self.outcomes,
            "sites": self.sites(),
            "waivers": list(self.waivers.values()),
            "balances": [
                {"name": name, "runs": runs, "taken": taken, "given_back": given_back}
                for name, (runs, taken, given_back) in sorted(self.balances.items())
            ],
            "controls": sorted(self.controls, key=lambda control: str(control["name"])),
            "seconds": round(seconds, 3),
            "runs": self.runs,
            "busy_seconds": round(self.busy_seconds, 3),
            "scenarios": list(self.hits),
            "unreached": self.unreached,
            "untried": self.untried,
            "capped": [
                {"scenario": scenario, "site": site, "role": role, "seen": seen}
                for (scenario, site, role), seen in sorted(self.capped.items())
            ],
            "too_deep": self.too_deep,
            "missed": sorted(self.missed),
            "no_effect": len(self.no_effect),
            "incomplete": self.incomplete,
            "broken": self.broken,
        }


def _count(outcomes: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(OUTCOMES, 0)
    for outcome in outcomes:
        counts[outcome] += 1
    return counts


def table(matrix: Matrix, *, by_action: bool) -> list[str]:
    """The matrix as lines of text: outcomes per site, or per site and action; zeros are left blank."""
    columns = ["site", "action"] if by_action else ["site"]
    lines: list[list[str]] = [[*columns, "ordinals", *(outcome.replace("_", " ") for outcome in OUTCOMES)]]
    for row in matrix.sites():
        if not row["cells"]:
            note = f"{row['hits']} hits, no injection" if row["reached"] else "never reached"
            lines.append([f"{row['site']}  {note}"])
        elif by_action:
            lines += [[row["site"], action, *_numbers(cell)] for action, cell in row["cells"].items()]
        else:
            total = {key: sum(cell[key] for cell in row["cells"].values()) for key in OUTCOMES}
            total["ordinals"] = max(cell["ordinals"] for cell in row["cells"].values())
            lines.append([row["site"], *_numbers(total)])
    return _aligned(lines, texts=len(columns))


def controls_table(matrix: Matrix) -> list[str]:
    """The positive controls as lines of text: what came of each scenario, and what with the bug put back."""
    rows = sorted(matrix.controls, key=lambda control: str(control["name"]))
    if not rows:
        return []
    lines = [["a bug put back", "tried at", "as it is", "with the bug"]]
    lines += [[row["name"], ", ".join(row["sites"]), words(row["before"]), words(row["after"])] for row in rows]
    return _aligned(lines, texts=4)


def words(counts: dict[str, int]) -> str:
    """Outcomes with their numbers, the worst first."""
    return ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in WORST_FIRST if counts.get(name))


def _numbers(cell: dict[str, int]) -> list[str]:
    return [str(cell[key] or "") for key in ("ordinals", *OUTCOMES)]


def _aligned(lines: list[list[str]], texts: int) -> list[str]:
    """Columns side by side, the first `texts` to the left, numbers to the right; a line of one cell stays as it is."""
    full = [line for line in lines if len(line) > 1]
    widths = [max(len(line[column]) for line in full) for column in range(len(full[0]))]
    return [
        line[0]
        if len(line) == 1
        else "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
