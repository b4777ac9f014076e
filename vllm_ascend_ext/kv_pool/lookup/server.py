"""Answers every look-up exactly once, whatever it holds and whatever the worker does; must never know keys or stores.

A few threads take turns at the socket; whoever got a question hands the turn on before it runs the handler, so that one
that is stuck delays nobody. The ROUTER socket interoperates with REQ peers: a message is the peer's identity and
envelope, an empty frame, and the question.
"""

from __future__ import annotations

import itertools
import math
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import zmq

from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import BadAnswer, DeadlineExceeded, NotRunning, PoolError, as_int
from vllm_ascend_ext.kv_pool.lookup.crew import Crew, Work
from vllm_ascend_ext.kv_pool.lookup.endpoint import check_path, claim, positive_seconds
from vllm_ascend_ext.kv_pool.lookup.faults import OutageLog
from vllm_ascend_ext.kv_pool.lookup.frames import readable, recv_frames, send_frames
from vllm_ascend_ext.kv_pool.lookup.wake import Wake
from vllm_ascend_ext.kv_pool.lookup.wire import (
    DEFAULT_LIMITS,
    Buffer,
    LookupRequest,
    WireError,
    WireLimits,
    decode_request,
    encode_reply,
)
from vllm_ascend_ext.kv_pool.observe import Stats

Handler: TypeAlias = Callable[[LookupRequest], int]
"""Gives the hit tokens, 0 to ``token_len``. Called on several threads; may raise; is given up after its deadline."""

DEFAULT_HANDLER_TIMEOUT_S = 0.8
"""Below the client's 1 s, so that an overdue handler is answered for before its client gives up."""

_HANDLER_THREADS = 2
_MAX_STUCK = 8
_WATCH_SECONDS = 1.0
_START_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_FLUSH_MS = 100


class LookupKeyServer:
    """Serves ``handler`` at ``path`` from ``start`` to ``close``.

    A question that isn't one, and a handler that raises, answers nonsense or is not done within ``handler_timeout_s``,
    are answered with 0 hits. ``on_overdue`` is told of each handler that has begun and is not done in time, so that its
    owner can spare the next ones the wait; it must not raise. ``failed`` holds the cause once the server itself has
    died; clients then find nobody at the path. ConfigError for a timeout that is not above 0, and from ``start`` if the
    path can't be had.

    Counters: ``lookup_served``, and as failures ``lookup_bad_requests``, ``lookup_handler_errors``,
    ``lookup_handler_bad_results``, ``lookup_handler_timeouts``, ``lookup_handler_refused`` (too many stuck) and
    ``lookup_server_failed``.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        limits: WireLimits = DEFAULT_LIMITS,
        handler_timeout_s: float = DEFAULT_HANDLER_TIMEOUT_S,
        clock: Clock = MONOTONIC,
        stats: Stats | None = None,
        on_overdue: Callable[[], object] | None = None,
    ) -> None:
        self.path = path
        self.limits = limits
        self.handler_timeout_s = positive_seconds("lookup_handler_timeout", handler_timeout_s)
        self.close_timeout_s = _CLOSE_SECONDS
        check_path(path)
        self.failed: BaseException | None = None
        self._handler = handler
        self._on_overdue = on_overdue
        self._clock = clock
        self._stats = stats or Stats()
        self._faults = OutageLog(self._stats)
        self._crew = Crew(
            "lookup-handler", self._lead, self._fail, size=_HANDLER_THREADS, max_stuck=_MAX_STUCK, clock=clock
        )
        self._lock = threading.Lock()  # whoever touches the socket or the open questions holds it
        self._socket: _Socket | None = None
        self._open: dict[int, _Question] = {}
        self._tickets = itertools.count()
        self._wake = Wake()
        self._started = False

    def start(self, timeout_s: float = _START_SECONDS) -> None:
        """Return when the path is served; raises with nothing left behind if it can't be."""
        if self._started:
            raise NotRunning(f"the look-up server at {self.path} can be started only once")
        self._started = True
        try:
            self._wake.open()
            self._socket = _Socket(self.path, self._wake.descriptor, self._clock)
            self._crew.start(timeout_s)
        except BaseException:
            self.close(timeout_s)
            raise

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Answer what is open with 0, stop, and give everything back; idempotent.

        Returns what is still stuck after ``timeout_s`` (``close_timeout_s``, if not given): handlers that have not
        returned, which can do no harm any more.
        """
        self._started = True
        deadline = Deadline.after(self.close_timeout_s if timeout_s is None else timeout_s, self._clock)
        shut = self._shut(deadline)
        stuck = self._crew.close(deadline.remaining())
        if not shut and not self._shut(deadline):
            return [*stuck, f"the look-up socket {self.path}"]
        self._wake.close()
        return stuck

    # -- the thread that leads --------------------------------------------------------------------------------------

    def _lead(self) -> Work | None:
        """Answer what needs no handler, until there is a question for one; None once the server is shut."""
        while True:
            self._wake.clear()  # first: what is set from now on is seen below, or wakes the poll
            pause_s = self._expire()
            with self._lock:
                socket = self._socket
                message = socket.receive() if socket is not None else None
            if socket is None:
                return None
            if message is None:
                socket.wait(pause_s)
            elif (work := self._accept(message)) is not None:
                return work

    def _accept(self, message: Sequence[Buffer]) -> Work | None:
        """Open the question in ``message``; the work that it makes, or None if it could be answered here."""
        cut = next((i for i, frame in enumerate(message) if i > 0 and not frame), 0) + 1
        ticket = next(self._tickets)
        envelope = [bytes(frame) for frame in message[:cut]]
        question = _Question(envelope, Deadline.after(self.handler_timeout_s, self._clock))
        with self._lock:
            self._open[ticket] = question
        try:
            request = decode_request(message[cut:], self.limits)
        except WireError as error:
            self._settle(ticket, 0, "lookup_bad_requests", error)
            return None
        if not request.hashes or request.token_len == 0:
            self._settle(ticket)
            return None
        question.work = Work(
            run=partial(self._handle, ticket, request),
            refuse=partial(self._settle, ticket, 0, "lookup_handler_refused"),
        )
        return question.work

    def _expire(self) -> float:
        """Answer for every handler that is overdue; the seconds until the next may be, or the socket file is due."""
        while True:
            with self._lock:
                ticket, question = next(iter(self._open.items()), (-1, None))  # the oldest is due first
            if question is None:
                return _WATCH_SECONDS
            remaining = question.deadline.remaining()
            if remaining > 0:
                return min(remaining, _WATCH_SECONDS)
            cause = DeadlineExceeded(f"the look-up handler was not done within {self.handler_timeout_s} s")
            if self._settle(ticket, 0, "lookup_handler_timeouts", cause) and question.work is not None:
                if question.work.begun and self._on_overdue is not None:
                    self._on_overdue()
                self._crew.give_up(question.work, cause)

    # -- the thread that has handed the lead on ---------------------------------------------------------------------

    def _handle(self, ticket: int, request: LookupRequest) -> None:
        try:
            hit = _checked(self._handler(request), request.token_len)
        except BadAnswer as error:
            self._settle(ticket, 0, "lookup_handler_bad_results", error)
        except BaseException as error:  # also one that is meant to end the thread: it is the handler's, not ours
            self._settle(ticket, 0, "lookup_handler_errors", error)
        else:
            self._settle(ticket, hit)

    # -- any thread -------------------------------------------------------------------------------------------------

    def _settle(self, ticket: int, hit: int = 0, fault: str = "", cause: BaseException | None = None) -> bool:
        """Count, and answer, one question; False, and nothing is done, if it has been answered before."""
        with self._lock:
            question = self._open.pop(ticket, None)
            if question is None or self._socket is None:
                return False
            if cause is None:
                self._stats.count("lookup_served")
                self._faults.over(f"the look-up server at {self.path}")
            else:
                self._faults.fault(fault, self.path, cause=cause)
            if self._socket.send([*question.envelope, encode_reply(hit)]):
                self._wake.set()
            return True

    def _fail(self, cause: BaseException) -> None:
        self.failed = cause
        self._stats.failure("lookup_server_failed", self.path, cause=cause)
        self._shut(Deadline.after(_START_SECONDS, self._clock))

    def _shut(self, deadline: Deadline) -> bool:
        """Answer what is open with 0, free the path, and let whoever leads end; False if somebody holds the lock."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            return False
        try:
            socket, self._socket = self._socket, None
            if socket is not None:
                socket.close([[*question.envelope, encode_reply(0)] for question in self._open.values()])
            self._open.clear()
        finally:
            self._lock.release()
            self._wake.set()
        return True


