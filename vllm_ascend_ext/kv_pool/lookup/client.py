"""Asks the worker how many tokens the pool holds, and answers 0 rather than wait; must never know keys or stores.

A socket that got anything but an answer is thrown away: the next question goes out on a new one, so a late answer has
nowhere to arrive. libzmq reports a broken or refused connection at once, and such a server isn't waited for at all.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq

from vllm_ascend_ext.kv_pool.clock import MONOTONIC, Clock, Deadline
from vllm_ascend_ext.kv_pool.errors import ClosedError, DeadlineExceeded, PoolError
from vllm_ascend_ext.kv_pool.lookup.endpoint import check_path, positive_seconds
from vllm_ascend_ext.kv_pool.lookup.faults import OutageLog
from vllm_ascend_ext.kv_pool.lookup.frames import readable, recv_frames, send_frames
from vllm_ascend_ext.kv_pool.lookup.wake import Wake
from vllm_ascend_ext.kv_pool.lookup.wire import Buffer, LookupRequest, WireError, decode_reply, encode_request
from vllm_ascend_ext.kv_pool.observe import Stats

DEFAULT_TIMEOUT_S = 1.0
DEFAULT_BACKOFF_S = 5.0

_MAX_ANSWER_BYTES = 1 << 20
"""libzmq refuses a larger frame by cutting the connection, before the bytes are taken into memory."""

_OVERTAKEN_MS = 10  # the news of a lost connection can overtake the answer that came before it
_names = itertools.count()  # libzmq frees an inproc name some time after its socket was closed
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Unreachable(PoolError):
    """Nobody listens at the path, or the connection broke."""


class LookupKeyClient:
    """Look-ups over one REQ socket at ``path``. ``lookup`` is for one thread at a time; ``close`` for any.

    A server that is dead or silent costs at most ``timeout_s``, and then nothing for ``backoff_s``: until that has
    passed every look-up is answered with 0 at once. ConfigError for a period that is not above 0.

    Counters: ``lookup_ok``, and as failures ``lookup_timeouts``, ``lookup_unreachable``, ``lookup_bad_answers``,
    ``lookup_errors`` (a fault of the socket itself), ``lookup_skipped`` (within a back-off) and ``lookup_closed``.
    """

    def __init__(
        self,
        path: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backoff_s: float = DEFAULT_BACKOFF_S,
        clock: Clock = MONOTONIC,
        stats: Stats | None = None,
    ) -> None:
        self.path = path
        self.timeout_s = positive_seconds("lookup_timeout", timeout_s)
        self.backoff_s = positive_seconds("lookup_backoff", backoff_s)
        check_path(path)
        self._clock = clock
        self._stats = stats or Stats()
        self._faults = OutageLog(self._stats)
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._retry_at = -math.inf
        self._channel: _Channel | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        self._wake = Wake()
        self._wake.open()
        self._wake_read = self._wake.descriptor

    def lookup(
        self,
        token_len: int,
        hashes: Sequence[bytes | str],
        group_ids: Sequence[int] = (0,),
        hbm_hit_tokens: int = 0,
        request_id: str = "-",
    ) -> int:
        """How many of the first ``token_len`` tokens the pool holds; 0 also for every failure of the peer.

        ``hashes`` are block hashes, raw or as hex text. Returns within ``timeout_s`` (rounded up to milliseconds).
        WireError if an argument is not of its type or range: that is the caller's fault, not the peer's.
        """
        if not hashes or token_len == 0:
            return 0
        frames = encode_request(LookupRequest(token_len, group_ids, hbm_hit_tokens, hashes))
        deadline = Deadline.after(self.timeout_s, self._clock)
        with self._condition:
            if self._busy:
                deadline.wait_for(self._condition, lambda: self._closed or not self._busy)
            if self._closed:
                self._faults.fault("lookup_closed", self.path, (request_id,))
                return 0
            if self._busy:
                self._faults.fault("lookup_timeouts", f"{self.path} is busy with another look-up", (request_id,))
                return 0
            if self._clock.now() < self._retry_at:
                self._stats.count("lookup_skipped")
                return 0
            self._busy = True
        try:
            return self._judged(frames, token_len, deadline, request_id)
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def close(self, timeout_s: float = 1.0) -> list[str]:
        """End a running look-up and give everything back; idempotent, from any thread.

        Returns what is still stuck after ``timeout_s``: nothing, or a look-up that could not be ended.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        with self._condition:
            if not self._closed:
                self._closed = True
                self._wake.set()
                self._condition.notify_all()
            if not deadline.wait_for(self._condition, lambda: not self._busy):
                return [f"a look-up at {self.path}"]
            context, self._context = self._context, None
            if context is None:
                return []
            self._drop_channel()
            context.destroy(linger=0)
            self._wake.close()
        return []

    # -- one look-up; the caller has set ``_busy`` ------------------------------------------------------------------

    def _judged(self, frames: list[bytes], token_len: int, deadline: Deadline, request_id: str) -> int:
        """The hit tokens, or 0 with the failure counted and, once per outage, logged."""
        whom = (request_id,)
        usable = False
        try:
            hit = decode_reply(self._ask(frames, deadline), token_len)
            usable = True
        except WireError as error:  # the peer lives and has answered: no reason to spare it
            self._faults.fault("lookup_bad_answers", self.path, whom, error)
            return 0
        except ClosedError as error:
            self._faults.fault("lookup_closed", self.path, whom, error)
            return 0
        except DeadlineExceeded as error:
            self._begin_backoff("lookup_timeouts", whom, error)
            return 0
        except Unreachable as error:
            self._begin_backoff("lookup_unreachable", whom, error)
            return 0
        except Exception as error:
            self._begin_backoff("lookup_errors", whom, error)
            return 0
        finally:
            if not usable:
                self._drop_channel()
        self._stats.count("lookup_ok")
        self._faults.over(f"look-up at {self.path}")
        return hit

    def _ask(self, frames: list[bytes], deadline: Deadline) -> list[Buffer]:
        if self._channel is not None and not self._channel.lost():
            with suppress(Unreachable):  # it may have broken only now, and a new server be there
                return self._channel.exchange(frames, deadline)
        self._drop_channel()
        assert self._context is not None
        self._channel = _Channel(self._context, self.path, self._wake_read)
        return self._channel.exchange(frames, deadline)

    def _begin_backoff(self, name: str, whom: tuple[str], cause: BaseException) -> None:
        self._retry_at = self._clock.now() + self.backoff_s
        self._faults.fault(name, f"{self.path}; 0 hits, asked again in {self.backoff_s} s", whom, cause)

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class _Channel:
    """One REQ socket that connects once, beside the monitor that tells when the connection is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str, wake: int) -> None:
        self._path = path
        self._wake = wake
        self._poller = zmq.Poller()
        self._monitor = context.socket(zmq.PAIR)
        self._socket = context.socket(zmq.REQ)
        try:
            self._socket.linger = 0
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
            name = f"inproc://lookup-monitor-{next(_names)}"
            self._socket.monitor(name, _LOST)
            self._monitor.connect(name)
            self._socket.connect(f"ipc://{path}")
            for source in (self._socket, self._monitor, wake):
                self._poller.register(source, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    def lost(self) -> bool:
        return readable(self._monitor)

    def exchange(self, frames: list[bytes], deadline: Deadline) -> list[Buffer]:
        """The frames that came back; raises DeadlineExceeded, Unreachable or ClosedError."""
        send_frames(self._socket, frames)
        ready = dict(self._poller.poll(_ms_left(deadline)))
        if self._monitor in ready and self._socket not in ready:
            self._socket.poll(min(_OVERTAKEN_MS, _ms_left(deadline)))
        if readable(self._socket):
            return recv_frames(self._socket)
        if self._wake in ready:
            raise ClosedError(f"the client of {self._path} was closed")
        if self.lost():
            raise Unreachable(f"no connection to {self._path}")
        raise DeadlineExceeded(f"no answer from {self._path}")

    def close(self) -> None:
        """Nothing of the socket is left, whatever state it is in."""
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _ms_left(deadline: Deadline) -> int:
    return math.ceil(deadline.remaining() * 1000)
