"""Leases acquired are leases released, key by key, whatever happens between; and nobody takes away another's."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.clock import ManualClock
from fixtures.footprint import footprint
from fixtures.gates import Gate
from fixtures.gva_stores import FlakyGvaStore, GvaPool, LaxGvaStore, StrictGvaStore
from fixtures.stores import answering, changing, healthy, holding, raising
from vllm_ascend_ext.kv_pool.backend.client import StoreClient
from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient
from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.layerwise.gva import LeaseBook
from vllm_ascend_ext.kv_pool.observe import Stats

OK = Status.OK
TTL, NEEDED = 60.0, 10.0


class Bench:
    def __init__(self, kind=StrictGvaStore):
        self.clock = ManualClock()
        self.pool = GvaPool(1 << 12, self.clock)
        self.store = FlakyGvaStore(kind(self.pool))
        self.stats = Stats()
        client = GvaClient(StoreClient(self.store, self.stats, clock=self.clock))
        self.book = LeaseBook(client, TTL, NEEDED, self.clock, self.stats)

    def fill(self, *keys):
        inner = self.store.inner
        for key in keys:
            inner.batch_alloc([key], [8])
            self.pool.blobs[key].written[:] = True
        inner.batch_write_finish(list(keys), [0] * len(keys))

    def check_even(self):
        """In the book, and as the store sees it."""
        assert self.book.held == Counter()
        assert self.book.acquired == self.book.released
        assert self.pool.leased() == Counter()

    def asked(self):
        return Counter(key for call in self.store.calls("batch_add_lease") for key in call)

    def removed(self):
        return Counter(key for call in self.store.calls("batch_remove_lease") for key in call)


@pytest.fixture
def bench():
    subject = Bench()
    subject.fill("a", "b", "c")
    return subject


@pytest.fixture
def gate():
    with Gate() as opened_at_the_end:
        yield opened_at_the_end


class Stop(BaseException):
    """Ends a thread."""


@pytest.mark.parametrize("error", [None, OSError("copy failed"), Stop()])
def test_leases_end_with_the_load(bench, error):
    with pytest.raises(type(error)) if error else _nothing(), bench.book.borrow() as leases:
        assert leases.take(["a", "b"]) == [OK, OK]
        assert bench.pool.leased() == Counter(a=1, b=1)
        if error:
            raise error
    bench.check_even()
    assert bench.removed() == Counter(a=1, b=1)


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def test_only_leases_that_were_given_are_given_back(bench):
    """A15: the store refuses one of two."""
    bench.store.script("batch_add_lease", changing(lambda codes: [codes[0], -3101]))
    bench.store.script("batch_remove_lease", lambda call: call())
    with bench.book.borrow() as leases:
        statuses = leases.take(["a", "b"])
    assert statuses == [OK, Status.MISSING]
    assert bench.removed() == Counter(a=1)


@pytest.mark.parametrize("raw", [None, [], [0], [0, 0, 0], 0, "00"], ids=repr)
def test_an_answer_that_can_not_be_read_fails_all_and_all_are_given_back(bench, raw):
    bench.store.script("batch_add_lease", changing(lambda codes: raw))
    with bench.book.borrow() as leases:
        assert leases.take(["a", "b"]) == [Status.FAILED, Status.FAILED]
    bench.check_even()


def test_a_call_that_raises_after_the_first_group(bench):
    bench.store.script("batch_add_lease", lambda call: call(), raising(OSError("down"), after=True))
    with bench.book.borrow() as leases:
        assert leases.take(["a"]) == [OK]
        assert leases.take(["b", "c"]) == [Status.FAILED, Status.FAILED]
    bench.check_even()


def test_a_thread_that_dies_in_the_call_keeps_no_lease(bench):
    bench.store.script("batch_add_lease", raising(Stop(), after=True))
    with pytest.raises(Stop), bench.book.borrow() as leases:
        leases.take(["a", "b"])
    bench.check_even()


def test_a_key_that_is_asked_for_twice_has_one_lease(bench):
    with bench.book.borrow() as leases:
        assert leases.take(["a", "a", "b"]) == [OK] * 3
        assert leases.take(["b"]) == [OK]
        assert bench.pool.leased() == Counter(a=1, b=1)
    bench.check_even()


@pytest.mark.parametrize("kind", [StrictGvaStore, LaxGvaStore])
def test_two_loads_of_one_key_keep_each_others_lease(kind):
    """On the lax engine, too, where removing one lease of a key removes all."""
    bench = Bench(kind)
    bench.fill("a", "b")
    first, second = bench.book.borrow(), bench.book.borrow()
    first.take(["a", "b"])
    second.take(["a"])
    first.__exit__(None, None, None)
    assert bench.pool.leased() == Counter(a=1)
    second.__exit__(None, None, None)
    bench.check_even()


def test_a_shared_lease_that_runs_out_too_soon_is_taken_anew(bench):
    first, second = bench.book.borrow(), bench.book.borrow()
    first.take(["a"])
    bench.clock.advance(TTL - NEEDED + 1)
    second.take(["a"])
    assert bench.asked() == Counter(a=2)
    bench.clock.advance(NEEDED)
    assert first.expired
    assert not second.expired
    for leases in (first, second):
        leases.__exit__(None, None, None)
    bench.check_even()
    assert bench.removed() == Counter(a=2)


def test_what_was_read_after_the_end_of_a_lease_is_not_trusted(bench):
    with bench.book.borrow() as leases:
        leases.take(["a"])
        assert not leases.expired
        bench.clock.advance(TTL)
        assert leases.expired


def test_a_load_without_leases_has_none_that_run_out(bench):
    with bench.book.borrow() as leases:
        leases.take([])
        bench.clock.advance(10 * TTL)
        assert not leases.expired
    assert bench.store.calls("batch_add_lease") == bench.store.calls("batch_remove_lease") == []


@pytest.mark.parametrize("fault", [answering(-3106), answering(None), raising(OSError("down"))])
def test_leases_that_the_store_does_not_take_back_are_offered_again_at_the_end(bench, fault):
    """Not before: by then somebody else of this rank may hold the key."""
    bench.store.script("batch_remove_lease", fault)
    with bench.book.borrow() as leases:
        leases.take(["a"])
    assert bench.stats.get("lease_release_failed") == 1
    with bench.book.borrow() as leases:
        leases.take(["a"])
        assert bench.pool.leased() == Counter(a=2)
    assert bench.pool.leased() == Counter(a=1)
    bench.book.close()
    bench.check_even()


@pytest.mark.parametrize(("answer", "owed"), [(healthy, []), (answering(-3106), ["a"])])
def test_a_lease_on_its_way_back_is_in_the_book_until_the_store_has_answered(bench, gate, answer, owed):
    """Otherwise whoever looks meanwhile finds it nowhere: not held, and not owed either."""
    bench.book.take(["a"])
    bench.store.script("batch_remove_lease", holding(gate, answer))
    with ThreadPoolExecutor(1) as threads:
        giving_back = threads.submit(bench.book.give_back, ["a"])
        gate.wait_until_reached()
        assert (bench.book.held, bench.book.acquired, bench.book.released) == (Counter(a=1), 1, 0)
        gate.open()
        giving_back.result(60)
    assert (bench.book.held, bench.book.acquired, bench.book.released) == (Counter(), 1, 1)
    assert bench.book.debts == owed


def test_leases_that_have_run_out_are_not_offered_again(bench):
    """A store that takes none back for hours must not have the pool remember all of them."""
    bench.store.always("batch_remove_lease", answering(-3106))
    for _ in range(3):
        with bench.book.borrow() as leases:
            leases.take(["a", "b"])
        bench.clock.advance(TTL / 2)
    assert sorted(bench.book.debts) == ["a", "b"], "those of the last time"
    bench.clock.advance(TTL)
    bench.store.always("batch_remove_lease", None)
    calls = len(bench.store.calls("batch_remove_lease"))
    bench.book.close()
    assert len(bench.store.calls("batch_remove_lease")) == calls
    bench.check_even()


def test_ten_thousand_loads_leave_nothing_behind(bench):
    def serve(count):
        for number in range(count):
            keys = [f"{number}-{part}" for part in range(3)]
            bench.store.script("batch_add_lease", answering([0, 0, -3102]))
            bench.store.script("batch_remove_lease", answering(0))
            with bench.book.borrow() as leases:
                leases.take(keys)

    serve(100)
    before = footprint(bench.book, without=[bench.store, bench.stats])
    serve(10_000)
    assert footprint(bench.book, without=[bench.store, bench.stats]) - before < 1000
    bench.check_even()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_story_of_loads_ends_even(data):
    """Loads come and go in any order, calls fail in any way, time passes."""
    bench = Bench(data.draw(st.sampled_from([StrictGvaStore, LaxGvaStore])))
    bench.fill("a", "b", "c")
    faults = [answering(None), raising(OSError("down")), raising(OSError("down"), after=True), answering([-3102])]
    borrowed = []
    for _ in range(data.draw(st.integers(1, 12))):
        act = data.draw(st.sampled_from(["begin", "end", "fault", "wait"]))
        if act == "begin":
            leases = bench.book.borrow()
            leases.take(data.draw(st.lists(st.sampled_from(["a", "b", "c", "missing"]), max_size=4)))
            borrowed.append(leases)
        elif act == "end" and borrowed:
            borrowed.pop(data.draw(st.integers(0, len(borrowed) - 1))).__exit__(None, None, None)
        elif act == "fault":
            bench.store.script("batch_add_lease", data.draw(st.sampled_from(faults)))
        else:
            bench.clock.advance(data.draw(st.floats(0, TTL)))
    for leases in borrowed:
        leases.__exit__(None, None, None)
    bench.book.close()
    bench.check_even()