@dataclass
class _Question:
    """One message that has not been answered yet."""

    envelope: Sequence[bytes]
    deadline: Deadline
    work: Work | None = None


class _Socket:
    """The claimed path and the ROUTER that listens on it. All but ``wait`` needs the server's lock."""

    def __init__(self, path: str, wake: int, clock: Clock) -> None:
        self.path = path
        self._watch = Deadline.after(_WATCH_SECONDS, clock)
        self._endpoint = claim(path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = select.poll()
        try:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.linger = 0
            # No limit of size: libzmq would cut the connection, and the request would have no answer.
            self._router.setsockopt(zmq.USE_FD, self._endpoint.descriptor)
            self._router.bind(f"ipc://{path}")
            self._endpoint.hand_over()  # libzmq closes it with the socket
            self._poller.register(self._router.FD, select.POLLIN)
            self._poller.register(wake, select.POLLIN)
        except BaseException:
            self.close([])
            raise

    def receive(self) -> list[Buffer] | None:
        """The next message, or None: then ``wait`` tells of the next one. PoolError as from ``wait``."""
        if self._watch.expired:  # one that is never idle must notice it, too
            self._check_path()
            self._watch = Deadline.after(_WATCH_SECONDS, self._watch.clock)
        return recv_frames(self._router) if readable(self._router) else None

    def send(self, message: Sequence[bytes]) -> bool:
        """True if this has eaten the signal that ``wait`` waits for: whoever waits must be woken.

        A peer that has gone, or reads nothing, makes libzmq drop the message.
        """
        with suppress(zmq.Again):
            send_frames(self._router, message)
        return readable(self._router)

    def wait(self, seconds: float) -> None:
        """Return when there may be a message, or it is woken; PoolError if nobody can find the path any more."""
        if not self._poller.poll(math.ceil(seconds * 1000)):
            self._check_path()

    def _check_path(self) -> None:
        if not self._endpoint.is_ours():
            raise PoolError(f"the socket file {self.path!r} was removed or replaced")

    def close(self, messages: Sequence[Sequence[bytes]]) -> None:
        """Send ``messages``, and leave nothing behind."""
        try:
            with suppress(zmq.ZMQError):
                for message in messages:
                    self.send(message)
        finally:
            self._endpoint.release()
            self._context.destroy(linger=_FLUSH_MS)


def _checked(value: object, token_len: int) -> int:
    hit = as_int(value)
    if hit is None:
        raise BadAnswer(f"the look-up handler gave a {type(value).__name__} where an integer was due")
    if not 0 <= hit <= token_len:
        raise BadAnswer(f"the look-up handler gave {hit} hit tokens where 0 to {token_len} can be")
    return hit
