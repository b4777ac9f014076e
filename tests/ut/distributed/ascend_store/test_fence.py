"""Fences: once revoked nobody touches the blocks any more, and whoever revokes knows that."""

import threading

from fixtures.clock import ManualClock
from fixtures.gates import Gate
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.fence import Fence, open_fence

LONG = 60.0


def test_blocks_may_be_touched_until_the_fence_is_revoked_and_never_again():
    fence = open_fence()
    with fence.hold() as granted:
        assert granted
    assert fence.revoke(Deadline.after(LONG))
    assert fence.revoked
    for _ in range(2):
        with fence.hold() as granted:
            assert not granted


def test_revoking_waits_for_every_holder():
    fence, clock, order = Fence(), ManualClock(), []
    with Gate() as gate:

        def copy():
            with fence.hold():
                gate.hold()
                order.append("copied")

        copiers = [threading.Thread(target=copy) for _ in range(2)]
        for copier in copiers:
            copier.start()
        gate.wait_until_reached(2)
        revoker = threading.Thread(
            target=lambda: order.append("revoked" if fence.revoke(Deadline.after(LONG, clock)) else "held")
        )
        revoker.start()
        clock.wait_for_waiters(1)
        gate.open()
        for thread in [*copiers, revoker]:
            thread.join(LONG)
    assert order == ["copied", "copied", "revoked"]


def test_revoking_says_so_when_a_holder_outlasts_the_deadline():
    fence, clock, answers = Fence(), ManualClock(), []
    with Gate() as gate:

        def copy():
            with fence.hold():
                gate.hold()

        copier = threading.Thread(target=copy)
        copier.start()
        gate.wait_until_reached()
        revoker = threading.Thread(target=lambda: answers.append(fence.revoke(Deadline.after(1.0, clock))))
        revoker.start()
        clock.wait_for_waiters(1)
        clock.advance(1.0)
        revoker.join(LONG)
        gate.open()
        copier.join(LONG)
    assert answers == [False]
    assert fence.revoke(Deadline.after(LONG)), "the holder has left since"


def test_a_refused_holder_is_not_waited_for():
    fence = Fence()
    fence.revoke(Deadline.after(LONG))
    with fence.hold() as granted:
        assert not granted
        assert fence.revoke(Deadline.after(0.0))


def test_a_holder_that_raises_lets_go():
    fence = Fence()
    try:
        with fence.hold():
            raise OSError("copy failed")
    except OSError:
        pass
    assert fence.revoke(Deadline.after(0.0))
