"""How vllm-ascend launches its smaller operators: argument types and constants (commit 182b75ea84).

Settings are those that a launch in the repository reaches, its tests' included: the sizes that the launch fixes or
computes, else those of models it serves. Strides that are 1 for a contiguous tensor are constants, as Triton makes
them at launch.
"""

from __future__ import annotations

from ..cases import Case
from .declare import case

_T = "vllm_ascend/ops/triton"
#: What ``linear_persistent`` makes of row counts, for 20 cores: setting -> rows and columns of a tile.
_LINEAR = {
    "1 row": (1, 256),
    "128 rows": (128, 256),
    "255 rows": (255, 128),
    "256 rows and more": (256, 128),
    "1,024 rows and more": (128, 256),
}
#: Setting of ``_triton_rope`` -> heads of queries and keys, their size, what is rotated, heads at a time, NeoX style.
_ROPE = {
    "NeoX style": (32, 8, 128, 128, 64, True),
    "NeoX style, heads of 64 rotated by half": (64, 1, 64, 32, 64, True),
    "NeoX style, heads of 256": (16, 2, 256, 256, 16, True),
    "NeoX style, heads of 256 rotated by a quarter": (16, 2, 256, 64, 16, True),
    "interleaved": (32, 8, 128, 128, 32, False),
    "interleaved, 96 heads": (96, 8, 128, 128, 32, False),
    "interleaved, heads of 64 rotated by half": (64, 1, 64, 32, 32, False),
    "interleaved, heads of 256": (16, 2, 256, 256, 16, False),
}

