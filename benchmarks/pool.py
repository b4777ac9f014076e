"""All of the pool's figures in one run, as ratios to a bare baseline beside each; must never assert anything.

python -m benchmarks.pool            # prints a table and writes build/bench-pool.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import pool_layerwise, pool_local, pool_lookup

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "local store": pool_local.measure,
    "look-up": pool_lookup.measure,
    "layerwise": pool_layerwise.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench-pool.json"))
    out = parser.parse_args().out
    figures: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
    }
    for name, measure in PARTS.items():
        print(f"{name} ...", flush=True)
        figures[name] = measure()
        for figure, value in figures[name].items():
            print(f"  {figure:<44} {value:.4g}" if isinstance(value, float) else f"  {figure:<44} {value}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
