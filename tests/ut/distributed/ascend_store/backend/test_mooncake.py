"""Mooncake without Mooncake: its configuration, what set-up tries first, and what its answers are taken for."""

import importlib.util
import json
import logging
import os
import socket

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.backend import mooncake
from vllm_ascend_ext.kv_pool.backend.mooncake import LIMITS, MooncakeBackend, arrived
from vllm_ascend_ext.kv_pool.backend.mooncake_config import MooncakeConfig, parse_bytes, split_address
from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError, Status
from vllm_ascend_ext.kv_pool.factory import make_backend
from vllm_ascend_ext.kv_pool.fence import open_fence

MASTER = {"master_server_address": "127.0.0.1:50051"}


@pytest.fixture
def read(tmp_path):
    """The configuration that a file with these settings gives, under an environment."""

    def read(settings, **environment):
        path = tmp_path / "mooncake.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return MooncakeConfig.from_environment({"MOONCAKE_CONFIG_PATH": str(path), **environment})

    return read


# -- the file and the environment --------------------------------------------------------------------------------------


def test_a_file_of_vllm_ascend_is_read_as_it_is(read):
    config = read(
        {
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "ascend",
            "device_name": "",
            "master_server_address": "10.0.0.1:50088",
            "global_segment_size": "1GB",
            "preferred_segment": True,
            "prefer_alloc_in_same_node": False,
        }
    )
    assert config.master_server_address == "10.0.0.1:50088"
    assert config.global_segment_size == 1 << 30
    assert (config.preferred_segment, config.prefer_alloc_in_same_node) == (True, False)


def test_what_is_left_out_is_as_vllm_ascend_has_it(read):
    config = read(MASTER)
    assert (config.protocol, config.metadata_server, config.device_name) == ("ascend", "P2PHANDSHAKE", "")
    assert (config.global_segment_size, config.prefer_alloc_in_same_node) == (1 << 30, True)
    assert not config.preferred_segment


def test_the_environment_goes_before_the_file(read):
    config = read(
        MASTER | {"global_segment_size": "1GB"},
        MOONCAKE_MASTER="other:1",
        MOONCAKE_GLOBAL_SEGMENT_SIZE="32MB",
    )
    assert (config.master_server_address, config.global_segment_size) == ("other:1", 32 << 20)
    assert read({}, MOONCAKE_MASTER="other:1").master_server_address == "other:1"


def test_settings_of_other_programs_are_named_once_and_left_alone(read, caplog):
    with caplog.at_level(logging.WARNING):
        read(MASTER | {"use_ascend_direct": True, "protcol": "tcp"})
    assert "protcol, use_ascend_direct: not used" in caplog.text


def test_without_a_path_the_variable_is_named():
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set"):
        MooncakeConfig.from_environment({})


@pytest.mark.parametrize(
    ("text", "why"), [("{", "can't be read as JSON"), ("[]", "a JSON object is needed, not list"), ("\x00", "JSON")]
)
def test_a_file_that_is_no_json_object_is_named(read, text, why):
    with pytest.raises(ConfigError, match=rf"mooncake.json'.*{why}"):
        read(text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        MooncakeConfig.from_environment({"MOONCAKE_CONFIG_PATH": str(tmp_path / "nowhere.json")})


def test_a_missing_master_says_where_it_is_set(read):
    with pytest.raises(ConfigError, match=r"master_server_address is missing: .* MOONCAKE_MASTER"):
        read({})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("protocol", "TCP", "'ascend', 'rdma' or 'tcp'"),
        ("protocol", "ubshmem", "'ascend', 'rdma' or 'tcp'"),
        ("protocol", None, "'ascend', 'rdma' or 'tcp'"),
        ("master_server_address", "localhost", "host:port"),
        ("master_server_address", "localhost:0", "1 to 65535"),
        ("master_server_address", "localhost:65536", "1 to 65535"),
        ("master_server_address", "::1:50051", r"\[address\]:port"),
        ("master_server_address", "a b:1", "host:port"),
        ("master_server_address", ":1", "host:port"),
        ("master_server_address", "ftp://host", "etcd://"),
        ("master_server_address", 50051, "string"),
        ("metadata_server", "P2PHANDSHAK", "P2PHANDSHAKE"),
        ("metadata_server", "", "P2PHANDSHAKE"),
        ("global_segment_size", "1 TB", "B, KB, MB or GB"),
        ("global_segment_size", "-1", "B, KB, MB or GB"),
        ("global_segment_size", -1, "0 to"),
        ("global_segment_size", 1.5, "whole numbers of bytes"),
        ("global_segment_size", True, "whole numbers of bytes"),
        ("global_segment_size", "0.3KB", "whole numbers of bytes"),
        ("global_segment_size", "15MB", "16777216 bytes or more"),
        ("global_segment_size", "9999999GB", "0 to"),
        ("local_buffer_size", "lots", "B, KB, MB or GB"),
        ("preferred_segment", "perhaps", "boolean"),
        ("device_name", 3, "string"),
        ("local_hostname", "", "at least 1 character"),
    ],
)
def test_a_value_that_can_not_be_used_is_named_with_what_is_allowed(read, field, value, allowed):
    with pytest.raises(ConfigError, match=rf"{field}={value!r}.*{allowed}"):
        read(MASTER | {field: value})


