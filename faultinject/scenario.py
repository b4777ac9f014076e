"""Scenarios: a callable, the sites that it passes and the laws that it keeps, in one frozen value; runs nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from faultinject.judge import Laws
from faultinject.site import Site, as_sites
from faultinject.waiver import Waiver

_NAME = re.compile(r"[\w.\-\[\]]+")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scenario:
    """What is run once per injection.

    name          first part of every replay token
    body          called with a `Run`; its return value is compared with the baseline's after benign faults
    sites         the declared sites (Site, or a name for one with the default actions)
    roles         role -> pattern(s) of thread names; the flow that runs the body is `main`
    deadline      seconds until the watchdog calls a run a hang
    grace         seconds that threads, descriptors and ledgers get to come back after the body has ended
    laws          how an exception that leaves the body is read
    waivers       known broken injections, each bound to an issue
    pairs         how many two-fault combinations to add, picked with a fixed seed
    max_ordinals  how many ordinals of a site and role are visited, where the Site doesn't say
    max_faults    how many faults one injection may take: hits that exist only after that many are counted, not visited
    """

    name: str
    body: Callable[..., Any]
    sites: Mapping[str, Site]
    roles: Mapping[str, str | Iterable[str]] = field(default_factory=dict)
    deadline: float = 5.0
    grace: float = 2.0
    laws: Laws = field(default_factory=Laws)
    waivers: tuple[Waiver, ...] = ()
    pairs: int = 0
    max_ordinals: int = 16
    max_faults: int = 4

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"scenario name {self.name!r}: letters, digits and any of . _ - [ ] are allowed")
        for what in ("deadline", "grace"):
            if not getattr(self, what) > 0:
                raise ValueError(f"scenario {self.name!r}: {what} {getattr(self, what)} must be above 0 seconds")
        if self.pairs < 0 or self.max_ordinals < 1:
            raise ValueError(
                f"scenario {self.name!r}: pairs {self.pairs} >= 0 and max_ordinals {self.max_ordinals} >= 1"
            )
        if self.max_faults < 1:
            raise ValueError(f"scenario {self.name!r}: max_faults {self.max_faults} must be at least 1")
        if not self.sites:
            raise ValueError(f"scenario {self.name!r}: at least one site must be declared")

    def limited(self, most: int) -> Scenario:
        """The same scenario with at most that many ordinals of any site and role."""
        sites = {
            name: replace(site, max_ordinals=site.max_ordinals and min(site.max_ordinals, most))
            for name, site in self.sites.items()
        }
        return replace(self, sites=sites, max_ordinals=min(self.max_ordinals, most))


def scenario(
    *,
    sites: Iterable[Site | str],
    name: str | None = None,
    expects: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    waivers: Iterable[Waiver] = (),
    **settings: Any,
) -> Callable[[F], F]:
    """Declare a function as a scenario; its argument `run` is the `Run`, further ones are pytest fixtures.

    Under pytest a decorated test becomes one item per declared site; elsewhere pass it to `explore`. The default name
    is the function's without `test_`. `settings` are further fields of `Scenario` (roles, deadline, grace, pairs,
    ...). `expects` restricts which exceptions may leave the body (None: any, except AssertionError).
    """
    only = expects if expects is None or isinstance(expects, tuple) else (expects,)

    def declare(body: F) -> F:
        if "run" not in inspect.signature(body).parameters or inspect.iscoroutinefunction(body):
            raise TypeError(f"scenario {body.__qualname__}: an ordinary function with a parameter `run` is needed")
        declared = Scenario(
            name=name or body.__name__.removeprefix("test_"),
            body=body,
            sites=as_sites(sites),
            laws=Laws(expects=only),
            waivers=tuple(waivers),
            **settings,
        )
        body.__faultinject__ = declared  # type: ignore[attr-defined]
        return body

    return declare
