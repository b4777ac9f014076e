"""Plans: the faults of one run, their check against the declared sites, and the replay token; knows no sessions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from faultinject.errors import BadToken, UnknownAction, UnknownSite
from faultinject.fault import Fault, From, Nth, Randomly, Trigger
from faultinject.site import Site


@dataclass(frozen=True)
class Plan:
    """The faults of one run, in order: at a hit that several want, the last one strikes (see `explore`)."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, plan: Plan | Fault | Iterable[Fault] | None) -> Plan:
        if plan is None:
            return cls()
        if isinstance(plan, Plan):
            return plan
        return cls((plan,) if isinstance(plan, Fault) else tuple(plan))

    def check(self, known: Iterable[str]) -> None:
        """Raises UnknownSite for a fault whose site is not among `known`."""
        names = sorted(set(known))
        for fault in self.faults:
            if fault.site not in names:
                near = difflib.get_close_matches(fault.site, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UnknownSite(f"fault {fault.token}: no site {fault.site!r}{hint} Known sites: {names or 'none'}")

    def then(self, fault: Fault) -> Plan:
        return Plan((*self.faults, fault))

    def token(self, scenario: str) -> str:
        """`SCENARIO:SITE:ROLE:ORDINAL:ACTION:PERSISTENCE`, further faults behind a `+`."""
        return f"{scenario}:" + "+".join(fault.token for fault in self.faults)


@dataclass(frozen=True)
class Token:
    """A replay token taken apart: the scenario's name and its faults, the actions still as names."""

    scenario: str
    faults: tuple[tuple[str, str, str, str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises BadToken."""
        scenario, _, rest = text.strip().partition(":")
        faults = tuple(tuple(part.split(":")) for part in rest.split("+"))
        if not scenario or any(len(fault) != 5 or not all(fault) for fault in faults):
            raise BadToken(f"replay token {text!r}: SCENARIO:SITE:ROLE:ORDINAL:ACTION:PERSISTENCE[+SITE:...] is needed")
        token = cls(scenario, faults)  # type: ignore[arg-type]  # the lengths were just checked
        for _, _, ordinal, _, persistence in token.faults:
            _trigger(ordinal, persistence, text)
        return token

    @property
    def site(self) -> str:
        """The site of the first fault: the test item that explores it."""
        return self.faults[0][0]

    def plan(self, sites: Mapping[str, Site]) -> Plan:
        """The plan behind the token. Raises UnknownSite or UnknownAction."""
        faults = []
        for site, role, ordinal, action, persistence in self.faults:
            if site not in sites:
                raise UnknownSite(
                    f"replay token: scenario {self.scenario!r} has no site {site!r}, only {sorted(sites)}"
                )
            actions = {known.name: known for known in sites[site].actions}
            if action not in actions:
                raise UnknownAction(f"replay token: site {site!r} has no action {action!r}, only {sorted(actions)}")
            when = _trigger(ordinal, persistence, self.scenario)
            faults.append(Fault(site, actions[action], when, None if role == "*" else role))
        return Plan(tuple(faults))


def _trigger(ordinal: str, persistence: str, text: str) -> Trigger:
    kind, _, rest = persistence.partition("-")
    try:
        if kind == "transient":
            return Nth(int(ordinal))
        if kind == "persistent":
            return From(int(ordinal))
        if kind == "random":
            p, _, seed = rest.partition("-")
            return Randomly(float(p), int(seed))
    except ValueError as exc:
        raise BadToken(f"replay token {text!r}: {exc}") from None
    raise BadToken(f"replay token {text!r}: persistence {persistence!r} is not transient, persistent or random-P-SEED")
