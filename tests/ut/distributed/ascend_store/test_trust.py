"""Trust: a block that was lost stays so until it is computed on sound ground, and nobody builds on it unreported."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.requests import ScheduledRequest
from vllm_ascend_ext.kv_pool.trust import Trust

BLOCK = 4


def going_on(name, table, before, tokens=BLOCK):
    return ScheduledRequest(name, before, tokens, (table,))


def trust(*lost):
    subject = Trust(BLOCK)
    subject.lose(lost)
    return subject


def test_a_request_that_builds_on_a_lost_block_is_stopped_each_time():
    subject = trust(2)
    for _ in range(3):
        assert subject.plan([going_on("b", [1, 2, 3], 8)]) == {2}


def test_the_first_request_computes_it_anew_and_others_may_build_on_it_in_the_same_step():
    subject = trust(2)
    assert subject.plan([going_on("b", [1, 2, 7], 8), going_on("a", [1, 2, 3], 4, 8)]) == frozenset()
    assert not subject.is_lost([2])


def test_what_the_first_request_has_not_reached_yet_is_still_lost():
    """It computes chunk by chunk; the other one would go on at once."""
    subject = trust(2, 3)
    assert subject.plan([going_on("a", [1, 2, 3], 4), going_on("b", [1, 2, 3, 7], 12)]) == {3}
    assert subject.is_lost([3])
    assert not subject.is_lost([1, 2])


def test_what_is_computed_on_a_lost_block_is_lost():
    subject = trust(2)
    subject.plan([going_on("b", [1, 2, 7], 8)])
    assert subject.is_lost([7])


def test_a_block_computed_by_a_stopped_request_is_no_ground_for_another():
    """Tables of the same prefix may name different copies of its first blocks."""
    subject = trust(2)
    assert subject.plan([going_on("a", [2, 5], 4), going_on("b", [1, 5, 6], 8)]) == {2, 5}


def test_a_partly_computed_block_is_ground():
    assert trust(2).plan([going_on("a", [1, 2], 5, 1)]) == {2}


def test_a_block_that_is_loaded_anew_is_not_lost_any_more():
    subject = trust(2)
    subject.loading([2])
    assert subject.plan([going_on("b", [1, 2, 3], 8)]) == frozenset()


def test_without_a_loss_nothing_is_lost():
    subject = trust()
    assert subject.plan([going_on("a", [1, 2], 4)]) == frozenset()
    assert not subject.is_lost([1, 2])


@settings(deadline=None)
@given(
    lost=st.sets(st.integers(1, 8)),
    requests=st.lists(
        st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=5, unique=True), st.integers(0, 19)), max_size=4
    ),
)
def test_whatever_is_planned_nobody_builds_on_a_lost_block_unreported(lost, requests):
    """The law: with the stopped requests taken out, every ground is sound or computed by one that is."""
    planned = [
        going_on(str(number), table, min(before, len(table) * BLOCK - 1), 1)
        for number, (table, before) in enumerate(requests)
    ]
    subject = trust(*lost)
    reported = subject.plan(planned)
    grounds = {r.req_id: set(r.block_ids[0][: -(-r.num_computed_tokens // BLOCK)]) for r in planned}
    unstopped = [r for r in planned if not grounds[r.req_id] & reported]
    anew = {
        block
        for r in unstopped
        for block in r.block_ids[0][-(-r.num_computed_tokens // BLOCK) : -(-(r.num_computed_tokens + 1) // BLOCK)]
    }
    assert not any(grounds[r.req_id] & (lost - anew) for r in unstopped)
