"""Sessions: faults armed for a while, every hit logged, proof that each fault fired; knows nothing of scenarios."""

from __future__ import annotations

import fnmatch
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from faultinject import site as sites_module
from faultinject.errors import ActionMismatch, FaultInjectError, NotFired, Released, UnknownSite
from faultinject.evidence import Evidence
from faultinject.fault import Fault, slug
from faultinject.lines import Lines
from faultinject.plan import Plan
from faultinject.site import Patch, Site

T = TypeVar("T")
MAIN = "main"
LOG_LIMIT = 1000  # hits of one site and role that are logged one by one; all are counted

#: Threads that outlived their case. They pass no site any more: the next one that they hit ends them.
strangers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Roles:
    """The role of a thread: by pattern of its name, else `main` for the main flow, else its name without numbers."""

    def __init__(self, patterns: Mapping[str, str | Iterable[str]] | None = None) -> None:
        self._patterns = [
            (role, pattern)
            for role, given in (patterns or {}).items()
            for pattern in ([given] if isinstance(given, str) else given)
        ]
        for role, _ in self._patterns:
            if role != slug(role):
                raise ValueError(f"role {role!r}: only letters, digits, '_', '.', '-' are allowed")
        self.main: set[threading.Thread] = set()
        self._by_name: dict[str, str] = {}

    def of(self, thread: threading.Thread) -> str:
        if thread in self.main:
            return MAIN
        name = thread.name
        role = self._by_name.get(name)
        if role is None:
            role = self._by_name[name] = self._match(name)
        return role

    def _match(self, name: str) -> str:
        for role, pattern in self._patterns:
            if fnmatch.fnmatchcase(name, pattern):
                return role
        # "Thread-7 (serve)" is "Thread-serve" in every run, whatever number it gets
        return slug(re.sub(r"[-_ ]?\d+", "", name))


@dataclass(frozen=True)
class Hit:
    """One passage through a site: the nth of this site in this role, and the fault that struck there, if any.

    `where` is the source line (`file.py:12`) of a hit of a line site.
    """

    site: str
    role: str
    ordinal: int
    fault: Fault | None = None
    where: str = ""

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        struck = f" <- {self.fault.action.name}" if self.fault else ""
        return f"{self.site}:{self.role}:{self.ordinal}{where}{struck}"


