"""Sites: named places where a fault can enter, made by wrapping an object or patching an attribute; knows no plans."""

from __future__ import annotations

import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from faultinject.errors import NestedSession
from faultinject.fault import DEFAULT_ACTIONS, Action

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z_<][\w.\-/<>]*")


@dataclass(frozen=True)
class Site:
    """A named place where a fault can enter.

    actions       what can go wrong there
    max_ordinals  how many ordinals an exploration visits per role (None: as the scenario says)
    persistent    whether faults that stay are explored, besides transient ones
    """

    name: str
    actions: tuple[Action, ...] = DEFAULT_ACTIONS
    max_ordinals: int | None = None
    persistent: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"site name {self.name!r}: letters, digits and any of . _ - / < > are allowed")
        object.__setattr__(self, "actions", tuple(self.actions))
        names = [action.name for action in self.actions]
        if len(set(names)) != len(names):
            raise ValueError(f"site {self.name!r}: two actions share a name in {names}; set label= on one of them")


class Gate(Protocol):
    """Whoever decides what happens at a hit: an armed session."""

    def pass_site(
        self, site: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], where: str = ""
    ) -> Any:
        """Count a hit of `site`, and make the call or let a fault strike. `where`: the source line, if it is known."""


_armed: Gate | None = None
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: a proxy may be unhashable


def arm(gate: Gate) -> None:
    """Make `gate` the one that unbound sites ask. Raises NestedSession."""
    global _armed
    if _armed is not None:
        raise NestedSession("a fault session is already armed in this process; sessions can't be nested")
    _armed = gate


def disarm(gate: Gate) -> None:
    global _armed
    if _armed is gate:
        _armed = None


def live_sites() -> Iterator[str]:
    """The sites of every wrapped object and patch that is alive."""
    for holder in tuple(_live.values()):
        yield from object.__getattribute__(holder, "_fi_sites")


def _through(site: str, fn: Callable[..., Any], gate: Gate | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"site {site!r}: {fn!r} is a coroutine function; only what threads call can be a site")

    def passing(*args: Any, **kwargs: Any) -> Any:
        target = gate or _armed
        return fn(*args, **kwargs) if target is None else target.pass_site(site, fn, args, kwargs)

    functools.update_wrapper(passing, fn)
    return passing


# ------------------------------------------------------------------------------------------------------ wrapped objects


class _Proxy:
    """Stands for an object: everything goes to it, and the calls of some methods pass sites on their way."""

    __slots__ = ("__weakref__", "_fi_gate", "_fi_prefix", "_fi_sites", "_fi_target", "_fi_wrapped")

    def __init__(self, target: Any, prefix: str, methods: Iterable[str], gate: Gate | None) -> None:
        put = functools.partial(object.__setattr__, self)
        put("_fi_target", target)
        put("_fi_prefix", prefix)
        put("_fi_gate", gate)
        put("_fi_wrapped", {name: _through(f"{prefix}.{name}", getattr(target, name), gate) for name in methods})
        put("_fi_sites", tuple(f"{prefix}.{name}" for name in self._fi_wrapped))

    @property  # type: ignore[misc]  # isinstance() asks __class__, so that a proxy passes for what it wraps
    def __class__(self) -> type:
        return type(self._fi_target)

    def __getattr__(self, name: str) -> Any:
        found = self._fi_wrapped.get(name)
        return getattr(self._fi_target, name) if found is None else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fi_target, name, value)
        if name in self._fi_wrapped:
            self._fi_wrapped[name] = _through(f"{self._fi_prefix}.{name}", value, self._fi_gate)

    def __delattr__(self, name: str) -> None:
        delattr(self._fi_target, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._fi_target)

    def __repr__(self) -> str:
        return f"<faultinject {self._fi_prefix!r} around {self._fi_target!r}>"


# Special methods that a proxy has of its own, or that make no sense on one.
_OWN = frozenset(
    f"__{name}__"
    for name in (
        *("class", "new", "init", "init_subclass", "subclasshook", "class_getitem", "set_name", "get", "set", "delete"),
        *("getattribute", "getattr", "setattr", "delattr", "dir", "repr", "del"),
        *("reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex"),
    )
)
_classes: weakref.WeakKeyDictionary[type, type[_Proxy]] = weakref.WeakKeyDictionary()


