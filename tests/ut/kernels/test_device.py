"""Laws of the seam to the accelerator that hold without one; and that it imports no accelerator's package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_ascend_ext import device

needs_no_accelerator = pytest.mark.skipif(device.current_kind() != "cpu", reason="this machine has an accelerator")


def test_importing_it_imports_neither_triton_nor_torch_npu() -> None:
    program = (
        "import sys, vllm_ascend_ext.device, vllm_ascend_ext.kernels; print({'triton', 'torch_npu'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"


@needs_no_accelerator
def test_cpu_events_are_reached_whether_recorded_or_not() -> None:
    event = device.new_event()
    assert event.query()
    event.record()
    event.synchronize()
    assert event.query()


@needs_no_accelerator
def test_cpu_has_no_streams_and_nothing_to_wait_for() -> None:
    with device.on_stream(device.new_stream()):
        device.synchronize()


@needs_no_accelerator
def test_any_rank_from_0_may_use_the_cpu() -> None:
    device.set_device(0)
    device.set_device(7)
    with pytest.raises(ValueError, match="rank -1"):
        device.set_device(-1)


def test_cpu_facts_are_asked_for_once() -> None:
    facts = device.facts(torch.device("cpu"))
    assert facts is device.facts(torch.device("cpu"))
    assert (facts.kind, facts.cores > 1, facts.runs_triton) == ("cpu", True, True)


def test_a_kind_of_device_that_is_not_supported() -> None:
    with pytest.raises(ValueError, match="device meta: its kind is 'meta'"):
        device.facts(torch.device("meta"))
