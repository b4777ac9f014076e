"""Law: at the pool's limits and after its threads' death requests go on, and what an engine holds does not grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .client import Engine, Request
from .lab import Lab, prompts

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}
each_mode = pytest.mark.parametrize("extra", [pytest.param(extra, id=mode) for mode, extra in MODES.items()])
BLOCK_BYTES = 2 * 2 * 32 * 64 * 4  # layers, KV heads, tokens, K and V, float32


@each_mode
def test_more_prompts_than_the_pool_holds(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    """Two engines drive each other's blocks out of a pool of 40, between look-up and load too."""
    lab = new_lab(pool_bytes=40 * BLOCK_BYTES, **extra)
    draw = random.Random(11)
    pool = [Request(prompt, max_tokens=3) for prompt in prompts("crowd", *[96, 160, 224, 290] * 5)]
    with lab.engine() as first, lab.engine() as second:
        for _ in range(12):
            for engine in (first, second):
                lab.run(engine, [replace(r, arrive=i // 2) for i, r in enumerate(draw.choices(pool, k=6))])
                engine.reset_prefix_cache()
        hits = first.metrics("vllm:ascend_store_hit_tokens_total")["vllm:ascend_store_hit_tokens_total"]
        assert hits > 0, "the scenario must also hit"


@each_mode
def test_a_prompt_larger_than_the_pool(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    lab = new_lab(pool_bytes=8 * BLOCK_BYTES, **extra)
    requests = [Request(prompt) for prompt in prompts("large", 600, 90)]
    with lab.engine() as engine:
        for _ in range(3):
            lab.run(engine, requests)
            engine.reset_prefix_cache()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", ["lost", "garbage"])
def test_one_block_of_a_hybrid_model_fails_its_request_whole(
    new_lab: Callable[..., Lab], kind: str, policy: str
) -> None:
    """With several groups vLLM can't take single blocks."""
    lab = new_lab("hybrid")
    victim, other = (Request(prompt) for prompt in prompts(("hybrid", kind), 300, 200))
    with lab.engine(policy) as engine:
        for where in ("first", "last", "all"):
            lab.run(engine, [victim, other])
            engine.reset_prefix_cache()
            engine.call("faults:spoil", kind=kind, prompt=victim.prompt, where=where)
            run = engine.generate([victim, other])
            assert engine.call("faults:heal")
            right = lab.oracle.tokens(lab.machine, [victim, other])
            if policy == "fail" and where != "first":  # the first block is not loaded into the window's group
                assert run.finishes[0] == "error"
            if run.finishes[0] != "error":
                assert run.tokens[0] == right[0]
            assert run.tokens[1] == right[1]
            lab.run(engine, [victim, other])
            engine.reset_prefix_cache()
            lab.run(engine, [victim, other])
            engine.reset_prefix_cache()


@each_mode
@pytest.mark.parametrize("call", ["exists", "load", "save"])
def test_the_end_of_a_transfer_thread_is_not_the_engines(
    new_lab: Callable[..., Lab], extra: dict[str, Any], call: str
) -> None:
    layerwise = "use_layerwise" in extra
    calls = {"load": "batch_copy" if layerwise else "get", "save": "batch_write_finish" if layerwise else "put"}
    lab = new_lab(**extra)
    old, new = (Request(prompt) for prompt in prompts(("thread", call), 200, 150))
    with lab.engine() as engine:
        lab.run(engine, [old])
        engine.reset_prefix_cache()
        engine.call("faults:break_call", call=calls.get(call, call), how="ends its thread")
        for _ in range(3):
            lab.run(engine, [old, new])
            engine.reset_prefix_cache()
        engine.call("faults:heal")
        lab.run(engine, [old, new])
        assert engine.metrics("vllm:ascend_store_faults_total"), "what ended the thread must be counted"


@each_mode
def test_what_an_engine_holds_does_not_grow(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    """300 requests, some aborted, some preempted, with loads that fail: threads and descriptors as before."""
    lab = new_lab(**extra)
    seed = [Request(prompt, max_tokens=3) for prompt in prompts("steady", *[70, 130, 200] * 5)]
    with lab.engine() as engine:
        _churn(lab, engine, seed, rounds=3)
        before = engine.footprint()
        _churn(lab, engine, seed, rounds=17)
        after = engine.footprint()
        assert after["descriptors"] <= before["descriptors"] + 2
        assert len(after["threads"]) <= len(before["threads"]) + 2, after["threads"]
        assert not engine.call("faults:live_requests")


def _churn(lab: Lab, engine: Engine, seed: list[Request], rounds: int) -> None:
    for number in range(rounds):
        if number % 3 == 2:
            engine.call("faults:spoil", kind="lost", prompt=seed[number % 15].prompt, where="middle")
        lab.run(engine, [replace(r, arrive=i // 4, abort=i % 3 if i % 5 == 4 else None) for i, r in enumerate(seed)])
        engine.call("faults:heal")
        engine.reset_prefix_cache()
