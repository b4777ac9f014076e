"""Law: a fault costs time or, under policy `fail`, the request that it hits; never a token, another request, the pool.

One engine per mode of transfer and failure policy, and a witness: a second engine on the same pool, which never has a
fault and computes everything anew from what the pool holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from .client import Engine, Request, Run
from .lab import Lab, full_blocks, prompts

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}
SHORT = {
    "load_timeout": 1.0,
    "save_timeout": 1.0,
    "layer_timeout": 1.0,
    "lookup_timeout": 1.0,
    "lookup_backoff": 0.1,
    "store_backoff": 0.1,
}


class Bench(NamedTuple):
    lab: Lab
    engine: Engine
    witness: Engine
    mode: str
    policy: str

    def saved(self, *lengths: int, seed: object) -> list[Request]:
        """Requests whose prompts are in the pool and not in vLLM's own cache."""
        requests = [Request(prompt) for prompt in prompts((self.mode, self.policy, seed), *lengths)]
        self.lab.run(self.engine, requests)
        self.engine.reset_prefix_cache()
        return requests

    def run_with_fault(self, hit: Sequence[Request], others: Sequence[Request] = ()) -> Run:
        """Run them in one batch. Those that the fault hits may end in an error if the policy says so, and only then."""
        before = self.lookups()
        requests = [*hit, *others]
        run = self.engine.generate(requests, seconds=40)
        right = self.lab.oracle.tokens(self.lab.machine, requests)
        for number, (output, tokens) in enumerate(zip(run.outputs, right, strict=True)):
            if self.policy == "fail" and number < len(hit) and output.finish == "error":
                continue
            if requests[number].abort is not None and output.finish == "abort":
                continue
            assert output.finish == "length", f"request {number} ended with {output.finish!r}"
            assert output.tokens == tokens, f"request {number} gave wrong tokens"
        assert self.engine.blocks_in_use() == 0
        assert not self.engine.call("faults:live_requests")
        assert self.lookups() - before <= 3 * len(requests), "a failed hit was offered again"
        return run

    def lookups(self) -> float:
        return sum(self.engine.metrics("vllm:ascend_store_lookups_total").values())

    def heal(self) -> None:
        """End the fault, which must have been met."""
        assert self.engine.call("faults:heal"), "the fault was never met"

    def afterwards(self, requests: Sequence[Request]) -> None:
        """The engine, from its own cache and from the pool, and the witness from the pool, give the right tokens."""
        longer = [replace(request, max_tokens=12) for request in requests]
        self.lab.run(self.engine, longer)
        self.engine.reset_prefix_cache()
        self.lab.run(self.engine, longer)
        self.witness.reset_prefix_cache()
        self.lab.run(self.witness, longer)

    def recovers(self, requests: Sequence[Request]) -> None:
        """By itself, after at most a few back-offs, everything is saved and hit again."""
        for _ in range(40):
            self.lab.run(self.engine, requests)
            self.engine.reset_prefix_cache()
            if self.lab.run(self.engine, requests).cached == tuple(full_blocks(len(r.prompt)) for r in requests):
                return
            self.engine.reset_prefix_cache()
        raise AssertionError("the pool does not come back into use")


POLICIES = ("recompute", "fail")


@pytest.fixture(scope="module", params=[f"{mode}-{policy}" for mode in MODES for policy in POLICIES])
def bench(request: pytest.FixtureRequest, new_lab: Callable[..., Lab]) -> Iterator[Bench]:
    mode, _, policy = request.param.partition("-")
    lab = new_lab(**MODES[mode], **SHORT)
    with lab.engine(policy) as engine, lab.engine(policy) as witness:
        yield Bench(lab, engine, witness, mode, policy)


@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
@pytest.mark.parametrize("kind", ["lost", "garbage"])
def test_blocks_that_do_not_arrive(bench: Bench, kind: str, where: str) -> None:
    victim, other_hit = bench.saved(300, 150, seed=(kind, where))
    (other_miss,) = (Request(prompt) for prompt in prompts((kind, where, "miss"), 120))
    bench.engine.call("faults:spoil", kind=kind, prompt=victim.prompt, where=where)
    run = bench.run_with_fault([victim], [other_hit, other_miss])
    bench.heal()
    if bench.policy == "fail":
        assert run.finishes == ("error", "length", "length")
    assert run.cached[1:] == (128, 0), "the other requests' hits are as ever"
    bench.afterwards([victim, other_hit, other_miss])


@pytest.mark.parametrize("where", ["first", "all"])
def test_two_requests_that_share_what_does_not_arrive(bench: Bench, where: str) -> None:
    (victim,) = bench.saved(300, seed=("shared", where))
    sibling = Request(victim.prompt[:200] + prompts("sibling", 60)[0])
    (other,) = (Request(prompt) for prompt in prompts(("shared", where, "miss"), 100))
    bench.engine.call("faults:spoil", kind="lost", prompt=victim.prompt, where=where)
    bench.run_with_fault([victim, replace(victim, arrive=1), sibling], [other])
    bench.heal()
    bench.afterwards([victim, sibling])


