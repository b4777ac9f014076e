"""Cases from public bug reports (their ids are those of the collection) that concern global addresses and leases.

Each through a whole worker, or a whole pool with the small engine, on the engine as it is and on a strict one.
"""

from collections import Counter

import pytest

from fixtures.engine import State
from fixtures.gva_stores import FlakyGvaStore, GvaPool, KeyInfo, LaxGvaStore, StrictGvaStore
from fixtures.layer_rank import LAYERS, LayerRank
from fixtures.parts import GENEROUS
from fixtures.stores import answering, changing, raising
from fixtures.world import World
from vllm_ascend_ext.kv_pool.clock import Deadline

KINDS = ["gva", "strict"]


@pytest.fixture(params=KINDS)
def rank(tmp_path, request):
    subject = LayerRank(tmp_path, request.param)
    yield subject
    subject.worker.close()


def asked(store, method):
    """How often each key was named in calls of ``method``."""
    return Counter(key for keys in store.calls(method) for key in keys)


def address_of(rank, key):
    return int(rank.store.inner.batch_get_key_info([key])[0].gva_list()[0])


class TestA14:
    """A failed allocation was remembered, and its value taken for an address."""

    def test_values_that_are_no_addresses_are_copied_nowhere_and_asked_for_again(self, rank):
        request = rank.request("a", [1, 2, 3])
        (size,) = rank.worker._path.sending._copies.value_bytes

        def two_fail(call):
            return [*rank.store.inner.batch_alloc(call.keys[:1], [size]), 0, -3016]

        rank.store.script("batch_alloc", two_fail)
        _, report = rank.save(request, 12)
        keys = rank.store.calls("batch_alloc")[0]
        assert list(report.saved_until.values()) == [(4, 1)]
        first = address_of(rank, keys[0])
        value = range(first, first + size)
        assert all(int(gva) in value for gvas in rank.store.calls("batch_copy") for gva in gvas)
        assert rank.store.finished == [(keys[0], 0)]
        _, report = rank.save(request, 12)
        assert rank.store.calls("batch_alloc")[1] == keys[1:]
        assert list(report.saved_until.values()) == [(12, 1)]
        rank.check_given_back()


class TestA15:
    """A block without a size or a lease was taken for loaded."""

    @pytest.mark.parametrize(
        ("infos", "leases", "lost"),
        [
            (lambda infos: [infos[0], KeyInfo(None), infos[2]], [0, -3101], {12, 13}),
            (lambda infos: infos[:2], None, {11, 12, 13}),
            (lambda infos: [infos[0], None, infos[2]], [0, 0], {12}),
            (list, [0, 0], {11, 12, 13}),
            (list, [0, -3102, 0], {12}),
        ],
        ids=["no size, no lease", "short", "none inside", "leases short", "lease refused"],
    )
    def test_exactly_the_blocks_without_are_lost_and_only_what_was_leased_is_released(self, rank, infos, leases, lost):
        rank.save(rank.request("a", [1, 2, 3]), 12)
        request = rank.request("a", [11, 12, 13])
        keys = rank.published()
        rank.store.script("batch_get_key_info", changing(infos))
        if leases is not None:
            granted = dict(zip(keys if len(leases) == 3 else [keys[0], keys[2]], leases, strict=False))

            def some(call):
                good = [key for key in call.keys if granted.get(key) == 0]
                assert set(rank.store.inner.batch_add_lease(good, 60_000)) == {0}
                return leases

            rank.store.script("batch_add_lease", some)
        errors, report = rank.load(request, 12)
        assert errors == lost
        assert len(report.failed_loads) == 1
        for block in {11, 12, 13} - lost:
            assert all((cache[block] == cache[block - 10]).all() for cache in rank.memory.caches)
        rank.check_given_back()


class TestA18:
    """A write was never finished, and its key stayed half written."""

    @pytest.mark.parametrize("layer", range(LAYERS))
    def test_a_copy_that_fails_for_one_key_drops_it_with_the_engines_code_and_publishes_the_other(self, rank, layer):
        request = rank.request("a", [1, 2])

        def refuse_the_second(call):
            """Whatever batch names an address of the second key's value."""
            blob = rank.pool.blobs[rank.store.calls("batch_alloc")[0][1]]
            second = range(0x110000000000 + blob.offset, 0x110000000000 + blob.offset + blob.size)
            return -3102 if any(int(gva) in second for gva in call.keys) else call()

        rank.store.script("batch_copy", *[lambda call: call()] * layer)
        rank.store.always("batch_copy", refuse_the_second)
        _, report = rank.save(request, 8)
        keys = rank.store.calls("batch_alloc")[0]
        assert rank.store.finished == [(keys[0], 0), (keys[1], -3102)]
        assert rank.published() == keys[:1]
        assert list(report.saved_until.values()) == [(4, 1)]
        rank.store.always("batch_copy", None)
        for _ in range(2):  # MemCache has no address for a key that was just dropped
            _, report = rank.save(request, 8)
        assert list(report.saved_until.values()) == [(8, 1)]
        assert sorted(rank.published()) == sorted(keys)
        rank.check_given_back()
        assert rank.pool.violations == []

    def test_a_request_that_is_aborted_after_the_first_layer_leaves_no_key(self, rank):
        request = rank.request("a", [1, 2])
        aborted = rank.orders((request, None, (0, 8)))
        rank.forward(aborted, [(request, 0, 8)], layers=[0])
        rank.finish(rank.orders())
        rank.check_given_back()
        assert rank.published() == []
        assert asked(rank.store, "batch_alloc") == Counter(key for key, _ in rank.store.finished)
        assert all(code != 0 for _, code in rank.store.finished)
        for _ in range(2):
            rank.save(request, 8)
        assert len(rank.published()) == 2


