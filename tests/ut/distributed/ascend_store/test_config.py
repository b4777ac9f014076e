"""The configuration: every value that can't be used is refused at start, with its field, itself and what is allowed."""

import re
from pathlib import Path

import pytest

from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError

PERIODS = [name for name in PoolConfig.model_fields if name.endswith(("_timeout", "_backoff", "_ttl"))]
COUNTS = ["prefill_pp_size", "prefill_tp_size", "decode_tp_size", "layerwise_prefetch_layers", "lanes", "staging_slots"]
LIMITS = ["layerwise_max_transfer_blocks", "layerwise_max_transfer_bytes", "local_capacity_bytes", "staging_slot_bytes"]


def refused(field, value, kv_role="kv_both"):
    with pytest.raises(ConfigError) as caught:
        PoolConfig.parse({field: value}, kv_role)
    return str(caught.value)


def test_an_empty_configuration_is_a_usable_one():
    config = PoolConfig.parse({})
    assert (config.backend, config.key_compat, config.load_async) == ("local", "fingerprint", False)


def test_the_fields_of_vllm_ascend_are_all_taken():
    config = PoolConfig.parse(
        {
            "lookup_rpc_port": "1",
            "load_async": True,
            "backend": "mooncake",
            "consumer_is_to_put": True,
            "consumer_is_to_load": True,
            "use_layerwise": True,
            "prefill_pp_size": 2,
            "prefill_pp_layer_partition": "16,16",
            "save_decode_cache": True,
            "discard_partial_chunks": False,
            "layerwise_prefetch_layers": 2,
            "layerwise_max_transfer_blocks": 64,
            "layerwise_max_transfer_bytes": 1 << 20,
        }
    )
    assert config.lookup_rpc_port == 1


def test_the_older_name_of_the_port_is_understood():
    assert PoolConfig.parse({"mooncake_rpc_port": 7}).lookup_rpc_port == 7


@pytest.mark.parametrize("field", PERIODS)
@pytest.mark.parametrize("value", [0, -1, -0.5, float("inf"), float("nan"), 86_401, "soon", None, True, False])
def test_a_period_is_finite_positive_and_at_most_a_day(field, value):
    message = refused(field, value)
    assert field in message
    assert repr(value) in message


@pytest.mark.parametrize("field", [*COUNTS, *LIMITS])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, False])
def test_a_count_is_a_positive_integer(field, value):
    message = refused(field, value)
    assert f"{field}={value!r}" in message


@pytest.mark.parametrize("value", [1, 4095, (8 << 40) + 1, 10**30])
def test_the_embedded_pool_has_a_page_at_least_and_8_tib_at_most(value):
    assert f"local_capacity_bytes={value}" in refused("local_capacity_bytes", value)


@pytest.mark.parametrize("value", [-1, 65_536, "port", True])
def test_a_port_is_a_port(value):
    assert f"lookup_rpc_port={value!r}" in refused("lookup_rpc_port", value)


@pytest.mark.parametrize("value", ["", "redis", "LOCAL", None, 3])
def test_an_unknown_backend_is_refused_and_the_known_ones_are_named(value):
    message = refused("backend", value)
    assert f"backend={value!r}" in message
    assert all(name in message for name in ("local", "mooncake", "memcache", "yuanrong"))


def test_an_unknown_field_is_refused_and_the_known_ones_are_named():
    message = refused("load_asinc", True)
    assert "load_asinc=True: unknown field" in message
    assert "load_async" in message


def test_every_fault_of_a_configuration_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        PoolConfig.parse({"lookup_timeout": 0, "lanes": 0, "backend": "x", "kv_role": "kv_consumer"})
    named = ("lookup_timeout=0", "lanes=0", "backend='x'", "kv_role='kv_consumer'")
    assert all(field in str(caught.value) for field in named)


@pytest.mark.parametrize("value", ["kv_neither", "", None])
def test_a_role_is_one_of_vllms(value):
    with pytest.raises(ConfigError, match="kv_role"):
        PoolConfig.parse({}, value)


@pytest.mark.parametrize("value", ["", ".hidden", "a/b", "../x", "x" * 65, "a b"])
def test_a_pool_name_is_a_plain_file_name(value):
    assert "local_pool_name" in refused("local_pool_name", value)


@pytest.mark.parametrize("value", ["plain", ""])
def test_the_key_form_is_one_of_two(value):
    message = refused("key_compat", value)
    assert "'fingerprint' or 'vllm-ascend'" in message


def test_a_lease_must_outlive_the_load_that_it_protects():
    with pytest.raises(ConfigError, match=r"lease_ttl \(5.0\) must be at least load_timeout \(6.0\)"):
        PoolConfig.parse({"lease_ttl": 5, "load_timeout": 6})


def test_checksums_are_refused_where_values_have_none():
    with pytest.raises(ConfigError, match="checksum=True"):
        PoolConfig.parse({"checksum": True, "key_compat": "vllm-ascend"})


@pytest.mark.parametrize(
    ("role", "fields", "saves", "loads"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, True, True),
        ("kv_consumer", {}, False, False),
        ("kv_consumer", {"consumer_is_to_put": True}, True, False),
        ("kv_consumer", {"consumer_is_to_load": True}, False, True),
    ],
)
def test_what_a_role_does(role, fields, saves, loads):
    config = PoolConfig.parse(fields, role)
    assert (config.saves, config.loads) == (saves, loads)


def test_a_configuration_can_not_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        PoolConfig.parse({}).lanes = 3


def test_the_guide_names_every_option():
    guide = (Path(__file__).parents[4] / "docs" / "users-guide.md").read_text()
    table = guide[guide.index("## Options") : guide.index("For instance")]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.M)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert named == PoolConfig.model_fields.keys() - {"kv_role"}


def test_a_role_among_the_options_is_refused_unless_it_is_the_engines():
    with pytest.raises(ConfigError, match=r"kv_role='kv_consumer': the role belongs beside .* 'kv_producer'"):
        PoolConfig.parse({"kv_role": "kv_consumer"}, "kv_producer")
    assert PoolConfig.parse({"kv_role": "kv_producer"}, "kv_producer").kv_role == "kv_producer"


@pytest.mark.parametrize(("field", "near"), [("bakend", "backend"), ("load_timeouts", "load_timeout")])
def test_a_misspelt_field_is_told_which_one_is_near(field, near):
    assert f"did you mean {near}? allowed are backend, " in refused(field, 1)
    assert "did you mean" not in refused("xyzzy", 1)


def test_sockets_go_where_vllm_keeps_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert PoolConfig.parse({}).rpc_base_path == str(tmp_path)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    assert PoolConfig.parse({}).rpc_base_path
