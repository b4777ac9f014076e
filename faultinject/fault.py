"""Faults: when to strike (triggers) and what to do (actions), as frozen values with short names; knows no sessions."""

from __future__ import annotations

import random
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from faultinject.errors import ActionMismatch, ThreadKilled

_UNSAFE = re.compile(r"[^\w.\-]+")


def slug(text: str) -> str:
    """`text` with every character that has a meaning in a replay token replaced by a dash."""
    return _UNSAFE.sub("-", text).strip("-") or "x"


class Passage(Protocol):
    """One hit of a site, as an action sees it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def proceed(self) -> Any:
        """Make the real call and return its result."""

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than the session lives."""

    def block(self) -> None:
        """Wait until the session releases its threads; raises `Released` if the case is over by then."""

    def no_effect(self) -> None:
        """Say that the action changed nothing at this hit (an empty list can't be truncated)."""


# -------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Action(ABC):
    """What a fault does at its hit.

    label   replaces the name in tokens and matrix columns
    benign  it may go unnoticed: the run counts as contained if its result equals the baseline's
    roles   explore it in these thread roles only (empty: in all)
    """

    label: str = field(default="", kw_only=True)
    benign: bool = field(default=False, kw_only=True)
    roles: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.name != slug(self.name):
            raise ValueError(f"action name {self.name!r}: only letters, digits, '_', '.', '-' are allowed (set label=)")

    @property
    def name(self) -> str:
        return self.label or self._name()

    @abstractmethod
    def _name(self) -> str: ...

    @abstractmethod
    def act(self, hit: Passage) -> Any:
        """Do it; what this returns or raises is what the caller of the site gets."""


def _suffix(after: bool) -> str:
    return "-after" if after else ""


@dataclass(frozen=True)
class Raise(Action):
    """Raise `exc(*args)` instead of making the call, or (`after`) although the call was made."""

    exc: type[BaseException]
    args: tuple[Any, ...] = ("injected",)
    after: bool = False

    def _name(self) -> str:
        return f"raise-{self.exc.__name__}{_suffix(self.after)}"

    def act(self, hit: Passage) -> Any:
        if self.after:
            hit.proceed()
        raise self.exc(*self.args)


@dataclass(frozen=True)
class Kill(Action):
    """End the thread with `ThreadKilled`, a BaseException that no `except Exception` stops."""

    after: bool = False

    def _name(self) -> str:
        return f"kill{_suffix(self.after)}"

    def act(self, hit: Passage) -> Any:
        if self.after:
            hit.proceed()
        raise ThreadKilled("injected")


@dataclass(frozen=True)
class Return(Action):
    """Return `value` without making the call."""

    value: Any

    def _name(self) -> str:
        return f"return-{slug(repr(self.value))[:24]}"

    def act(self, hit: Passage) -> Any:
        return self.value


@dataclass(frozen=True)
class Drop(Action):
    """Don't make the call; return None."""

    def _name(self) -> str:
        return "drop"

    def act(self, hit: Passage) -> Any:
        return None


@dataclass(frozen=True)
class Delay(Action):
    """Wait `seconds` before (or `after`) the call. Benign unless said otherwise: keep it shorter than any deadline."""

    seconds: float = 0.01
    after: bool = False
    benign: bool = field(default=True, kw_only=True)

    def _name(self) -> str:
        return f"delay{_suffix(self.after)}"

    def act(self, hit: Passage) -> Any:
        if not self.after:
            hit.pause(self.seconds)
            return hit.proceed()
        result = hit.proceed()
        hit.pause(self.seconds)
        return result


@dataclass(frozen=True)
class Block(Action):
    """Never return, as far as the code under test can tell.

    When the scenario calls `run.release()` the call goes on (late data). When the case is over, the session releases
    the thread with `Released`, so that it always can end.
    """

    after: bool = False

    def _name(self) -> str:
        return f"block{_suffix(self.after)}"

    def act(self, hit: Passage) -> Any:
        if not self.after:
            hit.block()
            return hit.proceed()
        result = hit.proceed()
        hit.block()
        return result


@dataclass(frozen=True)
class Mutate(Action):
    """Make the call and return `fn(result)`; `what` names the column."""

    fn: Callable[[Any], Any]
    what: str

    def _name(self) -> str:
        return self.what

    def act(self, hit: Passage) -> Any:
        result = hit.proceed()
        changed = self.fn(result)
        if _same(result, changed):
            hit.no_effect()
        return changed


