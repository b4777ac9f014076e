"""Putting a pool together: what the configuration names, or a clear error with nothing half-started."""

import os
import threading

import pytest

from fixtures.memory_store import MemoryStore
from fixtures.parts import make_setup
from fixtures.stores import FlakyStore, raising
from vllm_ascend_ext.kv_pool import factory
from vllm_ascend_ext.kv_pool.backend.local import destroy
from vllm_ascend_ext.kv_pool.config import PoolConfig
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.factory import make_backend, make_scheduler, make_worker


@pytest.fixture
def store(monkeypatch):
    """What the configuration's backend is made to be."""
    subject = FlakyStore(MemoryStore())
    monkeypatch.setitem(factory.BACKENDS, "local", lambda config: subject)
    return subject


def pool_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("kv-", "lookup-"))]


def test_the_backend_is_the_one_that_the_configuration_names(store):
    assert make_backend(PoolConfig(backend="local")) is store


def test_the_embedded_store_gets_its_options():
    name = f"factory-test-{os.getpid()}"
    config = PoolConfig(backend="local", local_pool_name=name, local_capacity_bytes=1 << 20, local_keep=True)
    store = make_backend(config)
    try:
        assert store.stats()["capacity_bytes"] == 1 << 20
    finally:
        store.close()
        assert destroy(name), "it was to be kept"


def test_a_backend_that_is_not_built_is_refused_and_the_others_are_named(monkeypatch):
    monkeypatch.delitem(factory.BACKENDS, "mooncake", raising=False)
    with pytest.raises(ConfigError, match=r"backend='mooncake'.*allowed are .*local"):
        make_backend(PoolConfig(backend="mooncake"))


def test_scheduler_and_worker_find_each_other(tmp_path, store):
    setup = make_setup(tmp_path)
    worker, scheduler = make_worker(setup), make_scheduler(setup)
    assert scheduler._lookup.lookup(4, [bytes(32)], [0], 0) == 0
    assert worker.stats.get("lookup_served") == 1
    assert scheduler.close() == []
    assert worker.close() == []
    assert store.calls("close") == [[]]
    assert not pool_threads()


def test_a_worker_that_does_not_start_has_closed_its_engine(tmp_path, store):
    store.script("set_device", raising(OSError("no device 3")))
    with pytest.raises(OSError, match="no device 3"):
        make_worker(make_setup(tmp_path))
    assert store.calls("close") == [[]]
    assert not pool_threads()


def test_a_worker_that_can_not_be_made_has_closed_its_engine(tmp_path):
    class Unclear(FlakyStore):
        @property
        def has_gva(self):
            raise RuntimeError("the engine does not say")

    store = Unclear(MemoryStore())
    with pytest.raises(RuntimeError, match="does not say"):
        make_worker(make_setup(tmp_path), store)
    assert store.calls("close") == [[]]
    assert not pool_threads()


@pytest.mark.parametrize("make", [make_worker, make_scheduler])
def test_a_missing_socket_directory_is_refused(tmp_path, store, make):
    with pytest.raises(ConfigError, match="nowhere"):
        make(make_setup(tmp_path / "nowhere"))
    assert not pool_threads()


@pytest.mark.parametrize("make", [make_worker, make_scheduler])
def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path, store, make):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with pytest.raises(ConfigError, match="bytes"):
        make(make_setup(folder))
    assert not pool_threads()
