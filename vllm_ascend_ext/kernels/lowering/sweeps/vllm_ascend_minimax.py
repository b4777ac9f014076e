"""How vllm-ascend launches the kernels of MiniMax M3: argument types and constants (commit 182b75ea84).

Settings are those that a launch in the repository reaches, its tests' included: M3's own index heads of 128 in blocks
of 128 tokens, of which 16 are kept; none of the first and the last one always (a test keeps one and two). A file of
kernels for A5 is lowered for A2, since this check can't lower for A5: its cases say so.
"""

from __future__ import annotations

from ..cases import Case
from .declare import A5, case

_M3 = "vllm_ascend/models/minimax_m3/ops/msa_m3_triton"
_A5 = "vllm_ascend/models/minimax_m3/ops/msa_m3_triton_a5"
#: (what is always kept, constants): as the model has it, and as a test does.
_KEPT = (("", 0, 1), ("first and last blocks kept", 1, 2))
#: (number of programs over one request's blocks, setting), by the number of tokens decoded at once.
_CHUNKS = ((20, "one token"), (1, "many tokens"))

# fmt: off
LOWERING_CASES: list[Case] = [
    *(
        case(
            f"{_M3}:_decode_index_score_kernel",
            "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr seq_lens global_seq_lens: *i32; block_offset "
            "decode_query_len stride_q_n stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
            f"{_tokens}, {_name}" if _name else _tokens,
            num_idx_heads=4, head_dim=128, init_blocks=_init, local_blocks=_local, stride_q_d=1, stride_ik_d=1,
            stride_s_k=1, BLOCK_SIZE_K=128, SCORE_BLOCK_COUNT=256, NUM_CHUNKS=_chunks,
        )
        for _chunks, _tokens in _CHUNKS for _name, _init, _local in _KEPT
    ),
    *(
        case(
            f"{_M3}:_gqa_sparse_decode_kernel",
            "q_ptr k_cache_ptr v_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr seq_lens: *i32; lse_ptr: *fp32; "
            "max_blocks total_q gqa_group_size head_dim max_topk: i32; sm_scale: fp32; decode_query_len stride_qn "
            "stride_qh stride_k_blk stride_k_pos stride_k_h stride_v_blk stride_v_pos stride_v_h stride_th stride_tn "
            "stride_o_c stride_o_b stride_o_h stride_l_c stride_l_b stride_bt_b: i32",
            f"{_chunks} chunks",
            stride_qd=1, stride_k_d=1, stride_v_d=1, stride_tk=1, stride_o_d=1, stride_l_h=1, BLOCK_SIZE_K=128,
            NUM_TOPK_CHUNKS=_chunks, BLOCK_SIZE_H=16, BLOCK_SIZE_D=128, BLOCK_SIZE_T=16, USE_FP8=False, USE_PDL=False,
        )
        for _chunks in (1, 4)
    ),
    case(
        f"{_M3}:_gqa_sparse_fwd_kernel",
        "q_ptr k_cache_ptr v_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr cu_seqlens_q cu_seqblocks_q seq_lens "
        "prefix_lens: *i32; gqa_group_size head_dim max_topk: i32; sm_scale: fp32; stride_qn stride_qh stride_k_blk "
        "stride_k_pos stride_k_h stride_v_blk stride_v_pos stride_v_h stride_th stride_tn stride_on stride_oh "
        "stride_bt_b: i32",
        num_q_loop=1, stride_qd=1, stride_k_d=1, stride_v_d=1, stride_tk=1, stride_od=1, BLOCK_SIZE_Q=1,
        BLOCK_SIZE_K=128, BLOCK_SIZE_D=128, BLOCK_SIZE_H=16, BLOCK_SIZE_T=16, BLOCK_SIZE_QH=16, USE_FP8=False,
    ),
    case(
        f"{_M3}:_mask_decode_topk_indices_kernel",
        "ti_ptr seq_lens global_seq_lens: *i32; block_offset decode_query_len stride_ti_h stride_ti_b: i32",
        block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),
    *(
        case(
            f"{_M3}:_mask_prefill_topk_indices_kernel",
            "topk_indices_ptr query_start_offsets_ptr prefix_lengths_ptr: *i32; index_head_stride index_token_stride: "
            "i32",
            f"{_rows} rows",
            index_head_count=4, sparse_block_size=128, topk=16, index_topk_stride=1, BLOCK_SIZE_Q=_rows,
            BLOCK_SIZE_T=16,
        )
        for _rows in (1, 64)
    ),
    *(
        case(
            f"{_M3}:_merge_topk_attn_out_kernel",
            "o_ptr out_ptr: *bf16; lse_ptr: *fp32; head_dim stride_o_c stride_o_b stride_o_h stride_l_c stride_l_b "
            "stride_out_n stride_out_h: i32",
            f"{_chunks} chunks",
            stride_o_d=1, stride_l_h=1, stride_out_d=1, NUM_TOPK_CHUNKS=_chunks, BLOCK_SIZE_D=128, USE_PDL=False,
        )
        for _chunks in (1, 4)
    ),
    case(
        f"{_M3}:_prefill_index_score_kernel",
        "query_ptr index_key_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr query_start_offsets_ptr "
        "sequence_lengths_ptr prefix_lengths_ptr: *i32; query_token_stride query_head_stride key_block_stride "
        "key_position_stride score_head_stride score_token_stride block_table_batch_stride: i32",
        index_head_count=4, head_dim=128, query_dim_stride=1, key_dim_stride=1, score_block_stride=1, BLOCK_SIZE_Q=96,
        BLOCK_SIZE_K=128,
    ),
    *(
        case(
            f"{_M3}:_prepare_prefill_topk_scores_kernel",
            "score_ptr: *fp32; query_start_offsets_ptr prefix_lengths_ptr: *i32; score_block_count score_head_stride "
            "score_token_stride: i32",
            f"{_rows} rows, {_name}" if _name else f"{_rows} rows",
            index_head_count=4, init_block_count=_init, local_block_count=_local, score_block_stride=1,
            sparse_block_size=128, BLOCK_SIZE_Q=_rows, BLOCK_SIZE_FORCE=_local, BLOCK_SIZE_TAIL=16,
        )
        for _rows in (8, 64) for _name, _init, _local in _KEPT
    ),

    case(
        f"{_A5}:_decode_index_score_masks_kernel",
        "init_mask_ptr local_mask_ptr: *i1; seq_lens: *i32; max_block decode_query_len chunk_blocks stride_mask_q: "
        "i32",
        A5, block_size=128, init_blocks=1, local_blocks=2, stride_mask_k=1, BLOCK_SIZE_K=2048,
    ),
    case(
        f"{_A5}:_decode_index_score_pad_tail_kernel",
        "score_ptr: *fp32; seq_lens: *i32; max_block decode_query_len chunk_blocks stride_s_h stride_s_b: i32",
        A5, block_size=128, stride_s_k=1, BLOCK_SIZE_K=2048,
    ),
    case(
        f"{_A5}:_decode_qk_score_kernel",
        "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr seq_lens_ptr: *i32; decode_query_len stride_q_n "
        "stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
        A5, num_idx_heads=4, head_dim=128, init_blocks=0, local_blocks=1, stride_q_d=1, stride_ik_d=1, stride_s_k=1,
        BLOCK_SIZE_K=128, NUM_CHUNKS=32,
    ),
    case(
        f"{_A5}:_gqa_sparse_decode_kernel",
        "q_ptr kv_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr seq_lens: *i32; lse_ptr: *fp32; total_q "
        "gqa_group_size head_dim max_topk: i32; sm_scale: fp32; decode_query_len stride_qn stride_qh stride_kv_blk "
        "stride_kv_kv stride_kv_pos stride_kv_h stride_th stride_tn stride_o_c stride_o_b stride_o_h stride_l_c "
        "stride_l_b stride_bt_b: i32",
        A5, stride_qd=1, stride_kv_d=1, stride_tk=1, stride_o_d=1, stride_l_h=1, BLOCK_SIZE_K=128, NUM_TOPK_CHUNKS=16,
        BLOCK_SIZE_H=16, BLOCK_SIZE_D=128, BLOCK_SIZE_T=16, USE_FP8=False, USE_PDL=False,
    ),
    case(
        f"{_A5}:_gqa_sparse_fwd_kernel",
        "q_ptr kv_cache_ptr o_ptr: *bf16; t_ptr block_table_ptr cu_seqlens_q cu_seqblocks_q seq_lens prefix_lens: "
        "*i32; num_kv_heads gqa_group_size head_dim max_topk: i32; sm_scale: fp32; stride_qn stride_qh stride_kv_blk "
        "stride_kv_kv stride_kv_pos stride_kv_h stride_th stride_tn stride_on stride_oh stride_bt_b: i32",
        A5, num_q_loop=1, stride_qd=1, stride_kv_d=1, stride_tk=1, stride_od=1, BLOCK_SIZE_Q=1, BLOCK_SIZE_K=128,
        BLOCK_SIZE_D=128, BLOCK_SIZE_H=16, BLOCK_SIZE_T=16, BLOCK_SIZE_QH=16, USE_FP8=False,
    ),
    case(
        f"{_A5}:_index_block_score_kernel",
        "q_ptr ik_cache_ptr: *bf16; score_ptr: *fp32; block_table_ptr cu_seqlens seq_lens prefix_lens: *i32; "
        "sm_scale: fp32; stride_q_n stride_q_h stride_ik_blk stride_ik_pos stride_s_h stride_s_n stride_bt_b: i32",
        A5, num_idx_heads=4, head_dim=128, stride_q_d=1, stride_ik_d=1, stride_s_k=1, BLOCK_SIZE_Q=128,
        BLOCK_SIZE_K=128,
    ),
    case(
        f"{_A5}:_merge_topk_attn_out_kernel",
        "o_ptr out_ptr: *bf16; lse_ptr: *fp32; head_dim stride_o_c stride_o_b stride_o_h stride_l_c stride_l_b "
        "stride_out_n stride_out_h: i32",
        A5, stride_o_d=1, stride_l_h=1, stride_out_d=1, NUM_TOPK_CHUNKS=16, BLOCK_SIZE_D=128, USE_PDL=False,
    ),
    case(
        f"{_A5}:_prefill_index_score_prepare_for_topk_kernel",
        "score_ptr: *fp32; cu_seqlens prefix_lens: *i32; max_block chunk_blocks num_prep_chunks stride_s_h "
        "stride_s_n: i32",
        A5, init_blocks=0, local_blocks=1, stride_s_k=1, block_size=128, BLOCK_SIZE_K=2048,
    ),
    case(
        f"{_A5}:_topk_index_mask_invalid_kernel",
        "ti_ptr seq_lens: *i32; decode_query_len stride_ti_h stride_ti_b: i32",
        A5, block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),
    case(
        f"{_A5}:_topk_index_mask_invalid_prefill_kernel",
        "ti_ptr cu_seqlens prefix_lens: *i32; stride_ti_h stride_ti_n: i32",
        A5, block_size=128, topk=16, stride_ti_t=1, BLOCK_SIZE_T=16,
    ),
]
# fmt: on
