"""Law: the pool's setup says all that changes a block's bytes, and a layout covers exactly a block's bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ascend_ext.kv_pool.engine_setup import (
    CacheFacts,
    GroupSpec,
    Ranks,
    block_layouts,
    forward_order,
    pool_setup,
)
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import GroupKind
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming


@dataclass(frozen=True)
class Attention:
    """What is read off one of vLLM's attention specs."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_quant_mode: int = 0
    prefix_cacheable: bool = True
    dcp_sharded: bool = True

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * 2 * self.dtype.itemsize


@dataclass(frozen=True)
class Mamba:
    block_size: int = 64
    mamba_cache_mode: str = "align"
    page_size_bytes: int = 4096
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    dcp_sharded: bool = False


@dataclass(frozen=True)
class Uniform:
    """vLLM's spec of a group whose layers differ."""

    kv_cache_specs: dict[str, Attention]
    block_size: int = 32


class Model(SimpleNamespace):
    def get_total_num_kv_heads(self) -> int:
        return int(self.kv_heads)


def model(**changes: Any) -> Model:
    described = changes.pop("described", {"rope_theta": 10000})
    values = {"model": "/models/a", "revision": None, "quantization": None, "use_mla": False, "kv_heads": 2}
    return Model(**(values | changes), hf_config=SimpleNamespace(to_dict=lambda: described))


@dataclass
class Engine:
    """vLLM's configuration, as far as it is read."""

    model_config: Model = field(default_factory=model)
    extra: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    events: Any = None
    policy: str = "recompute"

    @property
    def kv_transfer_config(self) -> Any:
        return SimpleNamespace(
            kv_connector_extra_config=self.extra, kv_role="kv_both", kv_load_failure_policy=self.policy
        )

    @property
    def kv_events_config(self) -> Any:
        return self.events

    @property
    def parallel_config(self) -> Any:
        sizes = {f"{name}_size": 1 for name in ("tensor_parallel", "pipeline_parallel")}
        sizes |= {f"{name}_context_parallel_size": 1 for name in ("prefill", "decode")}
        return SimpleNamespace(**(sizes | self.sizes), data_parallel_index=3)


FULL = GroupSpec(Attention(), "full_attention", None)
FACTS = CacheFacts((FULL,), 32, "LBHNC", host_memory=True)


def fingerprint(engine: Engine = Engine(), facts: CacheFacts = FACTS) -> str:  # noqa: B008  # never changed
    return pool_setup(engine, facts, Ranks()).key_scheme.model


def test_what_scheduler_and_workers_agree_on() -> None:
    engine = Engine(events=SimpleNamespace(enable_kv_cache_events=True), sizes={"tensor_parallel_size": 4})
    setup = pool_setup(engine, FACTS, Ranks(tp=3))
    assert (setup.hash_unit, setup.dp_rank, setup.enable_kv_events) == (32, 3, True)
    assert (setup.topology.tp_size, setup.topology.tp_rank, setup.topology.put_step) == (4, 3, 2)
    assert setup.key_scheme == pool_setup(engine, FACTS, Ranks()).key_scheme


def test_the_start_tells_which_pool_this_is(caplog: pytest.LogCaptureFixture) -> None:
    """What isn't as it is by default, and the keys' name of the model, which engines that share must have in common."""
    with caplog.at_level("INFO", logger="vllm_ascend_ext.kv_pool"):
        setup = pool_setup(Engine(extra={"load_async": True}), FACTS, Ranks())
    (line,) = caplog.messages
    assert line.startswith("KV pool of vllm-ascend-ext: backend='local', kv_role='kv_both', ")
    assert "load_async=True" in line
    assert "load_timeout" not in line
    assert line.endswith(f"; keys of model {setup.key_scheme.model}")


@pytest.mark.parametrize(
    "other",
    [
        Engine(model(model="/elsewhere/a")),
        Engine(model(revision="v2")),
        Engine(model(quantization="fp8")),
        Engine(model(described={"rope_theta": 500000})),
        Engine(extra={"model_id": "the one"}),
        Engine(extra={"checksum": False}),
    ],
)
def test_another_model_has_other_keys(other: Engine) -> None:
    assert fingerprint(other) != fingerprint()


