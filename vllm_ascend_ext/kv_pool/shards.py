"""The parts that have keys of their own in which a rank's share of a block is kept; must never know stores or requests.

Mostly there is one. There are several where the prefilling and the decoding engines split the model differently, so
that each can read what the other saved: one part per KV-head share of the engine with more tensor-parallel ranks, and,
on a decoding engine that saves for prefilling pipelines, one part per stage of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import GroupKind, PoolSetup
from vllm_ascend_ext.kv_pool.keys import Topology
from vllm_ascend_ext.kv_pool.layout import BlockLayout


@dataclass(frozen=True)
class Shard:
    """``rank``: whose key the part has. ``head_part``, ``stage``: which part of this rank's heads and layers it is."""

    rank: Topology
    head_part: int = 0
    stage: int = 0


@dataclass(frozen=True)
class Sharding:
    """How one rank's share of a group's blocks is parted: ``head_parts`` times ``stages`` keys."""

    topology: Topology
    head_parts: int = 1
    stages: int = 1
    stage_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, setup: PoolSetup, group: int) -> Sharding:
        """Raises ConfigError for sizes that don't go together."""
        config, topology = setup.config, setup.topology
        if setup.groups[group].kind is GroupKind.STATE:
            # every rank has a part of the state of its own, however few KV heads there are
            topology = replace(
                topology, num_kv_heads=max(topology.num_kv_heads, topology.tp_size), dcp_size=1, dcp_rank=0
            )
        parts = head_parts(config, topology)
        stages = config.prefill_pp_size or 1 if config.kv_role == "kv_consumer" else 1
        if parts * stages > 1 and (config.use_layerwise or len(setup.groups) > 1):
            raise ConfigError(
                f"{_sizes(config)}: another split than this engine's own is allowed only without use_layerwise and "
                "with one KV-cache group"
            )
        if stages > 1 and topology.pp_size > 1:
            raise ConfigError(f"prefill_pp_size={stages}: allowed only on an engine without pipeline parallelism")
        return cls(topology, parts, stages, _partition(config, stages))

    def own(self) -> list[Shard]:
        """This rank's parts."""
        return [
            Shard(
                self._key_rank(self.topology.head_rank * self.head_parts + part, self.topology.pp_rank + stage),
                part,
                stage,
            )
            for part, stage in product(range(self.head_parts), range(self.stages))
        ]

    def owners(self) -> Iterator[Topology]:
        """One rank for each part of a block, on all ranks: the block is in the pool when every one of them is."""
        own = self.topology
        for pcp, dcp, head, pp in product(
            range(own.pcp_size),
            range(own.dcp_size),
            range(own.head_ranks * self.head_parts),
            range(own.pp_size * self.stages),
        ):
            yield replace(self._key_rank(head, pp), pcp_rank=pcp, dcp_rank=dcp)

    def layouts(self, layout: BlockLayout, block_size: int) -> list[BlockLayout]:
        """Where each of ``own`` lies; ConfigError if ``layout`` can't be parted so."""
        parts = [(shard, layout) for shard in self.own()]
        if self.stages > 1:
            cuts = [self.layers_of(shard, layout.num_layers) for shard, _ in parts]
            parts = [(shard, layout.layers(cut.start, cut.stop)) for (shard, _), cut in zip(parts, cuts, strict=True)]
        return [
            part.heads(shard.head_part, self.head_parts, block_size) if self.head_parts > 1 else part
            for shard, part in parts
        ]

    def layers_of(self, shard: Shard, num_layers: int) -> slice:
        """Which of this rank's layers ``shard`` has. Of what doesn't come out even, the stages before the last have one
        more each, from the back."""
        counts = list(self.stage_layers)
        if not counts:
            counts = [num_layers // self.stages] * self.stages
            for stage in range(num_layers % self.stages):
                counts[-2 - stage] += 1
        if sum(counts) != num_layers:
            raise ConfigError(f"prefill_pp_layer_partition={counts}: must add up to the {num_layers} layers")
        start = sum(counts[: shard.stage])
        return slice(start, start + counts[shard.stage])

    def _key_rank(self, head: int, stage: int) -> Topology:
        """A rank of the finer split, as far as keys go."""
        own = self.topology
        if self.head_parts > 1:
            heads = own.head_ranks * self.head_parts
            own = replace(own, tp_size=heads, tp_rank=head, num_kv_heads=heads)
        elif own.head_rank != head:
            own = replace(own, tp_rank=head * own.put_step)
        return replace(own, pp_size=self.stages, pp_rank=stage) if self.stages > 1 else replace(own, pp_rank=stage)


def head_parts(config: PoolConfig, topology: Topology) -> int:
    """Into how many parts each rank's KV heads are divided; ConfigError for sizes that don't go together."""
    peer = config.prefill_tp_size if config.kv_role == "kv_consumer" else config.decode_tp_size
    if peer is None or peer <= topology.tp_size or topology.num_kv_heads == 1:
        return 1
    shares = min(peer, topology.num_kv_heads)
    if shares % topology.head_ranks or topology.num_kv_heads % shares:
        raise ConfigError(
            f"{_sizes(config)}: {topology.num_kv_heads} KV heads can't be divided among {peer} ranks so that "
            f"{topology.tp_size} ranks hold whole shares"
        )
    return shares // topology.head_ranks


def _partition(config: PoolConfig, stages: int) -> tuple[int, ...]:
    text = config.prefill_pp_layer_partition
    if stages == 1 or text is None:
        return ()
    try:
        counts: Sequence[int] = [int(part) for part in text.split(",")]
    except ValueError:
        counts = ()
    if len(counts) != stages or min(counts) < 1:
        raise ConfigError(
            f"prefill_pp_layer_partition={text!r}: {stages} positive numbers of layers are needed, separated by commas"
        )
    return tuple(counts)


def _sizes(config: PoolConfig) -> str:
    return (
        f"prefill_tp_size={config.prefill_tp_size}, decode_tp_size={config.decode_tp_size}, "
        f"prefill_pp_size={config.prefill_pp_size}"
    )