def test_a_disk_behind_the_store_is_refused(read):
    with pytest.raises(ConfigError, match="enable_ssd_offload=True: not supported"):
        read(MASTER | {"enable_ssd_offload": True, "ssd_offload_path": "/tmp"})


def test_all_that_is_wrong_is_said_at_once(read):
    with pytest.raises(ConfigError, match=r"protocol='x'.*; .*global_segment_size='y'"):
        read(MASTER | {"protocol": "x", "global_segment_size": "y"})


@pytest.mark.parametrize(
    ("text", "number"),
    [(0, 0), (123, 123), ("123", 123), ("2 kb", 2048), ("1.5GB", 3 << 29), (" 64Mb ", 64 << 20), ("7b", 7)],
)
def test_sizes_are_in_units_of_1024(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.b:1", ("a.b", 1)), ("[::1]:50051", ("::1", 50051)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


# -- set-up ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    """host:port of a socket of this test that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody():
    """host:port of loopback where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


class FakeStore:
    """The calls of a native client, answering what a test writes into ``answers``."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def setup(self, **arguments):
        self.asked.append(("setup", arguments))
        return self.answers.get("setup", 0)

    def get_hostname(self):
        return "this-host:1"

    def register_buffer(self, address, length):
        return self.answers.get("register_buffer", 0)

    def close(self):
        self.asked.append(("close", None))
        return 0

    def __getattr__(self, name):
        """Any call on keys."""

        def call(keys, *rest):
            self.asked.append((name, (keys, *rest)))
            return self.answers[name]

        return call


class FakeModule:
    """Stands for ``mooncake.store``."""

    def __init__(self, answers):
        self.stores = []
        self.answers = answers

    def MooncakeDistributedStore(self):
        self.stores.append(FakeStore(self.answers))
        return self.stores[-1]

    class ReplicateConfig:
        preferred_segment = ""
        prefer_alloc_in_same_node = False


@pytest.fixture
def module(monkeypatch):
    for variable in (*LIMITS, "VLLM_HOST_IP"):
        monkeypatch.setenv(variable, "to be restored")
        monkeypatch.delenv(variable)
    module = FakeModule({})
    monkeypatch.setattr(mooncake, "_import", lambda: module)
    return module


def config_of(address, **values):
    return MooncakeConfig(**{"master_server_address": address, "protocol": "tcp", **values})


def open_backend(address, **values):
    return MooncakeBackend(config_of(address, **values), slots=1, slot_bytes=1 << 16)


def test_a_master_that_is_not_there_is_named_before_the_engine_is_asked(module, nobody):
    with pytest.raises(ConfigError, match=rf"master_server_address='{nobody}': a mooncake_master .*MOONCAKE_MASTER"):
        open_backend(nobody)
    assert module.stores == []


def test_a_metadata_server_that_is_not_there_is_named(module, listener, nobody):
    with pytest.raises(ConfigError, match=rf"metadata_server='http://{nobody}/metadata': a metadata server"):
        open_backend(listener, metadata_server=f"http://{nobody}/metadata")
    assert module.stores == []


def test_the_engine_gets_the_settings_and_limits_of_its_own(module, listener):
    open_backend(
        listener, global_segment_size="16MB", local_buffer_size=5, device_name="x", preferred_segment=True
    ).close()
    (store,) = module.stores
    assert store.asked[0] == (
        "setup",
        {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 16 << 20,
            "local_buffer_size": 5,
            "protocol": "tcp",
            "rdma_devices": "x",
            "master_server_addr": listener,
        },
    )
    assert {name: os.environ[name] for name in LIMITS} == LIMITS
    assert store.asked[-1] == ("close", None)


def test_limits_that_the_environment_sets_stay(module, listener, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "12")
    open_backend(listener).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "12"


@pytest.mark.parametrize(("variable", "setting", "name"), [("1.2.3.4", None, "1.2.3.4"), ("1.2.3.4", "me", "me")])
def test_a_client_goes_by_the_name_that_it_is_given(module, listener, monkeypatch, variable, setting, name):
    monkeypatch.setenv("VLLM_HOST_IP", variable)
    open_backend(listener, local_hostname=setting).close()
    assert module.stores[0].asked[0][1]["local_hostname"] == name


def test_with_a_name_service_this_host_must_be_named(module):
    with pytest.raises(ConfigError, match=r"local_hostname=None: .*VLLM_HOST_IP"):
        open_backend("etcd://nowhere:1")
    open_backend("etcd://nowhere:1", local_hostname="me").close()


def test_a_setup_that_fails_is_closed_and_explained(module, listener):
    module.answers["setup"] = -600
    with pytest.raises(ConfigError, match=rf"failed with -600.*master_server_address='{listener}'"):
        open_backend(listener)
    assert module.stores[0].asked[-1] == ("close", None)


def test_staging_memory_that_can_not_be_registered_closes_the_client(module, listener):
    module.answers["register_buffer"] = -600
    with pytest.raises(ConfigError, match="can't register 65536 bytes"):
        open_backend(listener)
    assert module.stores[0].asked[-1] == ("close", None)


def test_rdma_without_a_device_is_refused(module, listener, monkeypatch, tmp_path):
    monkeypatch.setattr(mooncake, "_DEVICES", tmp_path)
    with pytest.raises(ConfigError, match=r"protocol='rdma'.* are none"):
        open_backend(listener, protocol="rdma")
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(ConfigError, match=r"device_name='mlx5_1'.*mlx5_0"):
        open_backend(listener, protocol="rdma", device_name="mlx5_1")
    open_backend(listener, protocol="rdma", device_name="mlx5_0").close()
    open_backend(listener, protocol="rdma").close()


def test_the_factory_reads_the_environment(module, listener, monkeypatch, tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"protocol": "tcp"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", listener)
    monkeypatch.delenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", raising=False)
    backend = make_backend(PoolConfig.parse({"backend": "mooncake", "staging_slots": 1, "staging_slot_bytes": 4096}))
    assert isinstance(backend, MooncakeBackend)
    backend.close()


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed here")
def test_without_the_package_its_name_is_said(listener):
    with pytest.raises(ConfigError, match=r"(?s)mooncake-transfer-engine-npu.*libibverbs1"):
        open_backend(listener)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "code"),
    [
        (4096, Status.OK),
        (0, Status.REFUSED),
        (1, Status.REFUSED),
        (4095, Status.REFUSED),
        (4097, Status.REFUSED),
        (-704, -704),
        (-12345, -12345),
        (None, Status.FAILED),
        (4096.0, Status.FAILED),
        (True, Status.FAILED),
    ],
)
def test_anything_but_the_exact_size_is_a_failure(count, code):
    assert arrived(count, 4096) == code


