"""How vllm-ascend launches the kernels of sampling, drafting and workers: types and constants (commit 182b75ea84).

Settings are those of the launch where it fixes them, else of a usual model: head size 128, 32 heads, 8 of them for
keys, vocabulary 151,936. Strides that are 1 for a contiguous tensor are constants, as Triton makes them at launch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..cases import Case, Constant
from .declare import case


def _case(
    place: str, types: str, setting: str = "", values: Mapping[str, int] | None = None, /, **constants: Constant
) -> Case:
    return case(f"vllm_ascend/{place}", types, setting, values, **constants)


_L = "ops/triton/linearnorm"
_ROPE: dict[str, Constant] = dict(  # noqa: C408
    q_hidden_size=4096, kv_hidden_size=1024, total_hidden_size=6144, eps=1e-6, BIAS=False, HEAD_DIM=128, ROPE_DIM=128,
    HALF_ROPE_DIM=64, IS_PARTIAL_ROPE=False, num_vectorcore=40, q_head_num=32, kv_head_num=8, qk_head_num_sum=40,
    q_bias_ptr=None, k_bias_ptr=None,
)  # fmt: skip
_M = "ops/triton/mamba"
_HEADS: dict[str, Constant] = {"b": 1, "h": 16, "d": 128, "e": 128, "BLOCK": 256}
_R = "ops/triton/reject_sample"
_VERIFY = (
    "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr bonus_token_ids_ptr recovered_token_ids_ptr: "
    "*i32; draft_probs_ptr target_probs_ptr uniform_probs_ptr: *fp32; is_greedy_ptr: *i1; max_spec_len vocab_size "
    "global_vocab_size vec_len: i32"
)
_VERIFY_CONSTANTS: dict[str, Constant] = dict(  # noqa: C408
    target_indices_ptr=None, ori_target_probs_ptr=None, NO_ORI_TARGET_PROBS=True, NO_DRAFT_PROBS=False,
    ENABLE_REDUCE_SAMPLING=False, ENTROPY_VERIFY=False, BLOCK_SIZE=8, VOCAB_BLOCK_SIZE=512, POSTERIOR_THRESHOLD=0.09,
    POSTERIOR_ALPHA=0.3, SUB_BLOCK=4096, EPSILON=1e-10,
)  # fmt: skip
_VERIFY_SETTINGS: dict[str, dict[str, Constant]] = {
    "": {},
    "by entropy": {"ENTROPY_VERIFY": True},
    "without draft probabilities": {"NO_DRAFT_PROBS": True},
}
_VOCAB = 151_936
_S = "worker/v2/sample"
_J = "worker/v2/spec_decode/rejection_sampler_utils"

# fmt: off
LOWERING_CASES = [
    # ops/triton/linearnorm
    _case(
        f"{_L}/split_qkv_rmsnorm_mrope:split_qkv_rmsnorm_mrope_kernel",
        "in_qkv_ptr q_weight_ptr k_weight_ptr cos_sin_ptr out_q_ptr out_k_ptr out_v_ptr: *bf16; num_tokens "
        "front_core_num num_tokens_each_front_core num_tokens_each_tail_core mrope_section_t mrope_section_h "
        "mrope_section_w: i32",
        q_bias_ptr=None, k_bias_ptr=None, out_gate_ptr=None, num_q_heads=32, num_kv_heads=8, head_size=128, q_size=4096,
        kv_size=1024, eps=1e-6, has_bias=False, is_interleaved=False, rope_dim=128, half_rope_dim=64,
        IS_PARTIAL_ROPE=False, gate_size=0,
    ),
    _case(
        f"{_L}/split_qkv_rmsnorm_rope:split_qkv_rmsnorm_rope_kernel",
        "input_gm_ptr q_gm_ptr k_gm_ptr v_gm_ptr q_weight_ptr k_weight_ptr cos_sin_cache_gm_ptr: *bf16; "
        "positions_gm_ptr: *i64; batch_size: i32",
        batch_size_per_iter_per_vec=1, qk_head_nums_per_iter_per_vec=40, v_batch_size_per_iter_per_vec=40, **_ROPE,
    ),
    _case(
        f"{_L}/split_qkv_rmsnorm_rope_simt:precompute_rope_cos_sin_kernel",
        "cos_sin_cache_gm_ptr out_cos_sin_gm_ptr: *bf16; positions_gm_ptr: *i64; batch_size: i32",
        ROPE_DIM=128, num_vectorcore=40, BLOCK_SIZE=32,
    ),
    _case(
        f"{_L}/split_qkv_rmsnorm_rope_simt:split_qkv_rmsnorm_rope_simt_kernel",
        "input_gm_ptr q_gm_ptr k_gm_ptr v_gm_ptr q_weight_ptr k_weight_ptr cos_sin_precomputed_ptr: *bf16; "
        "batch_size: i32",
        batch_size_per_iter_per_vec=1, qk_head_nums_per_iter_per_vec=40, v_batch_size_per_iter_per_vec=40, **_ROPE,
    ),
    _case(
        f"{_L}/split_qkv_tp_rmsnorm_rope:_apply_global_rmsnorm_kernel",
        "q_ptr k_ptr cos_ptr sin_ptr q_weight_ptr k_weight_ptr: *bf16; qk_global_var_ptr: *fp32; cs_row_stride "
        "num_tokens: i32",
        eps=1e-6, inv_tp_world=0.25, q_cols=1024, k_cols=256, q_num_heads=8, k_num_heads=2, head_dim=128,
        rotary_dim=128, HALF=64,
    ),
    *(
        _case(
            f"{_L}/split_qkv_tp_rmsnorm_rope:_split_qkv_and_compute_local_qk_var_kernel",
            "input_ptr q_out_ptr k_out_ptr v_out_ptr: *bf16; qk_var_ptr: *fp32; num_tokens: i32",
            f"tuned to {_rows} rows",
            q_cols=1024, k_cols=256, q_cols_pow2=1024, k_cols_pow2=256, qkv_stride=1536, q_inv_size=1 / 1024,
            k_inv_size=1 / 256, BLOCK_SIZE=_rows,
        )
        for _rows in (1, 2, 4)
    ),

    # ops/triton/mamba
    *(
        _case(
            f"{_M}/causal_conv1d:_causal_conv1d_update_kernel_npu_tiled",
            "x_ptr w_ptr conv_state_ptr o_ptr: *bf16; conv_state_indices_ptr: *i32; batch state_len num_cache_lines "
            "stride_x_seq stride_x_token stride_conv_state_seq stride_state_indices stride_o_seq stride_o_token: i32"
            + ("; num_accepted_tokens_ptr query_start_loc_ptr: *i32" if _drafts else ""),
            "draft tokens" if _drafts else "",
            bias_ptr=None, block_idx_last_scheduled_token=None, initial_state_idx=None, dim=4096,
            seqlen=4 if _drafts else 1, stride_x_dim=1, stride_w_dim=4, stride_w_width=1, stride_conv_state_dim=1,
            stride_conv_state_tok=4096, stride_o_dim=1, pad_slot_id=-1, HAS_BIAS=False, KERNEL_WIDTH=4,
            SILU_ACTIVATION=True, IS_VARLEN=_drafts, IS_APC_ENABLED=False, IS_SPEC_DECODING=_drafts,
            NP2_STATELEN=8 if _drafts else 4, USE_PAD_SLOT=True, BLOCK_N=512, B_TILE=4, T_CHUNK=1,
            **({} if _drafts else {"num_accepted_tokens_ptr": None, "query_start_loc_ptr": None}),
        )
        for _drafts in (False, True)
    ),
    _case(
        f"{_M}/lightning_attn:_fwd_diag_kernel", "Q K V Out: *bf16; S: *fp32",
        n=4096, CBLOCK=32, NUM_BLOCK=16, option_limit_auto_multi_buffer_only_for_local_buffer=False,
        option_set_workspace_multibuffer=4, option_tile_mix_vector_loop=2, option_tile_mix_cube_loop=2, **_HEADS,
    ),
    _case(
        f"{_M}/lightning_attn:_fwd_kv_parallel", "K V: *bf16; K_decay KV: *fp32",
        n=4096, NUM_BLOCK=16, D_FBLOCK=128, E_FBLOCK=64, NUM_FBLOCK=2, CBLOCK=64, NUM_CBLOCK=4, **_HEADS,
    ),
    _case(
        f"{_M}/lightning_attn:_fwd_kv_reduce", "S KV KV_HISTORY: *fp32; n NUM_BLOCK: i32",
        D_FBLOCK=128, E_FBLOCK=64, **_HEADS,
    ),
    _case(
        f"{_M}/lightning_attn:_fwd_none_diag_kernel", "Q Out: *bf16; S KV: *fp32; n NUM_BLOCK: i32",
        E_FBLOCK=64, CBLOCK=64, NUM_CBLOCK=4, **_HEADS,
    ),
    _case(
        f"{_M}/postprocess:postprocess_mamba_fused_kernel",
        "num_accepted_tokens_ptr mamba_state_idx_ptr num_scheduled_tokens_ptr num_computed_tokens_ptr "
        "num_draft_tokens_ptr state_elem_sizes_ptr state_conv_widths_ptr state_group_indices_ptr "
        "state_dim_row_count_ptr "
        "num_accepted_tokens_out_ptr idx_mapping_ptr: *i32; block_table_ptrs_ptr state_base_addrs_ptr "
        "state_block_strides_ptr state_inner_sizes_ptr state_dim_row_stride_ptr: *i64; block_table_stride_req: i64; "
        "num_reqs: i32",
        block_size=128, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True,
        PRECOMPUTED_NEW_COMPUTED=False, TEMPORAL_TILES=1,
    ),

    # ops/triton: rejection sampling, drafts, top-k and top-p
    *(
        _case(
            f"{_R}:expand_kernel",
            f"output_ptr input_ptr: *{_type}; cu_num_tokens_ptr: *i32; replace_from replace_to: {_type}; vec_len: i32",
            _type, MAX_NUM_TOKENS=128, BLOCK_SIZE=8,
        )
        for _type in ("i32", "fp32")
    ),
    _case(
        f"{_R}:rejection_greedy_sample_spec_len_1_triton",
        "output_token_ids_ptr draft_token_ids_ptr bonus_token_ids_ptr: *i32; target_argmax_ptr: *i64; vec_len: i32",
        uniform_probs_ptr=None, synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False, BLOCK_SIZE=8,
    ),
    _case(
        f"{_R}:rejection_greedy_sample_triton",
        "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr bonus_token_ids_ptr: *i32; "
        "target_argmax_ptr: *i64; vec_len max_spec_len: i32",
        is_greedy_ptr=None, uniform_probs_ptr=None, synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False,
        BLOCK_SIZE=8,
    ),
    *(
        _case(f"{_R}:rejection_random_sample_block_verify_kernel", _VERIFY, _name, **{**_VERIFY_CONSTANTS, **_changes})
        for _name, _changes in _VERIFY_SETTINGS.items()
    ),
    *(
        _case(
            f"{_R}:rejection_random_sample_kernel", _VERIFY, _name,
            synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False, **{**_VERIFY_CONSTANTS, **_changes},
        )
        for _name, _changes in _VERIFY_SETTINGS.items()
    ),
    *(
        _case(
            f"{_R}:sample_recovered_tokens_kernel",
            "output_token_ids_ptr cu_num_draft_tokens_ptr draft_token_ids_ptr: *i32; draft_probs_ptr target_probs_ptr "
            "q_ptr:"
            "*fp32; vocab_size global_vocab_size: i32" + ("; target_indices_ptr: *i64" if _reduced else ""),
            "reduced vocabulary" if _reduced else "",
            option_multibuffer=False, NO_DRAFT_PROBS=False, ENABLE_REDUCE_SAMPLING=_reduced, SUB_BLOCK=4096,
            VOCAB_BLOCK_SIZE=512,
            **({} if _reduced else {"target_indices_ptr": None}),
        )
        for _reduced in (False, True)
    ),
    _case(
        "ops/triton/spec_decode/ngram:ngram_spec_decode_kernel",
        "token_ids_ptr num_tokens_ptr sampled_ptr next_token_ids_ptr draft_token_ids_ptr num_valid_draft_ptr "
        "raw_valid_count_ptr: *i32; discard_ptr: *i1; batch_size: i32",
        max_seq_len=4096, max_new_tokens=4, vocab_size=_VOCAB, min_n=2, max_n=5, k=3,
    ),
    _case(
        "ops/triton/spec_decode/utils:copy_and_expand_dflash_and_dspark_inputs_kernel",
        "next_token_ids_ptr out_input_ids_ptr context_slot_mapping_ptr out_context_slot_mapping_ptr "
        "out_query_slot_mapping_ptr out_token_indices_ptr block_table_ptr query_start_loc_ptr seq_lens_ptr "
        "num_rejected_tokens_ptr out_context_positions_ptr out_query_positions_ptr: *i32; target_positions_ptr: *i64; "
        "block_table_stride parallel_drafting_token_id block_size num_query_per_req num_speculative_tokens "
        "total_input_tokens batch_size: i32",
        HAS_NUM_REJECTED=True, SAMPLE_FROM_ANCHOR=False, TILE_SIZE=256,
    ),
    _case(
        "ops/triton/spec_decode/utils:prepare_inputs_padded_kernel",
        "cu_num_draft_tokens_ptr valid_sampled_tokens_count_ptr query_start_loc_gpu_ptr token_indices_to_sample_ptr "
        "num_rejected_tokens_gpu_ptr: *i32; num_reqs: i32",
        BLOCK_SIZE=4,
    ),
    *(
        _case(
            "ops/triton/v2/sample/apply_top_k_top_p_triton:_topk_topp_kernel",
            "LOGITS BUFFER PERCENTILE_TO_STD_TABLE NORMAL_CDF_TO_SIGMA_TABLE P: *fp32; K: *i32; LOGITS_STRIDE_0 "
            "BATCH_SIZE: i32",
            " and ".join(["top-k"] * _top_k + ["top-p"] * _top_p),
            VOCAB_SIZE=_VOCAB, MASK_VALUE=float("-inf"), BLOCK_SIZE=1024, BLOCK_SIZE_TRUNC=512, TOPK_ENABLED=_top_k,
            TOPP_ENABLED=_top_p,
        )
        for _top_k, _top_p in ((True, True), (True, False), (False, True))
    ),

    # worker
    _case(
        "worker/utils:_zero_kv_blocks_kernel", "seg_addrs_ptr: *i64; block_ids_ptr: *i64; n_blocks: i32",
        N_SEGS=64, PAGE_SIZE_EL=32768, BLOCK_SIZE=8192, GRID_SIZE=40,
    ),
    _case(
        f"{_S}/bad_words:_bad_words_kernel",
        "logits_ptr: *fp32; expanded_idx_mapping_ptr bad_word_token_ids_ptr bad_word_offsets_ptr num_bad_words_ptr "
        "all_token_ids_ptr prompt_len_ptr total_len_ptr input_ids_ptr expanded_local_pos_ptr: *i32; logits_stride "
        "bad_word_token_ids_stride bad_word_offsets_stride all_token_ids_stride num_tokens max_num_bad_words: i32",
        MAX_PREFIX_LEN=32,
    ),
    _case(
        f"{_S}/gumbel:_gumbel_sample_kernel",
        "local_argmax_ptr seeds_ptr pos_ptr: *i64; local_max_ptr logits_ptr temp_ptr: *fp32; "
        "expanded_idx_mapping_ptr: *i32; local_argmax_stride local_max_stride processed_logits_stride logits_stride "
        "vocab_size num_blocks: i32",
        processed_logits_ptr=None, processed_logits_col_ptr=None, BLOCK_SIZE=1024, APPLY_TEMPERATURE=True,
        PER_TOKEN_COL=False,
    ),
    _case(
        f"{_S}/gumbel:_temperature_kernel",
        "logits_ptr temperature_ptr: *fp32; expanded_idx_mapping_ptr: *i32; logits_stride vocab_size: i32",
        option_multibuffer=False, BLOCK_SIZE=44_032,
    ),
    *(
        _case(
            f"{_S}/logprob:_ranks_kernel",
            f"output_ptr token_ids_ptr: *i64; logits_ptr: {_type}; logits_stride vocab_size batch_size rows_per_core: "
            "i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "batch_size": 1, "rows_per_core": 1, "grid": 1},
            option_multibuffer=False, BLOCK_SIZE=8192,
        )
        for _type in ("*fp32", "*bf16")
    ),
    *(
        _case(
            f"{_S}/logprob:_topk_log_softmax_kernel",
            f"output_ptr: *fp32; logits_ptr: {_type}; topk_ids_ptr: *i64; logits_stride topk vocab_size: i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "topk": 21, "grid": 1},
            option_multibuffer=False, BLOCK_SIZE=12_944, PADDED_TOPK=32,
        )
        for _type in ("*fp32", "*bf16")
    ),
    *(
        _case(
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
        _case(
            "worker/v2/structured_outputs:_apply_grammar_bitmask_kernel",
            f"logits_ptr: {_type}; logits_indices_ptr bitmask_ptr: *i32; logits_stride bitmask_stride vocab_size: i32",
            f"logits {_type}", {"vocab_size": _VOCAB, "grid": 19},
            BLOCK_SIZE=8192,
        )
        for _type in ("*fp32", "*bf16")
    ),
    _case(
        f"{_S}/min_p:_min_p_kernel",
        "in_logits_ptr out_logits_ptr min_p_ptr: *fp32; expanded_idx_mapping_ptr: *i32; logits_stride vocab_size "
        "num_tokens: i32",
        option_multibuffer=False, BLOCK_SIZE=8192,
    ),
    _case(
        f"{_S}/penalties:_bincount_kernel",
        "expanded_idx_mapping_ptr all_token_ids_ptr prompt_len_ptr prefill_len_ptr prompt_bin_mask_ptr "
        "output_bin_counts_ptr: *i32; all_token_ids_stride prompt_bin_mask_stride output_bin_counts_stride: i32",
        "", {"*prompt_len_ptr": 2048, "*prefill_len_ptr": 4096, "grid": 4}, BLOCK_SIZE=1024,
    ),
    _case(
        "worker/v2/spec_decode/dflash/speculator:_prepare_dflash_inputs_kernel_ascend",
        "out_input_ids_ptr out_query_start_loc_ptr out_seq_lens_ptr out_query_slot_mapping_ptr "
        "out_context_slot_mapping_ptr "
        "out_sample_idx_mapping_ptr target_query_start_loc_ptr idx_mapping_ptr next_prefill_tokens_ptr num_sampled_ptr "
        "num_rejected_ptr block_table_ptr: *i32; out_query_positions_ptr out_context_positions_ptr "
        "out_sample_indices_ptr out_sample_pos_ptr out_seeds_ptr target_positions_ptr last_sampled_ptr seeds_ptr: "
        "*i64; out_temperature_ptr temperature_ptr: *fp32; block_table_stride parallel_drafting_token_id block_size "
        "num_query_per_req num_speculative_steps max_num_reqs max_num_tokens max_model_len: i32",
        SAMPLE_FROM_ANCHOR=False, PAD_SLOT_ID=-1, BLOCK_SIZE=1024,
    ),
    _case(
        f"{_J}:_probabilistic_rejection_kernel",
        "sampled_ptr rejected_steps_ptr target_local_argmax_ptr draft_sampled_ptr seed_ptr pos_ptr: *i64; "
        "target_rejected_logsumexp_ptr draft_rejected_logsumexp_ptr target_logits_ptr target_local_max_ptr "
        "target_local_sumexp_ptr draft_logits_ptr draft_local_max_ptr draft_local_sumexp_ptr temp_ptr: *fp32; "
        "cu_num_logits_ptr idx_mapping_ptr: *i32; sampled_stride target_logits_stride target_local_argmax_stride "
        "target_local_max_stride target_local_sumexp_stride draft_logits_stride_0 draft_logits_stride_1 "
        "draft_local_max_stride draft_local_sumexp_stride vocab_num_blocks: i32",
        PADDED_VOCAB_NUM_BLOCKS=32, HAS_DRAFT_LOGITS=True,
    ),
    _case(
        f"{_J}:_resample_kernel",
        "resampled_local_argmax_ptr draft_sampled_ptr seed_ptr pos_ptr: *i64; resampled_local_max_ptr "
        "target_logits_ptr target_rejected_logsumexp_ptr draft_logits_ptr draft_rejected_logsumexp_ptr temp_ptr: "
        "*fp32; rejected_step_ptr cu_num_logits_ptr expanded_idx_mapping_ptr: *i32; resampled_local_argmax_stride "
        "resampled_local_max_stride target_logits_stride draft_logits_stride_0 draft_logits_stride_1 vocab_size: i32",
        BLOCK_SIZE=1024, HAS_DRAFT_LOGITS=True,
    ),
]
# fmt: on
