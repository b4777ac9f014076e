"""Turns a JSON file of run.py into the table of docs/kernels.md and a plot; must never time anything.

The plot needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: Implementation -> colour.
COLOURS = {"ours": "#1f77b4", "vllm": "#bbbbbb", "vllm-ascend": "#e69f00", "floor": "#444444"}


def floor_us(row: dict[str, Any], bandwidth: float) -> float:
    """Microseconds in which the bytes that can't be avoided pass at the bandwidth of an element-wise kernel."""
    return float(row["floor_bytes"]) / bandwidth * 1e6


def table(report: dict[str, Any]) -> str:
    """Markdown: one line a workload."""
    bandwidth = report["elementwise_bytes_per_s"]
    lines = [
        "| operation, shape | ours | vLLM | vllm-ascend | floor | of the better | to reach |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        us, share = row["us"], row.get("of_better")
        queued = row.get("timed_by", {})
        figures = [
            f"{us[name]:.4g}{'*' if name in queued else ''}" if name in us else "-"
            for name in ("ours", "vllm", "vllm-ascend")
        ]
        target = f"{row['target']:.3g}" if row["target"] is not None else "-"
        met = "" if row["target"] is None or share is None else " met" if share <= row["target"] else " **missed**"
        lines.append(
            f"| {row['op']}, {row['name']} | {' | '.join(figures)} | {floor_us(row, bandwidth):.2g} "
            f"| {share if share is not None else '-'} | {target}{met} |"
        )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of all implementations, one panel an operation, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    ops = list(dict.fromkeys(row["op"] for row in report["rows"]))
    sizes = [sum(row["op"] == op for row in report["rows"]) for op in ops]
    figure, panels = plt.subplots(
        len(ops), 1, figsize=(11, 0.62 * sum(sizes) + 1.2 * len(ops)), gridspec_kw={"height_ratios": sizes}
    )
    for op, panel in zip(ops, panels, strict=True):
        rows = [row for row in report["rows"] if row["op"] == op]
        for index, name in enumerate(("ours", "vllm", "vllm-ascend")):
            places = [place + 0.27 * (index - 1) for place in range(len(rows))]
            panel.barh(places, [row["us"].get(name, 0) for row in rows], 0.25, color=COLOURS[name], label=name)
        for place, row in enumerate(rows):
            floor = floor_us(row, report["elementwise_bytes_per_s"])
            panel.plot(
                [floor, floor],
                [place - 0.42, place + 0.42],
                color=COLOURS["floor"],
                label="byte floor" if place == 0 else None,
            )
        panel.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.set_xlim(1, 1200)
        panel.set_title(op, fontsize=10, loc="left")
        panel.grid(axis="x", alpha=0.3, which="both")
    panels[0].legend(fontsize=8, loc="lower right")
    panels[-1].set_xlabel("microseconds a call, median of graph replays (logarithmic)")
    figure.text(
        0.99, 0.995, f"{report['machine']['device']}, Triton {report['machine']['triton']}", ha="right", va="top"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.report",
        description="Turns what benchmarks.kernels.run wrote into the table of docs/kernels.md and a plot.",
    )
    parser.add_argument("report", type=Path, help="JSON file of benchmarks.kernels.run")
    parser.add_argument("--plot", type=Path, help="file to draw, .svg or .png; needs matplotlib")
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    print(table(report))
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
