"""Law: without Triton the operations import and the reference runs; kernels that are asked for say what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PROGRAM = """
import torch
from vllm_ascend_ext import kernels
for name in kernels.__all__:
    getattr(kernels, name)
logits, ids = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])
print(kernels.compute_token_ranks(logits, ids).tolist())
try:
    kernels.compute_token_ranks(logits, ids, impl="interpret")
except RuntimeError as error:
    print(error)
"""


def test_the_reference_needs_no_triton(tmp_path: Path) -> None:
    """Site-packages without Triton: links to all of its entries but one."""
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith("triton"):
            (tmp_path / entry.name).symlink_to(entry)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks, message = done.stdout.splitlines()
    assert ranks == "[2]"
    assert "Triton isn't installed" in message
