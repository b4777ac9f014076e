"""Trust: a block that was lost stays so until it is computed on sound ground, and nobody builds on it unreported."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.requests import ScheduledRequest
from vllm_ascend_ext.kv_pool.trust import EndedTables, Trust

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


def test_a_block_that_is_computed_in_part_is_ground_as_far_as_it_goes():
    """Its first tokens are right for the request that computes them, and the others are not there for anybody yet."""
    subject = trust(2)
    assert subject.plan([going_on("a", [1, 2], 4, 2), going_on("b", [1, 2, 7], 8)]) == {2}
    assert subject.is_lost([2])
    assert subject.plan([going_on("a", [1, 2], 6, 1)]) == frozenset()
    assert subject.plan([going_on("a", [1, 2], 7, 1), going_on("b", [1, 2, 7], 8)]) == frozenset()
    assert not subject.is_lost([2])


def test_tokens_behind_a_gap_do_not_make_a_block_right():
    subject = trust(2)
    subject.plan([going_on("a", [1, 2], 4, 1)])
    assert subject.plan([going_on("b", [1, 2], 6, 2)]) == {2}
    assert subject.is_lost([2])


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
    steps=st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 8), min_size=1, max_size=5, unique=True), st.integers(0, 19), st.integers(1, 9)
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_is_planned_nobody_builds_on_a_wrong_token_unreported(lost, steps):
    """The law, token by token: right is what was never lost, and what is computed on right tokens alone."""
    subject = trust(*lost)
    wrong = {(block, offset) for block in lost for offset in range(BLOCK)}
    for requests in steps:
        planned = [
            going_on(str(number), table, (b := min(before, len(table) * BLOCK - 1)), min(n, len(table) * BLOCK - b))
            for number, (table, before, n) in enumerate(requests)
        ]
        reported = subject.plan(planned)
        grounds = {r.req_id: tokens(r, 0, r.num_computed_tokens) for r in planned}
        computed = {
            r.req_id: tokens(r, r.num_computed_tokens, r.num_computed_tokens + r.num_scheduled_tokens) for r in planned
        }
        stopped = {r.req_id for r in planned if reported & {block for block, _ in grounds[r.req_id]}}
        for name in grounds.keys() - stopped:
            wrong -= computed[name]
        for name in stopped:
            wrong |= computed[name]
        assert not any(grounds[name] & wrong for name in grounds.keys() - stopped)


def tokens(request, start, end):
    """(block, offset in it) of the tokens ``start`` to ``end``."""
    return {(request.block_ids[0][token // BLOCK], token % BLOCK) for token in range(start, end)}


# -- requests that ended while a step of theirs was under way ----------------------------------------------------------


def test_of_an_ended_table_the_first_invalid_block_and_all_behind_it_are_named():
    ended = EndedTables(1)
    ended.next_step()
    ended.add([1, 2, 3, 4])
    ended.add([1, 7, 3])
    assert ended.behind({3, 7}) == {3, 4, 7}
    assert ended.behind({9}) == set()


def test_a_table_is_forgotten_once_the_steps_that_were_under_way_are_reported():
    ended = EndedTables(2)
    ended.next_step()
    ended.add([1, 2])
    ended.next_step()
    ended.add([5])
    assert ended.behind({1, 5}) == {1, 2, 5}
    ended.next_step()
    assert ended.behind({1, 5}) == {5}
    ended.next_step()
    assert ended.behind({1, 5}) == set()
