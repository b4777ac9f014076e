"""Law: off unless asked for; asked for, a function is replaced everywhere or, if its signature is another, nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .client import EngineError, Launcher, Request
from .lab import Lab, prompts

SCORES = "vllm.v1.worker.gpu.sample.logprob"
COMMAND = "from vllm_ascend_ext import plugin; plugin.main()"


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Callable[..., str]:
    """Run a script in a process of its own, with VLLM_ASCEND_EXT_KERNELS=`switch`; gives what it prints."""

    def run(script: str, switch: str = "") -> str:
        return launcher.script(script, tmp_path / "script.log", VLLM_ASCEND_EXT_KERNELS=switch)

    return run


def states(printed: str) -> dict[str, str]:
    """State by function, of what the command prints."""
    found = {}
    for line in printed.splitlines()[1:]:
        _, _, rest = line.partition(" ")
        where, _, state = rest.strip().partition(": ")
        found[where] = state
    return found


def test_the_command_says_what_would_be_done_and_does_nothing(run: Callable[..., str]) -> None:
    printed = run(COMMAND)
    assert printed.startswith("VLLM_ASCEND_EXT_KERNELS=(not set): nothing is done")
    assert states(printed)[f"{SCORES}.compute_topk_scores"].startswith("would be replaced in")
    assert states(printed)["vllm_ascend.worker.v2.sample.penalties.bincount"].startswith("not there")


def test_the_command_says_what_is_done(run: Callable[..., str]) -> None:
    found = states(run(COMMAND, "bincount,compute_token_logprobs"))
    replaced = {where for where, state in found.items() if state.startswith("replaced in")}
    assert replaced == {"vllm.v1.worker.gpu.sample.penalties.bincount", f"{SCORES}.compute_token_logprobs"}
    assert found[f"{SCORES}.compute_topk_scores"] == "off"


@pytest.mark.parametrize("switch", ["bincout", "1,bincount", "yes please"])
def test_an_unknown_name_is_refused(run: Callable[..., str], switch: str) -> None:
    with pytest.raises(EngineError, match=f"VLLM_ASCEND_EXT_KERNELS='{switch}': unknown .*apply_penalties"):
        run(COMMAND, switch)


EVERYWHERE = """
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as early  # has imported compute_topk_scores by name
from vllm_ascend_ext import plugin
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.worker.gpu.sample.sampler as late
import vllm.v1.worker.gpu.sample.logprob as home
import vllm.v1.worker.gpu.input_batch as batch
import vllm.v1.worker.gpu.sample.prompt_logprob as prompt
for module in (early, late, prompt):
    assert module.compute_topk_scores is home.compute_topk_scores, module
print(home.compute_topk_scores._vllm_ascend_ext, getattr(batch.post_update, "_vllm_ascend_ext", None))
"""


def test_replaced_wherever_it_was_or_will_be_imported_by_name(run: Callable[..., str]) -> None:
    assert run(EVERYWHERE, "1") == "compute_topk_scores post_update\n"


def test_nothing_is_touched_unless_asked(run: Callable[..., str]) -> None:
    script = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import sys
assert "vllm_ascend_ext.kernels" not in sys.modules
import vllm.v1.worker.gpu.sample.logprob as home
print(home.compute_topk_scores.__module__, hasattr(home.compute_topk_scores, "_vllm_ascend_ext"))
"""
    assert run(script) == f"{SCORES} False\n"


RESULTS = """
import torch
from vllm_ascend_ext import plugin
plugin.register_kernels()
plugin.register_kernels()  # plugins are loaded more than once in a process
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel as kernel
logits = torch.randn(3, 100)
scores = compute_topk_scores(logits, 4, torch.tensor([5, 6, 7]))
assert type(scores) is LogprobsTensors, type(scores)
assert torch.allclose(scores.logprobs[:, 0], logits.log_softmax(-1)[range(3), [5, 6, 7]])
assert scores.selected_token_ranks.tolist() == [int((row >= row[i]).sum()) for row, i in zip(logits, (5, 6, 7))]
allowed = torch.zeros(2, 4, dtype=torch.int32)
allowed[1, 0] = 1 << 3
starts = torch.tensor([0, 1, 3], dtype=torch.int32)
kernel[(2, 1)](logits, logits.stride(0), torch.tensor([0, 3], dtype=torch.int32), starts, allowed, 4, 100,
               MASK_STRIDE=2, BLOCK_SIZE=8192)
print([torch.isinf(row).logical_not().nonzero().flatten().tolist() == want
       for row, want in zip(logits, ([], list(range(100)), [3]))])
"""


