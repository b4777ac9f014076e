"""Line sites: every executed line of some functions as a hit, by tracing the threads that run them; knows no plans."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

from faultinject.fault import Action, Kill, Raise
from faultinject.site import Gate, Site


def LineSite(name: str, actions: Iterable[Action] = (Raise(RuntimeError), Kill()), **settings: Any) -> Site:
    """A `Site` for the lines of a function, named `QUALNAME.lines`: its actions raise, and no fault of it persists."""
    return Site(name, tuple(actions), persistent=False, **settings)


class Lines:
    """Traces the calling thread, and every thread started from now on, until `undo`.

    A raising trace function ends the tracing of its thread: so there is one fault per thread, and none is persistent.
    """

    def __init__(self, gate: Gate) -> None:
        self._sites: dict[types.CodeType, str] = {}
        self._gate = gate
        self._thread = threading.current_thread()
        self._old = sys.gettrace(), threading.gettrace()
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def add(self, function: Callable[..., Any], site: str) -> None:
        """Make the lines of `function` hits of `site`. Raises TypeError if it isn't written in Python."""
        code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
        if not isinstance(code, types.CodeType):
            raise TypeError(f"site {site!r}: {function!r} has no Python lines")
        self._sites[code] = site

    def undo(self) -> None:
        self._sites = {}
        threading.settrace(self._old[1])
        if threading.current_thread() is self._thread:
            sys.settrace(self._old[0])

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        return self._trace_lines if frame.f_code in self._sites else None

    def _trace_lines(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        site = self._sites.get(frame.f_code)
        if event == "line" and site is not None:
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            self._gate.pass_site(site, _nothing, (), {}, where)
        return self._trace_lines


def _nothing() -> None:
    """What a line's hit calls: the line itself is run by the interpreter afterwards."""