class TestA19:
    """What was allocated, but not finished, counted as a hit."""

    def test_a_block_is_a_hit_once_its_write_is_finished_and_not_before(self, rank):
        request = rank.request("a", [1])
        hits = rank.worker.hits
        orders = rank.orders((request, None, (0, 4)))
        rank.forward(orders, [(request, 0, 4)])
        path = rank.worker._path
        path._step.save.saved[LAYERS - 1].wait(Deadline.after(60.0, rank.clock))
        assert rank.pool.ledger()["open_writes"] == 1
        assert hits.hit(4, request.block_hashes, 0) == 0
        rank.finish(orders)
        assert hits.hit(4, request.block_hashes, 0) == 4


PROMPT = list(range(14))


class Pool:
    """Engines one after the other on one store whose every call is written down."""

    def __init__(self, folder, kind):
        self.folder, self.kind = folder, kind
        self.pool = GvaPool(1 << 16)
        self.fill()
        self.store = FlakyGvaStore(kind(self.pool))

    def fill(self):
        world = World.open(lambda: self.kind(self.pool), self.folder, **self.options())
        world.engine.add("fill", PROMPT)
        world.engine.run()
        assert world.close() == []

    def options(self, **more):
        return {**GENEROUS, "use_layerwise": True, "engine": {"layers": 3}, **more}

    def open(self, **more):
        return World.open(self.store, self.folder, **self.options(**more))

    def end(self, world):
        """Every request ends; leases acquired are leases released, key by key, and nobody was robbed of one."""
        world.engine.run()
        world.engine.check_idle()
        recving = world.workers[0]._path.recving
        recving._lanes.wait_until(lambda: not self.pool.leased(), 60.0)
        assert self.pool.leased() == Counter()
        assert recving.leases.debts == [], "a lease was given back that was not held"
        assert world.counters().get("lease_release_failed", 0) == 0
        assert asked(self.store, "batch_add_lease") == asked(self.store, "batch_remove_lease")
        assert world.close() == []
        return world.engine.requests


@pytest.mark.parametrize("kind", [LaxGvaStore, StrictGvaStore])
class TestA17:
    """Leases taken by a look-up that no load followed, or given back twice."""

    def test_a_hit_that_the_device_has_itself_is_not_leased(self, tmp_path, kind):
        pool = Pool(tmp_path, kind)
        world = pool.open()
        world.engine.add("a", PROMPT, output=3)
        world.engine.step()
        loads = asked(pool.store, "batch_add_lease")
        world.engine.add("b", PROMPT)
        world.engine.step()
        assert asked(pool.store, "batch_add_lease") == loads, "the second hit is vLLM's own"
        pool.end(world)

    def test_two_look_ups_and_one_load_are_one_lease_a_key(self, tmp_path, kind):
        pool = Pool(tmp_path, kind)
        world = pool.open()
        request = world.engine.add("a", PROMPT)
        for _ in range(2):
            assert world.engine.scheduler.get_num_new_matched_tokens(request, 0) == (12, False)
        assert pool.store.calls("batch_add_lease") == []
        pool.end(world)
        assert request.loaded_tokens == 12
        assert set(asked(pool.store, "batch_add_lease").values()) == {1}

    def test_a_role_that_only_loads_gives_back_what_it_took(self, tmp_path, kind):
        pool = Pool(tmp_path, kind)
        world = pool.open(kv_role="kv_consumer", consumer_is_to_load=True)
        request = world.engine.add("a", PROMPT)
        pool.end(world)
        assert request.loaded_tokens == 12
        assert pool.store.calls("batch_alloc") == []

    @pytest.mark.parametrize("load_async", [False, True])
    def test_an_abort_between_look_up_and_load_has_taken_none(self, tmp_path, kind, load_async):
        pool = Pool(tmp_path, kind)
        world = pool.open(load_async=load_async)
        request = world.engine.add("a", PROMPT)
        assert world.engine.scheduler.get_num_new_matched_tokens(request, 0) == (12, load_async)
        world.engine.abort("a")
        assert pool.end(world)["a"].state is State.ABORTED
        assert pool.store.calls("batch_add_lease") == []

    @pytest.mark.parametrize("layer", range(3))
    @pytest.mark.parametrize("fault", [answering(-1), raising(OSError("down"))], ids=["refused", "raises"])
    def test_a_copy_that_fails_gives_back_what_it_took(self, tmp_path, kind, layer, fault):
        pool = Pool(tmp_path, kind)
        world = pool.open()
        pool.store.script("batch_copy", *[lambda call: call()] * layer, *[fault] * 8)
        request = world.engine.add("a", PROMPT)
        assert pool.end(world)["a"].state is State.DONE
        assert request.loaded_tokens == 12
        assert world.engine.invalid_blocks == 3
