"""The names under which blocks lie in the store; must never know where the bytes are or who asks.

Formats (compatible with vllm-ascend's ascend_store of August 2026):

* block key ``{model}@pcp{p}@dcp{d}@head_or_tp_rank:{r}@pp_rank:{pp}@group:{g}@cache_role:kv@cache_family:{f}@{hash}``
* layer key: the same without ``@pp_rank``, and ``@layer_id:{n}`` before the hash
* GVA key ``{model}@{hash}@{r}``, with several groups ``{model}@{group}@{hash}@{r}``; a partial last block
  ``{model}@partial@{req}@{group}@{block}@{end_token}@{r}``

By default ``model`` carries a fingerprint of everything that changes the bytes, the block keys say in how many parts
pipeline and context parallelism split a block (``@of:{pp}x{pcp}x{dcp}``, if they do), and the GVA and layer keys name
those ranks; ``key_compat: vllm-ascend`` gives the plain forms, and leaves those ranks out only where there is a single
one (there, vllm-ascend's keys of different shards collide).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vllm_ascend_ext.kv_pool.errors import ConfigError

LAYOUT_VERSION = 1
"""Raised whenever the bytes of a value change their meaning or order."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel dimensions, this rank's place in each, and the model's KV heads (with MLA: 1).

    ConfigError for a size below 1, a rank that its size doesn't have, and heads that the ranks can't share evenly.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    pcp_size: int = 1
    pcp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads}: must be at least 1")
        for name in ("tp", "pp", "pcp", "dcp"):
            size, rank = getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
            if size < 1:
                raise ConfigError(f"{name}_size={size}: must be at least 1")
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank={rank}: allowed are 0..{size - 1}")
        if self.num_kv_heads < self.tp_size and self.tp_size % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads}: must divide tp_size={self.tp_size}, or not be below it"
            )

    @property
    def put_step(self) -> int:
        """How many neighbouring TP ranks hold the same KV heads."""
        return self.tp_size // self.num_kv_heads if self.num_kv_heads < self.tp_size else 1

    @property
    def replicas(self) -> int:
        """How many ranks hold the same bytes: of those with the same KV heads, neighbours are different DCP ranks."""
        step, rest = divmod(self.put_step, self.dcp_size)
        return 1 if rest else step

    @property
    def head_rank(self) -> int:
        return self.tp_rank // self.put_step

    @property
    def head_ranks(self) -> int:
        return self.tp_size // self.put_step

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that answers look-ups."""
        return self.tp_rank == self.pp_rank == self.pcp_rank == 0

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.pcp_size

    def owners(self) -> Iterator[Topology]:
        """One Topology for each distinct shard of a block: a block is in the pool when every one of them is."""
        for pcp, dcp, head, pp in product(
            range(self.pcp_size), range(self.dcp_size), range(self.head_ranks), range(self.pp_size)
        ):
            yield replace(self, pcp_rank=pcp, dcp_rank=dcp, tp_rank=head * self.put_step, pp_rank=pp)


@dataclass(frozen=True)
class BytesIdentity:
    """Everything that changes the bytes of a block under one token prefix, the ranks aside."""

    model_path: str
    kv_dtype: str
    block_sizes: tuple[int, ...]
    cache_shapes: tuple[tuple[int, ...], ...] = ()
    extra: str = ""

    @property
    def basename(self) -> str:
        return self.model_path.rstrip("/").rsplit("/", 1)[-1]

    def fingerprint(self) -> str:
        """Twelve hex digits of a BLAKE2b over all fields and the layout version."""
        text = repr((self.model_path, self.kv_dtype, self.block_sizes, self.cache_shapes, self.extra, LAYOUT_VERSION))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class KeyScheme:
    """Makes keys for one model. ``plain`` is the form shared with vllm-ascend."""

    identity: BytesIdentity
    families: tuple[str, ...] = ("default",)
    plain: bool = False

    @property
    def model(self) -> str:
        base = self.identity.basename
        return base if self.plain else f"{base}~{self.identity.fingerprint()}"

    def block_prefix(self, rank: Topology, group: int) -> str:
        """What stands before the hash in the key of a whole block."""
        sizes = (rank.pp_size, rank.pcp_size, rank.dcp_size)
        split = "" if self.plain or sizes == (1, 1, 1) else f"@of:{sizes[0]}x{sizes[1]}x{sizes[2]}"
        return f"{self._shard(rank)}@pp_rank:{rank.pp_rank}{split}{self._group(group)}@"

    def layer_prefix(self, rank: Topology, group: int, layer: int) -> str:
        """What stands before the hash in the key of one layer of a block."""
        pp = "" if self.plain and rank.pp_size == 1 else f"@pp_rank:{rank.pp_rank}"
        return f"{self._shard(rank)}{pp}{self._group(group)}@layer_id:{layer}@"

    def gva_key(self, rank: Topology, group: int, hash_hex: str) -> str:
        """The key of a block that is addressed by its global address; ``group`` shows when there are several."""
        prefix, suffix = self.gva_affixes(rank, group)
        return prefix + hash_hex + suffix

    def gva_affixes(self, rank: Topology, group: int) -> tuple[str, str]:
        """What stands before and behind the hash in a GVA key."""
        middle = f"@{group}" if len(self.families) > 1 else ""
        return f"{self.model}{middle}@", f"@{rank.head_rank}{self._gva_ranks(rank)}"

    def partial_key(self, rank: Topology, req_id: str, group: int, block: int, end_token: int) -> str:
        """The key of the last, partly filled block of one request."""
        return f"{self.model}@partial@{req_id}@{group}@{block}@{end_token}@{rank.head_rank}{self._gva_ranks(rank)}"

    def _shard(self, rank: Topology) -> str:
        return f"{self.model}@pcp{rank.pcp_rank}@dcp{rank.dcp_rank}@head_or_tp_rank:{rank.head_rank}"

    def _group(self, group: int) -> str:
        return f"@group:{group}@cache_role:kv@cache_family:{self.families[group]}"

    @staticmethod
    def _gva_ranks(rank: Topology) -> str:
        if rank.pp_size == rank.pcp_size == rank.dcp_size == 1:
            return ""
        return f"@pp{rank.pp_rank}@pcp{rank.pcp_rank}@dcp{rank.dcp_rank}"


def hash_hex(block_hash: bytes | str) -> str:
    """The hex form of a block hash, given as raw bytes or already as hex text."""
    return block_hash if isinstance(block_hash, str) else block_hash.hex()


def group_hashes(hashes: Sequence[bytes | str], scale: int) -> Sequence[bytes | str]:
    """The hashes of blocks of ``scale`` hash units each: hashes are chained, so a block's last unit names all of it.

    Units of an incomplete block at the end are left out.
    """
    return hashes if scale == 1 else hashes[scale - 1 :: scale]


def block_keys(prefix: str, hashes: Iterable[bytes | str], suffix: str = "") -> list[str]:
    """The hex form of each hash, with ``prefix`` before and ``suffix`` behind it."""
    return [prefix + (h if isinstance(h, str) else h.hex()) + suffix for h in hashes]
