"""Sends and takes the frames of one message without waiting; must never know what they mean.

pyzmq's multipart calls look at every part and ask for RCVMORE through a socket option: for the six frames of a
look-up, that takes longer than libzmq does.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from vllm_ascend_ext.kv_pool.lookup.wire import Buffer

_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_SMALL_BYTES = 4096  # below this a copy is cheaper than a view that keeps libzmq's message


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message; zmq.Again if it can't be queued now.

    Copies: a zero-copy send starts a thread of pyzmq's, which would be left behind.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    socket.send(frames[-1], _NOW)


def recv_frames(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """The frames of the next message, large ones as views on libzmq's memory; zmq.Again if there is none."""
    frames: list[Buffer] = []
    while True:
        frame = socket.recv(_NOW, copy=False)
        frames.append(frame.bytes if len(frame) < _SMALL_BYTES else frame.buffer)
        if not frame.more:
            return frames


def readable(socket: zmq.Socket[bytes]) -> bool:
    """True if a message can be taken now. Also makes libzmq look after what has happened to the socket."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