@pytest.mark.parametrize("mid_step", [False, True], ids=["between steps", "in mid-step"])
def test_aborted_between_the_failure_and_its_repair(bench: Bench, mid_step: bool) -> None:
    """What the failed step left in vLLM's own cache must not be hit by the next request with that prefix, not even if
    the request is gone before the failure is known."""
    (victim,) = bench.saved(900, seed=("abort", mid_step))  # several steps to compute again
    for age in (0, 1, 2, 3) if mid_step else (1, 2, 3):
        bench.engine.reset_prefix_cache()
        bench.engine.call("faults:spoil", kind="lost", prompt=victim.prompt, where="first")
        aborted = replace(victim, abort=age, abort_mid_step=mid_step)
        bench.run_with_fault([aborted, replace(victim, arrive=age + 1)])
        bench.heal()
    bench.afterwards([victim])


def test_control_blocks_that_failed_are_hit_if_nobody_forgets_them(new_lab: Callable[..., Lab]) -> None:
    """vLLM leaves them in its cache under `recompute`; if this fails, the test above shows nothing."""
    lab = new_lab(**SHORT)
    with lab.engine() as engine:
        bench = Bench(lab, engine, engine, "sync", "recompute")
        (victim,) = bench.saved(900, seed="abort")
        engine.call("faults:trust_what_failed")
        engine.call("faults:spoil", kind="lost", prompt=victim.prompt, where="first")
        with pytest.raises(AssertionError, match="wrong tokens"):
            bench.run_with_fault([replace(victim, abort=1), replace(victim, arrive=2)])


def test_a_load_that_comes_too_late(bench: Bench) -> None:
    """The data arrive long after the blocks were handed on, and land nowhere."""
    (victim,) = bench.saved(300, seed="late")
    (other,) = (Request(prompt) for prompt in prompts("late miss", 200))
    bench.engine.call("faults:break_call", call="batch_copy" if bench.mode == "layerwise" else "get", how="is late")
    bench.run_with_fault([victim], [other])
    again = [Request(prompt) for prompt in prompts("late others", 300, 300, 300)]
    bench.run_with_fault(again)
    bench.heal()
    bench.afterwards([victim, other, *again])


def benches(*modes: str, policies: Sequence[str] = POLICIES) -> pytest.MarkDecorator:
    """Only these modes and policies."""
    return pytest.mark.parametrize("bench", [f"{m}-{p}" for m in modes for p in policies], indirect=True)


def check_call(bench: Bench, call: str, how: str) -> None:
    """What was saved before and what is new, while one call misbehaves at every use, and after it has stopped."""
    old = bench.saved(200, 100, seed=(call, how))
    new = [Request(prompt) for prompt in prompts((call, how, "new"), 150, 70)]
    bench.engine.call("faults:break_call", call=call, how=how)
    bench.run_with_fault([*old, *new])
    bench.heal()
    bench.recovers([*old, *new])
    bench.afterwards([*old, *new])


WHOLE = ["exists", "put", "get"]
LAYERWISE = ["batch_alloc", "batch_write_finish", "batch_copy", "batch_get_key_info", "batch_add_lease", "exists"]
each_way = pytest.mark.parametrize("how", ["raises", "answers none", "answers short", "refuses"])


@benches("sync", "async")
@each_way
@pytest.mark.parametrize("call", WHOLE)
def test_every_call_of_whole_blocks(bench: Bench, call: str, how: str) -> None:
    check_call(bench, call, how)


@benches("layerwise")
@each_way
@pytest.mark.parametrize("call", LAYERWISE)
def test_every_call_of_layers(bench: Bench, call: str, how: str) -> None:
    check_call(bench, call, how)


@benches("sync", "async", policies=["recompute"])
@pytest.mark.parametrize("call", WHOLE)
def test_every_call_of_whole_blocks_too_late(bench: Bench, call: str) -> None:
    check_call(bench, call, "is late")


@benches("layerwise", policies=["recompute"])
@pytest.mark.parametrize("call", LAYERWISE)
def test_every_call_of_layers_too_late(bench: Bench, call: str) -> None:
    check_call(bench, call, "is late")


def test_the_look_up_server_killed_and_restarted(bench: Bench) -> None:
    requests = bench.saved(200, 100, seed="lookups")
    bench.engine.call("faults:kill_lookups")
    assert bench.run_with_fault([], requests).cached == (0, 0)
    bench.engine.call("faults:restart_lookups")
    bench.engine.reset_prefix_cache()
    bench.recovers(requests)
    bench.afterwards(requests)


def test_the_store_killed_and_restarted(bench: Bench) -> None:
    requests = bench.saved(200, 100, seed="store")
    bench.engine.call("faults:kill_store")
    bench.run_with_fault([], requests)
    bench.engine.call("faults:restart_store")
    bench.engine.reset_prefix_cache()
    bench.recovers(requests)
    bench.afterwards(requests)
