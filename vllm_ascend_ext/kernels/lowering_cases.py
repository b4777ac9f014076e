"""How the kernels of this package are lowered on Ascend where they ship: cases for the lowering check, and no kernel.

Every constant comes from the same function that sizes the launch, asked for an A2 with its 40 vector cores; the values
are those of a launch for one row of 151,936 logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from . import _launch, bitmask, logprobs, penalties, request_update, token_counts, topk
from ._launch import Target, cdiv
from .lowering.cases import A2, Case, Constant

CORES = 40
NPU = Target("npu", interpreted=False, cores=CORES)
FLOATS = {"fp32": 4, "bf16": 2}
#: The last is a multiple of nothing: its rows start anywhere.
VOCABULARIES = (32_000, 128_256, 151_936, 262_144, 50_257)
SHOWN_VOCABULARY = 151_936

#: Kernels that no launch on Ascend reaches, and why.
CUDA_ONLY = {
    "_candidates_kernel": "best tokens by groups are for GPUs; torch.topk finds them on Ascend",
    "_best_ids_kernel": "best tokens by groups are for GPUs; torch.topk finds them on Ascend",
}

#: What the kernels of logprobs compute: name, log-probabilities, ranks.
SCORES = (
    ("log-probabilities and ranks", True, True),
    ("log-probabilities", True, False),
    ("ranks", False, True),
)

#: What is allowed, and why. Each is a cost per launch, per tile of 4,096 and more, or per token that the caller names.
SINGLE_BITS = {"fixed-scalar-loop": "the 32 single-bit masks are made once a program, outside its loops"}
COLUMNS = {"transfer-per-element": "one trip for each token id that the caller asks for: neither tile nor vocabulary"}
TOKENS = {"scalar-walk": "one trip for each token id, inside the Unified Buffer and without a transfer"}


def _bitmask(dtype: str, vocabulary: int) -> Iterator[Case]:
    size = FLOATS[dtype]
    setting = bitmask._setting(NPU, size)
    for indices in ("*i32", "*i64"):
        for with_requests in (False, True):
            yield _case(
                "bitmask._bitmask_kernel",
                f"{dtype}, {indices[1:]} indices" + (", by request" if with_requests else ""),
                f"logits_ptr: *{dtype}; logits_indices_ptr: {indices}; bitmask_ptr: *i32; logits_stride bitmask_stride "
                "num_words vocab_size num_masks mask_stride pieces tiles_per_piece: i32"
                + (f"; cu_num_logits_ptr: {indices}" if with_requests else ""),
                {
                    "TILE": setting.tile,
                    "GROUP": setting.group,
                    "ALIGN": _launch.vector_elements(vocabulary, size),
                    **({} if with_requests else {"cu_num_logits_ptr": None}),
                },
                {"num_masks": 1, **_row(vocabulary, setting.tile)},
                SINGLE_BITS,
            )


def _penalties(dtype: str, vocabulary: int) -> Iterator[Case]:
    size = FLOATS[dtype]
    setting = penalties._setting(NPU, 256)
    yield _case(
        "penalties._penalties_kernel",
        dtype,
        f"logits_ptr: *{dtype}; expanded_idx_mapping_ptr token_ids_ptr expanded_local_pos_ptr bin_mask_ptr "
        "bin_counts_ptr: *i32; repetition_penalty_ptr frequency_penalty_ptr presence_penalty_ptr: *fp32; logits_stride "
        "bin_mask_stride bin_counts_stride vocab_size num_rows pieces tiles_per_piece: i32",
        {
            "TILE": setting.tile,
            "GROUP": setting.group,
            "DRAFTS": setting.drafts,
            "LOGITS_ALIGN": _launch.vector_elements(vocabulary, size),
            "COUNTS_ALIGN": _launch.vector_elements(vocabulary, 4),
        },
        {"num_rows": 1, "*expanded_local_pos_ptr": 0, **_row(vocabulary, setting.tile)},
        SINGLE_BITS,
    )


def _row(vocabulary: int, tile: int, most: int | None = None) -> dict[str, int]:
    """Values of a launch for one row, cut in pieces for all cores."""
    tiles = cdiv(vocabulary, tile)
    pieces = _launch.split_rows(1, tiles, CORES, tiles if most is None else most)
    return {
        "vocab_size": vocabulary,
        "pieces": pieces,
        "tiles_per_piece": cdiv(tiles, pieces),
        "grid": min(pieces, CORES),
    }


def _logprobs(dtype: str, vocabulary: int) -> Iterator[Case]:
    size = FLOATS[dtype]
    setting = logprobs._setting(NPU, size)
    types = (
        f"scores_ptr partials_ptr: *fp32; ranks_ptr ids_ptr: *i64; counts_ptr: *i32; logits_ptr: *{dtype}; "
        "logits_stride ids_stride num_columns vocab_size num_rows pieces: i32"
    )
    for name, lse, rank in SCORES:
        for whole in (False, True):
            yield _case(
                "logprobs._fold_kernel",
                f"{dtype}, {name}, {'whole rows' if whole else 'rows in pieces'}",
                f"{types}; tiles_per_piece: i32",
                {
                    **{"TILE": setting.tile, "LANES": setting.lanes, "COLUMNS": setting.columns},
                    **{"CUDA": False, "STAGES": setting.stages, "LSE": lse, "RANK": rank, "WHOLE": whole},
                    "ALIGN": _launch.vector_elements(vocabulary, size),
                    "keys_ptr": None,  # the best tokens are looked for by groups on GPUs only
                },
                {
                    "num_rows": 1,
                    "num_columns": 21 if lse else 1,
                    **_row(vocabulary, setting.tile, 1 if whole else setting.pieces),
                },
                COLUMNS if whole else {},
            )
        yield _case(
            "logprobs._combine_kernel",
            f"{dtype}, {name}",
            types,
            {"PIECES": setting.pieces, "COLUMNS": setting.columns, "LSE": lse, "RANK": rank},
            {"vocab_size": vocabulary, "num_rows": 1, "num_columns": 21 if lse else 1, "grid": 1},
            COLUMNS,
        )


def _bincount(vocabulary: int) -> Iterator[Case]:
    setting = token_counts._setting(NPU)
    words = cdiv(vocabulary, 32)
    mask_pieces = cdiv(words, setting.bins)
    pieces = mask_pieces + cdiv(vocabulary, setting.bins)
    for ids in ("*i32", "*i64"):
        yield _case(
            "token_counts._bincount_kernel",
            f"{ids[1:]} token ids",
            f"expanded_idx_mapping_ptr prompt_len_ptr prefill_len_ptr mask_ptr counts_ptr: *i32; tokens_ptr: {ids}; "
            "tokens_stride mask_stride counts_stride vocab_size num_rows max_len mask_pieces pieces: i32",
            {
                **{
                    "BINS": setting.bins,
                    "PROMPT_TOKENS": setting.prompt_tokens,
                    "OUTPUT_TOKENS": setting.output_tokens,
                },
                **{"CHUNK": setting.chunk, "SHARED": setting.shared},
                "COUNTS_ALIGN": _launch.vector_elements(vocabulary, 4),
            },
            {
                **{
                    "vocab_size": vocabulary,
                    "num_rows": 1,
                    "max_len": 4096,
                    "mask_pieces": mask_pieces,
                    "pieces": pieces,
                },
                **{"*prompt_len_ptr": 2048, "*prefill_len_ptr": 4096, "grid": min(pieces, CORES)},
            },
            TOKENS,
            multibuffer=False,
        )


def _post_update() -> Iterator[Case]:
    setting = request_update._setting(NPU)
    types = (
        "idx_mapping_ptr num_computed_ptr num_sampled_ptr num_rejected_ptr all_tokens_ptr total_len_ptr: *i32; "
        "last_ptr sampled_ptr: *i64; counts_stride sampled_stride all_tokens_stride drafts_stride drafts_out_stride "
        "vocab_size length width num_drafts num_rows: i32"
    )
    optional = {"counts_ptr": "*i32", "query_start_ptr": "*i32", "drafts_ptr": "*i64", "drafts_out_ptr": "*i64"}
    for name, given in (("all inputs", tuple(optional)), ("without counts, queries and drafts", ())):
        yield _case(
            "request_update._post_update_kernel",
            name,
            "; ".join([types, *(f"{pointer}: {optional[pointer]}" for pointer in given)]),
            {
                "ROWS": setting.rows,
                "STEPS": setting.steps,
                **{pointer: None for pointer in optional if pointer not in given},
            },
            {
                **{"vocab_size": SHOWN_VOCABULARY, "length": 4096, "width": 4, "num_rows": 1, "grid": 1},
                **{"num_drafts": 3, "*num_sampled_ptr": 4, "*total_len_ptr": 100},
            },
        )


def _topk() -> Iterator[Case]:
    yield _case(
        "topk._fill_ids_kernel",
        "",
        "ids_ptr lookup_ptr sampled_ptr topk_ptr: *i64; mapping_ptr num_requested_ptr requested_ptr: *i32; topk_stride "
        "num_topk requested_stride num_columns num_rows: i32",
        {"COLUMNS": topk._setting(NPU).columns},
        {"num_topk": 20, "num_columns": 20, "num_rows": 1, "grid": 1},
    )


def _case(
    place: str,
    name: str,
    types: str,
    constants: Mapping[str, Constant],
    values: Mapping[str, int],
    allow: Mapping[str, str] | None = None,
    multibuffer: bool | None = None,
) -> Case:
    """A case for the kernel at ``module.kernel``; ``types`` is "name name: type; ..."."""
    module, _, kernel = place.partition(".")
    groups = (group.partition(":") for group in types.split(";"))
    return Case(
        kernel=kernel,
        name=name,
        file=f"{module}.py",
        signature={argument: type_name.strip() for names, _, type_name in groups for argument in names.split()},
        constants=constants,
        values=values,
        allow=allow or {},
        multibuffer=(True, False) if multibuffer is None else (multibuffer,),
    )


def _of_vocabularies() -> Iterator[Case]:
    """Cases of the operations on logits. A vocabulary that changes no constant changes no code, and is left out."""
    seen = []
    for vocabulary in sorted(VOCABULARIES, key=lambda one: one != SHOWN_VOCABULARY):
        of_logits = (make(dtype, vocabulary) for dtype in FLOATS for make in (_bitmask, _penalties, _logprobs))
        for case in (*(case for cases in of_logits for case in cases), *_bincount(vocabulary)):
            code = (case.kernel, case.signature, case.constants)
            if code not in seen:
                seen.append(code)
                if vocabulary == SHOWN_VOCABULARY:
                    yield case
                else:
                    yield replace(case, name=f"{case.name}, vocabulary {vocabulary:,}", targets=(A2,))


LOWERING_CASES = [*_of_vocabularies(), *_post_update(), *_topk()]
