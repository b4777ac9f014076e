"""Moves bytes between blocks and the host memory of a store, chunk by chunk under a fence; must never know keys.

``Copier`` is the seam to the accelerator: blocks in device memory need one that hands the addresses to the device's
runtime.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_ext.kv_pool.fence import Fence

CHUNK_BYTES = 8 << 20
"""How much is copied, at least, under one hold of the fence (less than twice as much at most)."""

Ints = npt.NDArray[np.int64]

_WORD_BYTES = 8


class Copier(Protocol):
    """Copies by raw address; returns when the bytes have arrived."""

    def to_host(self, host: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]) -> None: ...

    def from_host(self, host: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]) -> None: ...


def _memmove(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


class HostCopier:
    """For blocks in host memory.

    Short pieces are moved without letting go of the GIL (PyDLL). Whoever releases it for 10 us waits up to 5 ms to get
    it back while another Python thread is busy: 256 blocks of 128 KiB took 890 ms so, and 9 ms this way.

    Long pieces of whole words go through a loop of numpy's, which releases it, too: in a virtual machine glibc takes
    the host's whole cache for ours, so it copies with ``rep movsb`` instead of past the cache, and is a sixth slower
    than a plain loop on the EPYC that this was measured on.
    """

    RELEASE_BYTES = 1 << 20

    def __init__(self) -> None:
        self._short = _memmove(ctypes.PyDLL(None))
        self._long = _memmove(ctypes.CDLL(None))

    def to_host(self, host: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]) -> None:
        self._move(host, blocks, sizes)

    def from_host(self, host: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]) -> None:
        self._move(blocks, host, sizes)

    def _move(self, to: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> None:
        if max(sizes) < self.RELEASE_BYTES:
            deque(map(self._short, to, start, sizes), maxlen=0)  # a loop in C: these are many
        else:
            for target, source, size in zip(to, start, sizes, strict=True):
                if size < self.RELEASE_BYTES:
                    self._short(target, source, size)
                elif (target | source | size) % _WORD_BYTES:
                    self._long(target, source, size)
                else:
                    np.positive(_words(source, size), out=_words(target, size))


def _words(address: int, size: int) -> npt.NDArray[np.uint64]:
    return np.ctypeslib.as_array((ctypes.c_uint64 * (size // _WORD_BYTES)).from_address(address))


def copy_fenced(copier: Copier, saving: bool, host: Ints, blocks: Ints, sizes: Ints, fence: Fence) -> int:
    """Copy the ranges in order, to the host if ``saving``; stops where the fence is revoked. Bytes copied."""
    host, blocks, sizes = _pieces(host, blocks, sizes)
    if not len(sizes):
        return 0
    ends = np.cumsum(sizes)
    chunk = (ends - 1) // CHUNK_BYTES
    cuts = np.append(np.flatnonzero(chunk[1:] != chunk[:-1]) + 1, len(chunk))
    copy = copier.to_host if saving else copier.from_host
    first = 0
    for cut in cuts.tolist():
        with fence.hold() as granted:
            if not granted:
                break
            copy(host[first:cut].tolist(), blocks[first:cut].tolist(), sizes[first:cut].tolist())
        first = cut
    return int(ends[first - 1]) if first else 0


def _pieces(host: Ints, blocks: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """The same bytes in the same order: neighbours on both sides in one piece, none longer than a chunk."""
    if not sizes.all():
        some = sizes > 0
        host, blocks, sizes = host[some], blocks[some], sizes[some]
    if not len(sizes):
        return host, blocks, sizes
    seam = (host[1:] == host[:-1] + sizes[:-1]) & (blocks[1:] == blocks[:-1] + sizes[:-1])
    if not seam.any() and sizes.max() <= CHUNK_BYTES:
        return host, blocks, sizes
    heads = np.flatnonzero(np.concatenate(([True], ~seam)))
    lengths = np.add.reduceat(sizes, heads)
    counts = -(-lengths // CHUNK_BYTES)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    skip = nth * CHUNK_BYTES
    return (
        np.repeat(host[heads], counts) + skip,
        np.repeat(blocks[heads], counts) + skip,
        np.minimum(np.repeat(lengths, counts) - skip, CHUNK_BYTES),
    )
