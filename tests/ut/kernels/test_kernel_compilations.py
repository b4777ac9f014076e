"""Laws of what is compiled for a GPU, checked without one: nothing anew for other sizes, no atomics, wide loads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("offline_cuda.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of its own finds: kernels that this one interprets can't be compiled here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton isn't installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_other_sizes_compile_nothing_anew(report: dict[str, Any]) -> None:
    """Rows, vocabularies, columns, slots and strides; among them 1 and multiples of 16, which Triton prefers."""
    assert {name: count for name, count in report["more"].items() if count} == {"scores, unaligned": 1}


def test_every_kernel_was_compiled(report: dict[str, Any]) -> None:
    """Or the count above would be of nothing: rows in pieces and whole rows are two forms of one
    kernel, and so are up to 8 tokens of a row and more."""
    assert list(report["first"].values()) == [3, 7, 8, 9, 10, 12]


def test_no_kernel_has_an_atomic_on_global_memory(report: dict[str, Any]) -> None:
    assert set(report["atomics"].values()) == {0}


@pytest.mark.parametrize("kernel", ["bitmask", "fold", "penalties"])
def test_logits_are_read_16_bytes_a_thread(report: dict[str, Any], kernel: str) -> None:
    """Where rows are aligned; a size that isn't known to be a multiple of anything must not cost that."""
    assert report["loads of 16 bytes"][kernel] > 0
