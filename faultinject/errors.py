"""Errors of faultinject: mistakes of whoever plans faults, never the faults themselves; knows nothing of pytest."""

from __future__ import annotations


class FaultInjectError(Exception):
    """Base of every error that says: the plan, the scenario or its declaration is wrong."""


class UnknownSite(FaultInjectError):
    """A fault, a wrap or a patch names a site that nobody declared."""


class UnknownAction(FaultInjectError):
    """A replay token names an action that the site doesn't declare."""


class NotFired(FaultInjectError):
    """A planned fault never fired; the message lists the hits that were seen instead."""


class NestedSession(FaultInjectError):
    """A session was entered while another one is armed in this process."""


class ActionMismatch(FaultInjectError):
    """An action can't be applied to what the site returned (truncating an int, say)."""


class BaselineNotClean(FaultInjectError):
    """The scenario fails, leaks or logs errors without any fault, so nothing could be told apart with one."""


class BadToken(FaultInjectError):
    """A replay token that can't be read."""


class WrongData(AssertionError):
    """Raised by a scenario: a law about its data is broken (the bytes differ, something is counted twice, ...)."""


class ThreadKilled(BaseException):
    """Injected by `Kill`: ends the thread that runs into it, past every `except Exception`."""


class Released(BaseException):
    """Raised in a thread that a session held blocked, once the case is over, so that the thread can end."""


class Livelock(AssertionError):
    """For scenarios to raise when work goes round and round without getting anywhere: judged as a hang."""
