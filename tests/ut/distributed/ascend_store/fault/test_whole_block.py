"""The whole-block path driven through its failure paths: each scenario is explored at every site, hit by hit.

The laws are checked by the engine (no token on wrong bytes that nobody reported, no answer that kills vLLM, no
livelock, nothing held when idle), by an audit of the store's bytes, and by faultinject (no hang, no leak, nothing
swallowed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.pool_sites import (
    DIGEST_VERIFY,
    DIGEST_WRITE,
    EVENT,
    EVENT_RECORD,
    HITS,
    RECVING,
    ROLES,
    SENDING,
    STORE_EXISTS,
    STORE_GET,
    STORE_PUT,
    harmless,
)
from fixtures.story import Story
from fixtures.world import World

pytestmark = pytest.mark.fault

SAVE_SITES = [STORE_EXISTS, STORE_PUT, SENDING, EVENT, EVENT_RECORD, DIGEST_WRITE, HITS]
LOAD_SITES = [STORE_EXISTS, STORE_GET, RECVING, DIGEST_VERIFY, HITS]
ALL_SITES = [*SAVE_SITES, STORE_GET, RECVING, DIGEST_VERIFY]

PROMPT = range(14)  # three full blocks and a part of a fourth
SAME_START = [*range(8), *range(50, 56)]


def scenario(name: str, sites: list[fi.Site], **settings: Any) -> Any:
    return fi.scenario(
        name=name, sites=sites, roles=ROLES, deadline=20.0, grace=5.0, expects=(), max_faults=1, **settings
    )


@scenario("save", SAVE_SITES)
def test_save(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return Story(run, tmp_path).play(lambda world: world.engine.add("a", PROMPT))


@scenario("save-chunked", SAVE_SITES)
def test_save_chunked(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """Blocks that failed in one chunk are offered again with the next."""
    return Story(run, tmp_path).play(lambda world: world.engine.add("a", PROMPT, output=3), engine={"chunk": 5})


@scenario("sync-load", LOAD_SITES)
def test_sync_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = Story(run, tmp_path)
    story.fill(PROMPT)
    return story.play(lambda world: world.engine.add("a", PROMPT))


@scenario("sync-load-fail-policy", LOAD_SITES)
def test_sync_load_fail_policy(run: fi.Run, tmp_path: Path) -> None:
    """Under policy "fail" the request whose load failed ends, and only that one."""
    story = Story(run, tmp_path)
    story.fill(PROMPT)

    def act(world: World) -> None:
        world.engine.add("a", PROMPT)
        world.engine.add("other", range(100, 109))

    ended = story.play(act, engine={"policy": "fail"})
    assert ended["other"] == "done"


@scenario("async-load", LOAD_SITES)
def test_async_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = Story(run, tmp_path)
    story.fill(PROMPT)
    return story.play(lambda world: world.engine.add("a", PROMPT), load_async=True)


@scenario("abort-mid-load", [harmless(STORE_GET), harmless(RECVING), harmless(DIGEST_VERIFY)])
def test_abort_mid_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """An aborted load ends, however it ends, and its blocks are given back once."""
    story = Story(run, tmp_path)
    story.fill(PROMPT)

    def act(world: World) -> None:
        world.engine.add("a", PROMPT)
        world.engine.add("b", range(200, 210))
        world.engine.before_step = lambda step: world.engine.abort("a") if step == 1 else None

    ended = story.play(act, load_async=True)
    assert ended["b"] == "done"
    return {}


@scenario("preempt-and-resume", ALL_SITES)
def test_preempt_and_resume(run: fi.Run, tmp_path: Path) -> None:
    """A request that was preempted comes back to what it saved itself."""

    def act(world: World) -> None:
        world.engine.add("a", PROMPT, output=3)
        world.engine.before_step = lambda step: world.engine.preempt("a") if step == 2 else None

    ended = Story(run, tmp_path).play(act)
    assert ended == {"a": "done"}


@scenario("two-ranks-share-prefix", ALL_SITES)
def test_two_ranks_share_prefix(run: fi.Run, tmp_path: Path) -> None:
    """Two requests with the same start on two ranks: what fails for one never reaches the other unreported."""
    story = Story(run, tmp_path)
    story.fill(range(8), tp=2)

    def act(world: World) -> None:
        world.engine.add("a", PROMPT)
        world.engine.add("b", SAME_START)

    ended = story.play(act, tp=2)
    assert ended == {"a": "done", "b": "done"}


@scenario("store-full", [STORE_EXISTS, STORE_PUT, STORE_GET])
def test_store_full(run: fi.Run, tmp_path: Path) -> None:
    """A store with room for a few blocks: the oldest make room, and what was evicted is a miss, not an error."""
    story = Story(run, tmp_path, capacity_bytes=8 * 4096)

    def act(world: World) -> None:
        for number in range(6):
            world.engine.add(f"r{number}", range(100 * number, 100 * number + 17))

    ended = story.play(act, evicts=True)
    assert set(ended.values()) == {"done"}


@scenario("lookup-server-restart", [HITS, STORE_EXISTS, STORE_GET])
def test_lookup_server_restart(run: fi.Run, tmp_path: Path) -> None:
    """The look-up server goes away and comes back in mid-traffic; nobody waits for it, and it is found again."""
    story = Story(run, tmp_path)
    story.fill(PROMPT)

    def act(world: World) -> None:
        def before_step(step: int) -> None:
            if step == 1:
                world.restart_lookups()
            if step == 2:
                world.engine.add("late", PROMPT)

        world.engine.add("a", PROMPT, output=4)
        world.engine.before_step = before_step

    ended = story.play(act)
    assert ended == {"a": "done", "late": "done"}
