"""Steps that break off between any two layers, and the steps after them: nothing of the one is seen by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.layerwise_sites import ALLOC, COPY, FINISH, FORWARD, GVA_LOAD, GVA_SAVE, fewer
from fixtures.layerwise_story import LayerStory
from fixtures.pool_sites import EVENT, ROLES, STORE_GET, STORE_PUT
from fixtures.world import World

pytestmark = pytest.mark.fault

PROMPT = range(14)
LONGER = range(30)


def scenario(name: str, sites: list[fi.Site], **settings: Any) -> Any:
    settings = {"max_faults": 2, **settings}
    return fi.scenario(name=name, sites=sites, roles=ROLES, deadline=30.0, grace=5.0, expects=(), **settings)


def add(*prompts: Any) -> Any:
    def act(world: World) -> None:
        for name, prompt in zip("abcdef", prompts, strict=False):
            world.engine.add(name, prompt, output=2)

    return act


@scenario("aborted-save", [FORWARD, *map(fewer, GVA_SAVE)])
def test_aborted_save(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """What a step had opened is dropped before the next one opens the same keys."""
    return LayerStory(run, tmp_path, "strict").play(add(PROMPT), engine={"chunk": 9})


@scenario("aborted-load", [FORWARD, *map(fewer, GVA_LOAD)], max_faults=1)
def test_aborted_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """What a step had not loaded is reported by the next one, which computes on it."""
    story = LayerStory(run, tmp_path, "lax")
    story.fill(PROMPT)
    return story.play(add(LONGER, range(100, 110)), layerwise_prefetch_layers=2)


@scenario("aborted-by-key", [FORWARD, fewer(STORE_GET), fewer(STORE_PUT)], max_faults=1)
def test_aborted_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "key")
    story.fill(PROMPT)
    return story.play(add(LONGER, range(100, 110)))


@scenario("aborted-two-ranks", [FORWARD], max_faults=1)
def test_aborted_with_two_ranks(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT, tp=2)
    return story.play(add(LONGER), tp=2)


REUSE: dict[str, Any] = {
    "layerwise_num_shared_buffers": 2,
    "engine": {"layers": 5, "buffers": (0, 1, 2, 1, 2)},
}
"""The first layer has a buffer of its own, the others take turns in two."""


@scenario("layer-reuse", [*map(fewer, (*GVA_LOAD, ALLOC, FINISH)), EVENT], max_faults=1)
def test_layers_that_share_buffers(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """A load into a buffer waits until the save of what was there has finished or failed; what could not be saved can't
    be loaded, and is computed anew."""
    story = LayerStory(run, tmp_path, "lax")
    return story.play(add(PROMPT, range(100, 107)), **REUSE)


@scenario("layer-reuse-fail-policy", [*map(fewer, (ALLOC, COPY))], max_faults=1)
def test_layers_that_share_buffers_fail_policy(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """What a step has computed and the pool has lost fails the request to which it belongs."""
    story = LayerStory(run, tmp_path, "local")
    engine = {**REUSE["engine"], "policy": "fail", "chunk": 8}
    return story.play(add(PROMPT), **{**REUSE, "engine": engine}, layerwise_prefetch_layers=2)


@scenario("layer-reuse-aborted", [FORWARD], max_faults=1)
def test_layers_that_share_buffers_in_aborted_steps(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    return LayerStory(run, tmp_path, "strict").play(add(PROMPT), **REUSE)
