"""Law: a run that was told to use a device fails where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_ext import device

ROOT = Path(__file__).parents[3]


def collect(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/e2e/kernels/test_bincount.py"]
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_device_that_was_asked_for_and_is_missing_ends_the_run(kind: str) -> None:
    if device.current_kind() == kind:
        pytest.skip(f"this machine has a {kind}")
    done = collect("--device", kind)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--device {kind}: this machine's device is a {device.current_kind()}" in done.stderr
