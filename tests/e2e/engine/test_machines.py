"""Law: what holds for the plain model holds for other dtypes, cache groups, ranks, memory sizes and later engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .client import Request
from .lab import Lab, full_blocks, prompts

MODES = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}
each_mode = pytest.mark.parametrize("extra", [pytest.param(extra, id=mode) for mode, extra in MODES.items()])


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("machine", ["bfloat16", "hybrid", "tp2"])
def test_two_engines_one_after_the_other(new_lab: Callable[..., Lab], machine: str, layerwise: bool) -> None:
    """The first loads synchronously, where vLLM can, the second asynchronously; each hits what the first saved."""
    lab = new_lab(machine, use_layerwise=layerwise)
    first, second = ([Request(prompt) for prompt in prompts((machine, i), 300, 210, 100, 64, 20)] for i in range(2))
    # A window can't be resumed inside a block: the hit of 64 tokens ends a block earlier there.
    saved = (288, 192, 96, 32 if machine == "hybrid" else 63, 0)
    with lab.engine() as engine:
        assert lab.run(engine, first).cached == (0,) * 5
        engine.reset_prefix_cache()
        assert lab.run(engine, first).cached == saved
        assert engine.metrics("vllm:ascend_store_faults_total") == {}
    with lab.engine(load_async=True) as engine:
        assert lab.run(engine, [*first, *second]).cached == (*saved, *[0] * 5)
        engine.reset_prefix_cache()
        assert lab.run(engine, [*first, *second]).cached == saved * 2
        assert engine.metrics("vllm:ascend_store_faults_total") == {}


@pytest.mark.parametrize(
    ("machine", "layerwise"),
    [("float32", True), ("hybrid", True), ("tp2", True), pytest.param("pp2", False, id="pp2-whole"), ("pp2", True)],
)
def test_a_block_is_there_when_all_its_keys_are(new_lab: Callable[..., Lab], machine: str, layerwise: bool) -> None:
    """A store without global addresses has a key of each layer on each rank; the stages of pp2 have two and one."""
    lab = new_lab(machine, use_layerwise=layerwise)
    lab.module = "keyed"
    requests = [Request(prompt) for prompt in prompts(("keyed", machine), 300, 210, 100, 20)]
    with lab.engine() as engine:
        assert lab.run(engine, requests).cached == (0,) * 4
        engine.reset_prefix_cache()
        assert lab.run(engine, requests).cached == (288, 192, 96, 0)
        assert engine.metrics("vllm:ascend_store_faults_total") == {}


@each_mode
def test_too_few_blocks_for_the_batch(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    """Preempted requests give up blocks and come back, some into hits of what they had saved themselves."""
    lab = new_lab(**extra)
    requests = [Request(prompt, max_tokens=60, arrive=i) for i, prompt in enumerate(prompts("few", 90, 70, 100, 60))]
    with lab.engine(options={"num_gpu_blocks_override": 12, "max_model_len": 320}) as engine:
        lab.run(engine, requests)
        preempted = engine.metrics("vllm:num_preemptions_total")
        assert sum(preempted.values()) > 0, "the scenario must preempt"
        engine.reset_prefix_cache()
        lab.run(engine, requests)
        assert engine.metrics("vllm:ascend_store_faults_total") == {}


def test_an_engine_that_was_killed_leaves_the_pool_usable(new_lab: Callable[..., Lab]) -> None:
    lab = new_lab()
    requests = [Request(prompt) for prompt in prompts("killed", 150, 250)]
    with lab.engine() as engine:
        lab.run(engine, requests)
        engine.kill()
    with lab.engine() as engine:
        assert lab.run(engine, requests).cached == tuple(full_blocks(len(r.prompt)) for r in requests)


def test_models_of_one_name_and_dtypes_do_not_read_each_other(new_lab: Callable[..., Lab]) -> None:
    """Two directories called "model", and the plain one in two dtypes, on one pool: each computes its own."""
    labs = [new_lab("float32"), new_lab("hybrid"), new_lab("bfloat16")]
    requests = [Request(prompt) for prompt in prompts("names", 200)]
    for lab in labs:
        lab.pool = labs[0].pool
        with lab.engine() as engine:
            assert lab.run(engine, requests).cached == (0,)


def test_another_adapter_is_another_prompt(new_lab: Callable[..., Lab], adapters: list[tuple[str, int, str]]) -> None:
    """One prompt without an adapter and with each of two; one after the other, for on the CPU vLLM 0.32 itself gives a
    request without one the adapter of another in its batch."""
    lab = new_lab("adapters")
    (prompt,) = prompts("adapters", 200)
    requests = [Request(prompt, adapter=adapter) for adapter in (None, *adapters)]
    assert len({lab.oracle.tokens(lab.machine, [request]) for request in requests}) == 3
    with lab.engine() as engine:
        for request in requests:
            assert lab.run(engine, [request]).cached == (0,)
    with lab.engine() as engine:
        for request in requests:
            assert lab.run(engine, [request]).cached == (192,)


@each_mode
def test_control_zeros_give_other_tokens(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    """If this fails, a wrong block would go unnoticed in all the other tests."""
    lab = new_lab(**extra)
    requests = [Request(prompt) for prompt in prompts("control", 200, 100, 40)]
    with lab.engine(checksum=False) as engine:
        lab.run(engine, requests)
        engine.reset_prefix_cache()
        engine.call("faults:zero_what_is_loaded")
        run = engine.generate(requests)
        assert run.cached == (192, 96, 32)
        right = lab.oracle.tokens(lab.machine, requests)
        assert all(wrong != tokens for wrong, tokens in zip(run.tokens, right, strict=True))


@each_mode
def test_control_zeros_are_found_by_the_checksum(new_lab: Callable[..., Lab], extra: dict[str, Any]) -> None:
    lab = new_lab(**extra)
    requests = [Request(prompt) for prompt in prompts("checked", 200, 100, 40)]
    with lab.engine() as engine:
        lab.run(engine, requests)
        engine.reset_prefix_cache()
        engine.call("faults:zero_what_is_loaded")
        lab.run(engine, requests)
        assert engine.metrics("vllm:ascend_store_faults_total")
        engine.call("faults:heal")
        lab.run(engine, [replace(request, max_tokens=12) for request in requests])
