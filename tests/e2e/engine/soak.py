"""A soak of vLLM's API server on the pool: mixed requests and seeded faults; all is right, and nothing held grows.

    make soak                                       # 600 s; a line each 15 s, and build/soak.json
    SOAK_SECONDS=60 SOAK_SEED=7 SOAK_MODE=layerwise make soak

Clients send requests all the time, several at once: new prompts, known ones, known beginnings with new ends, short and
long, and some hang up early. Meanwhile one fault after the other is put into the server's core and taken out again. In
between the clients pause: then nothing may be held any more, by the engine or in the pool, and a sample is taken. What
an engine without a connector answers is right.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm_ascend_ext.kv_pool.backend import local_audit
from vllm_ascend_ext.kv_pool.backend.arena import pool_folder
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend

from .client import Launcher, Request, Server
from .flat import FEWEST_SAMPLES, SLACK_BYTES, WARMING_BYTES, Sample, folder_bytes, not_flat, sample, total
from .lab import Lab, Machine, Oracle, prompts
from .tiny_model import TinyModel
from .traffic import CLIENTS, PATIENCE, Answer, Mix, Traffic, words

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"load_async": True}, "layerwise": {"use_layerwise": True}}
POOL_BYTES = 6 << 20  # some 180 blocks of 32 KiB: fewer than the known prompts have, so that blocks are driven out
OPTIONS = {"num_gpu_blocks_override": 80, "disable_uvicorn_access_log": True}  # vLLM's own cache forgets even sooner
SHORT = {
    "load_timeout": 1.0,
    "save_timeout": 1.0,
    "layer_timeout": 1.0,
    "lookup_timeout": 1.0,
    "lookup_backoff": 0.1,
    "store_backoff": 0.1,
}


@dataclass(frozen=True)
class Settings:
    seconds: float = 600.0
    seed: int = 1
    mode: str = "sync"

    @classmethod
    def of_environment(cls, seconds: float) -> Settings:
        """From SOAK_SECONDS, SOAK_SEED and SOAK_MODE; ValueError names one that can't be used."""
        given = os.environ.get("SOAK_SECONDS") or str(seconds)
        seed, mode = os.environ.get("SOAK_SEED") or "1", os.environ.get("SOAK_MODE") or "sync"
        try:
            length = float(given)
        except ValueError:
            length = 0.0
        if not 30 <= length <= 86_400:
            raise ValueError(f"SOAK_SECONDS={given!r}: allowed are numbers from 30 to 86400")
        if not seed.isdigit():
            raise ValueError(f"SOAK_SEED={seed!r}: allowed are whole numbers from 0 on")
        if mode not in MODES:
            raise ValueError(f"SOAK_MODE={mode!r}: allowed are {', '.join(MODES)}")
        return cls(length, int(seed), mode)

    @property
    def period(self) -> float:
        """Seconds between two pauses."""
        return min(15.0, max(2.0, self.seconds / 24))


# -- faults ------------------------------------------------------------------------------------------------------------

WHOLE = ("exists", "put", "get")
LAYERWISE = ("exists", "batch_alloc", "batch_write_finish", "batch_copy", "batch_get_key_info", "batch_add_lease")
WAYS = ("raises", "answers none", "answers short", "refuses", "is late")
PLACES = ("first", "middle", "last", "all")
NOTICED = (
    "lookup_timeouts_total",
    "load_failed_total",
    "save_failed_total",
    "operation_failed_keys_total",
    "faults_total",
)


