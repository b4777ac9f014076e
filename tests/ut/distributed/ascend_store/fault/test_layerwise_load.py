"""Layerwise loads driven through their failure paths, by global address and by key, on engines strict and lax.

The engine checks that no token is computed on wrong bytes that nobody reported, the story that every lease is given
back, and faultinject that nothing hangs, leaks or is swallowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faultinject as fi
from fixtures.layerwise_sites import (
    ADD_LEASE,
    ALLOC,
    COPY,
    COPY_HONEST,
    EXISTS,
    FINISH,
    GATE_RECORD,
    GATE_WAIT,
    GVA_LOAD,
    KEY_INFO,
    LAYERS_RECV,
    PREPARE_LOAD,
    REMOVE_LEASE,
    SIGNAL_SET,
    fewer,
)
from fixtures.layerwise_story import LayerStory
from fixtures.pool_sites import DIGEST_VERIFY, EVENT, EVENT_RECORD, ROLES, STORE_GET
from fixtures.world import World

pytestmark = pytest.mark.fault

PROMPT = range(14)  # three full blocks and a part of a fourth
LONGER = range(30)
INSIDE = [LAYERS_RECV, PREPARE_LOAD, GATE_RECORD, GATE_WAIT, SIGNAL_SET, EVENT, EVENT_RECORD, DIGEST_VERIFY]


def scenario(name: str, sites: list[fi.Site], **settings: Any) -> Any:
    settings = {"max_faults": 1, **settings}
    return fi.scenario(name=name, sites=sites, roles=ROLES, deadline=30.0, grace=5.0, expects=(), **settings)


def add(*prompts: Any) -> Any:
    """Requests a, b, ... with these prompts."""

    def act(world: World) -> None:
        for name, prompt in zip("abcdef", prompts, strict=False):
            world.engine.add(name, prompt)

    return act


@scenario("layer-load", [*GVA_LOAD, *INSIDE, EXISTS])
def test_layer_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT)
    return story.play(add(PROMPT))


@scenario("layer-load-lax", [*map(fewer, GVA_LOAD)])
def test_layer_load_lax(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "lax")
    story.fill(PROMPT)
    return story.play(add(PROMPT))


@scenario("layer-load-plain", [KEY_INFO, ADD_LEASE, COPY_HONEST, REMOVE_LEASE])
def test_layer_load_without_digests(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """As on an NPU, whose caches the CPU can't read; the engine is strict about leases."""
    story = LayerStory(run, tmp_path, "strict")
    story.fill(PROMPT, checksum=False)
    return story.play(add(PROMPT), checksum=False)


@scenario("layer-load-key", [STORE_GET, EXISTS, LAYERS_RECV, GATE_RECORD, GATE_WAIT])
def test_layer_load_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "key")
    story.fill(PROMPT)
    return story.play(add(PROMPT))


@scenario("layer-load-depth-2", [fewer(COPY), GATE_RECORD, GATE_WAIT])
def test_prefetch_two_layers(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT, engine={"layers": 5})
    return story.play(add(PROMPT), engine={"layers": 5}, layerwise_prefetch_layers=2)


@scenario("layer-load-depth-3", [fewer(COPY), GATE_RECORD, GATE_WAIT])
def test_prefetch_three_layers(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """In pieces: two blocks per call, and no range longer than half a block."""
    options: dict[str, Any] = {
        "engine": {"layers": 5},
        "layerwise_max_transfer_blocks": 2,
        "layerwise_max_transfer_bytes": 64,
    }
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT, **options)
    return story.play(add(PROMPT), **options, layerwise_prefetch_layers=3)


@scenario("layer-load-async", [*map(fewer, GVA_LOAD), LAYERS_RECV, PREPARE_LOAD])
def test_asynchronous_load(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT)
    return story.play(add(PROMPT), load_async=True)


@scenario("layer-load-fail-policy", [*map(fewer, (KEY_INFO, ADD_LEASE, COPY))])
def test_fail_policy(run: fi.Run, tmp_path: Path) -> None:
    """Under policy "fail" the request whose load failed ends, and only that one."""
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT)
    ended = story.play(add(PROMPT, range(100, 109)), engine={"policy": "fail"})
    assert ended["b"] == "done"


@scenario("layer-load-shared-keys", [*map(fewer, GVA_LOAD)])
def test_two_requests_share_keys(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """Neither takes the other's leases away."""
    story = LayerStory(run, tmp_path, "strict")
    story.fill(PROMPT)
    return story.play(add(PROMPT, [*range(8), 90, 91]), engine={"prefix_caching": False})


@scenario("layer-load-shared-keys-async", [*map(fewer, GVA_LOAD)])
def test_two_asynchronous_requests_share_keys(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "lax")
    story.fill(PROMPT)
    return story.play(add(PROMPT, [*range(8), 90, 91]), engine={"prefix_caching": False}, load_async=True)


@scenario("layer-load-and-save", [*map(fewer, (*GVA_LOAD, ALLOC, FINISH))])
def test_load_and_save_in_one_step(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """A50: what is computed on blocks that did not arrive is not published, and neither are others' copies of it."""
    story = LayerStory(run, tmp_path, "lax")
    story.fill(PROMPT)
    return story.play(add(LONGER, [*range(12), *range(50, 60)], range(100, 110)))


@scenario("layer-load-and-save-key", [fewer(STORE_GET)])
def test_load_and_save_in_one_step_by_key(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    story = LayerStory(run, tmp_path, "key")
    story.fill(PROMPT)
    return story.play(add(LONGER, [*range(12), *range(50, 60)], range(100, 110)))


@scenario("layer-load-two-ranks", [*map(fewer, (KEY_INFO, COPY))])
def test_two_ranks(run: fi.Run, tmp_path: Path) -> dict[str, str]:
    """What one rank could not load, the other ranks' shares are not saved on either."""
    story = LayerStory(run, tmp_path, "local")
    story.fill(PROMPT, tp=2)
    return story.play(add(LONGER), tp=2)
