"""Several KV-cache groups, driven through their failure paths: a load fails as a whole, the other requests go on.

Loads are always asynchronous here, for vLLM can't take single blocks back when there are several groups. The engine
dies if a block id is named nevertheless; its two groups use the same ids for different blocks (A48).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.layerwise_sites import GVA_LOAD, GVA_SAVE, LAYERS_RECV, PREPARE_LOAD, fewer
from fixtures.layerwise_story import LayerStory
from fixtures.pool_sites import EVENT, ROLES, STORE_GET, STORE_PUT, harmless
from fixtures.world import World
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind

pytestmark = pytest.mark.fault

PROMPT = range(22)
GROUPS = (CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, window=6), CacheGroup(8, GroupKind.STATE))
OPTIONS: dict[str, Any] = {"groups": GROUPS, "engine": {"layers": (2, 2, 1)}}


def scenario(name: str, sites: list[fi.Site], **settings: Any) -> Any:
    settings = {"max_faults": 1, **settings}
    return fi.scenario(name=name, sites=sites, roles=ROLES, deadline=30.0, grace=5.0, expects=(), **settings)


def act(world: World) -> None:
    world.engine.add("a", PROMPT)
    world.engine.add("b", range(100, 110))


@scenario("groups-load", [*map(fewer, GVA_LOAD), LAYERS_RECV, PREPARE_LOAD])
def test_groups_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "strict")
    story.fill(PROMPT, **OPTIONS)
    return story.play(act, **OPTIONS)


@scenario("groups-load-fail-policy", [*map(fewer, GVA_LOAD)])
def test_groups_load_fail_policy(run: fi.Run, tmp_path: Path) -> None:
    """Under policy "fail" the request whose load failed ends, and only that one."""
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT, **OPTIONS)
    ended = story.play(act, **{**OPTIONS, "engine": {"layers": (2, 2, 1), "policy": "fail"}})
    assert ended["b"] == "done"


@scenario("groups-load-key", [STORE_GET])
def test_groups_load_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "key")
    story.fill(PROMPT, **OPTIONS)
    return story.play(act, **OPTIONS)


@scenario("groups-load-whole", [STORE_GET])
def test_groups_load_whole_blocks(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "key")
    story.fill(PROMPT, use_layerwise=False, **OPTIONS)
    return story.play(act, use_layerwise=False, **OPTIONS)


@scenario("groups-save", [*map(fewer, GVA_SAVE), EVENT])
def test_groups_save(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """A failure in any group rolls back what the request has opened in all of them."""
    return LayerStory(run, tmp_path, "strict").play(act, **OPTIONS)


@scenario("groups-save-key", [fewer(STORE_PUT)])
def test_groups_save_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return LayerStory(run, tmp_path, "key").play(act, **OPTIONS)


@scenario("groups-abort-mid-load", [harmless(fewer(site)) for site in GVA_LOAD])
def test_abort_mid_load(run: fi.Run, tmp_path: Path) -> None:
    """An aborted load is named as received once, and gives back its leases, however it ends."""
    story = LayerStory(run, tmp_path, "strict")
    story.fill(PROMPT, **OPTIONS)

    def abort(world: World) -> None:
        act(world)
        world.engine.before_step = lambda step: world.engine.abort("a") if step == 1 else None

    story.play(abort, **OPTIONS)
