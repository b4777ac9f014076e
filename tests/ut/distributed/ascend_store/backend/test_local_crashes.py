"""The local store under processes that die, or stop, anywhere: the others go on, and never read a wrong byte."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.backend.local_audit import faults
from vllm_ascend_ext.kv_pool.errors import DeadlineExceeded, Status
from vllm_ascend_ext.kv_pool.fence import open_fence

SCRIPT = Path(__file__).with_name("crash_points.py")
_spec = importlib.util.spec_from_file_location("crash_points", SCRIPT)
crash_points = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(crash_points)

VALUES = {f"k{key}": crash_points.value_of(key) for key in range(crash_points.KEYS)}
WORK_POINTS, MAKE_POINTS, STORM_SECONDS = 60, 40, 6
CHANGES = {"reserve": 42, "publish": 10, "_release": 14, "drop": 10, "leave": 6, "insert": 12, "sign_out": 9}
"""The functions that change the index, and how many of their lines, from the story's first on, are died at."""
SEED = 20260901
PAGE = b"p" * 4096


class Victims:
    """Processes to be killed. ``tell`` runs one to its death; ``start`` leaves one at its story."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._forker = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=pipe, stdout=pipe, text=True)

    def tell(self, story: str, pool: str, line: int, seed: int = 0, within: str | None = None) -> dict:
        return self._ask(story=story, pool=pool, line=line, seed=seed, within=within)

    def start(self, story: str, pool: str, seed: int = 0) -> int:
        return self._ask(story=story, pool=pool, seed=seed)["pid"]

    def _ask(self, **order) -> dict:
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        answer = self._forker.stdout.readline()
        assert answer, "the forker died"
        return json.loads(answer)

    def close(self) -> None:
        self._forker.stdin.close()
        assert self._forker.wait(60) == 0
        self._forker.stdout.close()


@pytest.fixture(scope="module")
def victims():
    victims = Victims()
    yield victims
    victims.close()


@pytest.fixture
def pool(local_pool):
    local_pool.capacity_bytes = crash_points.CAPACITY
    return local_pool


def kill(pid: int) -> None:
    """Kill, and wait until the kernel has taken everything back from it (its parent collects it later)."""
    os.kill(pid, signal.SIGKILL)
    wait_for_state(pid, "ZX")


def wait_for_state(pid: int, states: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "X"
        if state in states:
            return
        assert time.monotonic() < deadline, f"{pid} is in state {state}"
        time.sleep(0.001)


def read_all(client) -> int:
    """Every value that can be read must be the right one; how many there were."""
    found = 0
    for size in {len(value) for value in VALUES.values()}:
        keys = [key for key, value in VALUES.items() if len(value) == size]
        for key, value in zip(keys, client.get(keys, size), strict=True):
            assert value in (VALUES[key], Status.MISSING), f"{key} came back wrong"
            found += value is not Status.MISSING
    return found


def outlive(survivor, victims, pool, choose, line: int, within: str | None) -> int:
    """Have a client killed there, and check what the survivor finds; how many values there were."""
    seed = int(choose.integers(1 << 30))
    victims.tell("work", pool.name, line, seed, within)
    where = f"line {line} of {within}, seed {seed}"
    assert faults(survivor.backend) == [], where
    seen = read_all(survivor)
    for key in choose.permutation(list(VALUES))[:6].tolist():
        assert survivor.put({key: VALUES[key]}) == [Status.OK], where
    pool.open().backend.close()
    stats = survivor.backend.stats()
    assert (stats["clients"], stats["open_writes"], stats["leases"], stats["pins"]) == (1, 0, 0, 0), where
    assert faults(survivor.backend) == [], where
    return seen


def test_a_client_killed_at_any_line_leaves_a_sound_pool_behind(pool, victims):
    survivor, choose = pool.open(), np.random.default_rng(SEED)
    lines = victims.tell("work", pool.name, line=1 << 40)["lines"]
    points = choose.integers(1, lines, WORK_POINTS).tolist()
    assert sum(outlive(survivor, victims, pool, choose, line, None) for line in points) > 0


@pytest.mark.parametrize("within", CHANGES)
def test_a_client_killed_at_each_line_of_a_change_leaves_a_sound_pool_behind(pool, victims, within):
    survivor, choose = pool.open(), np.random.default_rng(SEED)
    victims.tell("work", pool.name, line=1 << 40)
    for line in range(1, CHANGES[within] + 1):
        outlive(survivor, victims, pool, choose, line, within)


def test_a_maker_killed_at_any_line_leaves_nothing_that_hinders_the_next(pool, victims):
    lines = victims.tell("make", f"{pool.name}-x", line=1 << 40)["lines"]
    crash_points.LocalBackend(f"{pool.name}-x", crash_points.CAPACITY).close()
    for line in np.random.default_rng(SEED).integers(1, lines, MAKE_POINTS).tolist():
        victims.tell("make", pool.name, line)
        client = pool.open()
        assert client.put({"k": PAGE}) == [Status.OK], f"line {line}"
        assert client.get(["k"], 4096) == [PAGE], f"line {line}"
        assert client.backend.stats()["clients"] == 1, f"line {line}"
        client.backend.close()
        assert not pool.folder.exists()


def test_the_survivor_of_a_storm_reads_no_wrong_byte(pool, victims):
    survivor = pool.open()
    choose = np.random.default_rng(SEED)
    storm = [victims.start("storm", pool.name, seed) for seed in (1, 2, 3)]
    kills = seen = 0
    end = time.monotonic() + STORM_SECONDS
    while time.monotonic() < end:
        seen += read_all(survivor)
        keys = choose.permutation(list(VALUES))[:4].tolist()
        survivor.put({keys[0]: VALUES[keys[0]]})
        survivor.backend.batch_add_lease(keys, 20)
        if kills % 8 == 0:
            assert faults(survivor.backend) == []
        kill(storm.pop(int(choose.integers(len(storm)))))
        kills += 1
        storm.append(victims.start("storm", pool.name, 100 + kills))
    for pid in storm:
        kill(pid)
    assert seen > 100
    assert kills > 10
    assert faults(survivor.backend) == []
    pool.open()
    stats = survivor.backend.stats()
    assert (stats["clients"], stats["open_writes"], stats["pins"]) == (2, 0, 0)


def test_what_the_dead_held_is_free_again(pool, victims):
    survivor = pool.open()
    survivor.put({"leased": PAGE, "pinned": PAGE})
    pid = victims.start("hold", pool.name)
    survivor.backend.batch_alloc(["shared"], [4096])
    assert survivor.put({"opened": PAGE}) == [Status.REFUSED]
    stats = survivor.backend.stats()
    assert (stats["open_writes"], stats["leases"], stats["pins"], stats["clients"]) == (2, 1, 1, 2)
    kill(pid)
    assert survivor.put({"opened": PAGE}) == [Status.OK]
    stats = survivor.backend.stats()
    assert (stats["open_writes"], stats["leases"], stats["pins"], stats["clients"]) == (1, 0, 0, 1)
    assert survivor.backend.ledger()["open_writes"] == 1, "our part in the shared write stays"
    assert survivor.backend.batch_write_finish(["shared"], [0]) == [Status.OK]


def test_a_pool_full_of_what_the_dead_held_is_not_full(pool, victims):
    survivor = pool.open()
    pid = victims.start("storm", pool.name)
    kill(pid)
    survivor.put({"leased": PAGE, "pinned": PAGE})
    pid = victims.start("hold", pool.name)
    kill(pid)
    pages = crash_points.CAPACITY // 4096
    assert survivor.put({f"x{n}": PAGE for n in range(pages)}) == [Status.OK] * pages


def test_a_client_stopped_in_mid_copy_keeps_nobody_waiting(pool, victims):
    pool.lock_timeout = 10.0
    survivor = pool.open()
    survivor.put({"leased": PAGE, "pinned": b"q" * 4096})
    pid = victims.start("hold", pool.name)
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    pages = crash_points.CAPACITY // 4096
    assert survivor.put({f"x{n}": PAGE for n in range(2 * pages)})[:10] == [Status.OK] * 10
    assert survivor.get(["pinned"], 4096) == [b"q" * 4096], "a value that is being copied stays"
    kill(pid)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_a_client_stopped_under_the_lock_costs_the_others_a_deadline_each(pool, victims, end):
    pool.lock_timeout = 0.2
    survivor = pool.open()
    survivor.put({"k": PAGE})
    pid = victims.start("stop_under_lock", pool.name)
    wait_for_state(pid, "T")
    assert survivor.put({"x": PAGE}) == [Status.TIMEOUT]
    assert survivor.get(["k"], 4096) == [Status.TIMEOUT]
    with pytest.raises(DeadlineExceeded):
        survivor.exists("k")
    if end == "goes on":
        os.kill(pid, signal.SIGCONT)
        wait_for_state(pid, "ZX")
    else:
        kill(pid)
    assert survivor.put({"x": PAGE}) == [Status.OK]
    assert survivor.get(["k", "x"], 4096) == [PAGE, PAGE]
    assert survivor.backend.stats()["rebuilds"] == (end == "is killed")
    assert faults(survivor.backend) == []


def test_whoever_opens_a_pool_that_is_being_made_waits_for_it_with_a_deadline(pool, victims):
    pid = victims.start("make_slowly", pool.name)
    with pytest.raises(DeadlineExceeded, match="being made"):
        LocalBackend(pool.name, crash_points.CAPACITY, open_timeout=0.2)
    kill(pid)
    client = pool.open()
    assert client.put({"k": PAGE}) == [Status.OK]


FORK = """
import os, sys
import numpy as np
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.errors import ClosedError
from vllm_ascend_ext.kv_pool.fence import open_fence
name = sys.argv[1]
parent = LocalBackend(name, 1 << 20)
memory = np.full(4096, 7, np.uint8)
at, sizes = np.array([[memory.ctypes.data]]), np.array([[4096]])
assert parent.put(["k"], at, sizes, open_fence()) == [0]
parent.batch_alloc(["open"], [4096])
child = os.fork()
if not child:
    try:
        parent.exists(["k"])
    except ClosedError as error:
        assert "after a fork open it again" in str(error)
        parent.close()
        again = LocalBackend(name, 1 << 20)
        assert again.exists(["k"]) == [1]
        assert again.stats()["clients"] == 2
        del parent
        assert again.stats()["clients"] == 2
        again.close()
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert parent.ledger()["open_writes"] == 1
other = LocalBackend(name, 1 << 20)
assert other.stats()["clients"] == 2 and other.stats()["open_writes"] == 1
other.close()
print("well")
"""


def test_a_forked_child_may_not_use_its_parent_s_client_and_does_it_no_harm(pool):
    told = subprocess.run([sys.executable, "-c", FORK, pool.name], capture_output=True, text=True, timeout=120)
    assert told.stdout == "well\n", told.stderr
    assert not pool.folder.exists(), "an interpreter that ends signs its clients out"


ORPHAN = """
import os, signal, sys, time
import numpy as np
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.fence import open_fence
parent = LocalBackend(sys.argv[1], 1 << 20)
parent.batch_alloc(["open"], [4096])
mother = os.getpid()
if os.fork():
    signal.pause()
child = LocalBackend(sys.argv[1], 1 << 20)
assert child.stats()["clients"] == 2
os.kill(mother, signal.SIGKILL)
while os.getppid() == mother:
    time.sleep(0.001)
memory = np.full(4096, 7, np.uint8)
print(child.put(["open"], np.array([[memory.ctypes.data]]), np.array([[4096]]), open_fence()), child.stats()["clients"])
"""


def test_a_forked_child_does_not_keep_its_dead_parent_s_claims_alive(pool):
    told = subprocess.run([sys.executable, "-c", ORPHAN, pool.name], capture_output=True, text=True, timeout=120)
    assert told.stdout == "[0] 1\n", told.stderr


def test_two_processes_share_one_pool(pool, victims):
    client = pool.open()
    victims.tell("work", pool.name, line=1 << 40, seed=5)
    assert read_all(client) > 5
    at = np.zeros((1, 1), np.int64)
    assert client.backend.get(["k0"], at, at, open_fence()) == [Status.INVALID]
