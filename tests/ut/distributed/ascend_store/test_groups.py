"""KV-cache groups and the setup: what scheduler and workers must agree on, refused where it can't work."""

import pytest

from fixtures.parts import make_setup
from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.groups import CacheGroup, GroupKind, PoolSetup
from vllm_ascend_ext.kv_pool.keys import BytesIdentity, Topology

IDENTITY = BytesIdentity("m", "uint8", (16,))


@pytest.mark.parametrize("size", [0, -16])
def test_a_block_holds_tokens(size):
    with pytest.raises(ConfigError, match=f"block_size={size}"):
        CacheGroup(size)


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.SLIDING, 0), (GroupKind.FULL, 8), (GroupKind.STATE, 8)])
def test_a_window_belongs_to_sliding_window_groups_alone(kind, window):
    with pytest.raises(ConfigError, match=f"window={window}"):
        CacheGroup(16, kind, window)


@pytest.mark.parametrize("unit", [0, -1])
def test_a_hash_names_tokens(unit):
    with pytest.raises(ConfigError, match=f"hash_unit={unit}"):
        PoolSetup(PoolConfig(), IDENTITY, (CacheGroup(16),), unit)


def test_a_block_size_that_the_hash_unit_does_not_divide_is_refused_with_its_group():
    with pytest.raises(ConfigError, match=r"groups\[1\].block_size=24: must be a multiple of hash_unit=16"):
        PoolSetup(PoolConfig(), IDENTITY, (CacheGroup(32), CacheGroup(24)), 16)


def test_a_pool_has_at_least_one_group():
    with pytest.raises(ConfigError, match="groups"):
        PoolSetup(PoolConfig(), IDENTITY, (), 16)


@pytest.mark.parametrize(
    ("fields", "host_memory", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"checksum": False}, True, False),
        ({"checksum": True}, True, True),
        ({"key_compat": "vllm-ascend"}, True, False),
    ],
)
def test_checksums_are_taken_wherever_they_can_be(fields, host_memory, expected):
    setup = PoolSetup(PoolConfig(**fields), IDENTITY, (CacheGroup(16),), 16, host_memory=host_memory)
    assert setup.checksum is expected


def test_checksums_of_memory_that_the_cpu_can_not_read_are_refused():
    with pytest.raises(ConfigError, match="checksum=True"):
        PoolSetup(PoolConfig(checksum=True), IDENTITY, (CacheGroup(16),), 16, host_memory=False)


def test_values_with_and_without_a_digest_never_share_a_key():
    """A55: the digest is a part of the value."""
    rank = Topology()
    with_digest, without = (make_setup(checksum=on).key_scheme.block_prefix(rank, 0) for on in (True, False))
    assert with_digest != without


def test_plain_keys_are_those_of_vllm_ascend():
    assert make_setup(key_compat="vllm-ascend").key_scheme.model == "tiny"


def test_groups_share_the_boundaries_of_their_least_common_multiple():
    setup = make_setup(groups=(CacheGroup(8), CacheGroup(12)))
    assert setup.granularity == 24
    assert [setup.floor(tokens) for tokens in (0, 23, 24, 47, 48)] == [0, 0, 24, 24, 48]


def test_several_groups_always_load_asynchronously():
    """vLLM has no way to fail a synchronous load of more than one group."""
    assert not make_setup().load_async
    assert make_setup(load_async=True).load_async
    assert make_setup(groups=(CacheGroup(4), CacheGroup(4))).load_async


def test_only_full_attention_can_resume_inside_a_block():
    assert make_setup().only_full_attention
    assert not make_setup(groups=(CacheGroup(4), CacheGroup(4, GroupKind.SLIDING, 8))).only_full_attention
