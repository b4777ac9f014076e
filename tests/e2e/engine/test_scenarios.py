"""Law: with the pool, every request gives the tokens that it gives without, and hits are what was saved before.

One engine per mode of transfer runs all of these in turn; each has prompts of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from .client import Engine, Request
from .lab import Lab, full_blocks, prompts

MODES = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}


class Bench(NamedTuple):
    lab: Lab
    engine: Engine


@pytest.fixture(scope="module", params=MODES)
def bench(request: pytest.FixtureRequest, new_lab: Callable[..., Lab]) -> Iterator[Bench]:
    lab = new_lab(**MODES[request.param])
    with lab.engine() as engine:
        yield Bench(lab, engine)


@pytest.fixture(autouse=True)
def nothing_went_wrong(bench: Bench) -> Iterator[None]:
    """No fault is counted in a scenario without one. (A load that an abort ends counts among the failed ones.)"""
    yield
    assert bench.engine.metrics("vllm:ascend_store_faults_total") == {}
    assert bench.engine.metrics("vllm:ascend_store_operation_failed_keys_total") == {}


def test_the_same_prompts_again_hit_every_full_block(bench: Bench) -> None:
    lab, engine = bench
    requests = [Request(prompt) for prompt in prompts("same", 200, 95, 33, 31)]
    assert lab.run(engine, requests).cached == (0, 0, 0, 0)
    engine.reset_prefix_cache()
    assert lab.run(engine, requests).cached == (192, 64, 32, 0)
    assert lab.run(engine, requests).cached == (192, 64, 32, 0), "vLLM's own cache must serve what was loaded"


def test_prompts_that_share_a_prefix_hit_that(bench: Bench) -> None:
    lab, engine = bench
    prefix, *tails = prompts("prefix", 150, 40, 90, 10)
    lab.run(engine, [Request(prefix + tails[0])])
    engine.reset_prefix_cache()
    assert lab.run(engine, [Request(prefix + tail) for tail in tails[1:]]).cached == (128, 128)


def test_a_batch_of_hits_and_misses_that_come_and_go(bench: Bench) -> None:
    lab, engine = bench
    known = [Request(prompt, max_tokens=4) for prompt in prompts("known", 100, 180, 260)]
    lab.run(engine, known)
    engine.reset_prefix_cache()
    new = [Request(prompt, max_tokens=12, arrive=2) for prompt in prompts("new", 70, 130)]
    late = [Request(request.prompt, max_tokens=20, arrive=3 + i) for i, request in enumerate(known)]
    run = lab.run(engine, [*new, *late])
    assert run.cached == (0, 0, 96, 160, 256)


def test_a_prompt_that_takes_several_steps_to_prefill(bench: Bench) -> None:
    lab, engine = bench
    requests = [Request(prompt) for prompt in prompts("chunks", 900, 400)]
    lab.run(engine, requests)
    engine.reset_prefix_cache()
    assert lab.run(engine, requests).cached == (896, 384)


def test_a_local_prefix_and_the_rest_from_the_pool(bench: Bench) -> None:
    lab, engine = bench
    (prompt,) = prompts("local", 320)
    lab.run(engine, [Request((*prompt, 7))])
    engine.reset_prefix_cache()
    lab.run(engine, [Request(prompt[:130])])
    before = engine.metrics("vllm:external_prefix_cache_hits_total")
    assert lab.run(engine, [Request((*prompt, 7))]).cached == (320,)
    after = engine.metrics("vllm:external_prefix_cache_hits_total")
    (gained,) = (after[name] - before[name] for name in after)
    assert gained == 192


def test_a_prompt_that_is_a_hit_to_its_last_token(bench: Bench) -> None:
    lab, engine = bench
    requests = [Request(prompt) for prompt in prompts("full", 192, 32)]
    lab.run(engine, requests)
    engine.reset_prefix_cache()
    assert lab.run(engine, requests).cached == (191, 31)


def test_aborted_at_any_step(bench: Bench) -> None:
    lab, engine = bench
    shared = prompts("abort", *[300] * 6)
    lab.run(engine, [Request(prompt) for prompt in shared])
    engine.reset_prefix_cache()
    doomed = [Request(prompt, max_tokens=30, abort=age) for age, prompt in enumerate(shared[:5])]
    lab.run(engine, [*doomed, Request(shared[5], max_tokens=20)])
    again = [Request(prompt, max_tokens=10) for prompt in shared]
    lab.run(engine, again)
    engine.reset_prefix_cache()
    assert lab.run(engine, again).cached == (288,) * 6


def test_another_salt_is_another_prompt(bench: Bench) -> None:
    lab, engine = bench
    (prompt,) = prompts("salt", 100)
    lab.run(engine, [Request(prompt, salt="a")])
    engine.reset_prefix_cache()
    assert lab.run(engine, [Request(prompt, salt="b")]).cached == (0,)
    assert lab.run(engine, [Request(prompt, salt="a")]).cached == (96,)


def test_one_prompt_many_times_in_one_batch(bench: Bench) -> None:
    lab, engine = bench
    (prompt,) = prompts("twins", 150)
    lab.run(engine, [Request(prompt)])
    engine.reset_prefix_cache()
    run = lab.run(engine, [Request(prompt, max_tokens=6, arrive=i // 2) for i in range(6)])
    assert run.cached == (128,) * 6


def test_two_engines_share_the_pool_at_the_same_time(bench: Bench) -> None:
    lab, first = bench
    mine, yours, ours = (prompts(name, 100, 200, 300) for name in ("mine", "yours", "ours"))
    lab.run(first, [Request(prompt) for prompt in mine])
    with lab.engine() as second, ThreadPoolExecutor(2) as threads:
        assert lab.run(second, [Request(prompt) for prompt in mine]).cached == tuple(full_blocks(len(p)) for p in mine)
        work = {first: [*ours, *mine], second: [*yours, *ours]}
        runs = {
            engine: threads.submit(engine.generate, [Request(prompt, max_tokens=16) for prompt in chosen])
            for engine, chosen in work.items()
        }
        for engine, run in runs.items():
            lab.check(engine, [Request(prompt, max_tokens=16) for prompt in work[engine]], run.result())
        first.reset_prefix_cache()
        assert lab.run(first, [Request(prompt) for prompt in yours]).cached == tuple(full_blocks(len(p)) for p in yours)