class _Passage:
    """A hit on its way through a fault's action (the `fault.Passage` protocol)."""

    def __init__(self, session: Session, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._session, self._fn, self.args, self.kwargs = session, fn, args, kwargs
        self.effective = True

    def proceed(self) -> Any:
        return self._fn(*self.args, **self.kwargs)

    def pause(self, seconds: float) -> None:
        self._session._over.wait(seconds)

    def block(self) -> None:
        self._session._block()

    def no_effect(self) -> None:
        self.effective = False


@dataclass
class _Armed:
    """A fault and the number of hits that came before it was armed."""

    fault: Fault
    base: int
    fired: bool = False


class Session:
    """Arms a plan: `with Session(plan, roles={"send": "kv-send*"}) as session: ...`.

    plan    faults, or one fault, or a `Plan`
    sites   the declared sites (Site, name, or a wrapped object). If given, wrapping anything else is an error; if not,
            every object wrapped and attribute patched beforehand counts as declared
    roles   role -> pattern(s) of thread names; the thread that enters is `main`
    strict  on exit, raise NotFired for a fault that never fired
    quiet   don't forward exceptions that end a thread to the previous `threading.excepthook`

    Entering raises UnknownSite and NestedSession. Thread-safe.
    """

    def __init__(
        self,
        plan: Plan | Fault | Iterable[Fault] | None = None,
        *,
        sites: Iterable[Any] | Mapping[str, Site] | None = None,
        roles: Mapping[str, str | Iterable[str]] | None = None,
        strict: bool = True,
        quiet: bool = False,
    ) -> None:
        self.plan = Plan.of(plan)
        self.roles = Roles(roles)
        self._declared = sites is not None
        self.sites = dict(sites) if isinstance(sites, Mapping) else sites_module.as_sites(sites or ())
        self.counts: dict[tuple[str, str], int] = {}
        self.hits: list[Hit] = []
        self.fired: list[Hit] = []
        self.mistakes: list[BaseException] = []
        self.evidence = Evidence(strangers, forward_deaths=not quiet)
        self._errors_before_fault = 0
        self._strict = strict
        self._lock = threading.Lock()
        self._overall: dict[str, int] = {}
        self._faults: list[_Armed] = [_Armed(fault, 0) for fault in self.plan.faults]
        self._armed = False
        self._over = threading.Event()
        self._release = threading.Condition(self._lock)
        self._generation = 0
        self._blocked = 0
        self._inside: dict[threading.Thread, list[str]] = {}
        self._patches: list[Patch | Lines] = []
        self._lines: Lines | None = None

    # ------------------------------------------------------------------------------------------------------- life cycle

    def __enter__(self) -> Session:
        known = set(self.sites)
        if not self._declared:
            known.update(sites_module.live_sites())
        self.plan.check(known)
        sites_module.arm(self)
        self.roles.main.add(threading.current_thread())
        self.evidence.install()
        self._armed = True
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: object) -> None:
        self.end()
        self.evidence.remove()
        while self._patches:
            self._patches.pop().undo()
        sites_module.disarm(self)
        if exc is None:
            if self.mistakes:
                raise self.mistakes[0]
            if self._strict:
                self.check_fired()

    def end(self) -> int:
        """Stop injecting and counting, and free every blocked thread with `Released`; the number of threads freed."""
        with self._lock:
            self._armed = False
            self._over.set()
            self._release.notify_all()
            return self._blocked

    def release(self) -> int:
        """Let every blocked thread go on with its call now, while the session stays armed; how many there were."""
        with self._lock:
            self._generation += 1
            self._release.notify_all()
            return self._blocked

    @property
    def blocked(self) -> int:
        """How many threads the session holds blocked."""
        return self._blocked

    def check_fired(self) -> None:
        """Raises NotFired if a planned fault never fired."""
        idle = self.unfired()
        if idle:
            seen = ", ".join(map(str, self.hits[:40])) or "none at all"
            more = f" and {len(self.hits) - 40} more" if len(self.hits) > 40 else ""
            raise NotFired(f"never fired: {', '.join(fault.token for fault in idle)}. Hits seen: {seen}{more}")

    def unfired(self) -> list[Fault]:
        return [armed.fault for armed in self._faults if not armed.fired]

    @property
    def visible_errors(self) -> list[str]:
        """The ERROR log records written since the first fault fired."""
        return [str(record) for record in self.evidence.errors[self._errors_before_fault :]] if self.fired else []

    def arm(self, fault: Fault) -> None:
        """Arm one more fault now; its ordinals count from here. Raises UnknownSite."""
        known = set(self.sites) if self._declared else {*self.sites, *sites_module.live_sites()}
        Plan((fault,)).check(known)
        with self._lock:
            seen = self._overall.get(fault.site, 0)
            if fault.role is not None:
                seen = self.counts.get((fault.site, fault.role), 0)
            self._faults.append(_Armed(fault, seen))

    def disarm(self, fault: Fault) -> None:
        """Let a fault strike no more."""
        with self._lock:
            self._faults = [armed for armed in self._faults if armed.fault != fault]

    # ------------------------------------------------------------------------------------------------------------ sites

    def wrap(self, obj: T, prefix: str, methods: Iterable[str] | None = None) -> T:
        """`site.wrap`, bound to this session. `methods=None`: the declared ones, else all public ones."""
        if methods is None and self._declared:
            methods = [name[len(prefix) + 1 :] for name in self.sites if name.rpartition(".")[0] == prefix]
            if not methods:
                raise UnknownSite(f"wrap: no site {prefix}.* is declared; declared are {sorted(self.sites)}")
        proxy = sites_module.wrap(obj, prefix, methods, gate=self)
        for name in object.__getattribute__(proxy, "_fi_sites"):
            self._admit(name)
        return proxy

    def patch(self, target: Any, attr: str, *, site: str | None = None) -> None:
        """`site.patch`, bound to this session and undone when it ends."""
        made = sites_module.patch(target, attr, site=site, gate=self)
        self._patches.append(made)
        self._admit(made._fi_sites[0])

    def lines(self, function: Callable[..., Any], *, site: str | None = None) -> None:
        """Make every line of a Python function that this thread or a later one runs a hit of `QUALNAME.lines`."""
        name = site or f"{function.__qualname__.rpartition('<locals>.')[2]}.lines"
        self._admit(name)
        if self._declared and self.sites[name].persistent:
            raise FaultInjectError(f"site {name!r}: faults at lines can't persist, declare it with LineSite")
        if self._lines is None:
            self._lines = Lines(self)
            self._patches.append(self._lines)
        self._lines.add(function, name)

    def _admit(self, name: str) -> None:
        if name in self.sites:
            return
        if self._declared:
            raise UnknownSite(f"site {name!r} is not declared; declared are {sorted(self.sites)}")
        self.sites[name] = Site(name)

    # ------------------------------------------------------------------------------------------------------------- hits

    def pass_site(
        self, site: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], where: str = ""
    ) -> Any:
        thread = threading.current_thread()
        if strangers and thread in strangers:
            raise Released(f"{thread.name} outlived its case")
        if not self._armed:
            return fn(*args, **kwargs)
        role = self.roles.of(thread)
        with self._lock:
            hit, armed = self._count(site, role, where)
            number = self._log(hit)
        stack = self._inside.setdefault(thread, [])
        stack.append(site)
        try:
            return fn(*args, **kwargs) if armed is None else self._strike(hit, armed, number, fn, args, kwargs)
        finally:
            stack.pop()
            if not stack:  # or the thread, and all that it holds, would live as long as the session
                del self._inside[thread]

    def _count(self, site: str, role: str, where: str) -> tuple[Hit, _Armed | None]:
        ordinal = self.counts[site, role] = self.counts.get((site, role), 0) + 1
        overall = self._overall[site] = self._overall.get(site, 0) + 1
        for armed in reversed(self._faults):
            fault = armed.fault
            if fault.site == site and fault.role in (None, role):
                number = (overall if fault.role is None else ordinal) - armed.base
                if fault.when.strikes(number, f"{site}:{fault.role}"):
                    return Hit(site, role, ordinal, fault, where), armed
        return Hit(site, role, ordinal, None, where), None

    def _log(self, hit: Hit) -> int:
        """Where the hit stands in the log; -1 if it is not logged, as a loop that polls would fill the memory."""
        if hit.fault is not None and not self.fired:
            self._errors_before_fault = len(self.evidence.errors)
        if hit.ordinal > LOG_LIMIT and (hit.fault is None or self.fired):
            return -1
        if hit.fault is not None:
            self.fired.append(hit)
        self.hits.append(hit)
        return len(self.hits) - 1

    def _strike(
        self,
        hit: Hit,
        armed: _Armed,
        number: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        passage = _Passage(self, fn, args, kwargs)
        try:
            return armed.fault.action.act(passage)
        except ActionMismatch as exc:
            self.mistakes.append(ActionMismatch(f"{hit}: {exc}"))
            raise
        finally:
            if passage.effective:
                armed.fired = True
            elif number >= 0:
                with self._lock:
                    self.hits[number] = replace(hit, fault=None)
                    self.fired.remove(hit)

    def inside(self, thread: threading.Thread) -> str | None:
        """The site that `thread` is in the middle of passing."""
        stack = self._inside.get(thread)
        return stack[-1] if stack else None

    def _block(self) -> None:
        with self._lock:
            generation = self._generation
            self._blocked += 1
            self._release.notify_all()
            try:
                while self._generation == generation:
                    if self._over.is_set():
                        raise Released("the case is over")
                    self._release.wait()
            finally:
                self._blocked -= 1

    def wait_blocked(self, threads: int = 1, timeout: float = 5.0) -> bool:
        """Wait until the session holds that many threads blocked; False on timeout."""
        with self._lock:
            return self._release.wait_for(lambda: self._blocked >= threads, timeout)
