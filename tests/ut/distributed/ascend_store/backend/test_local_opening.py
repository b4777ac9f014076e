"""Opening a local pool: bad values and foreign files are named before anything is started, and nothing stays behind."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from faultinject.leaks import open_descriptors
from vllm_ascend_ext.kv_pool.backend import arena
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend, destroy
from vllm_ascend_ext.kv_pool.backend.local_table import VERSION
from vllm_ascend_ext.kv_pool.errors import ConfigError

SIZE = 1 << 20


@pytest.fixture
def nothing_left(local_pool):
    """The pool's name; no folder and no descriptor may be there afterwards that wasn't before."""
    before = open_descriptors()
    yield local_pool.name
    assert not local_pool.folder.exists()
    assert open_descriptors() == before


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "-x", "n" * 65, "näme", "a b", None, 7, b"x"])
def test_a_name_that_cannot_be_is_refused(name):
    with pytest.raises(ConfigError, match="name_or_path="):
        LocalBackend(name, SIZE)


@pytest.mark.parametrize("capacity", [0, -1, 4095, 1 << 60, None, "1", 1.5, True])
def test_a_capacity_that_cannot_be_is_refused(nothing_left, capacity):
    with pytest.raises(ConfigError, match=r"capacity_bytes=.* allowed are 4096 to"):
        LocalBackend(nothing_left, capacity)


@pytest.mark.parametrize("field", ["lock_timeout", "open_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), None, True, "1"])
def test_a_timeout_that_cannot_be_is_refused(nothing_left, field, seconds):
    with pytest.raises(ConfigError, match=f"{field}="):
        LocalBackend(nothing_left, SIZE, **{field: seconds})


def test_more_than_the_file_system_has_is_refused(nothing_left):
    disk = os.statvfs("/dev/shm")
    with pytest.raises(ConfigError, match=r"capacity_bytes=\d+: at most the \d+ bytes free"):
        LocalBackend(nothing_left, disk.f_bavail * disk.f_frsize + (1 << 30))


def test_more_than_the_host_s_memory_is_refused(nothing_left, monkeypatch):
    monkeypatch.setattr(arena, "_memory_available", lambda: SIZE - 1)
    with pytest.raises(ConfigError, match=rf"capacity_bytes={SIZE}: at most the {SIZE - 1} bytes of memory"):
        LocalBackend(nothing_left, SIZE)


def test_memory_that_runs_out_while_the_pool_is_made_leaves_nothing(nothing_left, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        LocalBackend(nothing_left, SIZE)


def test_a_capacity_is_rounded_down_to_whole_pages(local_pool):
    local_pool.capacity_bytes = 3 * 4096 + 1
    assert local_pool.open().backend.stats()["capacity_bytes"] == 3 * 4096


def test_an_absolute_path_is_the_pool_s_folder(tmp_path):
    client = LocalBackend(str(tmp_path / "pool"), SIZE)
    assert sorted(path.name for path in (tmp_path / "pool").iterdir()) == ["arena", "lock", "meta"]
    client.close()
    assert not (tmp_path / "pool").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing/pool can't be made"):
        LocalBackend(str(tmp_path / "missing" / "pool"), SIZE)


@pytest.mark.parametrize("keep", [True, False])
def test_a_pool_of_another_capacity_is_left_as_it_is(local_pool, keep):
    local_pool.keep = True
    client = local_pool.open()
    if keep:
        client.backend.close()
    with pytest.raises(ConfigError, match=rf"capacity_bytes={SIZE}, but {2 * SIZE} was asked for.*destroy"):
        LocalBackend(local_pool.name, 2 * SIZE)
    assert local_pool.open().backend.stats()["clients"] == 2 - keep


def test_a_pool_of_another_layout_is_left_as_it_is(local_pool):
    local_pool.keep = True
    local_pool.open().backend.close()
    with (local_pool.folder / "meta").open("r+b") as meta:
        meta.seek(8)
        meta.write(struct.pack("q", 99))
    with pytest.raises(ConfigError, match=f"layout version=99, but {VERSION} was asked for"):
        local_pool.open()


@pytest.mark.parametrize("rubbish", [b"", b"x" * 100, b"\0" * 10_000])
def test_files_that_are_no_finished_pool_are_made_anew(local_pool, rubbish):
    local_pool.folder.mkdir(mode=0o700)
    for name in ("meta", "arena"):
        (local_pool.folder / name).write_bytes(rubbish)
        (local_pool.folder / name).chmod(0o600)
    client = local_pool.open()
    assert client.put({"k": b"v" * 10}) == [0]
    assert client.get(["k"], 10) == [b"v" * 10]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(local_pool, mode):
    local_pool.folder.mkdir()
    local_pool.folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"permissions {mode:04o}; allowed is 0700"):
        local_pool.open()
    local_pool.folder.rmdir()


@pytest.mark.parametrize("name", ["lock", "meta", "arena"])
def test_a_file_that_others_may_read_is_refused(local_pool, name):
    local_pool.folder.mkdir(mode=0o700)
    (local_pool.folder / name).touch()
    (local_pool.folder / name).chmod(0o640)
    with pytest.raises(ConfigError, match=f"{name} has the permissions 0640; allowed is 0600"):
        local_pool.open()
    shutil.rmtree(local_pool.folder)


def test_a_link_in_the_place_of_a_file_or_folder_is_refused(local_pool, tmp_path):
    local_pool.folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder"):
        local_pool.open()
    local_pool.folder.unlink()
    local_pool.folder.mkdir(mode=0o700)
    (tmp_path / "elsewhere").touch(mode=0o600)
    (local_pool.folder / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="lock can't be opened"):
        local_pool.open()
    shutil.rmtree(local_pool.folder)


def test_a_folder_in_the_place_of_a_file_is_refused(local_pool):
    (local_pool.folder / "meta").mkdir(mode=0o700, parents=True)
    local_pool.folder.chmod(0o700)
    with pytest.raises(ConfigError, match="meta can't be opened"):
        local_pool.open()
    shutil.rmtree(local_pool.folder)


def test_somebody_else_s_folder_is_refused(local_pool, monkeypatch):
    local_pool.folder.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}; allowed is {owner + 1}"):
        LocalBackend(f"/dev/shm/ascend-pool-{owner}-{local_pool.name}", SIZE)
    monkeypatch.undo()
    local_pool.folder.rmdir()


def test_a_pool_takes_64_clients_and_says_so(local_pool):
    for _ in range(arena.MAX_CLIENTS):
        local_pool.open()
    with pytest.raises(ConfigError, match="64 clients; no more are allowed"):
        local_pool.open()
    local_pool.clients.pop().close()
    assert local_pool.open().backend.stats()["clients"] == 64


def test_opening_and_closing_leaves_no_descriptor_behind(nothing_left):
    clients = [LocalBackend(nothing_left, SIZE) for _ in range(3)]
    for client in clients:
        client.close()


HOLD = """
import sys
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
client = LocalBackend(sys.argv[1], 1 << 20)
print(flush=True)
input()
"""


def test_a_pool_in_use_is_not_destroyed_unless_by_force(local_pool):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, local_pool.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "\n"
    with pytest.raises(ConfigError, match="in use by other processes"):
        destroy(local_pool.name)
    client = local_pool.open()
    with pytest.raises(ConfigError, match="in use by this process"):
        destroy(local_pool.name)
    client.put({"k": b"1"})
    assert destroy(local_pool.name, force=True)
    assert client.get(["k"], 1) == [b"1"], "who has it mapped keeps it"
    client.backend.close()
    assert local_pool.open().exists("k") == [0], "a new pool of the same name"
    other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert local_pool.folder.exists(), "the old pool's last client leaves the new pool's files alone"


def test_destroying_by_force_while_only_others_use_it(local_pool):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, local_pool.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "\n"
    assert destroy(local_pool.name, force=True)
    other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert not Path(local_pool.folder).exists()


def test_the_overhead_per_cached_block_is_under_512_bytes(local_pool):
    block = 128 << 10
    local_pool.capacity_bytes = 128 << 20
    client = local_pool.open()
    count = local_pool.capacity_bytes // block
    for n in range(0, 3 * count, 64):
        client.put(
            {
                f"model~0123456789ab@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{m:064x}": bytes(block)
                for m in range(n, n + 64)
            }
        )
    assert client.backend.stats()["keys"] == count
    used = sum(path.stat().st_blocks * 512 for path in local_pool.folder.iterdir())
    assert 0 < (used - local_pool.capacity_bytes) / count < 512


def test_making_a_large_pool_tells_how_far_it_is(local_pool, monkeypatch, caplog):
    monkeypatch.setattr(arena, "_TOUCH_STEP", 16 * 4096)
    with caplog.at_level("INFO", logger=arena.__name__):
        local_pool.open()
    assert [record.getMessage().split(": ")[1].split(",")[0] for record in caplog.records] == [
        "512 of 1024 KiB touched",
        "1024 of 1024 KiB touched",
    ]


def test_a_host_that_does_not_tell_its_memory_is_an_error(nothing_left, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 1 kB\n")
    with pytest.raises(ConfigError, match="doesn't say what memory is available"):
        LocalBackend(nothing_left, SIZE)


def test_a_living_process_s_client_cannot_be_taken_over(local_pool):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, local_pool.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "\n"
    with pytest.raises(RuntimeError, match=r"client 0 of .* belongs to another process"):
        local_pool.open().backend._session.segment.claim(0)
    other.communicate("\n", timeout=60)


def test_a_folder_with_something_else_in_it_stays_and_is_told_of(local_pool, caplog):
    caplog.set_level("INFO")
    client = local_pool.connect()
    (local_pool.folder / "notes").write_text("mine")
    client.close()
    assert [path.name for path in local_pool.folder.iterdir()] == ["notes"]
    assert f"{local_pool.folder} stays" in caplog.text
    shutil.rmtree(local_pool.folder)