class Faults:
    """Puts one fault at a time into the server, in an order of the seed; no kind comes twice before all have come."""

    def __init__(self, server: Server, traffic: Traffic, settings: Settings, pool: LocalBackend) -> None:
        self._server, self._traffic, self._pool = server, traffic, pool
        self._draw = random.Random(f"{settings.seed} faults")
        self._nudges = random.Random(f"{settings.seed} words")  # how many are drawn is a matter of time
        calls = LAYERWISE if settings.mode == "layerwise" else WHOLE
        self.kinds = [f"{call}: {how}" for call in calls for how in WAYS]
        self.kinds += [f"blocks {kind}: {where}" for kind in ("lost", "garbage") for where in PLACES]
        self.kinds += ["look-ups killed", "store killed", "store full", "store emptied"]
        self._deck: list[str] = []
        self._victim: tuple[int, ...] = ()
        self.injected: dict[str, int] = dict.fromkeys(self.kinds, 0)
        self.met: dict[str, int] = dict.fromkeys(self.kinds, 0)
        self.diary: list[tuple[float, float, str]] = []

    def one(self) -> None:
        """A fault comes, lasts until it was met and a while longer, and goes."""
        if not self._deck:
            self._deck = self._draw.sample(self.kinds, len(self.kinds))
        kind = self._deck.pop()
        self.injected[kind] += 1
        began = time.monotonic()
        lasts = time.monotonic() + self._draw.uniform(0.3, 2.0)
        met, end = self._begin(kind)
        limit = time.monotonic() + PATIENCE / 2
        while time.monotonic() < lasts or (not met() and time.monotonic() < limit):
            time.sleep(0.1)
            if self._victim:
                self._traffic.ask(Request((*self._victim, *words(self._nudges, 3)), max_tokens=4), None)
        self.met[kind] += met()
        end()
        self.diary.append((began, time.monotonic(), kind))
        time.sleep(self._draw.uniform(0.1, 1.0))

    def _begin(self, kind: str) -> tuple[Callable[[], bool], Callable[[], object]]:
        """Whether it was met, and how it ends."""
        what, _, how = kind.partition(": ")
        self._victim = ()
        call = partial(self._server.call, "worker")
        heal = partial(call, "faults:heal")
        if kind == "store full":
            taken = self._fill()
            return self._noticed(), lambda: self._pool.batch_write_finish(taken, [-1] * len(taken))
        if kind == "store emptied":
            keys = self._pool.stats()["keys"]
            taken = self._fill()
            self._pool.batch_write_finish(taken, [-1] * len(taken))
            return lambda: keys > 0, lambda: None
        if kind in ("look-ups killed", "store killed"):
            part = "lookups" if kind == "look-ups killed" else "store"
            noticed = self._noticed()
            call(f"faults:kill_{part}")
            return noticed, lambda: call(f"faults:restart_{part}")
        if what in ("blocks lost", "blocks garbage"):
            self._victim = self._traffic.mix.victim(self._draw)
            call("faults:spoil", kind=what.split()[1], prompt=self._victim, where=how)
            return lambda: "spoiled" in call("faults:met"), heal
        call("faults:break_call", call=what, how=how)
        return lambda: what in call("faults:met"), heal

    def _fill(self) -> list[str]:
        """Another client opens writes until there is no room: everything that nobody uses is driven out."""
        taken: list[str] = []
        for size in (256 << 10, 32 << 10, 4 << 10):
            keys = [f"intruder {size} {n}" for n in range(POOL_BYTES // size)]
            addresses = self._pool.batch_alloc(keys, [size] * len(keys))
            taken += [key for key, address in zip(keys, addresses, strict=True) if address]
        return taken

    def _noticed(self) -> Callable[[], bool]:
        """Whether the server has counted a failure since now."""

        def failures() -> float:
            found = self._server.metrics("vllm:ascend_store_")
            return sum(found.get(f"vllm:ascend_store_{name}", 0.0) for name in NOTICED)

        before = failures()
        return lambda: failures() > before


# -- the soak ----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    settings: Settings
    requests: int = 0
    left_early: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    faults: dict[str, dict[str, int]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    diary: list[tuple[float, float, str]] = field(default_factory=list)  # when which fault was in
    at: list[dict[str, float]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    pool_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        slack = SLACK_BYTES if self.settings.seconds >= 300 else WARMING_BYTES
        return [*self.wrong[:5], *self.complaints, *not_flat(self.samples, slack)]

    def line(self) -> str:
        """The progress so far, in one line."""
        last, fired = self.samples[-1], sum(kind["met"] for kind in self.faults.values())
        return (
            f"{self.seconds:5.0f} s  {self.requests} requests ({self.left_early} left early), {self.right} right, "
            f"{len(self.wrong)} wrong, {fired} faults met, RSS {total(last, lambda h: h.resident) >> 20} MiB in "
            f"{len(last)} processes, {total(last, lambda h: h.descriptors)} descriptors, "
            f"{total(last, lambda h: h.threads)} threads, pool {self.pool_bytes[-1] / (1 << 20):.1f} MiB"
        )

    def write(self, path: Path) -> None:
        names = sorted({pid for found in self.samples for pid in found})
        series = {
            f"{next(found[pid].name for found in self.samples if pid in found)} ({pid})": {
                what: [getattr(found[pid], what) if pid in found else None for found in self.samples]
                for what in ("resident", "descriptors", "threads")
            }
            for pid in names
        }
        figures = {
            **asdict(self.settings),
            "ran_seconds": round(self.seconds, 1),
            "requests": self.requests,
            "left_early": self.left_early,
            "answers_right": self.right,
            "answers_wrong": len(self.wrong),
            "failures": self.failures,
            "faults": self.faults,
            "metrics": self.metrics,
            "at": self.at,
            "processes": series,
            "pool_folder_bytes": self.pool_bytes,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1))


def soak(lab: Lab, launcher: Launcher, settings: Settings, say: Callable[[str], None]) -> Report:
    """Run it; the report says what was seen. `lab` must have been made with `MODES[...]`, `SHORT` and `POOL_BYTES`."""
    report, mix = Report(settings), Mix(settings.seed)
    pool = LocalBackend(lab.pool, POOL_BYTES)
    door = {"ENGINE_TIER_DOOR": f"{lab.sockets}/door"}
    machine = replace(lab.machine, environment=lab.machine.environment | door)
    lab.module = "controlled"
    config = machine.config(lab.transfer(), **OPTIONS)
    try:
        with launcher.server(config, lab.folder / f"soak-{settings.mode}.log") as server:
            _drive(lab, server, report, mix, pool, say)
        _afterwards(lab, report, mix, pool)
    finally:
        pool.close()
    return report


def _drive(lab: Lab, server: Server, report: Report, mix: Mix, pool: LocalBackend, say: Callable[[str], None]) -> None:
    settings = report.settings
    traffic = Traffic(server, mix, settings.seed)
    faults = Faults(server, traffic, settings, pool)
    report.diary = faults.diary
    began, spoken, told = time.monotonic(), 0.0, 0
    judge = ThreadPoolExecutor(1)
    judging = judge.submit(lambda: None)
    try:
        while report.seconds < settings.seconds or len(report.samples) < FEWEST_SAMPLES:
            until = time.monotonic() + settings.period
            while time.monotonic() < until:
                faults.one()
            with traffic.paused():
                judging.result(PATIENCE)
                _pause(server, report, lab, pool)
                judging = judge.submit(_judge, lab, report, traffic.take())
            for failure in [*report.wrong, *report.complaints][told:]:
                say(f"FAILED: {failure}")
            told = len(report.wrong) + len(report.complaints)
            report.seconds = time.monotonic() - began
            report.faults = {
                kind: {"injected": faults.injected[kind], "met": faults.met[kind]} for kind in faults.kinds
            }
            report.at.append({"seconds": round(report.seconds, 1), "requests": report.requests})
            if report.seconds - spoken >= min(15.0, settings.seconds / 4):
                spoken = report.seconds
                say(report.line())
    finally:
        traffic.close()
        judge.shutdown()
    judging.result()
    _judge(lab, report, traffic.take())
    report.metrics = server.metrics("vllm:ascend_store_")
    _check_coverage(report)
    _recovers(server, report, mix)


def _pause(server: Server, report: Report, lab: Lab, pool: LocalBackend) -> None:
    """Nothing is under way: nothing may be held, and a sample is taken.

    What a broken store did not take back is given back with the next save: so there is one if anything is held.
    """
    began, saves = time.monotonic(), 0
    while held := _held(server, pool):
        waited = time.monotonic() - began
        if waited > PATIENCE:
            report.complaints.append(f"after {report.requests} requests, with none under way: {held}")
            break
        if waited > saves + 1:
            saves += 1
            server.complete(Request(prompts((report.requests, saves), 40)[0], max_tokens=1))
        time.sleep(0.05)
    server.metrics("vllm:")  # the server keeps a thread for these, if it was asked lately
    report.complaints += [f"the pool's index: {fault}" for fault in local_audit.faults(pool)]
    report.samples.append(sample(server.pid, report.samples[-1] if report.samples else None))
    report.pool_bytes.append(folder_bytes(pool_folder(lab.pool)))


def _held(server: Server, pool: LocalBackend) -> dict[str, Any]:
    ledger = {name: count for name, count in pool.stats().items() if name in ("open_writes", "leases", "pins")}
    ledger["blocks"] = server.call("scheduler", "faults:blocks_in_use")
    ledger["requests"] = server.call("scheduler", "faults:live_requests")
    return {name: count for name, count in ledger.items() if count}


def _judge(lab: Lab, report: Report, answers: list[Answer]) -> None:
    for start in range(0, len(answers), 64):
        part = answers[start : start + 64]
        rights = lab.oracle.tokens(lab.machine, [answer.request for answer in part])
        for answer, right in zip(part, rights, strict=True):
            report.requests += 1
            report.left_early += answer.leave_after is not None
            if answer.is_right(right):
                report.right += 1
            else:
                kinds = [kind for start, end, kind in report.diary if answer.began - 5 < end and start < answer.ended]
                report.wrong.append(
                    f"a prompt of {len(answer.request.prompt)} tokens that begins with {answer.request.prompt[:4]}, in "
                    f"{answer.ended - answer.began:.1f} s, after {kinds}: {answer.error or (answer.tokens, right)}"
                )


def _check_coverage(report: Report) -> None:
    """A soak without hits or saves shows nothing, nor does one whose faults nobody meets."""
    for name in ("hit_tokens_total", "load_failed_total", "save_failed_total", "lookups_total"):
        if not report.metrics.get(f"vllm:ascend_store_{name}"):
            report.complaints.append(f"{name} is 0: the scenario must have some")
    for kind, count in report.faults.items():
        if count["met"] < count["injected"]:
            report.complaints.append(f"{kind}: put in {count['injected']} times, met {count['met']} times")


def _recovers(server: Server, report: Report, mix: Mix) -> None:
    """When the last fault is over, there are hits again by themselves."""

    def hits() -> float:
        return server.metrics("vllm:ascend_store_hit_tokens")["vllm:ascend_store_hit_tokens_total"]

    before, limit = hits(), time.monotonic() + PATIENCE
    while hits() == before and time.monotonic() < limit:
        for request in mix.known[4:12]:
            server.complete(request)
    if hits() == before:
        report.complaints.append("when all faults were over, there were no hits")


def _afterwards(lab: Lab, report: Report, mix: Mix, pool: LocalBackend) -> None:
    """The server has ended: it holds nothing in the pool, and what is there is right for a new engine."""
    left = {name: count for name, count in pool.stats().items() if name in ("open_writes", "leases", "pins") and count}
    if left:
        report.complaints.append(f"the server has ended, and in the pool are still {left}")
    lab.module = "vllm_ascend_ext.kv_pool.connector"
    with lab.engine() as engine:
        lab.run(engine, mix.known)
        lab.run(engine, [Request((*beginning, 7)) for beginning in mix.beginnings])


def main() -> int:
    settings = Settings.of_environment(600.0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends with it
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        launcher = Launcher(folder / "launcher.log")
        oracle = Oracle(launcher, folder)
        machine = Machine(TinyModel().write(folder / "model"), {"max_num_batched_tokens": 256, "max_num_seqs": CLIENTS})
        lab = Lab(launcher, oracle, folder, machine, MODES[settings.mode] | SHORT, POOL_BYTES)
        try:
            report = soak(lab, launcher, settings, lambda line: print(line, flush=True))
        finally:
            lab.close()
            oracle.close()
            launcher.close()
    report.write(Path("build/soak.json"))
    print(report.line())
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
