"""Fails unless the pool's lines and branches are covered as they must be: ``coverage json`` on standard input."""

from __future__ import annotations

import json
import sys

LINES, BRANCHES = 95.0, 90.0


def main() -> int:
    totals = json.load(sys.stdin)["totals"]
    lines = 100.0 * totals["covered_lines"] / totals["num_statements"]
    branches = 100.0 * totals["covered_branches"] / totals["num_branches"]
    print(f"kv_pool: {lines:.1f} % of lines (at least {LINES}), {branches:.1f} % of branches (at least {BRANCHES})")
    return int(lines < LINES or branches < BRANCHES)


if __name__ == "__main__":
    sys.exit(main())
