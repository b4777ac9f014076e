"""What a bystander sees while a session is armed: ERROR log records, dying threads, joined threads; judges nothing."""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faultinject.errors import Released, ThreadKilled

_formatter = logging.Formatter()
_real_join = threading.Thread.join


def join(thread: threading.Thread, timeout: float) -> bool:
    """Wait for `thread` without leaving a trace in any `Evidence`; True once it has ended."""
    _real_join(thread, max(0.0, timeout))
    return not thread.is_alive()


@dataclass(frozen=True)
class ErrorRecord:
    """A log record of level ERROR or above, as text (the record itself would keep frames and what they hold alive)."""

    logger: str
    message: str

    def __str__(self) -> str:
        return f"{self.logger}: {self.message}"


@dataclass(frozen=True)
class ThreadDeath:
    """An exception that left a thread's target."""

    thread: str
    error: str
    injected: bool
    traceback: str


def _reduce_to_text(record: logging.LogRecord) -> None:
    """Handlers that keep records (caplog does) would pin arguments and frames, and with them sockets and threads."""
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        record.exc_text = record.exc_text or _formatter.formatException(record.exc_info)
        record.exc_info = None
    try:
        record.msg, record.args = record.getMessage(), None
    except Exception:  # a wrong format string is reported by the handlers, as always
        return


class Evidence:
    """Collects, between `install` and `remove`, what a bystander could notice.

    Logger.callHandlers is replaced rather than a handler added, so that loggers with propagate=False are seen too.
    Threads in `strangers` (left over by earlier cases) leave no evidence.
    """

    def __init__(self, strangers: weakref.WeakSet[threading.Thread], forward_deaths: bool) -> None:
        self.errors: list[ErrorRecord] = []
        self.deaths: list[ThreadDeath] = []
        self.joined: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._strangers = strangers
        self._forward = forward_deaths
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        self._install_log()
        self._install_excepthook()
        self._install_join()

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _install_log(self) -> None:
        original = logging.Logger.callHandlers

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            _reduce_to_text(record)
            if record.levelno >= logging.ERROR and threading.current_thread() not in self._strangers:
                self.errors.append(ErrorRecord(record.name, str(record.msg)))
            original(logger, record)

        logging.Logger.callHandlers = call_handlers  # type: ignore[assignment,method-assign]  # a plain function works
        self._undo.append(lambda: setattr(logging.Logger, "callHandlers", original))

    def _install_excepthook(self) -> None:
        original = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> Any:
            if issubclass(args.exc_type, SystemExit):  # how a thread may end
                return
            injected = issubclass(args.exc_type, ThreadKilled | Released)
            if args.thread is None or args.thread not in self._strangers:
                text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
                name = args.thread.name if args.thread else "?"
                self.deaths.append(ThreadDeath(name, f"{args.exc_type.__name__}: {args.exc_value}", injected, text))
            if self._forward and not injected:
                original(args)

        threading.excepthook = hook
        self._undo.append(lambda: setattr(threading, "excepthook", original))

    def _install_join(self) -> None:
        original = threading.Thread.join
        joined = self.joined

        def noted_join(thread: threading.Thread, timeout: float | None = None) -> None:
            joined.add(thread)
            original(thread, timeout)

        threading.Thread.join = noted_join  # type: ignore[assignment,method-assign]  # a plain function works
        self._undo.append(lambda: setattr(threading.Thread, "join", original))
