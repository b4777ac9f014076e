"""Law: a benchmark's command says what it does, and where it can't be run it ends with one line that says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", ["run", "sweep", "report"])
def test_help_is_for_whoever_runs_it(name: str) -> None:
    done = run(f"benchmarks.kernels.{name}", "--help")
    assert done.stdout.startswith(f"usage: python -m benchmarks.kernels.{name} ")
    assert "must never" not in done.stdout, "that is for whoever changes it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_without_a_gpu_it_ends_with_one_line(name: str, tmp_path: Path) -> None:
    done = run(f"benchmarks.kernels.{name}", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 2
    assert done.stderr.endswith("error: an NVIDIA GPU is needed, and torch sees none\n")
