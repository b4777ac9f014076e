"""Law: on the real Mooncake Store, too, every request gives the tokens that it gives without a pool.

Two engine processes share the store; its master is killed and started again in mid-traffic (`make backends`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fixtures.mooncake import MISSING, MooncakeMaster

from .client import Engine, Request
from .lab import Lab, full_blocks, prompts

pytestmark = [pytest.mark.backend, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}
OPTIONS = {"backend": "mooncake", "store_backoff": 0.2, "lookup_backoff": 0.2, "staging_slot_bytes": 1 << 20}


class Bench(NamedTuple):
    lab: Lab
    first: Engine
    second: Engine
    master: MooncakeMaster
    mode: str


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module", params=MODES)
def bench(
    request: pytest.FixtureRequest, new_lab: Callable[..., Lab], master: MooncakeMaster, folder: Path
) -> Iterator[Bench]:
    settings = folder / f"mooncake-{request.param}.json"
    settings.write_text(json.dumps({"protocol": "tcp", "global_segment_size": "64MB"}))
    lab = new_lab(**OPTIONS, **MODES[request.param])
    surroundings = {
        "MOONCAKE_CONFIG_PATH": str(settings),
        "MOONCAKE_MASTER": master.address,
        "VLLM_HOST_IP": "127.0.0.1",  # there is no other
    }
    lab.machine = replace(lab.machine, environment=surroundings)
    with lab.engine() as first, lab.engine() as second:
        yield Bench(lab, first, second, master, request.param)


def test_what_one_engine_has_computed_the_other_loads(bench: Bench) -> None:
    lab, first, second, _, mode = bench
    prefix, tail = prompts((mode, "prefix"), 150, 60)
    requests = [Request(prompt) for prompt in (*prompts((mode, "same"), 200, 95, 33, 31, 192), prefix + tail)]
    assert lab.run(first, requests).cached == (0,) * 6
    assert lab.run(second, requests).cached == (192, 64, 32, 0, 191, 192)
    first.reset_prefix_cache()
    assert lab.run(first, [Request(prefix + tail[:9])]).cached == (128,)
    for engine in (first, second):
        assert engine.metrics("vllm:ascend_store_faults_total") == {}


def test_both_at_the_same_time(bench: Bench) -> None:
    lab, first, second, _, mode = bench
    mine, yours, ours = (prompts((mode, name), 100, 200, 300) for name in ("mine", "yours", "ours"))
    work = {first: [*ours, *mine], second: [*yours, *ours]}
    with ThreadPoolExecutor(2) as threads:
        runs = {
            engine: threads.submit(engine.generate, [Request(prompt, max_tokens=16) for prompt in chosen])
            for engine, chosen in work.items()
        }
        for engine, run in runs.items():
            lab.check(engine, [Request(prompt, max_tokens=16) for prompt in work[engine]], run.result())
    first.reset_prefix_cache()
    assert lab.run(first, [Request(prompt) for prompt in yours]).cached == tuple(full_blocks(len(p)) for p in yours)


def test_the_master_is_killed_in_mid_traffic_and_comes_back(bench: Bench) -> None:
    """Both engines go on, right; after its return they save and hit again, unasked."""
    lab, first, second, master, mode = bench
    saved = [Request(prompt) for prompt in prompts((mode, "saved"), 200, 250, 300)]
    lab.run(first, saved)
    first.reset_prefix_cache()
    new = [Request(prompt, max_tokens=20, arrive=3 * n) for n, prompt in enumerate(prompts((mode, "new"), *[150] * 8))]
    work = {first: [*new, *(replace(request, arrive=9 + n) for n, request in enumerate(saved))], second: new}
    with ThreadPoolExecutor(2) as threads:
        runs = {engine: threads.submit(engine.generate, requests) for engine, requests in work.items()}
        master.kill()
        for engine, run in runs.items():
            lab.check(engine, work[engine], run.result())
    master.start()
    for attempt in range(60):
        request = Request(prompts((mode, "again", attempt), 200)[0])
        lab.run(first, [request])
        first.reset_prefix_cache()
        if lab.run(second, [request]).cached == (192,):
            break
    else:
        raise AssertionError("no hit after the master's return")
    assert first.metrics("vllm:ascend_store_faults_total") != {}, "nobody noticed that the master was away"
