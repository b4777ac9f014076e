"""One bad address fails the block that it is of, and no other; limits are kept; nothing is copied behind a fence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.backend.base import GLOBAL_TO_LOCAL
from vllm_ascend_ext.kv_pool.backend.gva_client import Copied
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.layerwise.batches import Ranges
from vllm_ascend_ext.kv_pool.layerwise.copying import LimitedCopier


class Engine:
    """Refuses every batch that has a bad global address, with ``status``; remembers what it has copied."""

    def __init__(self, bad=(), status=Status.REFUSED, raised=None):
        self.bad, self.status, self.raised = set(bad), status, raised
        self.calls = []
        self.copied = []

    def copy(self, gvas, addrs, sizes, direction, fence):
        self.calls.append(gvas.tolist())
        if self.bad.intersection(gvas.tolist()):
            return Copied(self.status, -3102, self.raised)
        self.copied += gvas.tolist()
        return Copied(Status.OK)


def ranges(count, pieces=2, length=8):
    """Block b has the global addresses b + 1 and b + 1001."""
    gvas = np.arange(1, count + 1)[None, :] + 1000 * np.arange(pieces)[:, None]
    return Ranges(gvas, gvas + 10_000, np.full(pieces, length))


def copy(engine, count, max_blocks=None, max_bytes=None, fence=None):
    return LimitedCopier(engine, max_blocks, max_bytes).copy(ranges(count), GLOBAL_TO_LOCAL, fence or Fence())


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.none() | st.integers(1, 9))
def test_exactly_the_bad_blocks_fail(count, bad, max_blocks):
    bad = {block for block in bad if block < count}
    engine = Engine(bad={block + 1 for block in bad})
    result = copy(engine, count, max_blocks)
    assert {block for block, status in enumerate(result.statuses.tolist()) if status} == bad
    assert {block for block, code in enumerate(result.codes.tolist()) if code == -3102} == bad
    good = [block + 1 for block in range(count) if block not in bad]
    assert sorted(engine.copied) == sorted(good + [gva + 1000 for gva in good])


def test_a_batch_that_was_taken_apart_is_told():
    assert copy(Engine(), 8).refused == 0
    assert copy(Engine(bad={3}), 8).refused == 3  # of 8, 4 and 2 blocks


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.FAILED, Status.TIMEOUT])
def test_what_is_not_about_an_address_is_not_tried_again(status):
    """A dead engine would cost a call for every block."""
    cause = OSError("down")
    engine = Engine(bad={3}, status=status, raised=cause)
    result = copy(engine, 8)
    assert len(engine.calls) == 1
    assert result.statuses.tolist() == [status] * 8
    assert result.cause is cause


@given(st.integers(1, 30), st.integers(1, 9))
def test_no_call_has_more_blocks_than_allowed(count, max_blocks):
    engine = Engine()
    copy(engine, count, max_blocks)
    assert all(len(call) <= 2 * max_blocks for call in engine.calls)
    assert len(engine.calls) == -(-count // max_blocks)


def test_no_range_is_longer_than_allowed():
    engine = Engine()
    copy(engine, 3, max_bytes=3)
    assert len(engine.calls[0]) == 3 * 2 * 3  # 8 bytes in pieces of 3, 3 and 2


def test_nothing_is_copied_once_the_blocks_are_not_ours_any_more():
    fence = Fence()
    fence.revoke(Deadline.after(1))
    engine = Engine()
    result = copy(engine, 4, fence=fence)
    assert engine.calls == []
    assert result.statuses.tolist() == [Status.CANCELLED] * 4


@pytest.mark.parametrize("status", [Status.FAILED, Status.REFUSED, Status.UNAVAILABLE])
def test_a_copy_that_is_given_up_in_the_middle_is_cancelled_whatever_the_engine_calls_it(status):
    """Otherwise a load that its request's abort had ended would be told of as a failure of the store, now and then."""
    fence = Fence()

    class GivenUp(Engine):
        def copy(self, *args):
            fence.revoke(Deadline.after(1))
            return super().copy(*args)

    engine = GivenUp(bad={3}, status=status)
    assert copy(engine, 4, fence=fence).statuses.tolist() == [Status.CANCELLED] * 4
    assert len(engine.calls) == 1, "it is not taken apart"
