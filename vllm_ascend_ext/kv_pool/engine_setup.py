"""Reads what the pool must know off an engine's configuration and caches; must never import vllm.

The objects are vLLM's (0.32, 0.33), used by their attributes alone, so that this runs and is tested without vLLM.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind, PoolSetup
from vllm_ascend_ext.kv_pool.keys import BytesIdentity, Topology
from vllm_ascend_ext.kv_pool.layout import BlockLayout
from vllm_ascend_ext.kv_pool.observe import logger
from vllm_ascend_ext.kv_pool.shards import head_parts

_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_SLIDING = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(frozen=True)
class Ranks:
    """A worker's places; the scheduler has none and takes the zeros."""

    tp: int = 0
    pp: int = 0
    pcp: int = 0
    dcp: int = 0


@dataclass(frozen=True)
class GroupSpec:
    """One of vLLM's KV-cache groups: the spec, its kind (``KVCacheSpecKind``'s value) and its window, if it has one."""

    spec: Any
    kind: str
    window: int | None
    is_draft: bool = False
    transferable: bool = True


@dataclass(frozen=True)
class CacheFacts:
    """The engine's KV caches: tokens per block hash, their layout's name, whether the CPU can read them.

    ``stage_layers``: layers of each group on each pipeline stage, as ``PoolSetup`` has them.
    """

    groups: tuple[GroupSpec, ...]
    hash_unit: int
    layout: str
    host_memory: bool
    stage_layers: tuple[tuple[int, ...], ...] = ()


def pool_setup(vllm_config: Any, caches: CacheFacts, ranks: Ranks) -> PoolSetup:
    """What scheduler and workers of one engine agree on.

    Raises ConfigError for an option that can't be used, alone or with vLLM's own, and for a group that a pool of hashed
    blocks can't restore.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    config = PoolConfig.parse(transfer.kv_connector_extra_config, transfer.kv_role)
    model = vllm_config.model_config
    topology = Topology(
        tp_size=parallel.tensor_parallel_size,
        tp_rank=ranks.tp,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=ranks.pp,
        pcp_size=parallel.prefill_context_parallel_size,
        pcp_rank=ranks.pcp,
        dcp_size=parallel.decode_context_parallel_size,
        dcp_rank=ranks.dcp,
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
    )
    events = getattr(vllm_config, "kv_events_config", None)
    setup = PoolSetup(
        config=config,
        identity=_identity(config, vllm_config.model_config, caches, head_parts(config, topology)),
        groups=tuple(_group(number, group, topology.dcp_size) for number, group in enumerate(caches.groups)),
        hash_unit=caches.hash_unit,
        topology=topology,
        dp_rank=parallel.data_parallel_index,
        enable_kv_events=events is not None and events.enable_kv_cache_events,
        host_memory=caches.host_memory,
        stage_layers=caches.stage_layers,
    )
    policy = transfer.kv_load_failure_policy
    if setup.layer_reuse and policy != "fail":
        # Under ``recompute`` vLLM lets requests of one step build on a block that one of them computes anew, and the
        # others would load it in that step, into a buffer that holds one layer of it.
        raise ConfigError(
            f"kv_load_failure_policy={policy!r}: only 'fail' is allowed with "
            f"layerwise_num_shared_buffers={config.layerwise_num_shared_buffers}"
        )
    told = {"backend": config.backend, "kv_role": config.kv_role} | config.model_dump(exclude_defaults=True)
    options = ", ".join(f"{name}={value!r}" for name, value in told.items())
    logger.info("KV pool of vllm-ascend-ext: %s; keys of model %s", options, setup.key_scheme.model)
    return setup


def block_layouts(
    groups: Sequence[Sequence[str]], kv_caches: Mapping[str, Any], num_blocks: int, layout: str = ""
) -> tuple[BlockLayout, ...]:
    """One layout per group, of the layers named in ``groups``; ``layout``: vLLM's name of the order of their axes.

    A cache is a tensor (num_blocks * n, ...) or a sequence of such tensors (K and V apart, several states); n kernel
    blocks make up a block. Raises ConfigError for a layer that was not registered or whose shape doesn't fit.
    """
    layouts = []
    for number, names in enumerate(groups):
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise ConfigError(f"kv_caches: group {number} needs {missing}; registered are {sorted(kv_caches)}")
        layers = [list(_segments(name, kv_caches[name], num_blocks)) for name in names]
        if len({len(segments) for segments in layers}) != 1:
            raise ConfigError(f"kv_caches: the layers of group {number} differ in their number of pieces per block")
        base, length, stride = zip(*(piece for segments in layers for piece in segments), strict=True)
        layouts.append(BlockLayout(base, length, stride, num_blocks, len(layers[0]), _heads_first(layout)))
    return tuple(layouts)


def _heads_first(layout: str) -> bool | None:
    """Whether heads (H) come before tokens (N) within a block, and next to them; tokens do where nothing is said."""
    if "H" not in layout:
        return False
    return True if "HN" in layout else False if "NH" in layout else None


def forward_order(groups: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """(group, number in it) of each layer by name, in the forward pass's order: that of the numbers in the names."""
    places = {name: (group, number) for group, names in enumerate(groups) for number, name in enumerate(names)}
    return dict(sorted(places.items(), key=lambda item: ([int(n) for n in re.findall(r"\d+", item[0])], item[0])))


