"""Time to the first token of a 512-token prompt: hits and misses, with this pool, without one, and with vLLM's own.

    make bench-engine            # prints a table and writes build/bench-engine.json
    make bench-mooncake          # the same on a real Mooncake Store: build/bench-mooncake.json

All engines are up at the same time and take turns, so that what else the machine does hits all of them alike. The
figures are medians; what counts are the ratios, to no connector and to vLLM's own prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures.mooncake import MISSING, MooncakeMaster
from tests.e2e.engine.client import Engine, EngineConfig, Launcher
from tests.e2e.engine.lab import prompts
from tests.e2e.engine.tiny_model import TinyModel

MODEL = TinyModel(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64)
TOKENS = 512
POOL_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class Variant:
    """One engine. ``hits``: its prompt is always the same and in the pool, or in vLLM's cache if that is not reset."""

    name: str
    transfer: dict[str, Any] | None = None
    prefix_cache: bool = True
    reset: bool = True
    hits: bool = True
    environment: dict[str, str] = field(default_factory=dict)


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
        Variant("vLLM prefix cache", reset=False),
        Variant("pool, hit", ours(pool, sockets, next(port))),
        Variant("pool, hit without checksum", ours(f"{pool}-n", sockets, next(port), checksum=False)),
        Variant("pool, hit async", ours(pool, sockets, next(port), load_async=True)),
        Variant("pool, hit layerwise", ours(pool, sockets, next(port), use_layerwise=True)),
        Variant("vLLM ExampleConnector, hit", theirs("ExampleConnector", example)),
        Variant("none, new prompts", prefix_cache=False, hits=False),
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
    environment = {"MOONCAKE_CONFIG_PATH": str(settings), "VLLM_HOST_IP": "127.0.0.1"}
    sockets, port = str(folder), itertools.count(1)

    def pool(**extra: Any) -> dict[str, Any]:
        return ours("unused", sockets, next(port), backend="mooncake", **extra)

    def store() -> dict[str, Any]:  # it loads in no other way
        return theirs("MooncakeStoreConnector", {"load_async": True, "lookup_rpc_port": next(port)})

    return [
        Variant("none", prefix_cache=False),
        Variant("vLLM prefix cache", reset=False),
        Variant("pool on Mooncake, hit", pool(), environment=environment),
        Variant("pool on Mooncake, hit async", pool(load_async=True), environment=environment),
        Variant("vLLM MooncakeStore, hit async", store(), environment=environment),
        Variant("none, new prompts", prefix_cache=False, hits=False),
        Variant("pool on Mooncake, miss, saved", pool(), hits=False, environment=environment),
        Variant("vLLM MooncakeStore, miss, saved", store(), hits=False, environment=environment),
    ]


def theirs(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def measure(repeats: int, mooncake: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as name, ExitStack() as stack:
        folder = Path(name)
        model = MODEL.write(folder / "model")
        chosen = (
            mooncake_variants(folder, stack.enter_context(MooncakeMaster()).address) if mooncake else variants(folder)
        )
        launcher = Launcher(folder / "launcher.log")
        stack.callback(launcher.close)
        engines: dict[Variant, Engine] = {}
        for number, variant in enumerate(chosen):
            options = {"enable_prefix_caching": variant.prefix_cache, "kv_cache_memory_bytes": 256 << 20}
            config = EngineConfig(model, variant.transfer, options, variant.environment)
            engines[variant] = stack.enter_context(launcher.engine(config, folder / f"{number}.log"))
        times: dict[Variant, list[float]] = {variant: [] for variant in engines}
        (same,) = prompts("bench", TOKENS)
        for number in range(-2, repeats):  # the first two save, fill caches and warm up
            for variant, engine in engines.items():
                prompt = same if variant.hits else prompts((variant.name, number), TOKENS)[0]
                if variant.prefix_cache and variant.reset:
                    engine.reset_prefix_cache()
                seconds = engine.call("timing:first_token", prompt=prompt, number=number)
                if number >= 0:
                    times[variant].append(seconds)
        return {variant.name: statistics.median(seconds) for variant, seconds in times.items()}


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
    medians = measure(options.repeats, options.mooncake)
    rows = {
        name: {
            "ms": 1e3 * seconds,
            "to none": seconds / medians["none, new prompts" if "miss" in name else "none"],
            "to prefix cache": seconds / medians["vLLM prefix cache"],
        }
        for name, seconds in medians.items()
    }
    for name, row in rows.items():
        print(f"{name:32} {row['ms']:8.2f} ms   {row['to none']:6.3f} of none   {row['to prefix cache']:7.3f} of cache")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "prompt_tokens": TOKENS, "repeats": options.repeats, "rows": rows}
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
