"""How vllm-ascend launches the kernels of sampling, drafting and workers: types and constants (commit 182b75ea84).

Settings are those that a launch in the repository reaches, its tests' included: every branch that a launch can choose,
tiles for few and for many requests, a vocabulary of 151,936. Strides that are 1 for a contiguous tensor are constants,
as Triton makes them at launch.
"""

from __future__ import annotations

from ..cases import Case, Constant
from .declare import case

_R = "vllm_ascend/ops/triton/reject_sample"
_D = "vllm_ascend/ops/triton/spec_decode"
_W = "vllm_ascend/worker"
_S = f"{_W}/v2/sample"
_J = f"{_W}/v2/spec_decode/rejection_sampler_utils"
_VOCAB = 151_936
_VERIFY = (
    "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr bonus_token_ids_ptr recovered_token_ids_ptr: "
    "*i32; target_probs_ptr uniform_probs_ptr: *fp32; is_greedy_ptr: *i1; max_spec_len vocab_size global_vocab_size "
    "vec_len: i32"
)
_VERIFY_CONSTANTS: dict[str, Constant] = dict(  # noqa: C408
    NO_ORI_TARGET_PROBS=True, NO_DRAFT_PROBS=False, ENABLE_REDUCE_SAMPLING=False, ENTROPY_VERIFY=False, BLOCK_SIZE=8,
    VOCAB_BLOCK_SIZE=512, POSTERIOR_THRESHOLD=0.09, POSTERIOR_ALPHA=0.3, SUB_BLOCK=4096, EPSILON=1e-10,
)  # fmt: skip
#: Setting of a verification -> pointers that it has, constants that change.
_VERIFY_SETTINGS: dict[str, tuple[str, dict[str, Constant]]] = {
    "": ("draft_probs_ptr: *fp32", {}),
    "one request": ("draft_probs_ptr: *fp32", {"BLOCK_SIZE": 1}),
    "by entropy": (
        "draft_probs_ptr ori_target_probs_ptr: *fp32",
        {"ENTROPY_VERIFY": True, "NO_ORI_TARGET_PROBS": False},
    ),
    "without draft probabilities": ("", {"NO_DRAFT_PROBS": True}),
    "reduced vocabulary": ("draft_probs_ptr: *fp32; target_indices_ptr: *i64", {"ENABLE_REDUCE_SAMPLING": True}),
    "reduced vocabulary, without draft probabilities": (
        "target_indices_ptr: *i64",
        {"ENABLE_REDUCE_SAMPLING": True, "NO_DRAFT_PROBS": True},
    ),
}


def _verify(kernel: str, name: str, optional: str, changed: dict[str, Constant], **more: Constant) -> Case:
    """A case of a kernel that verifies drafts: pointers that are not in ``optional`` are None."""
    pointers = ("draft_probs_ptr", "ori_target_probs_ptr", "target_indices_ptr")
    absent: dict[str, Constant] = {pointer: None for pointer in pointers if pointer not in optional}
    return case(
        f"{_R}:{kernel}", f"{_VERIFY}; {optional}" if optional else _VERIFY, name,
        **{**_VERIFY_CONSTANTS, **changed, **absent, **more},
    )  # fmt: skip


