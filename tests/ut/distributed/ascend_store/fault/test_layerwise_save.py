"""Layerwise saves driven through their failure paths, by global address and by key, on engines strict and lax.

The story checks that every write that was opened is published or dropped, and that all that is published has the bytes
that its key promises; the engine and faultinject the rest, as for loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.layerwise_sites import (
    ALLOC,
    ALLOC_FOR_SAVE,
    COPY,
    EXISTS,
    FINISH,
    GVA_SAVE,
    LAYERS_SEND,
    PUBLISH,
    SIGNAL_SET,
    fewer,
)
from fixtures.layerwise_story import LayerStory
from fixtures.pool_sites import DIGEST_WRITE, EVENT, EVENT_RECORD, ROLES, STORE_PUT
from fixtures.world import World

pytestmark = pytest.mark.fault

PROMPT = range(14)  # three full blocks and a part of a fourth
INSIDE = [LAYERS_SEND, ALLOC_FOR_SAVE, PUBLISH, SIGNAL_SET, EVENT, EVENT_RECORD, DIGEST_WRITE]


def scenario(name: str, sites: list[fi.Site], **settings: Any) -> Any:
    settings = {"max_faults": 1, **settings}
    return fi.scenario(name=name, sites=sites, roles=ROLES, deadline=30.0, grace=5.0, expects=(), **settings)


@scenario("layer-save", [*GVA_SAVE, *INSIDE, EXISTS])
def test_layer_save(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return LayerStory(run, tmp_path, "local").play(lambda world: world.engine.add("a", PROMPT))


@scenario("layer-save-lax", [ALLOC, *map(fewer, (COPY, FINISH))], max_faults=2)
def test_layer_save_lax(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """Rolling back is explored, too: what fails after a first failure."""
    return LayerStory(run, tmp_path, "lax").play(lambda world: world.engine.add("a", PROMPT))


@scenario("layer-save-strict", [*map(fewer, (ALLOC, COPY)), FINISH])
def test_layer_save_strict(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return LayerStory(run, tmp_path, "strict").play(lambda world: world.engine.add("a", PROMPT), checksum=False)


@scenario("layer-save-key", [STORE_PUT, EXISTS, LAYERS_SEND, EVENT])
def test_layer_save_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return LayerStory(run, tmp_path, "key").play(lambda world: world.engine.add("a", PROMPT))


@scenario("layer-save-chunked", [*map(fewer, GVA_SAVE), EVENT_RECORD])
def test_layer_save_chunked(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """The same prefix is saved again after a step that failed; on the lax engine its keys are not to be had at once."""
    story = LayerStory(run, tmp_path, "lax")
    return story.play(lambda world: world.engine.add("a", PROMPT, output=4), engine={"chunk": 5})


@scenario("layer-save-shared-keys", [*map(fewer, GVA_SAVE)])
def test_two_requests_share_keys(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """One of them writes, the other one shares its fate; nobody drops what somebody else has published."""

    def act(world: World) -> None:
        world.engine.add("a", PROMPT)
        world.engine.add("b", [*range(8), *range(50, 56)])

    return LayerStory(run, tmp_path, "strict").play(act, engine={"prefix_caching": False})


@scenario("layer-save-preempted", [*map(fewer, GVA_SAVE)])
def test_preempted_and_resumed(run: fi.Run, tmp_path: Path) -> None:
    """A request that was preempted comes back to what it saved itself."""

    def act(world: World) -> None:
        world.engine.add("a", PROMPT, output=3)
        world.engine.before_step = lambda step: world.engine.preempt("a") if step == 2 else None

    ended = LayerStory(run, tmp_path, "local").play(act)
    assert ended == {"a": "done"}
