"""Answers every look-up exactly once, whatever it holds and whatever the worker does; must never know keys or stores.

One thread owns the socket; handlers run beside it on a few lanes, so that one that is stuck delays nobody. The ROUTER
socket interoperates with REQ peers: a message is the peer's identity and envelope, an empty frame, and the question.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import zmq

from vllm_ascend_ext.kv_pool.calls import Call, Lanes
from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import BadAnswer, DeadlineExceeded, NotRunning, PoolError, as_int
from vllm_ascend_ext.kv_pool.lookup.endpoint import Endpoint, check_path, claim, positive_seconds
from vllm_ascend_ext.kv_pool.lookup.faults import OutageLog
from vllm_ascend_ext.kv_pool.lookup.frames import readable, recv_frames, send_frames
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
_FLUSH_MS = 100


class LookupKeyServer:
    """Serves ``handler`` at ``path`` from ``start`` to ``close``.

    A question that isn't one, and a handler that raises, answers nonsense or is not done within ``handler_timeout_s``,
    are answered with 0 hits. ``failed`` holds the cause once the server's own thread has died; clients then find nobody
    at the path. ConfigError for a timeout that is not above 0, and from ``start`` if the path can't be had.

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
    ) -> None:
        self.path = path
        self.limits = limits
        self.handler_timeout_s = positive_seconds("lookup_handler_timeout", handler_timeout_s)
        check_path(path)
        self.failed: BaseException | None = None
        self._handler = handler
        self._clock = clock
        self._stats = stats or Stats()
        self._faults = OutageLog(self._stats)
        self._wake = _Wake()
        self._lanes = Lanes(
            "lookup-handler",
            size=_HANDLER_THREADS,
            max_stuck=_MAX_STUCK,
            on_fatal=self._stop_with,
            clock=clock,
        )
        self._lock = threading.Lock()  # whoever touches the socket or the open questions holds it
        self._socket: zmq.Socket[bytes] | None = None
        self._open: dict[int, _Question] = {}
        self._tickets = itertools.count()
        self._fatal: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, timeout_s: float = _START_SECONDS) -> None:
        """Return when the path is served; raises with nothing left behind if it can't be."""
        if self._thread is not None or self._closing:
            raise NotRunning(f"the look-up server at {self.path} can be started only once")
        with ExitStack() as undo:
            endpoint = claim(self.path)
            undo.callback(endpoint.release)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.destroy, linger=0)
            self._socket = _listen(context, endpoint)
            self._wake.open()
            undo.callback(self._wake.close)
            undo.callback(self._lanes.close, timeout_s)
            self._lanes.start(timeout_s)
            thread = threading.Thread(target=self._serve, args=(context, endpoint), name="lookup-server", daemon=True)
            thread.start()
            self._thread = thread
            undo.pop_all()

    def close(self, timeout_s: float = 1.0) -> list[str]:
        """Answer what is open with 0, stop, and give everything back; idempotent.

        Returns what is still stuck after ``timeout_s``: handlers that have not returned, which can do no harm any more.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self._closing = True
        self._wake.set()
        stuck = self._lanes.close(deadline.remaining())  # meanwhile the server's thread ends too
        if self._thread is not None:
            self._thread.join(deadline.remaining())
            if self._thread.is_alive():
                return [*stuck, f"the look-up server's thread at {self.path}"]
        self._wake.close()
        return stuck

    # -- the server's thread ----------------------------------------------------------------------------------------

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        try:
            poller = select.poll()
            poller.register(self._router.FD, select.POLLIN)
            poller.register(self._wake.descriptor, select.POLLIN)
            while not self._stopped():
                pause_s = self._expire()
                message = self._receive()
                if message is not None:
                    self._accept(message)
                elif not poller.poll(math.ceil(pause_s * 1000)) and not endpoint.is_ours():
                    raise PoolError(f"the socket file {self.path!r} was removed or replaced")
        except BaseException as cause:
            self.failed = cause
            self._stats.failure("lookup_server_failed", self.path, cause=cause)
        finally:
            with self._lock:
                with suppress(zmq.ZMQError):
                    for ticket in list(self._open):
                        self._send(self._open.pop(ticket), 0)
                self._open.clear()
                endpoint.release()
                context.destroy(linger=_FLUSH_MS)

    def _stopped(self) -> bool:
        self._wake.clear()  # first: what is set from now on is seen below, or wakes the poll
        if self._fatal is not None:
            raise self._fatal
        return self._closing

    @property
    def _router(self) -> zmq.Socket[bytes]:
        assert self._socket is not None
        return self._socket

    def _receive(self) -> list[Buffer] | None:
        """The next message, or None: then the socket's descriptor will tell of the next one, or ``_wake`` will."""
        with self._lock:
            return recv_frames(self._router) if readable(self._router) else None

    def _accept(self, message: Sequence[Buffer]) -> None:
        cut = next((i for i, frame in enumerate(message) if i > 0 and not frame), 0) + 1
        ticket = next(self._tickets)
        question = _Question(
            [bytes(frame) for frame in message[:cut]], Deadline.after(self.handler_timeout_s, self._clock)
        )
        with self._lock:
            self._open[ticket] = question
        try:
            request = decode_request(message[cut:], self.limits)
        except WireError as error:
            self._settle(ticket, 0, "lookup_bad_requests", error)
            return
        if not request.hashes or request.token_len == 0:
            self._settle(ticket)
            return
        handle = partial(self._handle, ticket, request)
        try:
            question.call = self._lanes.submit("look-up handler", handle, question.deadline)
        except (NotRunning, RuntimeError) as error:  # too many are stuck, or no thread is to be had
            self._settle(ticket, 0, "lookup_handler_refused", error)

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
            if self._settle(ticket, 0, "lookup_handler_timeouts", cause) and question.call is not None:
                self._lanes.give_up(question.call, cause)

    # -- a lane's thread --------------------------------------------------------------------------------------------

    def _handle(self, ticket: int, request: LookupRequest) -> None:
        try:
            try:
                hit = _checked(self._handler(request), request.token_len)
            except BadAnswer as error:
                self._settle(ticket, 0, "lookup_handler_bad_results", error)
            except BaseException as error:  # also one that is meant to end the thread: it is the handler's, not ours
                self._settle(ticket, 0, "lookup_handler_errors", error)
            else:
                self._settle(ticket, hit)
        except BaseException as cause:
            self._stop_with(cause)

    # -- either thread ----------------------------------------------------------------------------------------------

    def _settle(self, ticket: int, hit: int = 0, fault: str = "", cause: BaseException | None = None) -> bool:
        """Count, and answer, one question; False, and nothing is done, if it has been answered before."""
        with self._lock:
            question = self._open.pop(ticket, None)
            if question is None:
                return False
            if cause is None:
                self._stats.count("lookup_served")
                self._faults.over(f"the look-up server at {self.path}")
            else:
                self._faults.fault(fault, self.path, cause=cause)
            self._send(question, hit)
            if readable(self._router):  # sending may have eaten the descriptor's signal
                self._wake.set()
            return True

    def _send(self, question: _Question, hit: int) -> None:
        """A peer that has gone, or reads nothing, makes libzmq drop the answer."""
        with suppress(zmq.Again):
            send_frames(self._router, [*question.envelope, encode_reply(hit)])

    def _stop_with(self, cause: BaseException) -> None:
        """Let the server's thread raise ``cause``."""
        self._fatal = cause
        self._wake.set()


