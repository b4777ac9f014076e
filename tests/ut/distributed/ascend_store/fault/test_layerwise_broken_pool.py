"""The suite must turn red for a broken layerwise pool: each test puts one old fault back, and says what shows it.

Each fault was found in a pool that people run. The pool around it is today's, and without the fault the same
exploration is green.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import faultinject as fi
from faultinject import Do, Raise, Return, Site, Truncate
from fixtures.layerwise_sites import FORWARD
from fixtures.layerwise_story import Kind, LayerStory
from fixtures.pool_sites import ROLES
from fixtures.world import World
from vllm_ascend_ext.kv_pool.backend.client import Answer
from vllm_ascend_ext.kv_pool.backend.gva_client import GvaClient, Opened
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded, Status
from vllm_ascend_ext.kv_pool.groups import CacheGroup
from vllm_ascend_ext.kv_pool.layerwise import gva, threads
from vllm_ascend_ext.kv_pool.layerwise.gate import StepEnded
from vllm_ascend_ext.kv_pool.layerwise.path import LayerwisePath
from vllm_ascend_ext.kv_pool.layerwise.step import BlockRows, LayerLoad, LayerStep
from vllm_ascend_ext.kv_pool.worker import KVPoolWorker

pytestmark = pytest.mark.fault

PROMPT = range(14)
Body = Callable[[fi.Run], Any]


def tried(body: Body, site: Site, deadline: float = 20.0) -> Callable[..., Any]:
    """A scenario with one site, explored once as the pool is and once with the old fault in it."""
    return fi.scenario(name="broken", sites=[site], roles=ROLES, deadline=deadline, expects=(), max_faults=1)(body)


def save(folder: Path, kind: Kind = "lax", **options: Any) -> Body:
    return lambda run: LayerStory(run, folder, kind).play(
        lambda world: world.engine.add("a", PROMPT, output=3), **options
    )


def load(folder: Path, kind: Kind = "lax", prompt: Any = PROMPT, **options: Any) -> Body:
    def body(run: fi.Run) -> Any:
        story = LayerStory(run, folder, kind)
        story.fill(PROMPT, **options)
        return story.play(lambda world: world.engine.add("a", prompt), **options)

    return body


def test_lease_kept_on_an_error_is_a_leak(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site("layers.prepare-load", (Raise(RuntimeError, after=True),))
    assert fault_control.as_is(tried(load(tmp_path), site)) == {"surfaced"}
    give_back = gva.Leases.__exit__
    monkeypatch.setattr(
        gva.Leases, "__exit__", lambda self, kind, error, at: None if kind else give_back(self, kind, error, at)
    )
    assert fault_control.broken(tried(load(tmp_path), site)) == {"leak"}


def test_write_left_open_on_an_error_is_a_leak(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site("layers.alloc-for-save", (Raise(RuntimeError, after=True),))
    assert fault_control.as_is(tried(save(tmp_path, "strict"), site)) == {"contained"}
    monkeypatch.setattr(gva.OpenWrites, "__exit__", lambda *args: None)
    assert fault_control.broken(tried(save(tmp_path, "strict"), site)) == {"leak"}


def test_event_that_survives_a_step_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the aborted step had computed is taken for computed in the next one, and saved before it is."""

    def body(run: fi.Run) -> Any:
        def act(world: World) -> None:
            engine, path = world.engine, world.workers[0]._path
            break_off = engine.before_layer

            def before_step(step: int) -> None:
                if step == 1:  # whatever became of "a", its blocks are the next request's
                    engine.abort("a")
                    engine.add("b", range(100, 114))

            def before_layer(step: int, layer: int) -> None:
                if break_off is not None:
                    break_off(step, layer)
                if layer == 1 and isinstance(path, LayerwisePath) and path._step is not None and path._step.save:
                    with suppress(DeadlineExceeded):  # a layer's save does not come before its computation
                        path._step.save.saved[layer].wait(Deadline.after(0.1))

            engine.before_step, engine.before_layer = before_step, before_layer
            engine.add("a", PROMPT, output=3)

        return LayerStory(run, tmp_path, "lax").play(act)

    assert fault_control.as_is(tried(body, FORWARD)) == {"surfaced"}
    survivors: dict[int, LayerStep] = {}
    close, make = LayerStep.close, LayerStep.__init__

    def survive(self: LayerStep, cause: BaseException) -> None:
        survivors[len(self.plan)] = self
        close(self, cause)

    def inherit(self: LayerStep, meta: Any, plan: Any) -> None:
        make(self, meta, plan)
        old = survivors.pop(len(plan), None)
        for mine, theirs in zip(self.computed, old.computed if old else (), strict=False):
            if theirs._value is not None:
                mine.set(theirs._value)

    monkeypatch.setattr(LayerStep, "close", survive)
    monkeypatch.setattr(LayerStep, "__init__", inherit)
    assert "wrong_data" in fault_control.broken(tried(body, FORWARD))