def _segments(name: str, cache: Any, num_blocks: int) -> Iterable[tuple[int, int, int]]:
    """(address in block 0, bytes, bytes from block to block) of each contiguous piece of a block of one layer."""
    for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
        kernel_blocks, remainder = divmod(tensor.shape[0], num_blocks)
        if remainder or not kernel_blocks:
            raise ConfigError(f"kv_caches[{name!r}]: shape {tuple(tensor.shape)} doesn't hold {num_blocks} blocks")
        item = tensor.element_size()
        step = tensor.stride(0) * item
        offsets, run = _runs(tensor.shape[1:], tensor.stride()[1:])
        if len(offsets) == 1 and step == run * item:  # the kernel blocks of a block are one piece
            yield tensor.data_ptr(), run * item * kernel_blocks, step * kernel_blocks
            continue
        for kernel_block in range(kernel_blocks):
            for offset in offsets:
                yield tensor.data_ptr() + kernel_block * step + offset * item, run * item, step * kernel_blocks


def _runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], int]:
    """Offsets and common length, in elements, of the contiguous pieces of one block, in memory order."""
    axes = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    offsets = [0]
    for stride, size in reversed(axes):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    assert len(offsets) * run == prod(shape)
    return offsets, run


def _group(number: int, group: GroupSpec, dcp_size: int) -> CacheGroup:
    spec = group.spec
    if not group.transferable or not getattr(spec, "prefix_cacheable", True):
        raise ConfigError(f"KV-cache group {number} ({type(spec).__name__}): its blocks can't be named by hashes")
    size = spec.block_size * (dcp_size if getattr(spec, "dcp_sharded", True) else 1)
    if group.kind in _FULL:
        return CacheGroup(size, GroupKind.FULL, is_draft=group.is_draft)
    if group.kind in _SLIDING and group.window:
        return CacheGroup(size, GroupKind.SLIDING, group.window, is_draft=group.is_draft)
    if group.kind == "mamba" and spec.mamba_cache_mode == "align":
        return CacheGroup(size, GroupKind.STATE, is_draft=group.is_draft)
    mode = f" in mode {spec.mamba_cache_mode!r}" if group.kind == "mamba" else ""
    raise ConfigError(
        f"KV-cache group {number} is {group.kind!r}{mode}; the pool can restore full attention, sliding windows, "
        "and mamba in mode 'align'"
    )


def _identity(config: PoolConfig, model: Any, caches: CacheFacts, parts: int) -> BytesIdentity:
    """What changes the bytes under one prefix of tokens: the model, its configuration, and the caches' form."""
    layers = [layer for group in caches.groups for layer in _layer_specs(group.spec)]
    return BytesIdentity(
        model_path=config.model_id or str(model.model),
        kv_dtype=",".join(sorted({_dtype(layer) for layer in layers})),
        block_sizes=tuple(group.spec.block_size for group in caches.groups),
        cache_shapes=tuple(_shape(group.spec, parts) for group in caches.groups),
        extra=f"revision={model.revision};quantization={model.quantization};config={_config_digest(model)};"
        f"layout={caches.layout}",
    )


def _layer_specs(spec: Any) -> list[Any]:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer else [spec]


def _dtype(spec: Any) -> str:
    quantization = getattr(spec, "kv_quant_mode", None)
    dtypes = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", None),)
    return "/".join(str(dtype) for dtype in dtypes) + (f":{int(quantization)}" if quantization else "")


def _shape(spec: Any, parts: int) -> tuple[int, ...]:
    """Page size and heads of one of a rank's ``parts``; one entry per distinct layer, so that pipeline ranks agree."""
    names = {"page_size_bytes": parts, "num_kv_heads": parts, "head_size": 1, "head_size_v": 1}
    shapes = {
        tuple(int(getattr(layer, name, None) or 0) // divisor for name, divisor in names.items())
        for layer in _layer_specs(spec)
    }
    return tuple(number for shape in sorted(shapes) for number in shape)


def _config_digest(model: Any) -> str:
    """Of the model's own configuration, where it has any: rope scaling, say, changes the keys' bytes."""
    described: dict[str, Any] = getattr(getattr(model, "hf_config", None), "to_dict", dict)()
    kept = {name: value for name, value in described.items() if name not in ("_name_or_path", "transformers_version")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