@pytest.mark.parametrize(
    "facts",
    [
        replace(FACTS, layout="LBNHC"),
        replace(FACTS, groups=(replace(FULL, spec=Attention(dtype=torch.bfloat16)),)),
        replace(FACTS, groups=(replace(FULL, spec=Attention(num_kv_heads=1)),)),
        replace(FACTS, groups=(replace(FULL, spec=Attention(head_size=32)),)),
        replace(FACTS, groups=(replace(FULL, spec=Attention(kv_quant_mode=1)),)),
        replace(FACTS, groups=(replace(FULL, spec=Attention(block_size=64)),)),
        replace(FACTS, groups=(FULL, FULL)),
    ],
)
def test_other_caches_have_other_keys(facts: CacheFacts) -> None:
    assert fingerprint(facts=facts) != fingerprint()


def test_what_does_not_change_the_bytes_is_not_in_the_keys() -> None:
    renamed = Engine(model(described={"rope_theta": 10000, "_name_or_path": "x", "transformers_version": "9"}))
    assert fingerprint(renamed) == fingerprint()
    one = {"layer.0": Attention(), "layer.1": Attention(head_size=32)}
    two = {f"layer.{i}": Attention(head_size=16 * (1 + i % 2)) for i in range(4)}  # another pipeline rank's layers
    uniform = [replace(FACTS, groups=(replace(FULL, spec=Uniform(specs)),)) for specs in (one, two)]
    assert fingerprint(facts=uniform[0]) == fingerprint(facts=uniform[1])


def test_kinds_of_groups() -> None:
    groups = (
        FULL,
        GroupSpec(Attention(), "sliding_window", 64, is_draft=True),
        GroupSpec(Mamba(), "mamba", None),
        GroupSpec(Attention(), "mla_attention", None),
    )
    setup = pool_setup(Engine(), replace(FACTS, groups=groups), Ranks())
    assert [group.kind for group in setup.groups] == [
        GroupKind.FULL,
        GroupKind.SLIDING,
        GroupKind.STATE,
        GroupKind.FULL,
    ]
    assert [group.block_size for group in setup.groups] == [32, 32, 64, 32]
    assert (setup.groups[1].window, setup.groups[1].is_draft) == (64, True)


def test_decode_context_parallel_blocks_hold_more_tokens() -> None:
    engine = Engine(sizes={"tensor_parallel_size": 2, "decode_context_parallel_size": 2})
    facts = replace(FACTS, groups=(FULL, GroupSpec(Mamba(), "mamba", None)), hash_unit=64)
    assert [group.block_size for group in pool_setup(engine, facts, Ranks()).groups] == [64, 64]


def test_mla_has_one_head_on_every_rank() -> None:
    engine = Engine(model(use_mla=True, kv_heads=16), sizes={"tensor_parallel_size": 4})
    assert pool_setup(engine, FACTS, Ranks()).topology.put_step == 4


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (GroupSpec(Attention(), "chunked_local_attention", None), "chunked_local_attention"),
        (GroupSpec(Mamba(mamba_cache_mode="all"), "mamba", None), "'all'"),
        (GroupSpec(Attention(), "sliding_window", None), "sliding_window"),
        (replace(FULL, transferable=False), "Attention"),
        (replace(FULL, spec=Attention(prefix_cacheable=False)), "Attention"),
    ],
)
def test_groups_that_a_pool_cannot_restore_are_refused(group: GroupSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=f"group 0.*{said}"):
        pool_setup(Engine(), replace(FACTS, groups=(group,)), Ranks())


REUSE = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}


def test_layers_that_share_buffers_need_the_policy_fail() -> None:
    said = "kv_load_failure_policy='recompute': only 'fail' is allowed with layerwise_num_shared_buffers=2"
    with pytest.raises(ConfigError, match=said):
        pool_setup(Engine(extra=REUSE), FACTS, Ranks())
    assert pool_setup(Engine(extra=REUSE, policy="fail"), FACTS, Ranks()).layer_reuse
    assert pool_setup(Engine(extra={"use_layerwise": True}), FACTS, Ranks()).config.use_layerwise