def test_gate_that_nobody_can_fail_is_a_hang(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gate that is waited for again and again, as long as it does not open."""
    site = Site("gate.record", (fi.Drop(),))
    assert fault_control.as_is(tried(load(tmp_path), site)) == {"surfaced"}
    monkeypatch.setattr(threads.LayerThread, "_layer_deadline", lambda self: Deadline.after(3600.0))
    monkeypatch.setattr(LayerLoad, "end", lambda self, cause=None: super(LayerLoad, self).end(cause))
    monkeypatch.setattr(
        LayerwisePath,
        "_wait",
        lambda self, step, transfer, wait: wait() if transfer is not step.load else _insist(wait),
    )
    assert fault_control.broken(tried(load(tmp_path), site, deadline=3.0)) == {"hang"}


def _insist(wait: Callable[[], object]) -> object:
    while True:
        try:
            return wait()
        except StepEnded:
            return None
        except DeadlineExceeded:
            continue


def test_address_remembered_before_its_bytes_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A memo of allocations outlives the write that failed: the engine publishes what nobody wrote."""
    site = Site("store.batch_copy", (Raise(OSError),), max_ordinals=1, persistent=False)
    assert fault_control.as_is(tried(save(tmp_path), site)) == {"contained"}
    alloc = GvaClient.alloc

    def remember(self: GvaClient, keys: Sequence[str], size: int) -> Opened:
        memo: dict[str, int] = self.__dict__.setdefault("memo", {})
        fresh = [key for key in keys if key not in memo]
        answer = alloc(self, fresh, size)
        memo.update((key, gva) for key, gva in zip(fresh, answer.gvas.tolist(), strict=True) if gva > 0)
        gvas = np.asarray([memo.get(key, 0) for key in keys], dtype=np.int64)
        return Opened([Status.OK if gva else Status.FULL for gva in gvas.tolist()], None, [False] * len(keys), gvas)

    monkeypatch.setattr(GvaClient, "alloc", remember)
    assert "wrong_data" in fault_control.broken(tried(save(tmp_path), site))


def test_failed_allocation_taken_for_an_address_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A14: what was not allocated is copied nowhere, and yet counts as saved."""
    site = Site("store.batch_alloc", (Do(lambda call, keys, sizes: [0] * len(keys), "zero"),), max_ordinals=1)
    assert fault_control.as_is(tried(save(tmp_path), site)) == {"contained"}
    open_part = gva.OpenWrites._open_part

    def careless(self: Any, transfer: Any, rows: BlockRows, span: slice, size: int, opened: list[str]) -> bool:
        done = open_part(self, transfer, rows, span, size, opened)
        lost = np.flatnonzero(rows.gvas == 0)
        rows.statuses[lost], rows.done[lost], rows.stored[lost], rows.idle[lost] = 0, True, True, True
        return done

    monkeypatch.setattr(gva.OpenWrites, "_open_part", careless)
    assert "wrong_data" in fault_control.broken(tried(save(tmp_path), site))


def test_zip_over_short_key_infos_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks behind the end of a short answer are skipped, and taken for loaded."""
    site = Site("store.batch_get_key_info", (Truncate(),))
    assert fault_control.as_is(tried(load(tmp_path), site)) == {"surfaced"}

    def zipped(load: LayerLoad, leases: gva.Leases, client: GvaClient, sizes: Sequence[int], *, confirm: bool) -> None:
        for job in range(len(load.jobs)):
            for rows, span in load.parts(job):
                infos = client._client.backend.batch_get_key_info(rows.keys[span])
                leases.take(rows.keys[span])
                rows.idle[span] = True
                for row, info in zip(range(span.start, span.stop), infos, strict=False):
                    rows.gvas[row], rows.idle[row] = info.gva_list()[0], False

    monkeypatch.setattr(threads, "prepare_load", zipped)
    assert fault_control.broken(tried(load(tmp_path), site)) == {"wrong_data"}


def test_group_failure_that_is_only_logged_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups = (CacheGroup(4), CacheGroup(8))
    site = Site("store.batch_get_key_info", (Truncate(),))
    body = load(tmp_path, prompt=range(22), groups=groups)
    assert fault_control.as_is(tried(body, site)) == {"surfaced"}
    get_finished = KVPoolWorker.get_finished

    def only_logged(self: KVPoolWorker, *args: Any) -> Any:
        transfers = get_finished(self, *args)
        transfers.failed_recving = set()
        return transfers

    monkeypatch.setattr(KVPoolWorker, "get_finished", only_logged)
    assert fault_control.broken(tried(body, site)) == {"wrong_data"}


def test_load_that_ignores_its_statuses_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key path of old: what ``get`` answers for a layer is not looked at."""
    site = Site("store.get", (Return([-1, -1, -1], label="refused"),))
    assert fault_control.as_is(tried(load(tmp_path, "key"), site)) == {"surfaced"}
    get = threads.StoreClient.get

    def trusting(self: Any, *args: Any) -> Answer:
        return Answer([Status.OK] * len(get(self, *args).statuses))

    monkeypatch.setattr(threads.StoreClient, "get", trusting)
    assert fault_control.broken(tried(load(tmp_path, "key"), site)) == {"wrong_data"}


def test_save_after_a_failed_load_is_wrong_data(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A50: what was computed on blocks that did not arrive is published."""
    site = Site("store.batch_copy", (Return(-1, label="refused", roles=("recv",)),))
    body = load(tmp_path, prompt=range(30))
    assert fault_control.as_is(tried(body, site)) == {
        "surfaced",
        "contained",
    }  # a batch that is refused once is taken apart
    monkeypatch.setattr(LayerwisePath, "_distrust", lambda self, step, load: None)
    assert "wrong_data" in fault_control.broken(tried(body, site))


def test_dead_thread_that_nobody_hears_of_is_a_hang(
    fault_control: fi.Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site("layers.recv", (fi.Kill(),))
    assert fault_control.as_is(tried(load(tmp_path), site)) == {"surfaced"}
    monkeypatch.setattr(
        threads.LayerThread, "_carry_out", lambda self, transfer, fence: self._handle_layers(transfer, fence)
    )
    monkeypatch.setattr(LayerwisePath, "_recving_ended", lambda self, cause: None)
    monkeypatch.setattr(LayerwisePath, "_wait", lambda self, step, transfer, wait: _insist(wait))
    assert fault_control.broken(tried(load(tmp_path), site, deadline=3.0)) == {"hang"}