def table(count):
    memory = np.zeros((count, 64), np.uint8)
    at = memory.ctypes.data + np.arange(count, dtype=np.int64)[:, None] * 64
    return memory, at, np.full_like(at, 64)


def test_a_put_that_is_not_there_afterwards_was_none(module, listener):
    """The engine says 0 for a key that somebody else has begun and not finished."""
    backend = open_backend(listener)
    module.answers |= {"batch_put_from_multi_buffers": [0, -200, 0, 0], "batch_is_exist": [1, 0, -1]}
    _memory, at, sizes = table(4)
    codes = backend.put(["a", "b", "c", "d"], at, sizes, open_fence())
    backend.close()
    assert codes == [0, -200, Status.REFUSED, Status.REFUSED]
    assert module.stores[0].asked[-2] == ("batch_is_exist", (["a", "c", "d"],))


def test_a_short_read_leaves_the_block_as_it_was(module, listener):
    backend = open_backend(listener)
    module.answers["batch_get_into_multi_buffers"] = [64, 63, 0, -704]
    memory, at, sizes = table(4)
    memory[:] = 7
    codes = backend.get(["a", "b", "c", "d"], at, sizes, open_fence())
    backend.close()
    assert codes == [0, Status.REFUSED, Status.REFUSED, -704]
    assert (memory[1:] == 7).all()
    assert not memory[0].any(), "the slot's zeros are what the engine delivered"


def test_a_value_is_removed_whoever_reads_it(module, listener):
    backend = open_backend(listener)
    module.answers["batch_remove"] = [0, -704]
    assert list(backend.remove(["a", "b"])) == [0, -704]
    assert module.stores[0].asked[-1] == ("batch_remove", (["a", "b"], True))
    backend.close()