def test_keys_of_layers_know_the_other_stages_layers() -> None:
    """A look-up on the first stage asks for the layers of the last one too, however many those are."""
    engine = Engine(extra={"use_layerwise": True}, sizes={"pipeline_parallel_size": 2})
    facts = replace(FACTS, stage_layers=((2,), (3,)))
    for stage, own in enumerate(facts.stage_layers):
        setup = pool_setup(engine, facts, Ranks(pp=stage))
        assert setup.layers_per_stage(own) == ((2,), (3,))
        database = ChunkedTokenDatabase(setup, Naming.LAYER)
        database.set_layers(own)
        assert len({keys[0] for keys in database.owner_keys(0, [b"hash"], 0)}) == 2 + 3
    with pytest.raises(ConfigError, match=r"stage_layers=\(\).*2 stages are needed, with \(2,\) layers on stage 0"):
        pool_setup(engine, FACTS, Ranks()).layers_per_stage((2,))


# -- layouts -----------------------------------------------------------------------------------------------------------

BLOCKS, HEADS, TOKENS, WIDTH = 5, 2, 8, 4


def read(layouts: Any, group: int, block: int) -> bytes:
    """The bytes that a layout names for one block, in its order."""
    starts, lengths = layouts[group].addresses(np.array([block]))
    return b"".join(ctypes.string_at(a, n) for a, n in zip(starts[0].tolist(), lengths[0].tolist(), strict=True))


def cache(order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    """A cache of logical shape (block, head, token, width) whose memory has the axes in `order`."""
    shape = (BLOCKS, HEADS, TOKENS, WIDTH)
    memory = torch.arange(BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.float32).reshape([shape[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3)])
def test_a_layout_names_each_byte_of_a_block_once(order: tuple[int, ...]) -> None:
    tensor = cache(order)
    layouts = block_layouts([["a"]], {"a": tensor}, BLOCKS)
    for block in range(BLOCKS):
        found = np.frombuffer(read(layouts, 0, block), dtype=np.float32)
        assert sorted(found.tolist()) == sorted(tensor[block].flatten().tolist())
    assert layouts[0].block_bytes == HEADS * TOKENS * WIDTH * 4


def test_layers_keep_their_order_and_pieces() -> None:
    keys, values = cache(), cache() + 1000
    layouts = block_layouts([["b", "a"]], {"a": (keys, values), "b": (values, keys)}, BLOCKS)
    found = np.frombuffer(read(layouts, 0, 3), dtype=np.float32)
    expected = torch.cat([t[3].flatten() for t in (values, keys, keys, values)])
    assert found.tolist() == expected.tolist()
    assert (layouts[0].num_layers, layouts[0].per_layer) == (2, 2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_a_block_of_several_kernel_blocks(order: tuple[int, ...]) -> None:
    shape = (2 * BLOCKS, HEADS, TOKENS, WIDTH)
    memory = torch.arange(2 * BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.float32)
    tensor = memory.reshape([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
    layouts = block_layouts([["a"]], {"a": tensor}, BLOCKS)
    for block in range(BLOCKS):
        found = np.frombuffer(read(layouts, 0, block), dtype=np.float32)
        assert sorted(found.tolist()) == sorted(tensor[2 * block : 2 * block + 2].flatten().tolist())


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"group 0 needs \['b'\].*\['a'\]"):
        block_layouts([["a", "b"]], {"a": cache()}, BLOCKS)
    with pytest.raises(ConfigError, match=r"'a'.*\(5, 2, 8, 4\) doesn't hold 3 blocks"):
        block_layouts([["a"]], {"a": cache()}, 3)
    with pytest.raises(ConfigError, match="group 0 differ"):
        block_layouts([["a", "b"]], {"a": cache(), "b": (cache(), cache())}, BLOCKS)


def test_layers_in_the_order_of_the_forward_pass() -> None:
    groups = [["model.layers.1.attn", "model.layers.10.attn"], ["model.layers.0.attn", "model.layers.2.attn"]]
    assert list(forward_order(groups).values()) == [(1, 0), (0, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("layout", "heads_first"), [("", False), ("LNC", False), ("BHNC", True), ("BNHC", False), ("HBN", None)]
)
def test_where_heads_lie_is_read_off_the_layouts_name(layout, heads_first):
    assert block_layouts([["a"]], {"a": cache()}, BLOCKS, layout)[0].heads_first is heads_first
