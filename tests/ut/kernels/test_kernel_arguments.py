"""Law: a wrong argument raises TypeError or ValueError, and the message names the argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_ascend_ext import kernels

V, N, R = 70, 3, 4


def _int(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@dataclass(frozen=True)
class Buffer:
    gpu: torch.Tensor


@dataclass(frozen=True)
class State:
    num_token_ids: Buffer
    token_ids: Buffer


STATE = State(Buffer(_int(R)), Buffer(_int(R, 8)))

#: Operation -> arguments that are accepted.
VALID: dict[str, dict[str, Any]] = {
    "compute_token_logprobs": {"logits": torch.zeros(N, V), "token_ids": _int(N, 2)},
    "compute_token_ranks": {"logits": torch.zeros(N, V), "token_ids": _int(N)},
    "compute_token_logprobs_and_ranks": {"logits": torch.zeros(N, V), "token_ids": _int(N, 2)},
    "apply_grammar_bitmask": {
        "logits": torch.zeros(N, V),
        "logits_indices": _int(N),
        "bitmask": _int(N, 3),
        "cu_num_logits": torch.arange(N + 1),
        "mask_stride": 1,
    },
    "bincount": {
        "expanded_idx_mapping": torch.arange(N),
        "all_token_ids": _int(R, 9),
        "prompt_len": _int(R),
        "prefill_len": _int(R),
        "prompt_bin_mask": _int(R, 3),
        "output_bin_counts": _int(R, V),
        "max_prefill_len": 9,
    },
    "apply_penalties": {
        "logits": torch.zeros(N, V),
        "expanded_idx_mapping": _int(N),
        "token_ids": _int(N),
        "expanded_local_pos": _int(N),
        "repetition_penalty": torch.ones(R),
        "frequency_penalty": torch.zeros(R),
        "presence_penalty": torch.zeros(R),
        "prompt_bin_mask": _int(R, 3),
        "output_bin_counts": _int(R, V),
    },
    "post_update": {
        "idx_mapping": torch.arange(N),
        "num_computed_tokens": _int(R),
        "last_sampled_tokens": _int(R, 1),
        "output_bin_counts": _int(R, V),
        "sampled_tokens": _int(N, 3),
        "num_sampled": _int(N),
        "num_rejected": _int(N),
        "query_start_loc": _int(N + 1),
        "all_token_ids": _int(R, 9),
        "total_len": _int(R),
        "draft_tokens": _int(N, 2),
        "draft_tokens_out": _int(R, 2),
    },
    "compute_topk_scores": {
        "logits": torch.zeros(N, V),
        "num_logprobs": 2,
        "sampled_token_ids": _int(N),
        "expanded_idx_mapping": _int(N),
        "logprob_token_ids_state": STATE,
        "max_per_req_token_ids": 4,
    },
}
TENSORS = [
    (op, name)
    for op, arguments in VALID.items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor)
]


def _call(op: str, **changes: Any) -> None:
    arguments = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in VALID[op].items()}
    getattr(kernels, op)(**{**arguments, **changes}, impl="reference")


@pytest.mark.parametrize("op", VALID)
def test_the_valid_arguments_are_accepted(op: str) -> None:
    _call(op)


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_something_that_is_no_tensor(op: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: a list was passed"):
        _call(op, **{name: [1, 2, 3]})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_dtype_that_is_not_allowed(op: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: dtype complex64; allowed are"):
        _call(op, **{name: VALID[op][name].to(torch.complex64)})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_another_number_of_dimensions(op: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: shape .*; expected"):
        _call(op, **{name: VALID[op][name].unsqueeze(0).unsqueeze(0)})


@pytest.mark.parametrize(("op", "name"), [pair for pair in TENSORS if VALID[pair[0]][pair[1]].dim() == 2])
def test_elements_of_a_row_that_do_not_lie_side_by_side(op: str, name: str) -> None:
    value = VALID[op][name]
    if value.shape[1] == 1:
        pytest.skip("a row of one element has no stride")
    with pytest.raises(ValueError, match=f"^{name}: stride {value.shape[0]} in its last dimension"):
        _call(op, **{name: value.t().contiguous().t()})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_tensor_on_another_device(op: str, name: str) -> None:
    first = next(argument for argument, value in VALID[op].items() if isinstance(value, torch.Tensor))
    blamed = {"bincount": "all_token_ids"}.get(op, first)
    expected = "[a-z_.]+: on cpu; the other tensors are on meta" if name == blamed else f"{name}: on meta"
    with pytest.raises(ValueError, match=f"^{expected}"):
        _call(op, **{name: VALID[op][name].to("meta")})


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("compute_token_logprobs", {"token_ids": _int(N + 1, 2)}, "token_ids: shape"),
        ("compute_token_logprobs", {"logits": torch.zeros(N, 0)}, "logits: the vocabulary is 0; at least 1"),
        ("compute_token_logprobs_and_ranks", {"token_ids": _int(N, 0)}, "token_ids: the number of columns is 0"),
        ("apply_grammar_bitmask", {"bitmask": _int(N + 1, 3)}, "bitmask: shape"),
        ("apply_grammar_bitmask", {"mask_stride": 0}, "mask_stride: it is 0; at least 1"),
        ("apply_grammar_bitmask", {"cu_num_logits": _int(0)}, "cu_num_logits: its length is 0"),
        ("bincount", {"prompt_bin_mask": _int(R, 2)}, r"prompt_bin_mask: shape \(4, 2\); expected \(4, 3\)"),
        ("bincount", {"max_prefill_len": -1}, "max_prefill_len: it is -1; at least 0"),
        ("apply_penalties", {"output_bin_counts": _int(R, V - 1)}, "output_bin_counts: shape"),
        ("apply_penalties", {"presence_penalty": torch.zeros(R + 1)}, "presence_penalty: shape"),
        ("post_update", {"query_start_loc": _int(N)}, "query_start_loc: its length is 3; at least 4"),
        ("post_update", {"draft_tokens_out": _int(R, 3)}, "draft_tokens_out: shape"),
        ("post_update", {"last_sampled_tokens": _int(R, 2)}, "last_sampled_tokens: shape"),
        ("compute_topk_scores", {"num_logprobs": -1}, "num_logprobs: it is -1; at least 0"),
        ("compute_topk_scores", {"num_logprobs": V + 1}, "num_logprobs: 71; the vocabulary has 70"),
        ("compute_topk_scores", {"logprob_token_ids_state": None}, "logprob_token_ids_state: None"),
        ("compute_topk_scores", {"expanded_idx_mapping": None}, "expanded_idx_mapping: None"),
        ("compute_topk_scores", {"max_per_req_token_ids": 9}, "logprob_token_ids_state.token_ids: its width is 8"),
    ],
)
def test_sizes_that_do_not_fit(op: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        _call(op, **changes)


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("draft_tokens_out", {"draft_tokens_out": None}),
        ("draft_tokens_out", {"draft_tokens_out": _int(R, 2).long()}),
    ],
)
def test_drafts_need_a_place_of_their_dtype(op: str, changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{op}: "):
        _call("post_update", **changes)


def test_names_that_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gumbel_sample'"):
        _ = kernels.gumbel_sample
    assert set(kernels.__all__) == set(kernels._HOMES)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(function.__code__.co_varnames[: function.__code__.co_argcount])


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (
            "post_update",
            "idx_mapping num_computed_tokens last_sampled_tokens output_bin_counts sampled_tokens num_sampled "
            "num_rejected query_start_loc all_token_ids total_len draft_tokens draft_tokens_out",
        ),
        (
            "bincount",
            "expanded_idx_mapping all_token_ids prompt_len prefill_len prompt_bin_mask output_bin_counts "
            "max_prefill_len",
        ),
        (
            "apply_penalties",
            "logits expanded_idx_mapping token_ids expanded_local_pos repetition_penalty frequency_penalty "
            "presence_penalty prompt_bin_mask output_bin_counts",
        ),
        ("compute_token_logprobs", "logits token_ids"),
        (
            "compute_topk_scores",
            "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
            "max_per_req_token_ids logits_mode",
        ),
    ],
)
def test_parameters_in_vllms_order(op: str, names: str) -> None:
    """vLLM 0.33's model runner V2 passes them by position."""
    assert _parameters(getattr(kernels, op)) == names.split()