@dataclass(frozen=True)
class Do(Action):
    """Replace the call by `fn(call, *args, **kwargs)`; `call` is the real one, `what` names the column."""

    fn: Callable[..., Any]
    what: str

    def _name(self) -> str:
        return self.what

    def act(self, hit: Passage) -> Any:
        return self.fn(lambda *args, **kwargs: _proceed_with(hit, args, kwargs), *hit.args, **hit.kwargs)


def _proceed_with(hit: Passage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hit.args, hit.kwargs = args, kwargs
    return hit.proceed()


def _same(old: object, new: object) -> bool:
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except (ValueError, TypeError, RuntimeError):  # arrays have no single truth value
        return False


def _truncate(result: Any) -> Any:
    try:
        return result[: max(0, len(result) - 1)]
    except (TypeError, KeyError):
        raise ActionMismatch(f"truncate: a result of type {type(result).__name__} has no end to cut off") from None


def _extend(result: Any) -> Any:
    if isinstance(result, list | tuple | str | bytes | bytearray):
        return result + (result[-1:] or type(result)([0]))  # type: ignore[operator]  # each with its own kind
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(result, numpy.ndarray) and len(result):
        return numpy.append(result, result[-1:], axis=0)
    raise ActionMismatch(f"extend: it is not known how to make this {type(result).__name__} longer")


def _empty(result: Any) -> Any:
    try:
        return result[:0]
    except (TypeError, KeyError):
        if isinstance(result, Collection):
            return type(result)()
        raise ActionMismatch(f"empty: a result of type {type(result).__name__} can't be empty") from None


def _none(result: Any) -> Any:
    return None


def Truncate() -> Mutate:
    """The real result without its last element."""
    return Mutate(_truncate, "truncate")


def Extend() -> Mutate:
    """The real result with its last element twice (or one 0 where it was empty)."""
    return Mutate(_extend, "extend")


def Empty() -> Mutate:
    """The call is made, and its result replaced by an empty one of the same type."""
    return Mutate(_empty, "empty")


def NoneResult() -> Mutate:
    """The call is made, and its result replaced by None."""
    return Mutate(_none, "none")


#: For a site that declares nothing: it fails, its thread dies, it is slow.
DEFAULT_ACTIONS: tuple[Action, ...] = (Raise(RuntimeError), Kill(), Delay())


# ------------------------------------------------------------------------------------------------------------- triggers


@dataclass(frozen=True)
class Trigger(ABC):
    """Decides at which ordinal (1 is the first hit of a site in a role) a fault strikes."""

    @abstractmethod
    def strikes(self, ordinal: int, salt: str) -> bool: ...

    @property
    @abstractmethod
    def token(self) -> str:
        """`ORDINAL:ACTION:PERSISTENCE` with `{}` where the action's name goes."""


def _check_ordinal(n: int) -> None:
    if n < 1:
        raise ValueError(f"ordinal {n}: the first hit is 1")


@dataclass(frozen=True)
class Nth(Trigger):
    """The nth hit only: a transient fault."""

    n: int = 1

    def __post_init__(self) -> None:
        _check_ordinal(self.n)

    def strikes(self, ordinal: int, salt: str) -> bool:
        return ordinal == self.n

    @property
    def token(self) -> str:
        return f"{self.n}:{{}}:transient"


@dataclass(frozen=True)
class From(Trigger):
    """The nth hit and every later one: a persistent fault."""

    n: int = 1

    def __post_init__(self) -> None:
        _check_ordinal(self.n)

    def strikes(self, ordinal: int, salt: str) -> bool:
        return ordinal >= self.n

    @property
    def token(self) -> str:
        return f"{self.n}:{{}}:persistent"


def Always() -> From:
    """Every hit."""
    return From(1)


@dataclass(frozen=True)
class Randomly(Trigger):
    """Each hit with probability `p`, decided by `seed` and the ordinal alone, so not by how threads interleave."""

    p: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"p {self.p}: a probability above 0 and up to 1 is needed")

    def strikes(self, ordinal: int, salt: str) -> bool:
        return random.Random(f"{self.seed}/{salt}/{ordinal}").random() < self.p

    @property
    def token(self) -> str:
        return f"1:{{}}:random-{self.p}-{self.seed}"


# --------------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """`action` at the hits of `site` that `when` picks, counted in the threads of `role` (None: in all of them)."""

    site: str
    action: Action
    when: Trigger = Nth(1)
    role: str | None = None

    @property
    def token(self) -> str:
        """`SITE:ROLE:ORDINAL:ACTION:PERSISTENCE`; the role is `*` where all threads count together."""
        return f"{self.site}:{self.role or '*'}:{self.when.token.format(self.action.name)}"
