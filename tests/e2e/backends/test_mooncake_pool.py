"""The whole pool (scheduler, look-ups, workers) with a small engine on the real Mooncake Store.

The engine computes on no byte that it doesn't check: wrong bytes that nobody reported, and requests that don't end,
raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fixtures.mooncake import MooncakeMaster
from fixtures.world import World
from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend

from .conftest import eventually
from .peer import Peer

PROMPTS = [list(range(100 * n, 100 * n + 23)) for n in range(4)]
FULL_BLOCKS = 20  # tokens of each prompt's full blocks of 4

PATIENT: dict[str, Any] = {
    "lookup_timeout": 10.0,
    "load_timeout": 30.0,
    "save_timeout": 30.0,
    "start_timeout": 30.0,
    "close_timeout": 30.0,
}
"""For scenarios without a fault: what a loaded machine keeps."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"load_async": True},
    "layerwise": {"use_layerwise": True},
    "two ranks": {"tp": 2, "load_async": True},
}

Connect = Callable[..., MooncakeBackend]
NewPeer = Callable[..., Peer]
OpenWorld = Callable[..., World]


@pytest.fixture
def open_world(connect: Connect, tmp_path: Path) -> Iterator[OpenWorld]:
    """A pool with one client for all its ranks, closed at the end of the test."""
    numbers = count()
    with ExitStack() as stack:

        def open_world(backend: MooncakeBackend | None = None, **options: Any) -> World:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            world = World.open(backend or connect(), folder, **options)
            stack.callback(world.close)
            return world

        yield open_world


def save(world: World) -> None:
    for n, prompt in enumerate(PROMPTS):
        world.engine.add(f"saved{n}", prompt)
    world.engine.run()


@pytest.mark.parametrize("mode", MODES)
def test_one_process_loads_what_another_has_saved(
    mode: str, connect: Connect, new_peer: NewPeer, open_world: OpenWorld
) -> None:
    options = PATIENT | MODES[mode]
    provider, saver = connect(), new_peer(global_segment_size=0)
    ended = saver.ask("run", prompts=PROMPTS, **options)
    assert ended == {f"r{n}": ["done", 0] for n in range(len(PROMPTS))} | {"failed": {}}
    world = open_world(connect(global_segment_size=0), **options)
    requests = [world.engine.add(f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    world.engine.run()
    world.engine.check_idle()
    assert [request.loaded_tokens for request in requests] == [FULL_BLOCKS] * len(PROMPTS)
    assert world.audit(provider, requests) == len(world.workers) * len(PROMPTS) * FULL_BLOCKS // 4
    counters = world.counters()
    assert not {name for name in counters if "failed" in name}
    assert world.close() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_master_killed_between_two_steps_costs_hits_only(
    mode: str, master: MooncakeMaster, connect: Connect, open_world: OpenWorld
) -> None:
    """Deadlines are short here, so that calls are given up in the middle; afterwards hits come back by themselves."""
    save(open_world(**PATIENT | MODES[mode]))
    world = open_world(**MODES[mode], engine={"chunk": 6})

    def before_step(step: int) -> None:
        if step == 1:
            master.kill()
            for n, prompt in enumerate(PROMPTS):
                world.engine.add(f"cut{n}", prompt, output=3)
        if step == 6:
            master.start()

    world.engine.before_step = before_step
    first = [world.engine.add(f"r{n}", prompt, output=4) for n, prompt in enumerate(PROMPTS)]
    world.engine.run(max_steps=200)
    world.engine.check_idle()
    assert {r.state.value for r in world.engine.requests.values()} == {"done"}
    assert any(request.loaded_tokens for request in first), "nothing was loaded before the master was killed"
    assert world.counters()["save_failed"] > 0, "nothing was lost while the master was away"
    seen = iter(range(1000))

    def hit_again() -> bool:
        """Save a new prompt and ask for it once more."""
        name = next(seen)
        prompt = [5000 + name, *range(22)]
        for turn in ("save", "load"):
            request = world.engine.add(f"{turn}{name}", prompt)
            world.engine.run()
        return request.loaded_tokens == FULL_BLOCKS

    eventually(hit_again, "hits after the restart")
    world.audit(connect(global_segment_size=0), world.engine.requests.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_master_that_freezes_in_mid_load_costs_a_deadline(
    mode: str, master: MooncakeMaster, connect: Connect, open_world: OpenWorld
) -> None:
    """Every call hangs for the engine's 3 s; the pool's own deadlines (0.4 s) end the loads, and the lanes go on."""
    save(open_world(**PATIENT | MODES[mode]))
    backend = connect()
    world = open_world(backend, **MODES[mode])
    get = backend.get

    def freezing(*arguments: Any) -> Any:
        master.freeze()
        return get(*arguments)

    backend.get = freezing  # type: ignore[method-assign]  # the look-up has answered, the load begins
    try:
        requests = [world.engine.add(f"r{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        world.engine.run(max_steps=200)
    finally:
        backend.get = get  # type: ignore[method-assign]
        master.thaw()
    assert {request.state.value for request in requests} == {"done"}
    assert world.counters()["load_failed"] >= 1
    eventually(lambda: backend.ledger() == {"calls": 0, "slots": 0}, "the calls that were given up return")
    assert world.engine.invalid_blocks > 0
    world.audit(connect(global_segment_size=0), requests)
