"""Kernels that the lowering check is tried on; loaded by the check alone, in the environment of the Ascend compiler."""

import triton
import triton.language as tl

from vllm_ascend_ext.kernels.lowering.cases import A2, Case

FLOATS = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32"}
INTS = {"x_ptr": "*i32", "o_ptr": "*i32", "n": "i32"}


@triton.jit
def add_tiles(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, BLOCK * tl.num_programs(0)):
        off = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + off, mask=off < n, other=0.0)
        y = tl.load(y_ptr + off, mask=off < n, other=0.0)
        tl.store(o_ptr + off, x + y, mask=off < n)


@triton.jit
def bit_of(word, position):
    return (word >> position) & 1  # the place of the shift


@triton.jit
def unpack(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(x_ptr + (off >> 5), mask=off < n, other=0)
    x = tl.load(x_ptr + off, mask=off < n, other=0)
    tl.store(o_ptr + off, bit_of(x, off & 31) + word, mask=off < n)  # where bit_of is called


@triton.jit
def one_operation(x_ptr, o_ptr, n, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + off, mask=off < n, other=0)
    if OPERATION == "remainder":
        r = x % 7
    elif OPERATION == "power of two":
        r = x & 31
    elif OPERATION == "shift by a constant":
        r = x >> 3
    elif OPERATION == "scan":
        r = tl.cumsum(x, 0)
    elif OPERATION == "scan over the first axis":
        r = tl.reshape(tl.cumsum(tl.reshape(x, (BLOCK // 32, 32)), 0), (BLOCK,))
    elif OPERATION == "i64":
        r = (x.to(tl.int64) + 1).to(tl.int32)
    elif OPERATION == "division":
        r = x // 7
    elif OPERATION == "histogram":
        r = tl.histogram(x, BLOCK)
    elif OPERATION == "atomic or":
        tl.atomic_or(o_ptr + (x & 1023), 1, mask=off < n)
        r = x
    elif OPERATION == "32 lanes":
        bits = 1 << tl.arange(0, 32)
        r = x + tl.sum(bits, axis=0)
    elif OPERATION == "sort":
        r = tl.sort(x)
    elif OPERATION == "wrong shape":
        r = x + tl.arange(0, 3)
    tl.store(o_ptr + off, r, mask=off < n)


@triton.jit
def with_default(x_ptr, o_ptr, n, BLOCK: tl.constexpr = 2048):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + off, tl.load(x_ptr + off, mask=off < n, other=0) % 5, mask=off < n)


@triton.jit
def masked(x_ptr, o_ptr, d_ptr, n, low, flag, MASK: tl.constexpr, ACCESS: tl.constexpr, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASK == "off < n":
        m = off < n
    elif MASK == "off <= n - 1":
        m = off <= n - 1
    elif MASK == "both ends and a flag":
        m = (off >= low) & (off < n) & (flag > 0)
    elif MASK == "n > off":
        m = n > off
    elif MASK == "off > low":
        m = (off > low) & (off < n)
    elif MASK == "off != n":
        m = off != n
    elif MASK == "off - low < n":
        m = off - low < n
    elif MASK == "or":
        m = (off < n) | (off < low)
    elif MASK == "data":
        m = (off < n) & (tl.load(d_ptr + off) > 0)
    if ACCESS == "load":
        tl.store(o_ptr + off, tl.load(x_ptr + off, mask=m, other=0.0))
    else:
        x = tl.load(x_ptr + off)
        tl.store(o_ptr + off, x, mask=m)


@triton.jit
def gather(x_ptr, i_ptr, o_ptr, n, SAFE: tl.constexpr, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(i_ptr + off, mask=off < n, other=0)
    if not SAFE:
        index += off
    tl.store(o_ptr + off, tl.load(x_ptr + index, mask=off < n, other=0.0), mask=off < n)


@triton.jit
def tail(x_ptr, o_ptr, n, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + off, mask=off < n, other=0)
    if LENGTH > BLOCK:
        last = n - 8 + tl.arange(0, 8)
        x += tl.sum(tl.load(x_ptr + tl.where(last < 0, 0, last)), axis=0)  # eight elements, if there are two blocks
    tl.store(o_ptr + off, x, mask=off < n)


@triton.jit
def paces(x_ptr, o_ptr, n, rows, BLOCK: tl.constexpr):
    for row in range(rows):
        scale = tl.load(x_ptr + row)
        for start in range(0, n, BLOCK):
            off = start + tl.arange(0, BLOCK)
            bias = tl.load(x_ptr + n + start)
            x = tl.load(x_ptr + row * n + off, mask=off < n, other=0.0)
            tl.store(o_ptr + row * n + off, x * scale + bias, mask=off < n)
    for i in range(n):
        tl.store(o_ptr + i, tl.load(x_ptr + i) + 1.0)


def plain(x_ptr):
    return x_ptr


def _die():
    import os

    os.abort()


def _hang():
    import threading

    threading.Event().wait()


DEADLY = _die()
ENDLESS = _hang()


@triton.jit
def crashes(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + n, DEADLY)


@triton.jit
def hangs(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + n, ENDLESS)


LOWERING_CASES = [
    Case(
        kernel="add_tiles",
        name="declared",
        signature={**FLOATS, "y_ptr": "*fp32"},
        constants={"BLOCK": 8192},
        values={"n": 151_936, "grid": 40},
    ),
    Case(
        kernel="unpack",
        name="declared, allowed",
        signature=INTS,
        constants={"BLOCK": 1024},
        targets=(A2,),
        multibuffer=(True,),
        allow={"scalar-loop": "the test wants it so", "unguarded-gather": "the test wants it so"},
    ),
]
