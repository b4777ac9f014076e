"""How vllm-ascend launches the kernels of its models and operators: argument types and constants (commit 182b75ea84).

Settings are those of the launch where it fixes them, else of a usual model: head size 128, 16 or 32 heads, chunks of 64
tokens, vocabulary 151,936. Strides that are 1 for a contiguous tensor are constants, as Triton makes them at launch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..cases import Case, Constant
from .declare import case


def _case(
    place: str, types: str, setting: str = "", values: Mapping[str, int] | None = None, /, **constants: Constant
) -> Case:
    return case(f"vllm_ascend/{place}", types, setting, values, **constants)


_M3 = "models/minimax_m3/ops/msa_m3_triton"
_A5 = "models/minimax_m3/ops/msa_m3_triton_a5"
_T = "ops/triton"
_F = f"{_T}/fla"
_K = f"{_T}/kda"

# fmt: off
LOWERING_CASES = [
    # models/minimax_m3
    _case(
        f"{_M3}:_decode_index_score_kernel",
        "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr seq_lens global_seq_lens: *i32; block_offset "
        "decode_query_len stride_q_n stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
        num_idx_heads=4, head_dim=128, init_blocks=1, local_blocks=2, stride_q_d=1, stride_ik_d=1, stride_s_k=1,
        BLOCK_SIZE_K=128, SCORE_BLOCK_COUNT=256, NUM_CHUNKS=8,
    ),
    _case(
        f"{_M3}:_gqa_sparse_decode_kernel",
        "q_ptr k_cache_ptr v_cache_ptr: *bf16; t_ptr block_table_ptr seq_lens: *i32; o_ptr lse_ptr: *fp32; max_blocks "
        "total_q gqa_group_size head_dim max_topk: i32; sm_scale: fp32; decode_query_len stride_qn stride_qh "
        "stride_k_blk stride_k_pos stride_k_h stride_v_blk stride_v_pos stride_v_h stride_th stride_tn stride_o_c "
        "stride_o_b stride_o_h stride_l_c stride_l_b stride_bt_b: i32",
        stride_qd=1, stride_k_d=1, stride_v_d=1, stride_tk=1, stride_o_d=1, stride_l_h=1, BLOCK_SIZE_K=128,
        NUM_TOPK_CHUNKS=4, BLOCK_SIZE_H=16, BLOCK_SIZE_D=128, BLOCK_SIZE_T=16, USE_FP8=False, USE_PDL=False,
    ),
    _case(
        f"{_M3}:_gqa_sparse_fwd_kernel",
        "q_ptr k_cache_ptr v_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr cu_seqlens_q cu_seqblocks_q seq_lens "
        "prefix_lens: *i32; gqa_group_size head_dim max_topk: i32; sm_scale: fp32; stride_qn stride_qh stride_k_blk "
        "stride_k_pos stride_k_h stride_v_blk stride_v_pos stride_v_h stride_th stride_tn stride_on stride_oh "
        "stride_bt_b: i32",
        num_q_loop=1, stride_qd=1, stride_k_d=1, stride_v_d=1, stride_tk=1, stride_od=1, BLOCK_SIZE_Q=1,
        BLOCK_SIZE_K=128, BLOCK_SIZE_D=128, BLOCK_SIZE_H=16, BLOCK_SIZE_T=16, BLOCK_SIZE_QH=16, USE_FP8=False,
    ),
    _case(
        f"{_M3}:_mask_decode_topk_indices_kernel",
        "ti_ptr seq_lens global_seq_lens: *i32; block_offset decode_query_len stride_ti_h stride_ti_b: i32",
        block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),
    _case(
        f"{_M3}:_mask_prefill_topk_indices_kernel",
        "topk_indices_ptr query_start_offsets_ptr prefix_lengths_ptr: *i32; index_head_stride index_token_stride: i32",
        index_head_count=4, sparse_block_size=128, topk=16, index_topk_stride=1, BLOCK_SIZE_Q=64, BLOCK_SIZE_T=16,
    ),
    _case(
        f"{_M3}:_merge_topk_attn_out_kernel",
        "o_ptr lse_ptr: *fp32; out_ptr: *bf16; head_dim stride_o_c stride_o_b stride_o_h stride_l_c stride_l_b "
        "stride_out_n stride_out_h: i32",
        stride_o_d=1, stride_l_h=1, stride_out_d=1, NUM_TOPK_CHUNKS=4, BLOCK_SIZE_D=128, USE_PDL=False,
    ),
    _case(
        f"{_M3}:_prefill_index_score_kernel",
        "query_ptr index_key_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr query_start_offsets_ptr "
        "sequence_lengths_ptr prefix_lengths_ptr: *i32; query_token_stride query_head_stride key_block_stride "
        "key_position_stride score_head_stride score_token_stride block_table_batch_stride: i32",
        index_head_count=4, head_dim=128, query_dim_stride=1, key_dim_stride=1, score_block_stride=1, BLOCK_SIZE_Q=96,
        BLOCK_SIZE_K=128,
    ),
    _case(
        f"{_M3}:_prepare_prefill_topk_scores_kernel",
        "score_ptr: *fp32; query_start_offsets_ptr prefix_lengths_ptr: *i32; score_block_count score_head_stride "
        "score_token_stride: i32",
        index_head_count=4, init_block_count=1, local_block_count=2, score_block_stride=1, sparse_block_size=128,
        BLOCK_SIZE_Q=8, BLOCK_SIZE_FORCE=2, BLOCK_SIZE_TAIL=16,
    ),

    _case(
        f"{_A5}:_decode_index_score_masks_kernel",
        "init_mask_ptr local_mask_ptr: *i1; seq_lens: *i32; max_block decode_query_len chunk_blocks stride_mask_q: "
        "i32",
        block_size=128, init_blocks=1, local_blocks=2, stride_mask_k=1, BLOCK_SIZE_K=2048,
    ),
    _case(
        f"{_A5}:_decode_index_score_pad_tail_kernel",
        "score_ptr: *fp32; seq_lens: *i32; max_block decode_query_len chunk_blocks stride_s_h stride_s_b: i32",
        block_size=128, stride_s_k=1, BLOCK_SIZE_K=2048,
    ),
    _case(
        f"{_A5}:_decode_qk_score_kernel",
        "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr seq_lens_ptr: *i32; decode_query_len stride_q_n "
        "stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
        num_idx_heads=4, head_dim=128, init_blocks=1, local_blocks=2, stride_q_d=1, stride_ik_d=1, stride_s_k=1,
        BLOCK_SIZE_K=128, NUM_CHUNKS=8,
    ),
    _case(
        f"{_A5}:_gqa_sparse_decode_kernel",
        "q_ptr kv_cache_ptr: *bf16; t_ptr block_table_ptr seq_lens: *i32; o_ptr lse_ptr: *fp32; total_q "
        "gqa_group_size head_dim max_topk: i32; sm_scale: fp32; decode_query_len stride_qn stride_qh stride_kv_blk "
        "stride_kv_kv stride_kv_pos stride_kv_h stride_th stride_tn stride_o_c stride_o_b stride_o_h stride_l_c "
        "stride_l_b stride_bt_b: i32",
        stride_qd=1, stride_kv_d=1, stride_tk=1, stride_o_d=1, stride_l_h=1, BLOCK_SIZE_K=128, NUM_TOPK_CHUNKS=4,
        BLOCK_SIZE_H=16, BLOCK_SIZE_D=128, BLOCK_SIZE_T=16, USE_FP8=False, USE_PDL=False,
    ),
    _case(
        f"{_A5}:_gqa_sparse_fwd_kernel",
        "q_ptr kv_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr cu_seqlens_q cu_seqblocks_q seq_lens prefix_lens: "
        "*i32; num_kv_heads gqa_group_size head_dim max_topk: i32; sm_scale: fp32; stride_qn stride_qh stride_kv_blk "
        "stride_kv_kv stride_kv_pos stride_kv_h stride_th stride_tn stride_on stride_oh stride_bt_b: i32",
        num_q_loop=1, stride_qd=1, stride_kv_d=1, stride_tk=1, stride_od=1, BLOCK_SIZE_Q=1, BLOCK_SIZE_K=128,
        BLOCK_SIZE_D=128, BLOCK_SIZE_H=16, BLOCK_SIZE_T=16, BLOCK_SIZE_QH=16, USE_FP8=False,
    ),
    _case(
        f"{_A5}:_index_block_score_kernel",
        "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr cu_seqlens seq_lens prefix_lens: *i32; "
        "sm_scale: fp32; stride_q_n stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
        num_idx_heads=4, head_dim=128, stride_q_d=1, stride_ik_d=1, stride_s_k=1, BLOCK_SIZE_Q=128, BLOCK_SIZE_K=128,
    ),
    _case(
        f"{_A5}:_merge_topk_attn_out_kernel",
        "o_ptr lse_ptr: *fp32; out_ptr: *bf16; head_dim stride_o_c stride_o_b stride_o_h stride_l_c stride_l_b "
        "stride_out_n stride_out_h: i32",
        stride_o_d=1, stride_l_h=1, stride_out_d=1, NUM_TOPK_CHUNKS=4, BLOCK_SIZE_D=128, USE_PDL=False,
    ),
    _case(
        f"{_A5}:_prefill_index_score_prepare_for_topk_kernel",
        "score_ptr: *fp32; cu_seqlens prefix_lens: *i32; max_block chunk_blocks num_prep_chunks stride_s_h "
        "stride_s_n: i32",
        init_blocks=1, local_blocks=2, stride_s_k=1, block_size=128, BLOCK_SIZE_K=2048,
    ),
    _case(
        f"{_A5}:_topk_index_mask_invalid_kernel",
        "ti_ptr seq_lens: *i32; decode_query_len stride_ti_h stride_ti_b: i32",
        block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),
    _case(
        f"{_A5}:_topk_index_mask_invalid_prefill_kernel",
        "ti_ptr cu_seqlens prefix_lens: *i32; stride_ti_h stride_ti_n: i32",
        block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),

    # ops/triton: activation, batch_invariant, small ones
    _case(
        f"{_T}/activation/swiglu_quant:_swiglu_quant_kernel",
        "x_ptr: *bf16; group_list_ptr: *i64; out_ptr: *i8; scale_ptr: *fp32",
        TOTAL_COLS=4096, HALF_COLS=2048, COL_BLOCK_SIZE=1536, NUM_EXPERTS=16, NUM_EXPERTS_ALGIN=16, GROUP_LIST_TYPE=0,
        NUM_CORES=40, DTYPE_MAX=127, SCALE=True,
    ),
    _case(
        f"{_T}/activation/swiglustep:_swiglustep_kernel",
        "x_ptr out_ptr: *bf16; M: i32",
        TOTAL_COLS=4096, HALF_COLS=2048, LIMIT=7.0, NUM_CORES=40,
    ),
    _case(
        f"{_T}/batch_invariant/matmul:linear_persistent_kernel",
        "a_ptr b_ptr c_ptr: *bf16; M N K stride_am stride_bn stride_cm: i32",
        stride_ak=1, stride_bk=1, stride_cn=1, BLOCK_M=128, BLOCK_N=256, BLOCK_K=256, NUM_BLOCKS_M=16, NUM_BLOCKS_N=16,
        GRID_SIZE=20,
    ),
    _case(
        f"{_T}/batch_invariant/matmul:matmul_bias_persistent_kernel",
        "x_ptr y_ptr bias_ptr output_ptr: *bf16; M N K stride_xm stride_yk stride_outm: i32",
        stride_xk=1, stride_yn=1, stride_bias=1, stride_outn=1, has_bias=True, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64,
    ),
    _case(
        f"{_T}/batch_invariant/mean:mean_kernel",
        "input_ptr output_ptr: *fp32; input_stride0 input_stride1 output_stride0 M N K: i32",
        input_stride2=1, output_stride1=1, BLOCK_SIZE=1024,
    ),
    _case(
        f"{_T}/batch_invariant/rmsnorm:_rms_norm_kernel",
        "input_ptr weight_ptr output_ptr: *bf16; input_row_stride output_row_stride n_rows n_cols: i32; eps: fp32",
        BLOCK_SIZE=1024,
    ),
    _case(f"{_T}/batch_memcpy:batch_memcpy_kernel", "src_ptrs dst_ptrs: *i64; sizes: *i64", BLOCK_SIZE=8192),
    _case(
        f"{_T}/bincount:token_bin_counts_and_mask_kernel",
        "tokens_ptr: *i64; bin_counts_ptr: *i32; tokens_batch_stride batch_size seq_len vocab_size tp_rank "
        "counts_batch_stride total_blocks: i32",
        option_multibuffer=False, tokens_seq_stride=1, counts_vocab_stride=1, SEQ_BLOCK=256,
    ),
    *(
        _case(
            f"{_T}/compute_slot_mapping:_compute_slot_mapping_kernel",
            "num_tokens max_num_tokens block_table_stride block_size: i32; query_start_loc_ptr block_table_ptr "
            "slot_mapping_ptr: *i32; positions_ptr: *i64",
            f"context parallel over {_world}",
            KV_CACHE_BLOCK_SIZE=128, BLOCKS_PER_KV_BLOCK=1, TOTAL_CP_WORLD_SIZE=_world, TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, TILE_BLOCK_SIZE=1024, BLOCK_TABLE_WINDOW_SIZE=16,
        )
        for _world in (1, 2)
    ),
    _case(
        f"{_T}/dsa_cp:build_local_metadata_triton",
        "query_start_loc_ptr seq_lens_ptr local_query_start_loc_ptr local_seq_lens_ptr start_pos_out_ptr: *i32; "
        "local_start local_end num_reqs: i32",
        BLOCK_NUM_REQS=64, COMPUTE_START_POS=True,
    ),
    _case(
        f"{_T}/fused_gdn_gating:fused_gdn_gating_kernel",
        "g beta_output A_log: *fp32; a b dt_bias: *bf16; seq_len NUM_HEADS NUM_BATCHES ROW_ITER: i32; beta threshold: "
        "fp32",
        BLK_HEADS=32, BLK_BATCHES=64,
    ),
    _case(
        f"{_T}/layernorm_gated:_layer_norm_fwd_1pass_kernel_npu",
        "X Y W Z: *bf16; Mean Rstd: *fp32; stride_x_row stride_y_row stride_z_row M N: i32; eps: fp32",
        B=None, BLOCK_M=64, BLOCK_N=128, HAS_BIAS=False, HAS_Z=True, NORM_BEFORE_GATE=True, IS_RMS_NORM=True,
    ),
    *(
        _case(
            f"{_T}/{_file}:muls_add_kernel",
            "x_ptr y_ptr output_ptr: *bf16; scale: fp32; n_elements n_blocks: i32",
            BLOCK_SIZE=2048,
        )
        for _file in ("mul_add", "muls_add")
    ),
    _case(
        f"{_T}/penalty:apply_all_penalties_kernel",
        "logits_ptr repetition_penalties_ptr frequency_penalties_ptr presence_penalties_ptr: *fp32; prompt_mask_ptr "
        "output_mask_ptr: *i1; output_bin_counts_ptr: *i64; num_seqs vocab_size stride_logits_seq "
        "stride_prompt_mask_seq stride_output_mask_seq stride_bin_counts_seq: i32",
        stride_logits_vocab=1, stride_prompt_mask_vocab=1, stride_output_mask_vocab=1, stride_bin_counts_vocab=1,
        BLOCK_SIZE=2048,
    ),
    _case(
        f"{_T}/rms_norm:triton_rms_kernel",
        "hidden_state_ptr norm_output_ptr: *bf16; hidden_state_stride_bs total_batch: i32; variance_epsilon: fp32",
        DIM=512, BLOCK_M=16,
    ),
    *(
        _case(
            f"{_T}/rope:_triton_rope",
            "q_ptr k_ptr cos_sin_ptr: *bf16; pos_ptr: *i64; q_row_stride k_row_stride cos_sin_row_stride num_tokens: "
            "i32",
            "NeoX style" if _neox else "interleaved",
            cos_ptr=None, cos_row_stride=None, sin_ptr=None, sin_row_stride=None, n_qh=32, n_kh=8, hd=128, rope_dim=128,
            pad_rope_dim=128, BLOCK_SIZE_HEAD=32, IS_NEOX_STYLE=_neox, USE_COS_SIN=True,
        )
        for _neox in (True, False)
    ),
    *(
        _case(
            f"{_T}/rope:_triton_rope_siso",
            "qk_ptr cos_sin_ptr: *bf16; pos_ptr: *i64; qk_row_stride cos_sin_row_stride num_tokens: i32",
            "NeoX style" if _neox else "interleaved",
            cos_ptr=None, cos_row_stride=None, sin_ptr=None, sin_row_stride=None, n_h=32, hd=128, rope_dim=64,
            pad_n_h=32, pad_rope_dim=64, BLOCK_SIZE=32, IS_NEOX_STYLE=_neox, USE_COS_SIN=True,
        )
        for _neox in (True, False)
    ),

    # ops/triton/fla
    _case(
        f"{_F}/chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "k v w v_new h h_update: *bf16; g h0 ht: *fp32; cu_seqlens chunk_offsets: *i64; T H Hg K V: i32",
        BT=64, USE_G=True, USE_INITIAL_STATE=True, STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, IS_VARLEN=True,
    ),
    _case(
        f"{_F}/chunk_delta_hupdate:chunk_gated_delta_rule_fwd_kernel_hupdate_blockdim64",
        "k w h_update: *bf16; g: *fp32; cu_seqlens chunk_offsets: *i64; T: i32",
        H=16, Hg=16, K=128, BT=64, USE_G=True, IS_VARLEN=True,
    ),
    _case(
        f"{_F}/chunk_o:chunk_fwd_kernel_o",
        "q k v h o: *bf16; g: *fp32; cu_seqlens chunk_offsets: *i64; scale: fp32; T H Hg K V: i32",
        BT=64, BK=128, BV=128, USE_G=True, IS_VARLEN=True,
    ),
    _case(
        f"{_F}/chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel",
        "k: *bf16; beta g_cumsum A: *fp32; cu_seqlens chunk_indices: *i64; T B bh_step task_num num_core: i32",
        H=16, Hg=16, K=128, BT=64, BK=128, IS_VARLEN=True, USE_G=True,
    ),
    *(
        _case(
            f"{_T}/{_folder}/cumsum:chunk_local_cumsum_scalar_kernel",
            "s o: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
            scale=None, H=16, BLOCK_T=256, REVERSE=False, HAS_SCALE=False, IS_VARLEN=True, HEAD_FIRST=False,
            CHUNK_SIZE=64,
        )
        for _folder in ("fla", "kda")
    ),
    _case(
        f"{_F}/fused_qkvzba_split_reshape:fused_qkvzba_split_reshape_cat_kernel",
        "mixed_qkv z b a mixed_qkvz mixed_ba: *bf16; total_rows rows_per_vec: i32",
        NUM_HEADS_QK=8, NUM_HEADS_V=16, HEAD_QK=128, HEAD_V=128, QKVZ_ROW_STRIDE=6144, BA_ROW_STRIDE=32,
        QKV_ROW_STRIDE=4096, Z_ROW_STRIDE=2048, BA_OUT_ROW_STRIDE=16, ROWS_PER_ITER=4,
    ),
    _case(f"{_F}/l2norm:l2norm_fwd_kernel2_loop", "X Y: *bf16; eps: fp32; M NUM_CHUNKS: i32", N=128, MBLOCK=69),
    _case(
        f"{_F}/layernorm_guard:layer_norm_fwd_kernel",
        "X Y W Z: *bf16; Mean Rstd: *fp32; stride_x_row stride_y_row stride_z_row M N: i32; eps: fp32",
        B=None, BLOCK_N=128, HAS_BIAS=False, HAS_Z=True, NORM_BEFORE_GATE=True, IS_RMS_NORM=True, N_CORES=40,
    ),
    *(
        _case(
            f"{_F}/solve_tril:merge_16x16_to_{_size}x{_size}_inverse_kernel",
            "A Ad Ai: *fp32; cu_seqlens chunk_indices: *i64; T H: i32",
            BT=_size, IS_VARLEN=True,
        )
        for _size in (32, 64)
    ),
    _case(
        f"{_F}/solve_tril:solve_tril_16x16_kernel",
        "A Ad: *fp32; cu_seqlens chunk_indices: *i64; T H: i32",
        BT=64, IS_VARLEN=True, LARGE_BLOCK_T=1216, EXTRACT_SLICE_STRIDE_1=1,
    ),
    _case(
        f"{_F}/utils:_clear_ssm_states_kernel",
        "states_ptr: *fp32; has_initial_state_ptr: *i1; inner_size row_stride: i32",
        BLOCK_SIZE=1024,
    ),
    _case(
        f"{_F}/wy_fast:recompute_w_u_fwd_kernel",
        "k v w u A: *bf16; beta g: *fp32; cu_seqlens chunk_indices: *i64; T H Hg K V: i32",
        BT=64, BK=64, BV=64, IS_VARLEN=True,
    ),

    # ops/triton/kda
    _case(
        f"{_K}/chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64_kda",
        "k v w v_new h: *bf16; gk h0 ht: *fp32; cu_seqlens chunk_offsets: *i64; T: i32",
        g=None, H=16, Hg=16, K=128, V=128, BT=64, BV=64, USE_G=False, USE_GK=True, USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, IS_VARLEN=True,
    ),
    _case(
        f"{_K}/cumsum:chunk_local_cumsum_vector_kernel",
        "s o: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
        B=1, H=16, S=128, BT=64, BS=32, REVERSE=False, IS_VARLEN=True, HEAD_FIRST=False,
    ),
    _case(
        f"{_K}/fused_recurrent_kda:fused_recurrent_gated_delta_rule_fwd_kernel",
        "q k v o: *bf16; g beta h0 ht: *fp32; cu_seqlens: *i64; ssm_state_indices: *i32; scale: fp32; N T: i64",
        num_accepted_tokens=None, B=1, H=16, HV=16, K=128, V=128, BK=128, BV=8, stride_init_state_token=262144,
        stride_final_state_token=262144, stride_indices_seq=1, stride_indices_tok=1, USE_INITIAL_STATE=True,
        INPLACE_FINAL_STATE=True, IS_BETA_HEADWISE=False, USE_QK_L2NORM_IN_KERNEL=True, IS_VARLEN=True,
        IS_CONTINUOUS_BATCHING=True, IS_SPEC_DECODING=False, IS_KDA=True,
    ),
    _case(
        f"{_K}/kda:chunk_gla_fwd_kernel_o",
        "q v h o A: *bf16; g: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=16, K=128, V=128, BT=64, BK=64, BV=128, IS_VARLEN=True,
    ),
    _case(
        f"{_K}/kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter",
        "q k: *bf16; g beta A Aqk: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=16, K=128, BT=64, BC=16, BK=64, NC=4, IS_VARLEN=True,
    ),
    _case(
        f"{_K}/kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_intra",
        "q k: *bf16; g beta A Aqk: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=16, K=128, BT=64, BC=16, BK=128, IS_VARLEN=True,
    ),
    _case(
        f"{_K}/kda:kda_gate_fwd_kernel",
        "g y: *bf16; A g_bias: *fp32; T H: i32",
        beta=1.0, threshold=20.0, D=128, BT=32, BD=128, HAS_BIAS=True,
    ),
    _case(
        f"{_K}/kda:layer_norm_gated_fwd_kernel",
        "x g y w: *bf16; mean rstd: *fp32; eps: fp32; T: i32",
        b=None, residual=None, residual_out=None, D=128, BT=32, BD=128, ACTIVATION="sigmoid", IS_RMS_NORM=True,
        STORE_RESIDUAL_OUT=False, HAS_RESIDUAL=False, HAS_WEIGHT=True, HAS_BIAS=False,
    ),
    _case(
        f"{_K}/kda:layer_norm_gated_fwd_kernel1",
        "x g y w: *bf16; mean rstd: *fp32; eps: fp32",
        b=None, residual=None, residual_out=None, D=1024, BD=1024, ACTIVATION="sigmoid", IS_RMS_NORM=True,
        STORE_RESIDUAL_OUT=False, HAS_RESIDUAL=False, HAS_WEIGHT=True, HAS_BIAS=False,
    ),
    _case(
        f"{_K}/kda:recompute_w_u_fwd_kernel",
        "q k kg v w u A: *bf16; beta gk: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
        qg=None, H=16, K=128, V=128, BT=64, BK=64, BV=64, STORE_QG=False, STORE_KG=True, IS_VARLEN=True,
        DOT_PRECISION="ieee",
    ),
    _case(f"{_K}/l2norm:l2norm_fwd_persistent_kernel", "X Y: *bf16; eps: fp32; M NUM_CHUNKS: i32", N=128, MBLOCK=69),
    *(
        _case(
            f"{_K}/l2norm:l2norm_fwd_tiled_kernel", "X Y: *bf16; eps: fp32; M: i32", f"{_n} columns",
            N=_n, BD=_n, MBLOCK=32,
        )
        for _n in (128, 1024)
    ),
    *(
        _case(
            f"{_K}/solve_tril:{_kernel}",
            "A Ai: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
            H=16, BT=_size, IS_VARLEN=True, DOT_PRECISION="ieee",
        )
        for _kernel, _size in (
            ("solve_tril_16x16_kernel_kda", 16),
            ("merge_16x16_to_32x32_inverse_kernel_kda", 32),
            ("merge_16x16_to_64x64_inverse_kernel_kda", 64),
        )
    ),
]
# fmt: on
