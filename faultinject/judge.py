"""The judge: one outcome per injection, from what was observed; runs nothing and knows no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from faultinject.errors import FaultInjectError, Livelock

OUTCOMES: Final = ("contained", "surfaced", "hang", "leak", "swallowed", "wrong_data")
WORST_FIRST: Final = ("hang", "wrong_data", "leak", "swallowed", "surfaced", "contained")
BROKEN: Final = frozenset(WORST_FIRST[:4])


@dataclass
class Observation:
    """What one run of a scenario left behind."""

    result: Any = None
    error: BaseException | None = None
    error_text: str = ""
    hang: str = ""
    stacks: str = ""
    leaks: list[str] = field(default_factory=list)
    balances: dict[str, tuple[int, int]] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    log_errors: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    hits: list[Any] = field(default_factory=list)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    fired: list[Any] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The outcome and one line of why; `details` holds stacks, tracebacks and what else was wrong."""

    outcome: str
    reason: str
    details: str = ""

    @property
    def broken(self) -> bool:
        return self.outcome in BROKEN


@dataclass(frozen=True)
class Laws:
    """How errors that leave a scenario are told apart.

    law_errors  a law of the scenario is broken: wrong data
    expects     if set, any other Exception breaks a law, too
    not_judged  they are for whoever called `explore` (pytest's skip)
    """

    law_errors: tuple[type[BaseException], ...] = (AssertionError,)
    expects: tuple[type[BaseException], ...] | None = None
    not_judged: tuple[type[BaseException], ...] = (FaultInjectError,)

    def broken_by(self, error: BaseException | None) -> bool:
        if error is None:
            return False
        if isinstance(error, self.law_errors):
            return True
        # A BaseException must pass through the flow: whoever stops it there hides it.
        return self.expects is not None and isinstance(error, Exception) and not isinstance(error, self.expects)


def judge(seen: Observation, laws: Laws, *, benign: bool = False, same_result: bool = False) -> Verdict:
    """The worst that is true: hang > wrong_data > leak > swallowed, else surfaced or contained."""
    problems: list[tuple[str, str]] = []
    if seen.hang:
        problems.append(("hang", seen.hang))
    if isinstance(seen.error, Livelock):
        problems.append(("hang", _line(seen.error)))
    elif seen.error is not None and laws.broken_by(seen.error):
        problems.append(("wrong_data", _line(seen.error)))
    if seen.leaks:
        problems.append(("leak", "; ".join(seen.leaks)))
    how = _visible(seen)
    if not problems and how is not None:
        return Verdict(*how)
    if not problems and benign and same_result:
        return Verdict("contained", "benign, and the result is the baseline's")
    if not problems:
        what = "the result differs from the baseline's" if benign else "no ERROR log record, no saw(), no exception"
        problems.append(("swallowed", f"the fault fired, and nothing shows it: {what}{_deaths(seen.deaths)}"))
    (outcome, reason), *rest = problems
    details = [f"also {name}: {text}" for name, text in rest] + [f"a thread died: {death}" for death in seen.deaths]
    details += [part for part in (seen.error_text, seen.stacks) if part]
    return Verdict(outcome, reason, "\n".join(details))


def _visible(seen: Observation) -> tuple[str, str] | None:
    if seen.error is not None:
        return "surfaced", _line(seen.error)
    for kind, detail in seen.seen:
        if kind in ("result", "exception"):
            return "surfaced", f"{kind}: {detail}"
    for kind, detail in seen.seen:
        return "contained", f"{kind}: {detail}"
    if seen.log_errors:
        return "contained", f"ERROR log: {seen.log_errors[0]}"
    return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _deaths(deaths: Sequence[str]) -> str:
    return f" (a thread died: {deaths[0]})" if deaths else ""
