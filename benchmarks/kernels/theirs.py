"""Takes vLLM's and vllm-ascend's sampler functions out of a directory of theirs; must never hold any of their code.

The directory holds `vllm/` and `vllm_ascend/` as a checkout's root or site-packages does, and may hold
`vllm_ascend_post_update/`, a vllm_ascend/ from before its post_update was deleted. Only the functions that are asked
for are executed, so that nothing else of the packages is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

#: vllm-ascend passes it to every launch; only Ascend's compiler takes it.
_ASCEND_ONLY = "multibuffer"
#: The tile of vllm-ascend's log-softmax is no power of two, which only Ascend's compiler takes: the next one instead.
_TILE, _CUDA_TILE = 12944, 16384


class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: Any = None
    cu_num_generated_tokens_tensor: Any = None


class _ForCuda(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != _ASCEND_ONLY]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(_CUDA_TILE), node) if node.value == _TILE else node


def _cores() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def take(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The module-level functions and constants ``names`` of a file, executed on their own.

    Raises FileNotFoundError or KeyError for a file or a name that isn't there.
    """
    tree = ast.parse(path.read_text(), str(path))
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    space: dict[str, Any] = {
        "torch": torch,
        "triton": triton,
        "tl": tl,
        "LogprobsTensors": LogprobsTensors,
        "LogprobTokenIdsState": Any,
        "get_vectorcore_num": _cores,
        "__name__": f"theirs.{path.stem}",
    }
    body = [_ForCuda().visit(found[name]) for name in names]
    module = ast.fix_missing_locations(ast.Module(body, []))
    exec(compile(module, str(path), "exec", dont_inherit=True), space)
    return {name: space[name] for name in names}


Ops = dict[str, Callable[..., Any]]


def load(directory: Path) -> dict[str, Ops]:
    """Implementation -> operation -> function with this package's arguments."""
    gpu, npu = directory / "vllm/v1/worker/gpu", directory / "vllm_ascend/worker/v2"
    scores = ["_topk_log_softmax_kernel", "_ranks_kernel", "compute_token_logprobs"]
    vllm = take(
        gpu / "sample/logprob.py", ["_MAX_TOPK_BLOCK", *scores, "_fill_logprob_token_ids_kernel", "compute_topk_scores"]
    )
    vllm |= take(
        gpu / "sample/penalties.py",
        ["PENALTIES_BLOCK_SIZE", "_penalties_kernel", "apply_penalties", "_bincount_kernel", "bincount"],
    )
    vllm |= take(gpu / "input_batch.py", ["_post_update_kernel", "post_update"])
    vllm |= take(gpu / "structured_outputs.py", ["GRAMMAR_BITMASK_BLOCK_SIZE", "_apply_grammar_bitmask_kernel"])
    ascend = take(npu / "sample/logprob.py", [*scores, "compute_topk_logprobs"])
    ascend |= take(
        npu / "sample/penalties.py", ["_penalties_kernel", "apply_penalties", "_bincount_kernel", "bincount"]
    )
    ascend |= take(npu / "structured_outputs.py", ["_apply_grammar_bitmask_kernel"])
    older = directory / "vllm_ascend_post_update/worker/v2/input_batch.py"
    if older.exists():
        ascend |= take(older, ["_post_update_kernel", "post_update"])
    return {"vllm": _named(vllm, _vllm_bitmask), "vllm-ascend": _named(ascend, _ascend_bitmask)}


def _named(functions: dict[str, Any], bitmask: Callable[..., Any]) -> Ops:
    ops: Ops = {name: functions[name] for name in ("apply_penalties", "bincount", "post_update") if name in functions}
    ranks = functions["_ranks_kernel"]

    def logprobs_and_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> Any:
        """Their two launches, as their compute_topk functions make them."""
        logprobs = functions["compute_token_logprobs"](logits, token_ids)
        rows, vocab_size = logits.shape
        found = torch.empty(rows, dtype=torch.int64, device=logits.device)
        chosen = token_ids[:, 0].contiguous()
        if "batch_size" in ranks.arg_names:
            programs = min(rows, _cores())
            per_program = triton.cdiv(rows, programs)
            ranks[(programs,)](found, logits, logits.stride(0), chosen, vocab_size, rows, per_program, BLOCK_SIZE=8192)
        else:
            ranks[(rows,)](found, logits, logits.stride(0), chosen, vocab_size, BLOCK_SIZE=8192)
        return logprobs, found

    ops["compute_token_logprobs_and_ranks"] = logprobs_and_ranks
    ops["compute_topk_scores"] = functions.get("compute_topk_scores") or functions["compute_topk_logprobs"]
    ops["apply_grammar_bitmask"] = lambda *args: bitmask(functions["_apply_grammar_bitmask_kernel"], *args)
    return ops


def _vllm_bitmask(
    kernel: Any, logits: torch.Tensor, indices: torch.Tensor, bitmask: torch.Tensor, starts: torch.Tensor
) -> None:
    kernel[(bitmask.shape[0], triton.cdiv(logits.shape[1], 8192))](
        logits,
        logits.stride(0),
        indices,
        starts,
        bitmask,
        bitmask.stride(0),
        logits.shape[1],
        MASK_STRIDE=1,
        BLOCK_SIZE=8192,
    )


def _ascend_bitmask(
    kernel: Any, logits: torch.Tensor, indices: torch.Tensor, bitmask: torch.Tensor, _starts: torch.Tensor
) -> None:
    kernel[(bitmask.shape[0], triton.cdiv(logits.shape[1], 8192))](
        logits, logits.stride(0), indices, bitmask, bitmask.stride(0), logits.shape[1], BLOCK_SIZE=8192
    )