# fmt: off
LOWERING_CASES: list[Case] = [
    # ops/triton: rejection sampling, drafts, top-k and top-p
    *(
        case(
            f"{_R}:expand_kernel",
            f"output_ptr input_ptr: *{_type}; cu_num_tokens_ptr: *i32; replace_from replace_to: {_type}; vec_len: i32",
            f"{_type}, {_block} requests a program", MAX_NUM_TOKENS=128, BLOCK_SIZE=_block,
        )
        for _type in ("i32", "fp32") for _block in (1, 8)
    ),
    *(
        case(
            f"{_R}:rejection_greedy_sample_spec_len_1_triton",
            "output_token_ids_ptr draft_token_ids_ptr bonus_token_ids_ptr: *i32; target_argmax_ptr: *i64; vec_len: i32"
            + ("; uniform_probs_ptr synthetic_conditional_rates_ptr: *fp32" if _synthetic else ""),
            f"{_block} requests a program" + (", synthetic" if _synthetic else ""),
            SYNTHETIC_MODE=_synthetic, BLOCK_SIZE=_block,
            **({} if _synthetic else {"uniform_probs_ptr": None, "synthetic_conditional_rates_ptr": None}),
        )
        for _synthetic in (False, True) for _block in (1, 8)
    ),
    *(
        case(
            f"{_R}:rejection_greedy_sample_triton",
            "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr bonus_token_ids_ptr: *i32; "
            "target_argmax_ptr: *i64; vec_len max_spec_len: i32" + ("; is_greedy_ptr: *i1" if _some else "")
            + ("; uniform_probs_ptr synthetic_conditional_rates_ptr: *fp32" if _synthetic else ""),
            f"{'some' if _some else 'all'} greedy, {_block} requests a program" + (", synthetic" if _synthetic else ""),
            SYNTHETIC_MODE=_synthetic, BLOCK_SIZE=_block, **({} if _some else {"is_greedy_ptr": None}),
            **({} if _synthetic else {"uniform_probs_ptr": None, "synthetic_conditional_rates_ptr": None}),
        )
        for _some, _synthetic, _block in ((False, False, 8), (False, False, 1), (True, False, 8), (True, True, 8))
    ),
    *(
        _verify("rejection_random_sample_block_verify_kernel", _name, *_setting)
        for _name, _setting in _VERIFY_SETTINGS.items()
    ),
    *(
        _verify(
            "rejection_random_sample_kernel", _name, *_setting,
            synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False,
        )
        for _name, _setting in _VERIFY_SETTINGS.items()
    ),
    _verify(
        "rejection_random_sample_kernel", "synthetic", "draft_probs_ptr synthetic_conditional_rates_ptr: *fp32", {},
        SYNTHETIC_MODE=True,
    ),
    *(
        case(
            f"{_R}:sample_recovered_tokens_kernel",
            "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr: *i32; target_probs_ptr q_ptr: *fp32; "
            "vocab_size global_vocab_size: i32" + ("; draft_probs_ptr: *fp32" if _drafts else "")
            + ("; target_indices_ptr: *i64" if _reduced else ""),
            ", ".join(["reduced vocabulary"] * _reduced + ["without draft probabilities"] * (not _drafts)),
            option_multibuffer=False, NO_DRAFT_PROBS=not _drafts, ENABLE_REDUCE_SAMPLING=_reduced, SUB_BLOCK=4096,
            VOCAB_BLOCK_SIZE=512, **({} if _reduced else {"target_indices_ptr": None}),
            **({} if _drafts else {"draft_probs_ptr": None}),
        )
        for _reduced in (False, True) for _drafts in (True, False)
    ),
    *(
        case(
            f"{_D}/ngram:ngram_spec_decode_kernel",
            "token_ids_ptr num_tokens_ptr sampled_ptr next_token_ids_ptr draft_token_ids_ptr num_valid_draft_ptr "
            "raw_valid_count_ptr: *i32; discard_ptr: *i1; batch_size: i32",
            f"{_length:,} tokens", max_seq_len=_length, max_new_tokens=4, vocab_size=_VOCAB, min_n=2, max_n=5, k=3,
        )
        for _length in (1024, 2048, 32_768)
    ),
    *(
        case(
            f"{_D}/utils:copy_and_expand_dflash_and_dspark_inputs_kernel",
            "next_token_ids_ptr out_input_ids_ptr context_slot_mapping_ptr out_context_slot_mapping_ptr "
            "out_query_slot_mapping_ptr out_token_indices_ptr block_table_ptr query_start_loc_ptr seq_lens_ptr "
            "out_context_positions_ptr out_query_positions_ptr: *i32; target_positions_ptr: *i64; block_table_stride "
            "parallel_drafting_token_id block_size num_query_per_req num_speculative_tokens total_input_tokens "
            "batch_size: i32; num_rejected_tokens_ptr: " + ("*i32" if _rejected else "i32"),
            ("anchored" if _anchored else "not anchored") + ("" if _rejected else ", nothing rejected"),
            HAS_NUM_REJECTED=_rejected, SAMPLE_FROM_ANCHOR=_anchored, TILE_SIZE=256,
        )
        for _rejected, _anchored in ((True, False), (False, False), (True, True))
    ),
    case(
        f"{_D}/utils:prepare_inputs_padded_kernel",
        "cu_num_draft_tokens_ptr valid_sampled_tokens_count_ptr query_start_loc_gpu_ptr token_indices_to_sample_ptr "
        "num_rejected_tokens_gpu_ptr: *i32; num_reqs: i32",
        BLOCK_SIZE=4,
    ),
    # What isn't asked for is passed as the logits.
    *(
        case(
            "vllm_ascend/ops/triton/v2/sample/apply_top_k_top_p_triton:_topk_topp_kernel",
            "LOGITS BUFFER PERCENTILE_TO_STD_TABLE NORMAL_CDF_TO_SIGMA_TABLE P: *fp32; LOGITS_STRIDE_0 BATCH_SIZE: "
            f"i32; K: {'*i32' if _top_k else '*fp32'}",
            " and ".join(["top-k"] * _top_k + ["top-p"] * _top_p),
            VOCAB_SIZE=_VOCAB, MASK_VALUE=float("-inf"), BLOCK_SIZE=1024, BLOCK_SIZE_TRUNC=512, TOPK_ENABLED=_top_k,
            TOPP_ENABLED=_top_p,
        )
        for _top_k, _top_p in ((True, True), (True, False), (False, True))
    ),

    # worker
    *(
        case(
            f"{_W}/utils:_zero_kv_blocks_kernel", "seg_addrs_ptr: *u64; block_ids_ptr: *i64; n_blocks: i32",
            f"blocks of {_block:,}", N_SEGS=64, PAGE_SIZE_EL=_page, BLOCK_SIZE=_block, GRID_SIZE=40,
        )
        for _page, _block in ((65_536, 8192), (36_864, 4096))
    ),
    case(
        f"{_S}/bad_words:_bad_words_kernel",
        "logits_ptr: *fp32; expanded_idx_mapping_ptr bad_word_token_ids_ptr bad_word_offsets_ptr num_bad_words_ptr "
        "all_token_ids_ptr prompt_len_ptr total_len_ptr input_ids_ptr expanded_local_pos_ptr: *i32; logits_stride "
        "bad_word_token_ids_stride bad_word_offsets_stride all_token_ids_stride num_tokens max_num_bad_words: i32",
        MAX_PREFIX_LEN=32,
    ),
    *(
        case(
            f"{_S}/gumbel:_gumbel_sample_kernel",
            "local_argmax_ptr seeds_ptr pos_ptr: *i64; local_max_ptr logits_ptr temp_ptr: *fp32; "
            "expanded_idx_mapping_ptr: *i32; local_argmax_stride local_max_stride processed_logits_stride "
            "logits_stride vocab_size num_blocks: i32"
            + ("; processed_logits_ptr: *fp32; processed_logits_col_ptr: *i32" if _kept else ""),
            ", ".join(["with temperature"] * _temperature + ["logits kept"] * _kept + ["by columns"] * _columns),
            BLOCK_SIZE=1024, APPLY_TEMPERATURE=_temperature, PER_TOKEN_COL=_columns,
            **({} if _kept else {"processed_logits_ptr": None, "processed_logits_col_ptr": None}),
        )
        for _temperature, _kept, _columns in (
            (True, False, False), (False, False, False), (True, True, False), (True, True, True),
        )
    ),
    case(
        f"{_S}/gumbel:_temperature_kernel",
        "logits_ptr temperature_ptr: *fp32; expanded_idx_mapping_ptr: *i32; logits_stride vocab_size: i32",
        option_multibuffer=False, BLOCK_SIZE=44_032,
    ),
    *(
        case(
            f"{_S}/logprob:_ranks_kernel",
            f"output_ptr token_ids_ptr: *i64; logits_ptr: {_type}; logits_stride vocab_size batch_size rows_per_core: "
            "i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "batch_size": 1, "rows_per_core": 1, "grid": 1},
            option_multibuffer=False, BLOCK_SIZE=8192,
        )
        for _type in ("*fp32", "*bf16")
    ),
    *(
        case(
            f"{_S}/logprob:_topk_log_softmax_kernel",
            f"output_ptr: *fp32; logits_ptr: {_type}; topk_ids_ptr: *i64; logits_stride topk vocab_size: i32",
            f"logits {_type}" if _ids == 32 else f"logits {_type}, {_ids} ids",
            {"vocab_size": _VOCAB, "topk": 21, "grid": 1} if _ids == 32 else {},
            option_multibuffer=False, BLOCK_SIZE=12_944, PADDED_TOPK=_ids,
        )
        for _type in ("*fp32", "*bf16") for _ids in (32, 2)
    ),
    *(
        case(
            f"{_S}/penalties:_penalties_kernel",
            f"logits_ptr: {_type}; expanded_idx_mapping_ptr token_ids_ptr expanded_local_pos_ptr prompt_bin_mask_ptr "
            "output_bin_counts_ptr: *i32; repetition_penalty_ptr frequency_penalty_ptr presence_penalty_ptr: *fp32; "
            "logits_stride prompt_bin_mask_stride output_bin_counts_stride vocab_size: i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "*expanded_local_pos_ptr": 0, "grid": 38},
            NUM_VOCAB_BLOCKS=38, VOCAB_GRID_SIZE=38, BLOCK_SIZE=4096,
        )
        for _type in ("*fp32", "*bf16")
    ),
    *(
        case(
            f"{_W}/v2/structured_outputs:_apply_grammar_bitmask_kernel",
            f"logits_ptr: {_type}; logits_indices_ptr bitmask_ptr: *i32; logits_stride bitmask_stride vocab_size: i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "grid": 19},
            BLOCK_SIZE=8192,
        )
        for _type in ("*fp32", "*bf16")
    ),
    case(
        f"{_S}/min_p:_min_p_kernel",
        "in_logits_ptr out_logits_ptr min_p_ptr: *fp32; expanded_idx_mapping_ptr: *i32; logits_stride vocab_size "
        "num_tokens: i32",
        option_multibuffer=False, BLOCK_SIZE=8192,
    ),
    case(
        f"{_S}/penalties:_bincount_kernel",
        "expanded_idx_mapping_ptr all_token_ids_ptr prompt_len_ptr prefill_len_ptr prompt_bin_mask_ptr "
        "output_bin_counts_ptr: *i32; all_token_ids_stride prompt_bin_mask_stride output_bin_counts_stride: i32",
        "", {"*prompt_len_ptr": 2048, "*prefill_len_ptr": 4096, "grid": 4}, BLOCK_SIZE=1024,
    ),
    *(
        case(
            f"{_W}/v2/spec_decode/dflash/speculator:_prepare_dflash_inputs_kernel_ascend",
            "out_input_ids_ptr out_query_start_loc_ptr out_seq_lens_ptr out_query_slot_mapping_ptr "
            "out_context_slot_mapping_ptr out_sample_idx_mapping_ptr target_query_start_loc_ptr idx_mapping_ptr "
            "next_prefill_tokens_ptr num_sampled_ptr num_rejected_ptr block_table_ptr: *i32; out_query_positions_ptr "
            "out_context_positions_ptr out_sample_indices_ptr out_sample_pos_ptr out_seeds_ptr target_positions_ptr "
            "last_sampled_ptr seeds_ptr: *i64; out_temperature_ptr temperature_ptr: *fp32; block_table_stride "
            "parallel_drafting_token_id block_size num_query_per_req num_speculative_steps max_num_reqs "
            "max_num_tokens max_model_len: i32",
            "anchored" if _anchored else "not anchored",
            SAMPLE_FROM_ANCHOR=_anchored, PAD_SLOT_ID=-1, BLOCK_SIZE=1024,
        )
        for _anchored in (False, True)
    ),
    *(
        case(
            f"{_J}:_probabilistic_rejection_kernel",
            "sampled_ptr target_local_argmax_ptr draft_sampled_ptr seed_ptr pos_ptr: *i64; "
            "target_rejected_logsumexp_ptr draft_rejected_logsumexp_ptr target_logits_ptr target_local_max_ptr "
            "target_local_sumexp_ptr draft_logits_ptr draft_local_max_ptr draft_local_sumexp_ptr temp_ptr: *fp32; "
            "rejected_steps_ptr cu_num_logits_ptr idx_mapping_ptr: *i32; sampled_stride target_logits_stride "
            "target_local_argmax_stride target_local_max_stride target_local_sumexp_stride draft_logits_stride_0 "
            "draft_logits_stride_1 draft_local_max_stride draft_local_sumexp_stride vocab_num_blocks: i32",
            "" if _drafts else "without draft logits", PADDED_VOCAB_NUM_BLOCKS=32, HAS_DRAFT_LOGITS=_drafts,
        )
        for _drafts in (True, False)
    ),
    *(
        case(
            f"{_J}:_resample_kernel",
            "resampled_local_argmax_ptr draft_sampled_ptr seed_ptr pos_ptr: *i64; resampled_local_max_ptr "
            "target_logits_ptr target_rejected_logsumexp_ptr draft_logits_ptr draft_rejected_logsumexp_ptr temp_ptr: "
            "*fp32; rejected_step_ptr cu_num_logits_ptr expanded_idx_mapping_ptr: *i32; resampled_local_argmax_stride "
            "resampled_local_max_stride target_logits_stride draft_logits_stride_0 draft_logits_stride_1 vocab_size: "
            "i32",
            "" if _drafts else "without draft logits", BLOCK_SIZE=1024, HAS_DRAFT_LOGITS=_drafts,
        )
        for _drafts in (True, False)
    ),
]
# fmt: on
