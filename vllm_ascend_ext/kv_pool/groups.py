"""KV-cache groups and what one pool is made for; must never know addresses, stores or vLLM's spec classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.keys import BytesIdentity, KeyScheme, Topology


class GroupKind(Enum):
    FULL = "full_attention"
    SLIDING = "sliding_window"
    STATE = "mamba"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table. ``block_size`` and ``window`` in tokens; ``window`` only for SLIDING."""

    block_size: int
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    family: str = "default"
    is_draft: bool = False

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ConfigError(f"block_size={self.block_size}: must be a positive number of tokens")
        if (self.kind is GroupKind.SLIDING) != (self.window > 0):
            raise ConfigError(f"window={self.window}: a sliding-window group needs a positive one, others none")


@dataclass(frozen=True)
class PoolSetup:
    """All that scheduler and worker must agree on. ``hash_unit``: tokens per block hash.

    ``host_memory``: the caches can be read by the CPU, so that checksums can be taken of them. ``stage_layers``: layers
    of each group on each pipeline stage, needed for keys of single layers when there is more than one stage.
    """

    config: PoolConfig
    identity: BytesIdentity
    groups: tuple[CacheGroup, ...]
    hash_unit: int
    topology: Topology = Topology()
    dp_rank: int = 0
    enable_kv_events: bool = False
    host_memory: bool = True
    stage_layers: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("groups=(): at least one KV-cache group is needed")
        if self.hash_unit <= 0:
            raise ConfigError(f"hash_unit={self.hash_unit}: must be a positive number of tokens")
        for number, group in enumerate(self.groups):
            if group.block_size % self.hash_unit:
                raise ConfigError(
                    f"groups[{number}].block_size={group.block_size}: must be a multiple of hash_unit={self.hash_unit}"
                )

        if self.layer_reuse and (len(self.groups) > 1 or not self.only_full_attention or self.topology.world_size > 1):
            raise ConfigError(
                f"layerwise_num_shared_buffers={self.config.layerwise_num_shared_buffers}: allowed only with one group "
                "of full attention on one rank"
            )
        if self.config.checksum and not self.host_memory:
            raise ConfigError("checksum=True: allowed only where the CPU can read the caches; leave it out here")

    @property
    def checksum(self) -> bool:
        """Whether a digest is saved with each block and compared after each load."""
        wanted = self.config.checksum
        return self.host_memory and self.config.key_compat == "fingerprint" if wanted is None else wanted

    @property
    def granularity(self) -> int:
        """Tokens between two boundaries at which every group ends a block."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def load_async(self) -> bool:
        """vLLM can fail a load that spans several groups only while the request waits for it."""
        return (self.config.load_async and not self.layer_reuse) or len(self.groups) > 1

    @property
    def layer_reuse(self) -> bool:
        """Layers share device buffers: what a step has computed is only in the pool when the next one begins."""
        return self.config.use_layerwise and self.config.layerwise_num_shared_buffers is not None

    @property
    def only_full_attention(self) -> bool:
        return all(group.kind is GroupKind.FULL for group in self.groups)

    @property
    def key_scheme(self) -> KeyScheme:
        families = tuple(group.family for group in self.groups)
        identity = replace(self.identity, extra=f"{self.identity.extra};checksum={self.checksum}")
        return KeyScheme(identity, families, plain=self.config.key_compat == "vllm-ascend")

    def layers_per_stage(self, own: Sequence[int]) -> Sequence[Sequence[int]]:
        """``stage_layers``, or ``own`` where there is one stage; ConfigError if they disagree or are missing."""
        topology = self.topology
        stages = self.stage_layers or ((tuple(own),) if topology.pp_size == 1 else ())
        if len(stages) != topology.pp_size or tuple(stages[topology.pp_rank]) != tuple(own):
            raise ConfigError(
                f"stage_layers={self.stage_layers}: {topology.pp_size} stages are needed, with {tuple(own)} layers on "
                f"stage {topology.pp_rank}"
            )
        return stages

    def floor(self, tokens: int) -> int:
        """``tokens`` rounded down to a boundary that all groups share."""
        return tokens // self.granularity * self.granularity