def test_what_was_replaced_gives_vllms_results(run: Callable[..., str]) -> None:
    assert run(RESULTS, "1") == "[True, True, True]\n"


DIFFERS = """
import logging
import vllm.v1.worker.gpu.sample.penalties as penalties
from vllm_ascend_ext import plugin
def bincount(expanded_idx_mapping, all_token_ids, something_new): ...
penalties.bincount = bincount
plugin.logger.warning = lambda text, *values: print("WARNING", text % values)
plugin.register_kernels()
assert penalties.bincount is bincount
print(penalties.apply_penalties._vllm_ascend_ext)
"""


def test_another_signature_leaves_the_function_and_warns_once(run: Callable[..., str]) -> None:
    warning, replaced = run(DIFFERS, "bincount,apply_penalties").splitlines()
    assert warning.startswith("WARNING VLLM_ASCEND_EXT_KERNELS: left in place")
    assert "something_new" in warning
    assert replaced == "apply_penalties"


STAND_IN = {
    "worker/v2/sample/penalties.py": """
def bincount(expanded_idx_mapping, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts,
             max_prefill_len): ...
def apply_penalties(logits, changed): ...
""",
    "worker/v2/sample/logprob.py": """
def compute_token_logprobs(logits, token_ids): ...
def compute_topk_logprobs(logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None,
                          expanded_idx_mapping=None, max_per_req_token_ids=0): ...
""",
    "worker/v2/structured_outputs.py": """
def _apply_grammar_bitmask_kernel(logits_ptr, logits_stride, logits_indices_ptr, bitmask_ptr, bitmask_stride,
                                  vocab_size, BLOCK_SIZE): ...
""",
}
PATCHES_LATER = """
import sys
sys.path.insert(0, {path!r})
from vllm_ascend_ext import plugin
plugin.register_kernels()
plugin.register_connector()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(sorted(name for name in KVConnectorFactory._registry if name.startswith("AscendStore")))
from vllm_ascend.worker.v2.sample.penalties import bincount, apply_penalties
from vllm_ascend.worker.v2.sample.logprob import compute_token_logprobs, compute_topk_logprobs
from vllm_ascend.worker.v2.structured_outputs import _apply_grammar_bitmask_kernel as kernel
ours = (bincount, apply_penalties, compute_token_logprobs, compute_topk_logprobs, kernel)
print(*(hasattr(function, "_vllm_ascend_ext") for function in ours))
import torch
logits, row, mask = torch.zeros(2, 40), torch.tensor([1], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
kernel[(1, 1)](logits, 40, row, mask, 2, 40, BLOCK_SIZE=64)
print(logits.isinf().all(1).tolist())
"""


def test_what_vllm_ascend_patches_in_later_is_ours_too(run: Callable[..., str], tmp_path: Path) -> None:
    """A package of its name with its patch points (August 2026), for it can't be installed here."""
    for name, text in STAND_IN.items():
        file = tmp_path / "vllm_ascend" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    names, ours, blocked = run(PATCHES_LATER.format(path=str(tmp_path)), "1").splitlines()
    assert names == "['AscendStoreExtConnector']", "vllm-ascend's own registration of the short name must not fail"
    assert ours == "True False True True True", "apply_penalties of the stand-in has another signature"
    assert blocked == "[False, True]"


def test_an_engine_with_the_short_name_and_the_kernels(new_lab: Callable[..., Lab], launcher: Launcher) -> None:
    lab = new_lab()
    requests = [Request(prompt) for prompt in prompts("short name", 150, 80)]
    config = lab.machine.config(lab.transfer() | {"kv_connector_module_path": None})
    config.environment["VLLM_ASCEND_EXT_KERNELS"] = "1"
    with launcher.engine(config, lab.folder / "short-name.log") as engine:
        lab.run(engine, requests)
        engine.reset_prefix_cache()
        assert lab.run(engine, requests).cached == (128, 64)