@dataclass
class _Question:
    """One message that has not been answered yet."""

    envelope: Sequence[bytes]
    deadline: Deadline
    call: Call[None] | None = None


class _Wake:
    """A descriptor that polls readable after ``set``; nothing happens to it before ``open`` and after ``close``."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._write = -1
        self._is_set = False
        self._lock = threading.Lock()

    def open(self) -> None:
        self.descriptor, self._write = os.pipe()

    def set(self) -> None:
        with self._lock:
            if self._write >= 0 and not self._is_set:
                self._is_set = True
                os.write(self._write, b"x")

    def clear(self) -> None:
        if not self._is_set:  # the usual case, without the lock
            return
        with self._lock:
            if self._is_set and self.descriptor >= 0:
                os.read(self.descriptor, 1)
                self._is_set = False

    def close(self) -> None:
        with self._lock:
            descriptors = (self.descriptor, self._write)
            self.descriptor = self._write = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _listen(context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> zmq.Socket[bytes]:
    """A ROUTER on the endpoint's descriptor. No limit of size: libzmq would cut the connection and answer nobody."""
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.setsockopt(zmq.USE_FD, endpoint.descriptor)
    router.bind(f"ipc://{endpoint.path}")
    endpoint.hand_over()  # libzmq closes it with the socket
    return router


def _checked(value: object, token_len: int) -> int:
    try:
        hit = as_int(value)
    except TypeError:  # arrays and tensors of more than one entry
        hit = None
    if hit is None:
        raise BadAnswer(f"the look-up handler gave a {type(value).__name__} where an integer was due")
    if not 0 <= hit <= token_len:
        raise BadAnswer(f"the look-up handler gave {hit} hit tokens where 0 to {token_len} can be")
    return hit
