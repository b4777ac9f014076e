"""How vllm-ascend launches what stands around attention: KDA, fused norms with rotations, Mamba (commit 182b75ea84).

Settings are those that a launch in the repository reaches, its tests' included: the sizes that the launch fixes or
computes, else those of models it serves; every value that a tuner tries. KDA is launched by tests alone.
"""

from __future__ import annotations

from dataclasses import replace

from ..cases import Case, Constant
from .declare import A5, case

_K = "vllm_ascend/ops/triton/kda"
_L = "vllm_ascend/ops/triton/linearnorm"
_M = "vllm_ascend/ops/triton/mamba"
_HEADS: dict[str, Constant] = {"b": 1, "h": 16, "d": 128, "e": 128, "BLOCK": 256}
#: Heads of queries and keys of 128, and how many columns are rotated.
_ROPE = ((64, 8, 128), (64, 4, 128), (40, 8, 128), (32, 8, 128), (16, 8, 128), (12, 1, 128), (4, 1, 128), (8, 1, 64))
#: Setting of the fusion with m-RoPE -> heads of queries and keys, their size, what is rotated, interleaved, a gate.
_MROPE = {
    "as a test has it, not interleaved": (16, 2, 128, 128, False, False),
    "Qwen3-VL": (32, 8, 128, 128, True, False),
    "Qwen3.5, 16 heads": (16, 2, 256, 64, True, True),
    "Qwen3.5, 24 heads": (24, 4, 256, 64, True, True),
    "Qwen3.5, 32 heads": (32, 2, 256, 64, True, True),
}
#: Heads of queries and keys of a MiniMax M2 on 8, 4, 2 and 1 devices, and of a test.
_SHARDS = ((6, 1), (12, 2), (24, 4), (48, 8), (8, 2))
#: Sizes of a head of keys.
_SIZES = (("heads of 128", 128), ("heads of 256, the most that KDA takes", 256))


