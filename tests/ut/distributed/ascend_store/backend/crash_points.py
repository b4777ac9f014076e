"""A process that forks others, which tell stories on a local pool and are killed (SIGKILL) in the middle of them.

Reads lines of JSON, {"story", "pool", "line", "within", "seed"}, and answers each with one. With a line, the child
kills itself when it comes to that line of the store, counted over all of vllm_ascend_ext/kv_pool/backend or over the
function named by "within"; the answer tells the lines it ran and whether it died. Without, the answer is the child's
pid, as soon as its story says that it is ready.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from vllm_ascend_ext.kv_pool import backend as package
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.backend.local_table import Table
from vllm_ascend_ext.kv_pool.fence import open_fence

CAPACITY = 64 * 4096
KEYS = 48
STORE = str(Path(package.__file__).parent)


def value_of(key: int) -> bytes:
    """Every key's only value: of some 1 to 3 pages, each 8 bytes of which tell the key and the place."""
    words = np.arange(512 + 200 * (key % 6), dtype=np.uint64) * np.uint64(1_000_003) + np.uint64(key)
    return words.tobytes()


def arrays(values):
    memory = [np.frombuffer(value, np.uint8).copy() for value in values]
    at = np.array([[row.ctypes.data] for row in memory], np.int64)
    return memory, at, np.array([[len(row)] for row in memory], np.int64)


def work(pool: str, seed: int, ready=None) -> None:
    """Everything that a client can do, with evictions, for keys that the seed chooses."""
    choose = np.random.default_rng(seed)
    client = LocalBackend(pool, CAPACITY, keep=True)
    for _ in range(2):
        keys = choose.permutation(KEYS)[:12].tolist()
        names = [f"k{key}" for key in keys]
        memory, at, sizes = arrays([value_of(key) for key in keys])
        client.put(names, at, sizes, open_fence())
        client.get(names, at, sizes, open_fence())
        client.exists(names)
        client.batch_add_lease(names[:3], 60_000)
        fresh = choose.permutation(KEYS)[:6].tolist()
        names = [f"k{key}" for key in fresh]
        memory, at, sizes = arrays([value_of(key) for key in fresh])
        gvas = np.array(client.batch_alloc(names, sizes[:, 0]))
        some = gvas > 0
        assert client.batch_copy(gvas[some], at[some, 0], sizes[some, 0], 0, open_fence()) == 0
        client.batch_write_finish(names, [0, 1, 0, 1, 0, 0])
        client.batch_get_key_info(names)
        client.remove(names[:1])
        client.batch_remove_lease([f"k{key}" for key in keys[:3]])
        del memory
    client.close()


def make(pool: str, seed: int, ready=None) -> None:
    """Make the pool, which isn't there yet."""
    LocalBackend(pool, CAPACITY, keep=True).close()


def storm(pool: str, seed: int, ready) -> None:
    """Work until killed."""
    ready()
    while True:
        work(pool, seed)
        seed += 1


def hold(pool: str, seed: int, ready) -> None:
    """Hold everything that can be held, and wait to be killed."""
    client = LocalBackend(pool, CAPACITY, keep=True)
    client.batch_alloc(["opened"], [4096])
    client.batch_alloc(["shared"], [4096])
    client.batch_add_lease(["leased"], 1 << 40)
    stop_in_copy(client, "pinned", ready)


def stop_in_copy(client, key: str, ready) -> None:
    class Stop:
        def from_host(self, host, blocks, sizes):
            ready()
            signal.pause()

    client._copier = Stop()
    _, at, sizes = arrays([bytes(4096)])
    client.get([key], at, sizes, open_fence())


def stop_under_lock(pool: str, seed: int, ready) -> None:
    """Stop (SIGSTOP) in the middle of a change of the index; close when continued."""
    client = LocalBackend(pool, CAPACITY, keep=True)
    with client._session.changing():
        ready()
        os.kill(os.getpid(), signal.SIGSTOP)
    client.close()


def make_slowly(pool: str, seed: int, ready) -> None:
    """Take long over making the pool."""

    def initialise(segment):
        ready()
        signal.pause()

    Table.initialise = initialise
    LocalBackend(pool, CAPACITY, keep=True)


STORIES = {story.__name__: story for story in (work, make, storm, hold, stop_under_lock, make_slowly)}


def killed_at(line: int, story: str, pool: str, seed: int, within: str | None) -> int:
    """Tell the story and die at the ``line``-th line of the store; the number of lines run if there are fewer."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(STORE) or within not in (None, frame.f_code.co_name):
            return None
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    STORIES[story](pool, seed)
    sys.settrace(None)
    return count


def answer(story: str, pool: str, seed: int, line: int | None = None, within: str | None = None) -> dict:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        if line is None:
            STORIES[story](pool, seed, lambda: os.write(writer, b"ready"))
        else:
            os.write(writer, str(killed_at(line, story, pool, seed, within)).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 100)
    os.close(reader)
    if line is None:
        assert said == b"ready"
        return {"pid": child}
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child ended with {status}"
    return {"lines": int(said or 0), "killed": killed}


if __name__ == "__main__":
    for request in sys.stdin:
        print(json.dumps(answer(**json.loads(request))), flush=True)
