"""Times one operation under many settings, to find those that ship; must never change what an operation computes.

A setting is the operation's own `_Setting` with some fields replaced, put in place of the one for this device.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import measure, workloads
from .run import ours
from .workloads import Workload

F32, BF16 = torch.float32, torch.bfloat16


def _product(**axes: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _logprobs_settings(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for tile_bytes, warps in ((4096, 2), (4096, 4), (8192, 4), (8192, 8), (16384, 4), (16384, 8), (32768, 8)):
        tile, lanes = tile_bytes // dtype.itemsize, warps * 32 * 16 // dtype.itemsize
        for stages, per_core in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8) if lanes <= tile else ()):
            yield {"tile": tile, "num_warps": warps, "lanes": lanes, "stages": stages, "programs_per_core": per_core}


#: operation -> (module, its workloads, settings to try)
def plans(only: str | None) -> Iterator[tuple[str, Workload, list[dict[str, Any]]]]:
    if only in (None, "logprobs"):
        for dtype, vocab_size in ((F32, 151_936), (BF16, 128_256)):
            for rows in (1, 32, 256):
                yield "logprobs", workloads.logprobs(rows, vocab_size, dtype, None), list(_logprobs_settings(dtype))
    if only in (None, "bitmask"):
        for dtype, vocab_size, allowed in (
            (F32, 151_936, 0.01),
            (F32, 151_936, 0.9),
            (BF16, 128_256, 0.5),
            (BF16, 128_256, 0.9),
        ):
            shapes = [
                {"tile": t, "num_warps": w}
                for t, w in ((256, 1), (256, 2), (512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8))
            ]
            more = list(_product(tiles_per_piece=[1, 2, 3, 4, 8]))
            settings = [shape | {"group": 16 // dtype.itemsize} | rest for shape in shapes for rest in more]
            yield "bitmask", workloads.bitmask(256, vocab_size, dtype, allowed, None), settings
    if only in (None, "bincount"):
        for rows, prompt, output in ((1, 4096, 64), (64, 32_768, 1024), (256, 2048, 512)):
            settings = list(
                _product(
                    prompt_tokens=[4096, 8192, 16384],
                    output_tokens=[512, 1024],
                    chunk=[2048, 4096],
                    num_warps=[8, 16],
                    programs_per_core=[2, 3, 64],
                )
            )
            yield "token_counts", workloads.bincount(rows, prompt, output, 151_936, None), settings
    if only in (None, "penalties"):
        for requests, drafts, vocab_size, seen, dtype in (
            (256, 0, 151_936, "typical", F32),
            (1, 0, 151_936, "typical", F32),
            (256, 0, 151_936, "every token", F32),
            (64, 8, 129_280, "every token", F32),
            (256, 0, 128_256, "every token", BF16),
        ):
            shapes = [(256, 1), (256, 2), (512, 4), (512, 2), (1024, 8), (1024, 4)]
            more = list(_product(tiles_per_piece=[2, 3, 4, 6, 8]))
            settings = [{"tile": t, "num_warps": w, "group": 4} | rest for t, w in shapes for rest in more]
            yield "penalties", workloads.penalties(requests, drafts, vocab_size, seen, None, dtype), settings
    if only in (None, "post_update"):
        for rows, steps in ((1, 0), (16, 1), (1, 8), (64, 4), (16, 8), (1024, 0), (1024, 8)):
            settings = list(_product(rows=[1, 2], steps=[4, 8, 16], num_warps=[1], programs_per_core=[64]))
            yield "request_update", workloads.post_update(rows, steps, 32_000), settings


def _changed(shipped: Callable[..., Any], setting: dict[str, Any], *args: Any) -> Any:
    return replace(shipped(*args), **setting)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.sweep",
        description="Times each operation under many settings beside those that ship, on an NVIDIA GPU.",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", help="one operation")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop beginning new workloads after so long")
    options = parser.parse_args()
    measure.need_gpu(parser)
    begin, rows = time.monotonic(), []
    for module_name, workload, settings in plans(options.only):
        if time.monotonic() - begin > options.seconds:
            break
        module = importlib.import_module(f"vllm_ascend_ext.kernels.{module_name}")
        shipped = module._setting
        found = []
        for setting in settings:
            module._setting = partial(_changed, shipped, setting)
            workload.reset()
            calls = [partial(ours(workload.op), *arguments) for arguments in workload.arguments]
            try:
                us, _ = measure.replayed(calls, replays=5, least_calls=10)
            except Exception as error:  # a setting that doesn't compile is a result too
                print(f"{workload.op} {setting}: {type(error).__name__} {str(error)[:200]}", flush=True)
                torch.cuda.synchronize()
                continue
            found.append({"us": round(us, 2), "setting": setting})
        module._setting = shipped
        found.sort(key=lambda row: row["us"])
        rows.append({"op": workload.op, "name": workload.name, "found": found})
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{time.monotonic() - begin:5.0f}s {workload.op} {workload.name}")
        for row in found[:4]:
            print("   ", row["us"], row["setting"], flush=True)
        workload.arguments.clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