def _rope(queries: int, keys: int, rotated: int, bias: bool, *, simt: bool = False) -> dict[str, Constant]:
    """The constants that ``qkv_rmsnorm_rope`` computes, for heads of 128 in bf16."""
    q, kv, elements = 128 * queries, 128 * keys, 87_040 // 2
    tables = rotated * 4 + queries * rotated if rotated != 128 else rotated * 2 + queries * rotated // 2
    rows = max(1, elements // (5 * q + 3 * kv + tables))
    return {
        "q_hidden_size": q, "kv_hidden_size": kv, "total_hidden_size": q + 2 * kv, "eps": 1e-6, "BIAS": bias,
        "HEAD_DIM": 128, "ROPE_DIM": rotated, "HALF_ROPE_DIM": rotated // 2, "IS_PARTIAL_ROPE": rotated != 128,
        "num_vectorcore": 40, "batch_size_per_iter_per_vec": rows, "q_head_num": queries, "kv_head_num": keys,
        "qk_head_num_sum": queries + keys, "qk_head_nums_per_iter_per_vec": rows * (queries + keys),
        "v_batch_size_per_iter_per_vec": elements // (2 if simt else 1) // (kv + 1),
        **({} if bias else {"q_bias_ptr": None, "k_bias_ptr": None}),
    }  # fmt: skip


# fmt: off
LOWERING_CASES: list[Case] = [
    # ops/triton/kda
    case(
        f"{_K}/chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64_kda",
        "k v w v_new h: *bf16; gk h0 ht: *fp32; cu_seqlens chunk_offsets: *i64; T: i32",
        g=None, H=32, Hg=32, K=128, V=128, BT=64, BV=64, USE_G=False, USE_GK=True, USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, IS_VARLEN=True,
    ),
    case(
        f"{_K}/cumsum:chunk_local_cumsum_vector_kernel",
        "s: *bf16; o: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
        B=1, H=32, S=128, BT=64, BS=32, REVERSE=False, IS_VARLEN=True, HEAD_FIRST=False,
    ),
    *(
        case(
            f"{_K}/fused_recurrent_kda:fused_recurrent_gated_delta_rule_fwd_kernel",
            "q k v o: *bf16; g beta h0 ht: *fp32; cu_seqlens: *i64; ssm_state_indices: *i32; scale: fp32; N T: i64",
            "in place" if _in_place else "",
            num_accepted_tokens=None, B=1, H=32, HV=32, K=128, V=128, BK=128, BV=8, stride_init_state_token=524_288,
            stride_final_state_token=524_288, stride_indices_seq=1, stride_indices_tok=1, USE_INITIAL_STATE=True,
            INPLACE_FINAL_STATE=_in_place, IS_BETA_HEADWISE=False, USE_QK_L2NORM_IN_KERNEL=True, IS_VARLEN=True,
            IS_CONTINUOUS_BATCHING=True, IS_SPEC_DECODING=False, IS_KDA=True,
        )
        for _in_place in (True, False)
    ),
    case(
        f"{_K}/kda:chunk_gla_fwd_kernel_o",
        "q v h o: *bf16; A g: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=32, K=128, V=128, BT=64, BK=64, BV=128, IS_VARLEN=True,
    ),
    case(
        f"{_K}/kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter",
        "q k beta: *bf16; g A Aqk: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=32, K=128, BT=64, BC=16, BK=64, NC=4, IS_VARLEN=True,
    ),
    case(
        f"{_K}/kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_intra",
        "q k beta: *bf16; g A Aqk: *fp32; cu_seqlens chunk_indices: *i64; scale: fp32; T: i32",
        H=32, K=128, BT=64, BC=16, BK=128, IS_VARLEN=True,
    ),
    *(
        case(
            f"{_K}/kda:kda_gate_fwd_kernel", "g: *bf16; y A g_bias: *fp32; T H: i32", f"tuned to {_rows} rows",
            beta=1.0, threshold=20.0, D=128, BT=_rows, BD=128, HAS_BIAS=True,
        )
        for _rows in (32, 64, 128)
    ),
    case(
        f"{_K}/kda:layer_norm_gated_fwd_kernel",
        "x g y w: *bf16; rstd: *fp32; eps: fp32; T: i32",
        mean=None, b=None, residual=None, residual_out=None, D=128, BT=32, BD=128, ACTIVATION="sigmoid",
        IS_RMS_NORM=True, STORE_RESIDUAL_OUT=False, HAS_RESIDUAL=False, HAS_WEIGHT=True, HAS_BIAS=False,
    ),
    case(
        f"{_K}/kda:layer_norm_gated_fwd_kernel1",
        "x g y w: *bf16; rstd: *fp32; eps: fp32",
        mean=None, b=None, residual=None, residual_out=None, D=1024, BD=1024, ACTIVATION="sigmoid", IS_RMS_NORM=True,
        STORE_RESIDUAL_OUT=False, HAS_RESIDUAL=False, HAS_WEIGHT=True, HAS_BIAS=False,
    ),
    case(
        f"{_K}/kda:recompute_w_u_fwd_kernel",
        "q k kg v w u A beta: *bf16; gk: *fp32; cu_seqlens chunk_indices: *i64; T: i32",
        qg=None, H=32, K=128, V=128, BT=64, BK=64, BV=64, STORE_QG=False, STORE_KG=True, IS_VARLEN=True,
        DOT_PRECISION="ieee",
    ),
    *(
        case(
            f"{_K}/l2norm:l2norm_fwd_persistent_kernel", "X Y: *bf16; eps: fp32; M NUM_CHUNKS: i32",
            _name, N=_columns, MBLOCK=69,
        )
        for _name, _columns in _SIZES
    ),
    *(
        case(
            f"{_K}/l2norm:l2norm_fwd_tiled_kernel", "X Y: *bf16; eps: fp32; M: i32", _name,
            N=_columns, BD=_columns, MBLOCK=32,
        )
        for _name, _columns in _SIZES
    ),
    *(
        case(
            f"{_K}/solve_tril:{_kernel}",
            "A: *fp32; Ai: *bf16; cu_seqlens chunk_indices: *i64; T: i32",
            H=32, BT=_size, IS_VARLEN=True, DOT_PRECISION="ieee",
        )
        for _kernel, _size in (
            ("solve_tril_16x16_kernel_kda", 16),
            ("merge_16x16_to_32x32_inverse_kernel_kda", 32),
            ("merge_16x16_to_64x64_inverse_kernel_kda", 64),
        )
    ),

    # ops/triton/linearnorm
    *(
        case(
            f"{_L}/split_qkv_rmsnorm_mrope:split_qkv_rmsnorm_mrope_kernel",
            "in_qkv_ptr q_weight_ptr k_weight_ptr cos_sin_ptr out_q_ptr out_k_ptr out_v_ptr out_gate_ptr: *bf16; "
            "num_tokens front_core_num num_tokens_each_front_core num_tokens_each_tail_core mrope_section_t "
            "mrope_section_h mrope_section_w: i32",
            _name,
            q_bias_ptr=None, k_bias_ptr=None, num_q_heads=_queries, num_kv_heads=_keys, head_size=_size,
            q_size=_queries * _size, kv_size=_keys * _size, eps=1e-6, has_bias=False, is_interleaved=_interleaved,
            rope_dim=_rotated, half_rope_dim=_rotated // 2, IS_PARTIAL_ROPE=_rotated != _size,
            gate_size=_queries * _size if _gate else 0,
        )
        for _name, (_queries, _keys, _size, _rotated, _interleaved, _gate) in _MROPE.items()
    ),
    *(
        case(
            f"{_L}/split_qkv_rmsnorm_rope:split_qkv_rmsnorm_rope_kernel",
            "input_gm_ptr q_gm_ptr k_gm_ptr v_gm_ptr q_weight_ptr k_weight_ptr cos_sin_cache_gm_ptr: *bf16; "
            "positions_gm_ptr: *i64; batch_size: i32" + ("; q_bias_ptr k_bias_ptr: *bf16" if _bias else ""),
            f"{_queries} and {_keys} heads, {_rotated} rotated" + (", with bias" if _bias else ""),
            **_rope(_queries, _keys, _rotated, _bias),
        )
        for _bias, _heads in ((False, _ROPE), (True, _ROPE[3:4])) for _queries, _keys, _rotated in _heads
    ),
    replace(
        case(
            f"{_L}/split_qkv_rmsnorm_rope_simt:precompute_rope_cos_sin_kernel",
            "cos_sin_cache_gm_ptr: *bf16; out_cos_sin_gm_ptr: *fp32; positions_gm_ptr: *i64; batch_size: i32",
            A5, ROPE_DIM=128, num_vectorcore=40, BLOCK_SIZE=128,
        ),
        allow=dict.fromkeys(("retried", "scalar-loop"), "its launch asks for SIMT, which isn't lowered here"),
    ),
    *(
        case(
            f"{_L}/split_qkv_rmsnorm_rope_simt:split_qkv_rmsnorm_rope_simt_kernel",
            "input_gm_ptr q_gm_ptr k_gm_ptr v_gm_ptr q_weight_ptr k_weight_ptr: *bf16; cos_sin_precomputed_ptr: *fp32; "
            "batch_size: i32",
            f"{A5}, {_queries} and {_keys} heads",
            **_rope(_queries, _keys, _rotated, False, simt=True),
        )
        for _queries, _keys, _rotated in _ROPE[1:4]
    ),
    *(
        case(
            f"{_L}/split_qkv_tp_rmsnorm_rope:_apply_global_rmsnorm_kernel",
            "q_ptr k_ptr cos_ptr sin_ptr q_weight_ptr k_weight_ptr: *bf16; qk_global_var_ptr: *fp32; cs_row_stride "
            "num_tokens: i32",
            f"{_queries} and {_keys} heads",
            eps=1e-6, inv_tp_world=0.25, q_cols=128 * _queries, k_cols=128 * _keys, q_num_heads=_queries,
            k_num_heads=_keys, head_dim=128, rotary_dim=64, HALF=32,
        )
        for _queries, _keys in _SHARDS
    ),
    *(
        case(
            f"{_L}/split_qkv_tp_rmsnorm_rope:_split_qkv_and_compute_local_qk_var_kernel",
            "input_ptr q_out_ptr k_out_ptr v_out_ptr: *bf16; qk_var_ptr: *fp32; num_tokens: i32",
            f"{_queries} and {_keys} heads, tuned to {_rows} rows",
            q_cols=128 * _queries, k_cols=128 * _keys, q_cols_pow2=1 << (128 * _queries - 1).bit_length(),
            k_cols_pow2=1 << (128 * _keys - 1).bit_length(), qkv_stride=128 * (_queries + 2 * _keys),
            q_inv_size=1 / (128 * _queries), k_inv_size=1 / (128 * _keys), BLOCK_SIZE=_rows,
        )
        for _queries, _keys in _SHARDS for _rows in (1, 2, 4)
    ),

    # ops/triton/mamba
    *(
        case(
            f"{_M}/causal_conv1d:_causal_conv1d_update_kernel_npu_tiled",
            "x_ptr w_ptr conv_state_ptr o_ptr: *bf16; conv_state_indices_ptr: *i32; batch state_len num_cache_lines "
            "stride_x_seq stride_x_token stride_conv_state_seq stride_state_indices stride_o_seq stride_o_token: i32"
            + ("; num_accepted_tokens_ptr query_start_loc_ptr: *i32" if _drafts else "")
            + ("; bias_ptr: *bf16" if _bias else "")
            + ("; block_idx_last_scheduled_token initial_state_idx: *i32" if _cached else ""),
            f"{_columns:,} columns, {_rows} rows" + (", draft tokens" if _drafts else "")
            + (", with bias" if _bias else "") + (", cached states" if _cached else ""),
            dim=_columns, seqlen=4 if _drafts else 1, stride_x_dim=1, stride_w_dim=1, stride_w_width=_columns,
            stride_conv_state_dim=1, stride_conv_state_tok=_columns, stride_o_dim=1, pad_slot_id=-1, HAS_BIAS=_bias,
            KERNEL_WIDTH=4, SILU_ACTIVATION=True, IS_VARLEN=_drafts, IS_APC_ENABLED=_cached, IS_SPEC_DECODING=_drafts,
            NP2_STATELEN=8 if _drafts else 4, USE_PAD_SLOT=True, BLOCK_N=512 if _columns >= 512 else 256, B_TILE=_rows,
            T_CHUNK=1 if _columns >= 512 else 48,
            **({} if _drafts else {"num_accepted_tokens_ptr": None, "query_start_loc_ptr": None}),
            **({} if _bias else {"bias_ptr": None}),
            **({} if _cached else {"block_idx_last_scheduled_token": None, "initial_state_idx": None}),
        )
        for _columns, _rows, _drafts, _bias, _cached in (
            (8192, 1, False, False, False), (8192, 8, False, True, False), (8192, 8, True, False, False),
            (8192, 8, False, True, True), (384, 8, True, False, False), (384, 8, False, False, False),
        )
    ),
    case(
        f"{_M}/lightning_attn:_fwd_diag_kernel", "Q K V Out: *bf16; S: *fp32",
        n=4096, CBLOCK=32, NUM_BLOCK=16, option_limit_auto_multi_buffer_only_for_local_buffer=False,
        option_set_workspace_multibuffer=4, option_tile_mix_vector_loop=2, option_tile_mix_cube_loop=2, **_HEADS,
    ),
    case(
        f"{_M}/lightning_attn:_fwd_kv_parallel", "K V: *bf16; K_decay KV: *fp32",
        n=4096, NUM_BLOCK=16, D_FBLOCK=128, E_FBLOCK=64, NUM_FBLOCK=2, CBLOCK=64, NUM_CBLOCK=4, **_HEADS,
    ),
    case(
        f"{_M}/lightning_attn:_fwd_kv_reduce", "S KV KV_HISTORY: *fp32; n NUM_BLOCK: i32",
        D_FBLOCK=128, E_FBLOCK=64, **_HEADS,
    ),
    case(
        f"{_M}/lightning_attn:_fwd_none_diag_kernel", "Q Out: *bf16; S KV: *fp32; n NUM_BLOCK: i32",
        E_FBLOCK=64, CBLOCK=64, NUM_CBLOCK=4, **_HEADS,
    ),
    # The file defines this kernel twice, for two versions of vLLM.
    *(
        replace(
            case(
                f"{_M}/postprocess:postprocess_mamba_fused_kernel",
                "num_accepted_tokens_ptr mamba_state_idx_ptr num_computed_tokens_ptr state_elem_sizes_ptr "
                "state_conv_widths_ptr state_group_indices_ptr state_dim_row_count_ptr num_accepted_tokens_out_ptr: "
                "*i32; block_table_ptrs_ptr state_base_addrs_ptr state_block_strides_ptr state_inner_sizes_ptr "
                "state_dim_row_stride_ptr: *i64; block_table_stride_req: i64; num_reqs: i32"
                + ("; idx_mapping_ptr: *i32" if _v2 else "; num_scheduled_tokens_ptr num_draft_tokens_ptr: *i32"),
                f"{'vLLM 0.27.1' if _old else 'newer vLLM'}, runner {'V2' if _v2 else 'V1'}"
                + (", dimension first" if _first else ""),
                block_size=128, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=_first, HAS_IDX_MAPPING=_v2,
                PRECOMPUTED_NEW_COMPUTED=_v2, **({} if _old else {"TEMPORAL_TILES": 16}),
                **dict.fromkeys(("num_scheduled_tokens_ptr", "num_draft_tokens_ptr") if _v2 else ("idx_mapping_ptr",)),
            ),
            definition=1 if _old else 2,
        )
        for _old, _v2, _first in (
            (True, False, False), (True, True, True), (False, False, False), (False, True, False), (False, True, True),
        )
    ),
]
# fmt: on
