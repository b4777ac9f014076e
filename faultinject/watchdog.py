"""The watchdog: stacks of all threads, and what to do with threads that won't end; judges nothing."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable

from faultinject.errors import Released
from faultinject.evidence import join
from faultinject.session import strangers

_PACKAGE = os.path.dirname(__file__)
_STARTERS = {threading.__file__, *(os.path.join(_PACKAGE, name) for name in ("case.py", "pytest_plugin.py"))}


def stacks(threads: Iterable[threading.Thread] | None = None) -> str:
    """The Python stacks of `threads` (None: of all but the leftovers of earlier cases), the one that asks left out."""
    frames = sys._current_frames()
    chosen = [thread for thread in threading.enumerate() if thread not in strangers] if threads is None else threads
    parts = []
    for thread in sorted(chosen, key=lambda thread: thread.name):
        frame = frames.get(thread.ident or -1)
        if frame is None or thread is threading.current_thread():
            continue
        daemon = " daemon" if thread.daemon else ""
        parts.append(f"--- {thread.name}{daemon}\n" + "".join(traceback.format_list(_own_frames(frame))))
    return "\n".join(parts)


_printed = ""


def fresh_stacks() -> str:
    """The stacks of all threads, or a word if they are those of the last time: one bug often hangs at every hit."""
    global _printed
    last, _printed = _printed, stacks()
    return "All stacks: as before" if _printed == last else f"All stacks:\n{_printed}"


def _own_frames(frame: types.FrameType) -> list[traceback.FrameSummary]:
    """The stack without how every thread starts, and without what stands between a scenario and its body."""
    frames = traceback.extract_stack(frame)
    start = next((n for n, entry in enumerate(frames) if entry.filename not in _STARTERS), 0)
    return frames[start:]


def run_bounded(name: str, work: Callable[[], None], end: float) -> threading.Thread | None:
    """Run `work` in a daemon thread; the thread if it is still at it at `end` (monotonic seconds)."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return None if join(thread, end - time.monotonic()) else thread


def give_up(threads: Iterable[threading.Thread]) -> None:
    """Let the session go on without `threads`, which would not end.

    Each is asked once more (`Released` is raised in it, which reaches Python code but not a C call that never returns),
    is ended by the next site that it passes, is not waited for at interpreter exit, and dies without a word.
    """
    for thread in threads:
        strangers.add(thread)
        if hasattr(thread, "_invoke_excepthook"):
            thread._invoke_excepthook = lambda *_: None
        _forget_at_exit(thread)
        if thread.ident is not None and thread.is_alive():
            _raise_in(thread.ident)


def _raise_in(ident: int) -> None:
    """Raise `Released` in a thread when it next runs Python code.

    Then take one here, which ends the whole interpreter's looking out for them: a thread in a C call that never returns
    doesn't take its own. Until somebody takes one, every call in every thread goes the slow way, and CPython 3.11 with
    a tracer on (coverage) starts the next Python function for ever: so none is called in between. The other thread
    keeps its own, since whoever gets the GIL with one pending looks again.
    """
    set_exception, released = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(Released)
    other, me = ctypes.c_ulong(ident), ctypes.c_ulong(threading.get_ident())
    try:
        set_exception(other, released)
        set_exception(me, released)
        for _ in range(1000):
            pass
    except Released:
        pass


def _forget_at_exit(thread: threading.Thread) -> None:
    """A non-daemon thread, or one of an executor, that never ends would keep the interpreter from exiting."""
    locks = getattr(threading, "_shutdown_locks", None)  # CPython 3.10 to 3.12
    lock = getattr(thread, "_tstate_lock", None)
    if locks is not None and lock is not None:
        locks.discard(lock)
    executors = sys.modules.get("concurrent.futures.thread")
    if executors is not None:
        executors._threads_queues.pop(thread, None)
