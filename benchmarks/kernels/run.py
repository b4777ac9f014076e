"""Times every workload on every implementation in one process and writes JSON; must never tune anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_ext import kernels

from . import measure
from .theirs import load
from .workloads import Workload, all_workloads


def ours(op: str) -> Callable[..., Any]:
    function = getattr(kernels, op)
    if op == "apply_grammar_bitmask":
        return lambda logits, indices, bitmask, _starts: function(logits, indices, bitmask)
    return function


def _result(workload: Workload, function: Callable[..., Any]) -> list[torch.Tensor]:
    """What one call leaves: its return values, and copies of the tensors it may have changed."""
    arguments = [a.clone() if isinstance(a, torch.Tensor) else a for a in workload.arguments[0]]
    returned = function(*arguments)
    if returned is not None:
        return [value for value in returned if isinstance(value, torch.Tensor)]
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]


def _agreement(workload: Workload, ours: list[torch.Tensor], other: list[torch.Tensor]) -> str:
    """Whether another implementation's results are ours, so that the same thing was timed."""
    if workload.op == "compute_topk_scores":  # the order of ties differs, and with it the ids
        ours, other = ours[1:], other[1:]
    differing = [
        i
        for i, (a, b) in enumerate(zip(ours, other, strict=True))
        if not torch.allclose(a.double(), b.double(), rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    ]
    if differing == [1] and ours[1].dim() == 1 and bool((ours[1] > other[1]).all()):
        return "ranks count strictly greater logits, else the same results"
    return f"results {differing} differ" if differing else "same results"


def time_workload(workload: Workload, implementations: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": workload.op,
        "name": workload.name,
        "floor_bytes": workload.floor_bytes,
        "target": workload.target,
        "sets": len(workload.arguments),
        "us": {},
        "agreement": {},
        **workload.notes,
    }
    ours = _result(workload, implementations["ours"])
    for name, function in implementations.items():
        if name != "ours":
            row["agreement"][name] = _agreement(workload, ours, _result(workload, function))
    del ours
    for name, function in implementations.items():
        workload.reset()
        calls = [partial(function, *arguments) for arguments in workload.arguments]
        us, how = measure.replayed(calls, least_calls=20)
        row["us"][name] = round(us, 2)
        if how != "graph":
            row["timed_by"] = {**row.get("timed_by", {}), name: how}
    others = [time for name, time in row["us"].items() if name != "ours"]
    if others:
        row["of_better"] = round(row["us"]["ours"] / min(others), 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.run",
        description="Times every workload on every implementation, on an NVIDIA GPU, and writes JSON.",
    )
    parser.add_argument("--theirs", type=Path, help="directory with vllm/ and vllm_ascend/ (see theirs.py)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", help="one operation")
    options = parser.parse_args()
    measure.need_gpu(parser)
    theirs = load(options.theirs) if options.theirs else {}
    elements = 256 * 151_936
    report: dict[str, Any] = {
        "machine": measure.machine(),
        "elementwise_bytes_per_s": measure.elementwise_bandwidth(elements),
        "copy_bytes_per_s": measure.copy_bandwidth(elements),
        "rows": [],
    }
    for workload in all_workloads(options.only):
        implementations = {"ours": ours(workload.op)}
        implementations |= {name: ops[workload.op] for name, ops in theirs.items() if workload.op in ops}
        row = time_workload(workload, implementations)
        report["rows"].append(row)
        print(f"{row['op']:34} {row['name']:48} {row['us']} {row.get('of_better', '')} / {row['target']}", flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        workload.arguments.clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
