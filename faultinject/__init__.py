"""Fault injection for threaded Python: name the places, inject every fault at every hit, judge what came of each.

Knows nothing of what it is used on. Start with `docs/faultinject.md`.
"""

from faultinject.case import Run
from faultinject.control import Control
from faultinject.errors import (
    ActionMismatch,
    BadToken,
    BaselineNotClean,
    FaultInjectError,
    Livelock,
    NestedSession,
    NotFired,
    Released,
    ThreadKilled,
    UnknownAction,
    UnknownSite,
    WrongData,
)
from faultinject.explore import Exploration, Injection, explore, replay
from faultinject.fault import (
    DEFAULT_ACTIONS,
    Action,
    Always,
    Block,
    Delay,
    Do,
    Drop,
    Empty,
    Extend,
    Fault,
    From,
    Kill,
    Mutate,
    NoneResult,
    Nth,
    Raise,
    Randomly,
    Return,
    Trigger,
    Truncate,
)
from faultinject.judge import OUTCOMES, Verdict
from faultinject.lines import LineSite
from faultinject.matrix import Matrix
from faultinject.plan import Plan, Token
from faultinject.scenario import Scenario, scenario
from faultinject.session import Hit, Session
from faultinject.site import Patch, Site, patch, wrap
from faultinject.waiver import Waiver

__all__ = [
    "DEFAULT_ACTIONS",
    "OUTCOMES",
    "Action",
    "ActionMismatch",
    "Always",
    "BadToken",
    "BaselineNotClean",
    "Block",
    "Control",
    "Delay",
    "Do",
    "Drop",
    "Empty",
    "Exploration",
    "Extend",
    "Fault",
    "FaultInjectError",
    "From",
    "Hit",
    "Injection",
    "Kill",
    "LineSite",
    "Livelock",
    "Matrix",
    "Mutate",
    "NestedSession",
    "NoneResult",
    "NotFired",
    "Nth",
    "Patch",
    "Plan",
    "Raise",
    "Randomly",
    "Released",
    "Return",
    "Run",
    "Scenario",
    "Session",
    "Site",
    "ThreadKilled",
    "Token",
    "Trigger",
    "Truncate",
    "UnknownAction",
    "UnknownSite",
    "Verdict",
    "Waiver",
    "WrongData",
    "explore",
    "patch",
    "replay",
    "scenario",
    "wrap",
]
