"""Time to the first token of a 512-token prompt: hits and misses, with this pool, without one, and with vLLM's own.

    make bench-engine            # prints a table and writes build/bench-engine.json
    make bench-mooncake          # the same on a real Mooncake Store: build/bench-mooncake.json

All engines are up at the same time and take turns, each round in another order, so that what else the machine does
hits all of them alike. What counts are the ratios within a round, to no connector and to vLLM's own prefix cache: their
median, and the interval in which it lies with 95 %. Two engines that do the same differ by some percent for as long as
they live, by where their memory happens to lie: new prompts, whose differences are as small, are timed in three engines
of each kind, and the report has each engine's ratio to the mean of those without a connector. A Mooncake Store's memory
is used once before: its first use costs as much again as the whole save (page faults), and a store in service has that
behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fixtures.mooncake import MISSING, MooncakeMaster
from tests.e2e.engine.client import Engine, EngineConfig, Launcher
from tests.e2e.engine.lab import prompts
from tests.e2e.engine.tiny_model import TinyModel

MODEL = TinyModel(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64)
TOKENS = 512
POOL_BYTES = 512 << 20
CACHE = "vLLM prefix cache"
NEW = "none, new prompts"


@dataclass(frozen=True, eq=False)
class Variant:
    """Engines of one kind: one for hits, three for new prompts.

    ``hits``: its prompt is always the same and in the pool, or in vLLM's cache if that is not reset.
    """

    name: str
    transfer: dict[str, Any] | None = None
    prefix_cache: bool = True
    reset: bool = True
    hits: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def engines(self) -> int:
        return 1 if self.hits else 3

    def transfer_of(self, number: int) -> dict[str, Any] | None:
        """The transfer configuration of one of the engines: each answers look-ups on a socket of its own."""
        if self.transfer is None or not number:
            return self.transfer
        extra = self.transfer["kv_connector_extra_config"]
        return self.transfer | {
            "kv_connector_extra_config": extra | {"lookup_rpc_port": extra["lookup_rpc_port"] + 100 * number}
        }


def ours(pool: str, sockets: str, port: int, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_connector_module_path": "vllm_ascend_ext.kv_pool.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backend": "local",
            "local_pool_name": pool,
            "local_capacity_bytes": POOL_BYTES,
            "lookup_rpc_port": port,
            "rpc_base_path": sockets,
        }
        | extra,
    }


def variants(folder: Path) -> list[Variant]:
    sockets, port = str(folder), itertools.count(1)
    pool = f"bench-engine-{os.getpid()}"
    example = {"shared_storage_path": str(folder / "example")}
    return [
        Variant("none", prefix_cache=False),
        Variant(CACHE, reset=False),
        Variant("pool, hit", ours(pool, sockets, next(port))),
        Variant("pool, hit without checksum", ours(f"{pool}-n", sockets, next(port), checksum=False)),
        Variant("pool, hit async", ours(pool, sockets, next(port), load_async=True)),
        Variant("pool, hit layerwise", ours(pool, sockets, next(port), use_layerwise=True)),
        Variant("vLLM ExampleConnector, hit", theirs("ExampleConnector", example)),
        Variant(NEW, prefix_cache=False, hits=False),
        Variant(
            "pool, miss, not saved",
            ours(pool, sockets, next(port), role="kv_consumer", consumer_is_to_load=True),
            hits=False,
        ),
        Variant("pool, miss, saved", ours(pool, sockets, next(port)), hits=False),
    ]


def mooncake_variants(folder: Path, master: str) -> list[Variant]:
    """Ours and vLLM's connector on one store. The settings are vLLM's file format, which ours reads too."""
    settings = folder / "mooncake.json"
    sizes = {"global_segment_size": POOL_BYTES, "local_buffer_size": 128 << 20}
    where = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", "device_name": ""}
    settings.write_text(json.dumps(where | sizes))
    nearby = folder / "mooncake-nearby.json"
    nearby.write_text(json.dumps(where | sizes | {"preferred_segment": True}))
    environment = {"MOONCAKE_CONFIG_PATH": str(settings), "VLLM_HOST_IP": "127.0.0.1"}
    sockets, port = str(folder), itertools.count(1)

    def pool(**extra: Any) -> dict[str, Any]:
        return ours("unused", sockets, next(port), backend="mooncake", **extra)

    def store() -> dict[str, Any]:  # it loads in no other way
        return theirs("MooncakeStoreConnector", {"load_async": True, "lookup_rpc_port": next(port)})

    return [
        Variant("none", prefix_cache=False),
        Variant(CACHE, reset=False),
        Variant("pool on Mooncake, hit", pool(), environment=environment),
        Variant("pool on Mooncake, hit async", pool(load_async=True), environment=environment),
        Variant("vLLM MooncakeStore, hit async", store(), environment=environment),
        Variant(NEW, prefix_cache=False, hits=False),
        Variant("pool on Mooncake, miss, saved", pool(), hits=False, environment=environment),
        Variant(
            "pool on Mooncake, miss, nearby",
            pool(),
            hits=False,
            environment=environment | {"MOONCAKE_CONFIG_PATH": str(nearby)},
        ),
        Variant("vLLM MooncakeStore, miss, saved", store(), hits=False, environment=environment),
    ]


def theirs(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def use_once(master: str, size: int) -> None:
    """Fill the Mooncake Store with ``size`` bytes, and empty it again."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    piece = np.ones(8 << 20, np.uint8)
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) != 0:
        raise RuntimeError(f"no client of the Mooncake Store at {master}")
    try:
        codes = [store.register_buffer(piece.ctypes.data, piece.nbytes)]
        for number in range(size // piece.nbytes):
            codes += store.batch_put_from([f"used once {number}"], [piece.ctypes.data], [piece.nbytes])
        if any(codes):
            raise RuntimeError(f"the Mooncake Store at {master} can't be filled: {sorted({*codes})}")
        store.remove_all(True)
    finally:
        store.close()


def measure(repeats: int, mooncake: bool) -> dict[str, np.ndarray]:
    """Seconds to the first token by variant: [engines, repeats]."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as name, ExitStack() as stack:
        folder = Path(name)
        model = MODEL.write(folder / "model")
        master = stack.enter_context(MooncakeMaster()).address if mooncake else None
        chosen = variants(folder) if master is None else mooncake_variants(folder, master)
        launcher = Launcher(folder / "launcher.log")
        stack.callback(launcher.close)
        turns: list[tuple[Variant, int, Engine]] = []
        each = [(variant, number) for variant in chosen for number in range(variant.engines)]
        for variant, number in tqdm(each, "engines started"):
            options = {"enable_prefix_caching": variant.prefix_cache, "kv_cache_memory_bytes": 256 << 20}
            config = EngineConfig(model, variant.transfer_of(number), options, variant.environment)
            engine = stack.enter_context(launcher.engine(config, folder / f"{len(turns)}.log"))
            turns.append((variant, number, engine))
        if master is not None:
            use_once(master, POOL_BYTES * sum("MOONCAKE_CONFIG_PATH" in variant.environment for variant, _, _ in turns))
        times = {variant.name: np.empty((variant.engines, repeats)) for variant in chosen}
        (same,) = prompts("bench", TOKENS)
        order = random.Random(0)
        for repeat in tqdm(range(-1, repeats), "rounds"):  # the first one saves and warms up
            order.shuffle(turns)
            for variant, number, engine in turns:
                for take in range(2):  # the first one wakes it: the others have had the caches of the processor
                    prompt = same if variant.hits else prompts((variant.name, number, repeat, take), TOKENS)[0]
                    if variant.prefix_cache and variant.reset:
                        engine.reset_prefix_cache()
                    seconds = engine.call("timing:first_token", prompt=prompt)
                if repeat >= 0:
                    times[variant.name][number, repeat] = seconds
        return times


def row(variant: str, times: dict[str, np.ndarray]) -> dict[str, Any]:
    seconds = times[variant]
    base = times["none" if len(seconds) == 1 else NEW].mean(axis=0)
    return {
        "ms": 1e3 * float(np.median(seconds)),
        "to none": middle(seconds.mean(axis=0) / base),
        "to none, each engine": np.median(seconds / base, axis=1).round(3).tolist(),
        "to prefix cache": middle(seconds.mean(axis=0) / times[CACHE][0]),
        "all ms": (1e3 * seconds).round(3).tolist(),
    }


def middle(ratios: np.ndarray) -> dict[str, float]:
    """The median of the rounds' ratios and its 95 % interval (percentile bootstrap, Efron 1979)."""
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mooncake", action="store_true", help="on a real Mooncake Store")
    parser.add_argument("--out", type=Path, help="build/bench-engine.json or build/bench-mooncake.json")
    options = parser.parse_args()
    if options.mooncake and MISSING:
        parser.error(MISSING)
    out = options.out or Path("build", f"bench-{'mooncake' if options.mooncake else 'engine'}.json")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    times = measure(options.repeats, options.mooncake)
    rows = {name: row(name, times) for name in times}
    print(f"{'':32} {'median':>11}   {'of none (95 %)':21}   {'of prefix cache (95 %)':22}  of none, each engine")
    for name, figures in rows.items():
        none, cache = (
            f"{ratio['median']:6.3f} ({ratio['low']:5.3f}-{ratio['high']:6.3f})"
            for ratio in (figures["to none"], figures["to prefix cache"])
        )
        engines = "  ".join(f"{ratio:.3f}" for ratio in figures["to none, each engine"])
        print(f"{name:32} {figures['ms']:8.2f} ms   {none}   {cache}  {engines}")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "prompt_tokens": TOKENS, "repeats": options.repeats, "rows": rows}
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