def _forward(name: str) -> Callable[..., Any]:
    def special(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = self._fi_target
        result = (self._fi_wrapped.get(name) or getattr(target, name))(*args, **kwargs)
        return self if result is target else result  # `with proxy as p` must not hand out the bare object

    return special


def _proxy_class(cls: type) -> type[_Proxy]:
    """Special methods are looked up on the type, so each wrapped type gets a proxy type with those that it has."""
    made = _classes.get(cls)
    if made is None:
        names = [name for name in dir(cls) if name.startswith("__") and name.endswith("__") and name not in _OWN]
        special = [name for name in names if callable(getattr(cls, name, None))]
        own = {name: _forward(name) for name in special if getattr(cls, name) is not getattr(object, name, None)}
        made = _classes[cls] = type(f"{cls.__name__}Proxy", (_Proxy,), {"__slots__": (), **own})
    return made


def public_methods(obj: Any) -> list[str]:
    """Names of the public methods of `obj` that threads can call."""
    names = (name for name in dir(type(obj)) if not name.startswith("_"))
    return [
        name
        for name in names
        if callable(getattr(type(obj), name)) and not inspect.iscoroutinefunction(getattr(type(obj), name))
    ]


def wrap(obj: T, prefix: str, methods: Iterable[str] | None = None, *, gate: Gate | None = None) -> T:
    """A stand-in for `obj` whose calls of `methods` pass the sites `PREFIX.METHOD`; all else goes straight to `obj`.

    `methods=None` means all public ones. Calls that `obj` makes on itself don't pass (patch its class for that).
    Without a gate the sites ask whatever session is armed when they are hit. Raises AttributeError for a missing
    method, TypeError for a coroutine function, ValueError for a bad site name.
    """
    names = public_methods(obj) if methods is None else list(methods)
    for name in names:
        Site(f"{prefix}.{name}")
        if not hasattr(obj, name):
            has = ", ".join(public_methods(obj)) or "none"
            raise AttributeError(
                f"site {prefix}.{name}: {type(obj).__name__} has no method {name!r}; its public methods: {has}"
            )
        if not callable(getattr(obj, name)):
            raise TypeError(f"site {prefix}.{name}: {type(obj).__name__}.{name} is not callable")
    proxy: Any = _proxy_class(type(obj))(obj, prefix, names, gate)
    _live[id(proxy)] = proxy
    return proxy  # type: ignore[no-any-return]  # the proxy passes for T


# --------------------------------------------------------------------------------------------------- patched attributes

_MISSING = object()


class Patch:
    """An attribute of a class, module or instance whose calls pass a site until `undo()` or the end of a `with`."""

    def __init__(self, target: Any, attr: str, site: str, gate: Gate | None) -> None:
        self._fi_sites = (Site(site).name,)
        if not hasattr(target, attr):
            raise AttributeError(f"site {site}: {target!r} has no attribute {attr!r}")
        self._target, self._attr = target, attr
        own: Mapping[str, Any] = getattr(target, "__dict__", {})
        self._old = own.get(attr, _MISSING)
        setattr(target, attr, self._replacement(site, gate))
        _live[id(self)] = self

    def _replacement(self, site: str, gate: Gate | None) -> Any:
        if not isinstance(self._target, type):
            return _through(site, self._callable(getattr(self._target, self._attr)), gate)
        static = inspect.getattr_static(self._target, self._attr)
        if isinstance(static, classmethod):
            return classmethod(_through(site, static.__func__, gate))
        if isinstance(static, property):
            if static.fget is None:
                raise TypeError(f"site {site!r}: property {self._attr!r} has no getter")
            return property(_through(site, static.fget, gate), static.fset, static.fdel, static.__doc__)
        if isinstance(static, types.FunctionType):
            return _through(site, static, gate)
        inner = static.__func__ if isinstance(static, staticmethod) else static
        return staticmethod(_through(site, self._callable(inner), gate))

    def _callable(self, value: Any) -> Callable[..., Any]:
        if not callable(value):
            raise TypeError(f"{self._target!r}.{self._attr} is {value!r}: only callables and properties can be sites")
        return value  # type: ignore[no-any-return]

    def undo(self) -> None:
        if _live.pop(id(self), None) is None:
            return
        if self._old is _MISSING:
            delattr(self._target, self._attr)
        else:
            setattr(self._target, self._attr, self._old)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def patch(target: Any, attr: str, *, site: str | None = None, gate: Gate | None = None) -> Patch:
    """Make `target.attr` (a method, function, static or class method, or property) pass a site.

    The default name is `CLASS.ATTR` or `MODULE.ATTR`. Raises AttributeError if there is no such attribute, TypeError if
    it can't be called.
    """
    owner = target if isinstance(target, type | types.ModuleType) else type(target)
    return Patch(target, attr, site or f"{owner.__name__}.{attr}", gate)


def as_sites(sites: Iterable[Any]) -> dict[str, Site]:
    """Sites by name, from Site values, bare names, and wrapped objects. Raises ValueError if a name comes twice."""
    found: dict[str, Site] = {}
    for entry in sites:
        names: Iterable[Any] = [entry]
        if not isinstance(entry, Site | str):
            names = object.__getattribute__(entry, "_fi_sites")
        for name in names:
            site = name if isinstance(name, Site) else Site(name)
            if site.name in found:
                raise ValueError(f"site {site.name!r} is declared twice")
            found[site.name] = site
    return found
