"""Runs each piece of work in a process of its own, some at once; a crash or a time-out costs only that piece.

Processes are forked, so that what the parent has imported is there at once. A child leads a process group: what it
started dies with it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")
Result = TypeVar("Result")

#: Does one piece of work: the work, a folder of its own, and a function that is told what begins.
Worker = Callable[[Work, Path, Callable[[str], None]], Result]


@dataclass(frozen=True)
class Died:
    """A process that brought no result: what it was at, how it ended, and the last that it printed."""

    stage: str
    how: str
    timed_out: bool
    output: str


@dataclass
class _Running(Generic[Work]):
    index: int
    work: Work
    process: ForkProcess
    connection: Connection
    folder: tempfile.TemporaryDirectory[str]
    deadline: float
    stage: str = "starting"


def run(
    worker: Worker[Work, Result], pieces: Sequence[Work], *, at_once: int, timeout: float
) -> Iterator[tuple[int, Result | Died]]:
    """Work through ``pieces``; gives (index, result or Died) as each ends.

    Args:
        worker: called in the child. An exception it raises is a ``Died`` with the exception's text.
        pieces: what to work on; need not be picklable.
        at_once: processes at a time, at least 1.
        timeout: seconds that one piece may take before its process group is killed.
    """
    if at_once < 1:
        raise ValueError(f"at_once is {at_once}; at least 1 process is needed")
    waiting = list(enumerate(pieces))[::-1]
    running: list[_Running[Work]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, work = waiting.pop()
                running.append(_start(worker, index, work, timeout))
            for one in _ready(running):
                outcome = _collect(one)
                if outcome is not None:
                    running.remove(one)
                    yield one.index, outcome
    finally:
        for one in running:
            _end(one)


def _start(worker: Worker[Work, Result], index: int, work: Work, timeout: float) -> _Running[Work]:
    # The folder is the parent's, so that it goes away however the child ends.
    folder = tempfile.TemporaryDirectory(prefix="lowering-")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(worker, work, Path(folder.name), theirs))
    process.start()
    theirs.close()
    return _Running(index, work, process, ours, folder, time.monotonic() + timeout)


def _child(worker: Worker[Any, Any], work: Any, folder: Path, connection: Connection) -> None:
    os.setsid()
    faulthandler.disable()  # the parent tells of a crash; a trace of Python's own would go to what the parent inherited
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    try:
        result = worker(work, folder, lambda stage: connection.send(("stage", stage)))
        connection.send(("result", result))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        # What a library registered to run at exit belongs to the parent.
        os._exit(0)


def _ready(running: list[_Running[Work]]) -> list[_Running[Work]]:
    """Wait until one has something to tell or its time is up."""
    patience = max(0.0, min(one.deadline for one in running) - time.monotonic())
    told = set(wait([one.connection for one in running], patience))
    now = time.monotonic()
    return [one for one in running if one.connection in told or one.deadline <= now]


def _collect(one: _Running[Work]) -> Any | Died | None:
    """The outcome of a process, or None if it has only told what it is at."""
    try:
        while one.connection.poll():
            kind, value = one.connection.recv()
            if kind == "stage":
                one.stage = value
            elif kind == "result":
                _end(one)
                return value
            else:
                return _died(one, value)
    except (EOFError, OSError, pickle.UnpicklingError):
        return _died(one, _how(one.process))
    if one.deadline <= time.monotonic():
        return _died(one, "it was still running when its time was up", timed_out=True)
    return None


def _how(process: ForkProcess) -> str:
    _kill_group(process)
    process.join()
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} and no result"


def _died(one: _Running[Work], how: str, timed_out: bool = False) -> Died:
    path = Path(one.folder.name) / "output"
    output = path.read_text(errors="replace")[-4000:] if path.exists() else ""
    _end(one)
    return Died(one.stage, how, timed_out, output)


def _end(one: _Running[Work]) -> None:
    """End the process with all that it started, and remove its folder."""
    _kill_group(one.process)
    one.process.join()
    one.connection.close()
    one.folder.cleanup()


def _kill_group(process: ForkProcess) -> None:
    """Kill a process that wasn't waited for yet, and what it started: until then its number can't be another's."""
    if process.pid is None or process.exitcode is not None:
        return
    for kill in (os.killpg, os.kill):  # there is no group yet if the child was just forked
        try:
            kill(process.pid, signal.SIGKILL)
            return
        except ProcessLookupError:
            continue
