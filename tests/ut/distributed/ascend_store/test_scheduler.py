"""The scheduler's side: what it offers and orders, what it believes to be saved, and that it forgets in the end."""

import pytest

from fixtures.engine import Request
from fixtures.footprint import footprint
from fixtures.parts import FixedLookup, make_setup
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.requests import ScheduledRequest, ScheduledStep, WorkerReport
from vllm_ascend_ext.kv_pool.scheduler import KVPoolScheduler

BLOCK = 4


def request(name="a", tokens=16, prompt=None):
    return Request(name, list(range(tokens)), prompt or tokens, tokens + 1, hash_unit=BLOCK)


class Desk:
    """A scheduler, and the steps that an engine would have it plan."""

    def __init__(self, hit=0, *, num_ranks=1, **setup):
        self.setup = make_setup(**setup)
        self.lookup = FixedLookup(hit)
        self.scheduler = KVPoolScheduler(self.setup, self.lookup, num_ranks=num_ranks)

    def admit(self, req, local=0, block_ids=None):
        """As vLLM does it: ask, allocate, tell. Returns the external tokens."""
        external, is_async = self.scheduler.get_num_new_matched_tokens(req, local)
        last = local + external if is_async else req.num_tokens
        table = block_ids or list(range(1, -(-last // BLOCK) + 1))
        self.scheduler.update_state_after_alloc(req, tuple(table for _ in self.setup.groups), external)
        return external

    def step(self, *scheduled, preempted=()):
        """``scheduled``: (request, computed before, tokens)."""
        for r, before, n in scheduled:
            r.num_computed_tokens = before + n
        views = [
            ScheduledRequest(
                r.request_id, before, n, tuple(list(range(1, -(-(before + n) // BLOCK) + 1)) for _ in self.setup.groups)
            )
            for r, before, n in scheduled
        ]
        return self.scheduler.build_connector_meta(ScheduledStep(views, frozenset(preempted)))

    def report(self, meta=None, *, saved=None, failed_loads=(), ranks=1):
        """All saves of ``meta`` went well, or got as far as ``saved``."""
        until = {m.save.job_id: (m.save.end_token if saved is None else saved, ranks) for m in saves(meta)}
        self.scheduler.update_connector_output(WorkerReport(until, set(failed_loads)))


def saves(meta):
    return [m for m in meta.requests if m.save] if meta else []


def loads(meta):
    return [m for m in meta.requests if m.load]


class TestOffers:
    @pytest.mark.parametrize(
        ("hit", "local", "external"), [(0, 0, 0), (4, 0, 4), (12, 0, 12), (8, 4, 4), (8, 8, 0), (4, 8, 0)]
    )
    def test_what_the_pool_has_beyond_the_device_is_offered(self, hit, local, external):
        assert Desk(hit).scheduler.get_num_new_matched_tokens(request(), local) == (external, False)

    @pytest.mark.parametrize(("load_async", "local"), [(False, 0), (False, 4), (True, 0), (True, 4)])
    def test_a_hit_of_the_whole_prompt_leaves_one_token_to_compute(self, load_async, local):
        """A41."""
        desk = Desk(lambda asked: asked, load_async=load_async)
        assert desk.scheduler.get_num_new_matched_tokens(request(), local) == (15 - local, load_async)
        assert desk.lookup.asked == [16]

    @pytest.mark.parametrize("answer", [20, 1 << 20])
    def test_an_answer_beyond_the_question_is_cut(self, answer):
        """A41: a server that answers N + block."""
        assert Desk(answer).scheduler.get_num_new_matched_tokens(request(), 0) == (15, False)

    @pytest.mark.parametrize("answer", [-4, None, "8", 2.5, 13, RuntimeError("zmq"), OSError("gone")], ids=repr)
    def test_an_answer_that_is_none_is_no_hit_and_no_exception(self, answer):
        """An exception would end the engine; a hit inside a block is one that no group can resume from."""
        desk = Desk(answer)
        assert desk.scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)
        assert answer == -4 or desk.scheduler.stats.get("lookup_failed") == 1

    def test_only_hashed_blocks_are_asked_for(self):
        desk = Desk(0)
        desk.scheduler.get_num_new_matched_tokens(request(tokens=15), 0)
        assert desk.lookup.asked == [12]

    def test_nothing_is_asked_when_the_device_has_all_that_could_be_had(self):
        desk = Desk(8)
        assert desk.scheduler.get_num_new_matched_tokens(request(tokens=9), 8) == (0, False)
        assert desk.scheduler.get_num_new_matched_tokens(request("short", tokens=3), 0) == (0, False)
        assert desk.lookup.asked == []

    def test_a_window_or_a_state_can_not_resume_inside_its_last_block(self):
        desk = Desk(lambda asked: asked, groups=(CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, 8)))
        assert desk.scheduler.get_num_new_matched_tokens(request(), 0) == (12, True)

    @pytest.mark.parametrize(("role", "asks"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)])
    def test_who_does_not_load_does_not_ask(self, role, asks):
        desk = Desk(8, kv_role=role)
        assert desk.scheduler.get_num_new_matched_tokens(request(), 0)[0] == (8 if asks else 0)
        assert bool(desk.lookup.asked) is asks

    def test_asking_again_and_again_opens_nothing(self):
        desk, req = Desk(8), request()
        for _ in range(5):
            assert desk.scheduler.get_num_new_matched_tokens(req, 0) == (8, False)
        assert loads(desk.step()) == []
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.holds_nothing

    def test_the_asynchronous_flag_comes_only_with_tokens(self):
        assert Desk(0, load_async=True).scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)


class TestLoads:
    @pytest.mark.parametrize(("local", "told"), [(0, 8), (0, 4), (4, 4)])
    def test_what_is_loaded_is_what_vllm_says_and_not_what_was_offered(self, local, told):
        """The answer may be cut or dropped between the two hooks."""
        desk, req = Desk(8), request()
        desk.scheduler.get_num_new_matched_tokens(req, local)
        desk.scheduler.update_state_after_alloc(req, ([1, 2, 3, 4],), told)
        (meta,) = loads(desk.step((req, local + told, 16 - local - told)))
        assert (meta.load.vllm_cached_tokens, meta.load.pool_cached_tokens) == (local, local + told)
        assert len(meta.block_hashes) >= (local + told) // BLOCK

    def test_a_dropped_offer_is_not_loaded(self):
        desk, req = Desk(8), request()
        desk.scheduler.get_num_new_matched_tokens(req, 0)
        desk.scheduler.update_state_after_alloc(req, ([1, 2, 3, 4],), 0)
        assert loads(desk.step((req, 0, 16))) == []

    def test_each_load_is_ordered_once(self):
        desk, req = Desk(8), request()
        desk.admit(req)
        assert len(loads(desk.step((req, 8, 8)))) == 1
        assert loads(desk.step((req, 16, 1))) == []

    def test_a_hit_that_failed_to_load_is_not_offered_again(self):
        """Or policy recompute livelocks."""
        desk, req = Desk(8), request()
        desk.admit(req)
        (meta,) = loads(desk.step((req, 8, 8)))
        desk.report(failed_loads=[meta.load.job_id])
        assert desk.scheduler.get_num_new_matched_tokens(req, 0) == (0, False)
        assert desk.scheduler.get_num_new_matched_tokens(request("b"), 0) == (8, False), "it is to others"

    def test_a_failure_of_an_old_life_does_not_touch_the_new_one(self):
        desk, req = Desk(8), request()
        desk.admit(req)
        (old,) = loads(desk.step((req, 8, 8)))
        desk.step(preempted=["a"])
        desk.report(failed_loads=[old.load.job_id])
        assert desk.scheduler.get_num_new_matched_tokens(req, 0) == (8, False)

    def test_a_request_that_is_preempted_and_resumed_within_one_step_keeps_its_new_load(self):
        """vLLM does that when its prefix cache is reset: the id is among the preempted and among the new."""
        desk, req = Desk(8), request()
        desk.admit(req)
        desk.step((req, 8, 8))
        desk.admit(req)
        (new,) = loads(desk.step((req, 8, 8), preempted=["a"]))
        desk.report(failed_loads=[new.load.job_id])
        assert desk.scheduler.get_num_new_matched_tokens(req, 0) == (0, False)

    def test_the_hashes_reach_as_far_as_the_load_when_the_save_ends_before_it(self):
        """A resumed request: its prompt is saved, and what it generated is loaded, as it was another's prompt."""
        desk, req = Desk(16), request(tokens=17, prompt=8)
        desk.admit(req, local=4)
        (meta,) = desk.step((req, 16, 1)).requests
        assert (meta.load.pool_cached_tokens, meta.save.end_token) == (16, 8)
        assert len(meta.block_hashes) == 4


class TestAsync:
    def test_the_order_goes_out_although_the_request_is_in_no_list(self):
        desk, req = Desk(8, load_async=True), request()
        assert desk.admit(req) == 8
        (meta,) = loads(desk.step())
        assert meta.load.is_async
        assert [table.tolist() for table in meta.block_ids] == [[1, 2]]

    def test_nothing_is_saved_of_a_request_while_its_load_writes_its_blocks(self):
        """A03: one entry must not carry a save and an asynchronous load of one request."""
        desk, req = Desk(8, load_async=True), request()
        desk.admit(req)
        meta = desk.step((req, 8, 8))
        assert saves(meta) == []
        desk.scheduler.finish_loads(["a"])
        (meta,) = saves(desk.step((req, 8, 8)))
        assert (meta.save.start_token, meta.save.end_token) == (8, 16)
        assert meta.load is None

    def test_an_abort_in_flight_never_keeps_the_blocks_for_a_save(self):
        """vLLM keeps them for the load already; both would free them, and the second kills the engine."""
        desk, req = Desk(8, load_async=True), request()
        desk.admit(req)
        desk.step()
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.holds_nothing

    def test_an_abort_before_the_order_went_out_still_sends_it(self):
        """A02: vLLM waits for finished_recving, so a worker must hear of the load."""
        desk, req = Desk(8, load_async=True), request()
        desk.admit(req)
        assert desk.scheduler.request_finished("a") is False
        assert [meta.req_id for meta in loads(desk.step())] == ["a"]
        assert desk.scheduler.holds_nothing

    def test_a_failed_load_is_not_offered_again_once_it_is_over(self):
        desk, req = Desk(8, load_async=True), request()
        desk.admit(req)
        (meta,) = loads(desk.step())
        desk.report(failed_loads=[meta.load.job_id])
        desk.scheduler.finish_loads(["a"])
        assert desk.scheduler.get_num_new_matched_tokens(req, 0) == (0, False)

    def test_every_rank_may_report_the_same_failure(self):
        desk, req = Desk(8, load_async=True, num_ranks=2), request()
        desk.admit(req)
        (meta,) = loads(desk.step())
        desk.report(failed_loads=[meta.load.job_id])
        desk.report(failed_loads=[meta.load.job_id])
        desk.scheduler.finish_loads(["a", "unknown"])
        desk.scheduler.finish_loads(["a"])
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.holds_nothing


class TestSaves:
    def test_full_computed_prompt_blocks_are_saved_once(self):
        desk, req = Desk(), request(tokens=15)
        desk.admit(req)
        meta = desk.step((req, 0, 15))
        assert [(m.save.start_token, m.save.end_token) for m in saves(meta)] == [(0, 12)]
        desk.report(meta)
        assert saves(desk.step((req, 15, 1))) == []

    def test_chunks_are_saved_as_they_are_computed(self):
        desk, req = Desk(), request(tokens=16)
        desk.admit(req)
        spans = []
        for before in (0, 6, 12):
            meta = desk.step((req, before, min(6, 16 - before)))
            spans += [(m.save.start_token, m.save.end_token) for m in saves(meta)]
            desk.report(meta)
        assert spans == [(0, 4), (4, 12), (12, 16)]

    def test_a_save_that_is_not_reported_is_not_repeated(self):
        desk, req = Desk(), request()
        desk.admit(req)
        assert len(saves(desk.step((req, 0, 8)))) == 1
        assert saves(desk.step((req, 8, 8))) == []

    @pytest.mark.parametrize(("decode", "expected"), [(False, 8), (True, 12)])
    def test_generated_tokens_are_saved_only_on_request(self, decode, expected):
        desk, req = Desk(save_decode_cache=decode), request(tokens=13, prompt=9)
        desk.admit(req)
        (meta,) = saves(desk.step((req, 0, 13)))
        assert meta.save.end_token == expected

    def test_unverified_tokens_are_not_saved(self):
        """Draft tokens are scheduled and computed, but have no hash yet."""
        desk, req = Desk(save_decode_cache=True), request(tokens=9)
        desk.admit(req)
        (meta,) = saves(desk.step((req, 0, 14)))
        assert meta.save.end_token == 8

    @pytest.mark.parametrize(("role", "count"), [("kv_consumer", 0), ("kv_producer", 1)])
    def test_who_does_not_save_orders_none(self, role, count):
        desk, req = Desk(kv_role=role), request()
        desk.admit(req)
        assert len(saves(desk.step((req, 0, 16)))) == count

    def test_what_was_hit_is_not_saved_again(self):
        desk, req = Desk(8), request()
        desk.admit(req)
        (meta,) = saves(desk.step((req, 8, 8)))
        assert (meta.save.start_token, meta.save.end_token) == (8, 16)

    def test_a_hit_behind_blocks_of_the_device_says_nothing_about_those(self):
        desk, req = Desk(8), request()
        desk.admit(req, local=4)
        (meta,) = saves(desk.step((req, 8, 8)))
        assert meta.save.start_token == 0

    def test_a_failed_key_is_offered_again_and_what_was_saved_before_it_is_not(self):
        desk, req = Desk(), request()
        desk.admit(req)
        desk.report(desk.step((req, 0, 16)), saved=8)
        (meta,) = saves(desk.step((req, 16, 1)))
        assert (meta.save.start_token, meta.save.end_token) == (8, 16)

    @pytest.mark.parametrize("retries", [0, 2])
    def test_a_save_that_keeps_failing_is_given_up(self, retries):
        desk, req = Desk(save_retries=retries), request()
        desk.admit(req)
        orders = 0
        for _ in range(10):
            meta = desk.step((req, 15, 1))
            orders += len(saves(meta))
            desk.report(meta, saved=0)
        assert orders == retries + 1

    def test_a_new_boundary_is_offered_after_that(self):
        desk, req = Desk(save_retries=0), request()
        desk.admit(req)
        desk.report(desk.step((req, 0, 8)), saved=0)
        (meta,) = saves(desk.step((req, 8, 8)))
        assert (meta.save.start_token, meta.save.end_token) == (0, 16)

    def test_the_mark_moves_when_every_rank_has_reported_and_as_far_as_the_worst(self):
        desk, req = Desk(num_ranks=3, topology=Topology(tp_size=3, num_kv_heads=3)), request()
        desk.admit(req)
        meta = desk.step((req, 0, 16))
        desk.report(meta, ranks=1)
        assert saves(desk.step((req, 15, 1))) == []
        desk.report(meta, saved=4, ranks=2)
        (again,) = saves(desk.step((req, 15, 1)))
        assert again.save.start_token == 4

    def test_a_report_of_an_old_life_moves_no_mark(self):
        desk, req = Desk(), request()
        desk.admit(req)
        old = desk.step((req, 0, 16))
        desk.step(preempted=["a"])
        desk.report(old)
        (meta,) = saves(desk.step((req, 0, 16)))
        assert meta.save.start_token == 0

    def test_reports_of_unknown_jobs_are_ignored(self):
        desk = Desk()
        desk.scheduler.update_connector_output(WorkerReport({99: (4, 1)}, {98}))
        desk.scheduler.update_connector_output(None)
        assert desk.scheduler.holds_nothing

    def test_after_a_failed_load_everything_is_offered_again(self):
        """What the pool lost between the look-up and the load must not stay marked as saved."""
        desk, req = Desk(8), request()
        desk.admit(req)
        meta = desk.step((req, 8, 8))
        job = meta.requests[0]
        desk.scheduler.update_connector_output(
            WorkerReport({job.save.job_id: (job.save.start_token, 1)}, {job.load.job_id})
        )
        (again,) = saves(desk.step((req, 4, 12)))
        assert again.save.start_token == 0

    def test_several_groups_move_on_by_common_boundaries(self):
        desk, req = Desk(groups=(CacheGroup(4), CacheGroup(8))), request()
        desk.admit(req)
        (meta,) = saves(desk.step((req, 0, 13)))
        assert meta.save.end_token == 8

    def test_events_carry_the_tokens_of_what_is_saved(self):
        desk, req = Desk(4, enable_kv_events=True), request()
        desk.admit(req)
        (meta,) = saves(desk.step((req, 4, 12)))
        assert meta.token_ids == tuple(range(4, 16))
        assert saves(Desk().step()) == []


class TestSeveralRanks:
    """A load that fails on one rank spoils what all of them compute beside it, and each rank knows only of its own."""

    def desk(self):
        desk, req = Desk(8, num_ranks=2, topology=Topology(tp_size=2, num_kv_heads=2)), request()
        desk.admit(req)
        (meta,) = desk.step((req, 8, 8)).requests
        assert meta.save is None
        return desk, req, meta.load.job_id

    @staticmethod
    def used(desk, job_id, *, failed=False):
        desk.scheduler.update_connector_output(
            WorkerReport(failed_loads={job_id} if failed else set(), used_loads={job_id})
        )

    def test_what_is_computed_beside_a_load_is_saved_once_the_load_is_known_to_be_well(self):
        desk, req, job_id = self.desk()
        self.used(desk, job_id)
        (meta,) = saves(desk.step((req, 16, 1)))
        assert (meta.save.start_token, meta.save.end_token) == (8, 16)

    def test_not_before_that_where_the_next_step_is_planned_early(self):
        """With asynchronous scheduling."""
        desk, req, job_id = self.desk()
        assert saves(desk.step((req, 16, 1))) == []
        self.used(desk, job_id)
        assert len(saves(desk.step((req, 16, 1)))) == 1

    def test_nor_by_a_request_that_shares_its_blocks(self):
        desk, _, _ = self.desk()
        other = request("b")
        desk.admit(other)
        assert saves(desk.step((other, 8, 8))) == []

    @pytest.mark.parametrize("early_steps", [0, 1])
    def test_a_request_that_ends_meanwhile_is_saved_later_and_its_blocks_are_kept_until_then(self, early_steps):
        desk, _, job_id = self.desk()
        assert desk.scheduler.request_finished("a") is True
        for _ in range(early_steps):
            meta = desk.step()
            assert (saves(meta), meta.delayed_free) == ([], frozenset())
        self.used(desk, job_id)
        meta = desk.step()
        assert [(m.save.start_token, m.save.end_token) for m in saves(meta)] == [(8, 16)]
        assert meta.delayed_free == {"a"}
        desk.report(meta, ranks=2)
        desk.scheduler.update_connector_output(None, ["a"])
        assert desk.scheduler.holds_nothing

    def test_a_report_of_a_late_save_is_not_that_of_a_new_request_of_the_same_id(self):
        """It would have been looked for among the new one's jobs, and an exception here ends the engine."""
        desk, _, job_id = self.desk()
        desk.scheduler.request_finished("a")
        self.used(desk, job_id)
        late = desk.step()
        new = request()
        desk.lookup._answer = 0
        desk.admit(new)
        desk.report(late, ranks=2)
        (meta,) = saves(desk.step((new, 0, 16)))
        assert (meta.save.start_token, meta.save.end_token) == (0, 16)

    @pytest.mark.parametrize("early_steps", [0, 1])
    def test_or_never_if_the_load_failed_and_its_blocks_are_freed(self, early_steps):
        desk, _, job_id = self.desk()
        assert desk.scheduler.request_finished("a") is True
        for _ in range(early_steps):
            desk.step()
        self.used(desk, job_id, failed=True)
        meta = desk.step()
        assert (saves(meta), meta.delayed_free) == ([], {"a"})
        desk.scheduler.update_connector_output(None, ["a"])
        assert desk.scheduler.holds_nothing


class TestFinish:
    def test_blocks_are_kept_while_a_save_is_not_reported_and_then_named_until_sent(self):
        desk, req = Desk(), request()
        desk.admit(req)
        desk.step((req, 0, 16))
        assert desk.scheduler.request_finished("a") is True
        for _ in range(2):  # with asynchronous scheduling a step is planned before the last one's output is there
            assert desk.step().delayed_free == {"a"}
        desk.scheduler.update_connector_output(WorkerReport(), ["a"])
        assert desk.step().delayed_free == frozenset()
        assert desk.scheduler.holds_nothing

    def test_blocks_are_free_when_everything_is_reported(self):
        desk, req = Desk(), request()
        desk.admit(req)
        desk.report(desk.step((req, 0, 16)))
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.holds_nothing

    @pytest.mark.parametrize("groups", [(CacheGroup(4),), (CacheGroup(4), CacheGroup(8))])
    def test_a_forgotten_request_is_free_at_once(self, groups):
        """A06: preempted and then finished; or finished twice; or never seen."""
        desk, req = Desk(groups=groups), request()
        desk.admit(req)
        desk.step((req, 0, 16))
        desk.step(preempted=["a", "never-seen"])
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.request_finished("a") is False
        assert desk.scheduler.request_finished("never-seen") is False
        assert desk.step().delayed_free == frozenset()
        assert desk.scheduler.holds_nothing

    def test_a_late_report_of_a_finished_request_is_nobodys(self):
        desk, req = Desk(), request()
        desk.admit(req)
        meta = desk.step((req, 0, 16))
        desk.scheduler.request_finished("a")
        desk.report(meta)
        desk.scheduler.update_connector_output(None, ["a"])
        assert desk.scheduler.holds_nothing

    def test_the_same_id_may_come_again(self):
        desk = Desk()
        for _ in range(3):
            req = request()
            desk.admit(req)
            desk.report(desk.step((req, 0, 16)))
            assert desk.scheduler.request_finished("a") is False
            assert desk.scheduler.holds_nothing


class TestUntrusted:
    def test_a_failed_block_and_all_behind_it_are_to_be_forgotten_in_every_table(self):
        desk, a, b = Desk(), request("a"), request("b")
        for req in (a, b):
            desk.admit(req)
        desk.scheduler.build_connector_meta(
            ScheduledStep([ScheduledRequest("a", 8, 8, ([1, 2, 3, 4],)), ScheduledRequest("b", 8, 8, ([1, 2, 7, 8],))])
        )
        assert desk.scheduler.blocks_to_forget({2}) == {2, 3, 4, 7, 8}
        assert desk.scheduler.blocks_to_forget({7}) == {7, 8}
        assert desk.scheduler.blocks_to_forget({99}) == set()
        assert desk.scheduler.blocks_to_forget(set()) == set()

    def test_so_it_is_where_nothing_is_saved(self):
        """A consumer loads too, and vLLM's own prefix cache is as wrong there."""
        desk, req = Desk(8, kv_role="kv_consumer", consumer_is_to_load=True), request()
        desk.admit(req)
        desk.step((req, 8, 8))
        assert desk.scheduler.blocks_to_forget({2}) == {2, 3, 4}

    def test_blocks_that_a_step_computes_from_their_first_token_on_are_named(self):
        desk, a, b = Desk(), request("a"), request("b")
        meta = desk.step((a, 5, 6), (b, 4, 4))
        assert [blocks.tolist() for blocks in meta.computed_blocks] == [[3, 2]]
        assert not meta.idle

    def test_a_step_that_computes_nothing_says_so(self):
        assert Desk().step().idle


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_ranks": 2, "topology": Topology(tp_size=2, num_kv_heads=2)},
        {"load_async": True},
        {"use_layerwise": True, "layerwise_num_shared_buffers": 2},
        {"groups": (CacheGroup(4), CacheGroup(8))},
    ],
    ids=["one rank", "two ranks", "asynchronously", "layers share buffers", "two groups"],
)
def test_ten_thousand_finished_requests_leave_nothing_behind(options):
    desk = Desk(lambda asked: asked // 8 * 4, **options)
    ranks, load_async = options.get("num_ranks", 1), desk.setup.load_async

    def report(meta, number):
        """Of all that is under way; every third save and every seventh load does not go well."""
        jobs = {m.load.job_id for m in loads(meta)}
        saved = {m.save.job_id: (0 if number % 3 == 0 else m.save.end_token, ranks) for m in saves(meta)}
        failed = jobs if number % 7 == 0 else set()
        desk.scheduler.update_connector_output(
            WorkerReport(saved, failed, set() if load_async else jobs), meta.delayed_free
        )
        desk.scheduler.finish_loads([m.req_id for m in loads(meta)] if load_async else ())

    def serve(count):
        for number in range(count):
            req = request(f"r{number}", tokens=16)
            external = desk.admit(req)
            if load_async:
                report(desk.step(), number)
            meta = desk.step((req, external, 16 - external))
            if number % 5 == 0:
                desk.step(preempted=[req.request_id])
            if number % 11:  # else it ends before anybody has heard of the step
                report(meta, number)
            desk.scheduler.request_finished(req.request_id)
            if not number % 11:
                report(meta, number)
            for _ in range(2):
                report(desk.step(), number)

    serve(100)
    desk.lookup.asked.clear()
    before = footprint(desk.scheduler)
    serve(10_000)
    desk.lookup.asked.clear()
    assert desk.scheduler.holds_nothing
    assert footprint(desk.scheduler) - before < 1000


def test_closing_closes_the_lookups():
    desk = Desk()
    desk.scheduler.close()
    assert desk.lookup.closed
