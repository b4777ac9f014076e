"""Steps that break off between any two layers, and the steps after them: nothing of the one is seen by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.layerwise_sites import FORWARD, GVA_LOAD, GVA_SAVE, fewer
from fixtures.layerwise_story import LayerStory
from fixtures.pool_sites import ROLES, STORE_GET, STORE_PUT
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