# fmt: off
LOWERING_CASES: list[Case] = [
    *(
        case(
            f"{_T}/activation/swiglu_quant:_swiglu_quant_kernel",
            "x_ptr: *bf16; group_list_ptr: *i64; out_ptr: *i8; scale_ptr: *fp32",
            f"{2 * _half:,} columns, {'counts' if _counts else 'running sums'}",
            TOTAL_COLS=2 * _half, HALF_COLS=_half, COL_BLOCK_SIZE=1536, NUM_EXPERTS=_experts,
            NUM_EXPERTS_ALGIN=_experts, GROUP_LIST_TYPE=_counts, NUM_CORES=40, DTYPE_MAX=127, SCALE=True,
        )
        for _half, _experts, _counts in ((2048, 16, 0), (2048, 256, 1), (1536, 16, 1), (1408, 8, 1), (768, 16, 1))
    ),
    *(
        case(
            f"{_T}/activation/swiglustep:_swiglustep_kernel", "x_ptr out_ptr: *bf16; M: i32", f"{2 * _half:,} columns",
            TOTAL_COLS=2 * _half, HALF_COLS=_half, LIMIT=7.0, NUM_CORES=40,
        )
        for _half in (1280, 2048)
    ),
    *(
        case(
            f"{_T}/batch_invariant/matmul:linear_persistent_kernel",
            f"a_ptr b_ptr c_ptr: *{_type}; M N K stride_am stride_bn stride_cm: i32",
            f"{_type}, {_name}",
            stride_ak=1, stride_bk=1, stride_cn=1, BLOCK_M=_rows, BLOCK_N=_columns, BLOCK_K=_depth, NUM_BLOCKS_M=16,
            NUM_BLOCKS_N=16, GRID_SIZE=20,
        )
        for _type, _depth in (("bf16", 256), ("fp32", 128)) for _name, (_rows, _columns) in _LINEAR.items()
    ),
    *(
        case(
            f"{_T}/batch_invariant/matmul:matmul_bias_persistent_kernel",
            f"x_ptr y_ptr bias_ptr output_ptr: *{_type}; M N K stride_xm stride_yk stride_outm: i32",
            f"{_type}, {'with' if _bias else 'without'} bias",
            stride_xk=1, stride_yn=1, stride_bias=int(_bias), stride_outn=1, has_bias=_bias, BLOCK_M=128, BLOCK_N=128,
            BLOCK_K=64,
        )
        for _type in ("bf16", "fp32") for _bias in (True, False)
    ),
    *(
        case(
            f"{_T}/batch_invariant/mean:mean_kernel",
            f"input_ptr output_ptr: *{_type}; input_stride0 output_stride0 M N K: i32"
            + ("" if _last else "; input_stride1: i32"),
            f"{_type}, {'last' if _last else 'middle'} dimension",
            input_stride2=1, output_stride1=1, BLOCK_SIZE=1024, **({"input_stride1": 1} if _last else {}),
        )
        for _type in ("fp32", "fp16") for _last in (True, False)
    ),
    *(
        case(
            f"{_T}/batch_invariant/rmsnorm:_rms_norm_kernel",
            f"input_ptr weight_ptr output_ptr: *{_type}; input_row_stride output_row_stride n_rows n_cols: i32; eps: "
            "fp32",
            _type, BLOCK_SIZE=1024,
        )
        for _type in ("bf16", "fp32")
    ),
    case(f"{_T}/batch_memcpy:batch_memcpy_kernel", "src_ptrs dst_ptrs: *i64; sizes: *i32", BLOCK_SIZE=8192),
    case(
        f"{_T}/bincount:token_bin_counts_and_mask_kernel",
        "tokens_ptr: *i64; bin_counts_ptr: *i32; tokens_batch_stride batch_size seq_len vocab_size tp_rank "
        "counts_batch_stride total_blocks: i32",
        option_multibuffer=False, tokens_seq_stride=1, counts_vocab_stride=1, SEQ_BLOCK=256,
    ),
    *(
        case(
            f"{_T}/compute_slot_mapping:_compute_slot_mapping_kernel",
            "num_tokens max_num_tokens block_table_stride block_size: i32; query_start_loc_ptr block_table_ptr "
            "slot_mapping_ptr: *i32; positions_ptr: *i64",
            "as a test has it, context parallel over 2" if _world > 1 else f"{_blocks} blocks to a page",
            KV_CACHE_BLOCK_SIZE=128 * _blocks, BLOCKS_PER_KV_BLOCK=_blocks, TOTAL_CP_WORLD_SIZE=_world, TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=_world, PAD_ID=-1, TILE_BLOCK_SIZE=1024, BLOCK_TABLE_WINDOW_SIZE=16,
        )
        for _world, _blocks in ((1, 1), (1, 12), (2, 1))
    ),
    *(
        case(
            f"{_T}/dsa_cp:build_local_metadata_triton",
            "query_start_loc_ptr seq_lens_ptr local_query_start_loc_ptr local_seq_lens_ptr start_pos_out_ptr: *i32; "
            "local_start local_end num_reqs: i32",
            f"{_requests:,} requests" + (", with start positions" if _positions else ""),
            BLOCK_NUM_REQS=_requests, COMPUTE_START_POS=_positions,
        )
        for _requests, _positions in ((64, True), (64, False), (1024, True))
    ),
    case(
        f"{_T}/fused_gdn_gating:fused_gdn_gating_kernel",
        "g A_log: *fp32; a b dt_bias beta_output: *bf16; seq_len NUM_HEADS NUM_BATCHES ROW_ITER: i32; beta threshold: "
        "fp32",
        BLK_HEADS=8, BLK_BATCHES=64,
    ),
    *(
        case(
            f"{_T}/layernorm_gated:_layer_norm_fwd_1pass_kernel_npu",
            "X Y W Z: *bf16; Mean Rstd: *fp32; stride_x_row stride_y_row stride_z_row M N: i32; eps: fp32",
            _name,
            B=None, BLOCK_M=64, BLOCK_N=_columns, HAS_BIAS=False, HAS_Z=True, NORM_BEFORE_GATE=True, IS_RMS_NORM=True,
        )
        for _name, _columns in (("heads of 128", 128), ("heads of 192 or 256", 256))
    ),
    *(
        case(
            f"{_T}/{_file}:muls_add_kernel",
            "x_ptr y_ptr output_ptr: *bf16; scale: fp32; n_elements n_blocks: i32",
            f"{2 * _block:,} columns", BLOCK_SIZE=_block,
        )
        for _file in ("mul_add", "muls_add") for _block in (2048, 3584)
    ),
    *(
        case(
            f"{_T}/penalty:apply_all_penalties_kernel",
            f"logits_ptr: *{_type}; repetition_penalties_ptr frequency_penalties_ptr presence_penalties_ptr: *fp32; "
            "prompt_mask_ptr output_mask_ptr: *i1; output_bin_counts_ptr: *i32; num_seqs vocab_size stride_logits_seq "
            "stride_prompt_mask_seq stride_output_mask_seq stride_bin_counts_seq: i32",
            f"logits {_type}",
            stride_logits_vocab=1, stride_prompt_mask_vocab=1, stride_output_mask_vocab=1, stride_bin_counts_vocab=1,
            BLOCK_SIZE=2048,
        )
        for _type in ("fp32", "bf16")
    ),
    *(
        case(
            f"{_T}/rms_norm:triton_rms_kernel",
            "hidden_state_ptr norm_output_ptr: *bf16; hidden_state_stride_bs total_batch: i32; variance_epsilon: fp32",
            _name,
            DIM=_columns, BLOCK_M=_rows,
        )
        for _name, _columns, _rows in (
            ("16 rows", 512, 16), ("1 row", 512, 1), ("2,048 columns, the most that it takes", 2048, 16),
        )
    ),
    *(
        case(
            f"{_T}/rope:_triton_rope",
            "q_ptr k_ptr cos_sin_ptr: *bf16; pos_ptr: *i64; q_row_stride k_row_stride cos_sin_row_stride num_tokens: "
            "i32",
            _name,
            cos_ptr=None, cos_row_stride=None, sin_ptr=None, sin_row_stride=None, n_qh=_queries, n_kh=_keys, hd=_size,
            rope_dim=_rotated, pad_rope_dim=_rotated, BLOCK_SIZE_HEAD=_block, IS_NEOX_STYLE=_neox, USE_COS_SIN=True,
        )
        for _name, (_queries, _keys, _size, _rotated, _block, _neox) in _ROPE.items()
    ),
    *(
        case(
            f"{_T}/rope:_triton_rope",
            "q_ptr k_ptr cos_ptr sin_ptr: *bf16; q_row_stride k_row_stride cos_row_stride sin_row_stride num_tokens: "
            "i32",
            f"{'NeoX style' if _neox else 'interleaved'}, sines given",
            cos_sin_ptr=None, cos_sin_row_stride=None, pos_ptr=None, n_qh=64, n_kh=1, hd=128, rope_dim=128,
            pad_rope_dim=128, BLOCK_SIZE_HEAD=64 if _neox else 32, IS_NEOX_STYLE=_neox, USE_COS_SIN=False,
        )
        for _neox in (True, False)
    ),
    *(
        case(
            f"{_T}/rope:_triton_rope_siso",
            "qk_ptr cos_ptr sin_ptr: *bf16; qk_row_stride cos_row_stride sin_row_stride num_tokens: i32",
            f"{'NeoX style' if _neox else 'interleaved'}, {_heads} heads of {_size}, {_rotated} rotated",
            cos_sin_ptr=None, cos_sin_row_stride=None, pos_ptr=None, n_h=_heads, hd=_size, rope_dim=_rotated,
            pad_n_h=_heads, pad_rope_dim=_rotated, BLOCK_SIZE=_heads, IS_NEOX_STYLE=_neox, USE_COS_SIN=False,
        )
        for _neox in (True, False) for _heads, _size, _rotated in ((64, 128, 64), (1, 128, 64), (64, 64, 32))
    ),

    # ops/triton/fla
    case(
        f"{_T}/fla/chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "k v w v_new h h_update: *bf16; g h0 ht: *fp32; cu_seqlens chunk_offsets: *i64; T H Hg K V: i32",
        BT=64, USE_G=True, USE_INITIAL_STATE=True, STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, IS_VARLEN=True,
    ),
    case(
        f"{_T}/fla/chunk_delta_hupdate:chunk_gated_delta_rule_fwd_kernel_hupdate_blockdim64",
        "k w: *bf16; g h_update: *fp32; cu_seqlens chunk_offsets: *i64; T: i32",
        H=16, Hg=16, K=128, BT=64, USE_G=True, IS_VARLEN=True,
    ),
    case(
        f"{_T}/fla/chunk_o:chunk_fwd_kernel_o",
        "q k v h o: *bf16; g: *fp32; cu_seqlens chunk_offsets: *i64; scale: fp32; T H Hg K V: i32",
        BT=64, BK=128, BV=128, USE_G=True, IS_VARLEN=True,
    ),
    case(
        f"{_T}/fla/chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel",
        "k beta: *bf16; g_cumsum A: *fp32; cu_seqlens chunk_indices: *i64; T B bh_step task_num num_core: i32",
        H=16, Hg=16, K=128, BT=64, BK=128, IS_VARLEN=True, USE_G=True,
    ),
    *(
        case(
            f"{_T}/{_folder}/cumsum:chunk_local_cumsum_scalar_kernel",
            "s o: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
            f"{_heads} heads",
            scale=None, H=_heads, BLOCK_T=4096 // _heads, REVERSE=False, HAS_SCALE=False, IS_VARLEN=True,
            HEAD_FIRST=False, CHUNK_SIZE=64,
        )
        for _folder in ("fla", "kda") for _heads in (4, 32)
    ),
    *(
        case(
            f"{_T}/fla/fused_qkvzba_split_reshape:fused_qkvzba_split_reshape_cat_kernel",
            "mixed_qkv z b a mixed_qkvz mixed_ba: *bf16; total_rows rows_per_vec: i32",
            f"{_heads} and {2 * _heads} heads",
            NUM_HEADS_QK=_heads, NUM_HEADS_V=2 * _heads, HEAD_QK=128, HEAD_V=128, QKVZ_ROW_STRIDE=768 * _heads,
            BA_ROW_STRIDE=4 * _heads, QKV_ROW_STRIDE=512 * _heads, Z_ROW_STRIDE=256 * _heads,
            BA_OUT_ROW_STRIDE=2 * _heads, ROWS_PER_ITER=_rows,
        )
        for _heads, _rows in ((2, 16), (4, 8), (8, 4), (16, 1))
    ),
    *(
        case(
            f"{_T}/fla/l2norm:l2norm_fwd_kernel2_loop", f"X Y: *{_type}; eps: fp32; M NUM_CHUNKS: i32",
            _name, N=_columns, MBLOCK=69,
        )
        for _name, _type, _columns in (
            ("bf16", "bf16", 128), ("fp32", "fp32", 128), ("heads of 256, the most that its caller takes", "bf16", 256),
        )
    ),
    case(
        f"{_T}/fla/layernorm_guard:layer_norm_fwd_kernel",
        "X Y W Z: *bf16; Mean Rstd: *fp32; stride_x_row stride_y_row stride_z_row M N: i32; eps: fp32",
        B=None, BLOCK_N=128, HAS_BIAS=False, HAS_Z=True, NORM_BEFORE_GATE=True, IS_RMS_NORM=True, N_CORES=65_535,
    ),
    *(
        case(
            f"{_T}/fla/solve_tril:merge_16x16_to_{_size}x{_size}_inverse_kernel",
            "A Ad: *fp32; Ai: *bf16; cu_seqlens chunk_indices: *i64; T H: i32",
            BT=_size, IS_VARLEN=True,
        )
        for _size in (32, 64)
    ),
    case(
        f"{_T}/fla/solve_tril:solve_tril_16x16_kernel",
        "A Ad: *fp32; cu_seqlens chunk_indices: *i64; T H: i32",
        BT=64, IS_VARLEN=True, LARGE_BLOCK_T=1216, EXTRACT_SLICE_STRIDE_1=38,
    ),
    *(
        case(
            f"{_T}/fla/utils:_clear_ssm_states_kernel",
            f"states_ptr: *{_type}; has_initial_state_ptr: *i1; inner_size row_stride: i32",
            _type, BLOCK_SIZE=4096,
        )
        for _type in ("fp32", "bf16")
    ),
    case(
        f"{_T}/fla/wy_fast:recompute_w_u_fwd_kernel",
        "k v w u A beta: *bf16; g: *fp32; cu_seqlens chunk_indices: *i64; T H Hg K V: i32",
        BT=64, BK=64, BV=64, IS_VARLEN=True,
    ),
]
# fmt: on
