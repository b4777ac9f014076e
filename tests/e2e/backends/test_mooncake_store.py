"""The real Mooncake Store: right bytes or a failure, whatever becomes of its master, its providers and its room."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fixtures.mooncake import MooncakeMaster, free_port, mooncake_config
from vllm_ascend_ext.kv_pool.backend.mooncake import MooncakeBackend
from vllm_ascend_ext.kv_pool.calls import Lanes
from vllm_ascend_ext.kv_pool.clock import Deadline
from vllm_ascend_ext.kv_pool.errors import ConfigError, DeadlineExceeded, Status, from_native
from vllm_ascend_ext.kv_pool.fence import Fence

from .conftest import LIMIT_SECONDS, eventually
from .peer import Peer, get, put

SIZE = 128 << 10
KEYS = [f"key-{n}" for n in range(24)]
ALL_OK = [0] * len(KEYS)

Connect = Callable[..., MooncakeBackend]
NewPeer = Callable[..., Peer]


def statuses(codes: list[int]) -> set[Status]:
    return {from_native("mooncake", code) for code in codes}


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_two_processes_read_what_the_other_has_put(connect: Connect, new_peer: NewPeer) -> None:
    backend, peer = connect(), new_peer()
    theirs = [f"theirs-{key}" for key in KEYS]
    assert peer.ask("put", keys=theirs, size=SIZE) == ALL_OK
    assert put(backend, KEYS, SIZE) == ALL_OK
    assert get(backend, theirs, SIZE) == ALL_OK
    assert peer.ask("get", keys=KEYS, size=SIZE) == ALL_OK


def test_a_rank_that_prefers_its_own_memory_loses_nothing_with_another(connect: Connect, new_peer: NewPeer) -> None:
    """The engine does not look at ``preferred_segment`` beside ``prefer_alloc_in_same_node``, the default."""
    backend, peer = connect(preferred_segment=True), new_peer()
    assert put(backend, KEYS, SIZE) == ALL_OK
    peer.kill()
    assert get(backend, KEYS, SIZE) == ALL_OK


def test_a_put_of_a_key_that_another_process_has_only_begun_is_refused(connect: Connect, new_peer: NewPeer) -> None:
    """The engine answers 0 to such a put, and the key is not there."""
    backend, peer = connect(), new_peer()
    assert peer.ask("begin", key="begun", size=SIZE) == [0]
    assert put(backend, ["other", "begun"], SIZE) == [0, Status.REFUSED]
    assert statuses(get(backend, ["begun"], SIZE)) == {Status.MISSING}
    assert peer.ask("drop", key="begun") == [0]
    assert put(backend, ["begun"], SIZE) == [0]
    assert get(backend, ["begun"], SIZE) == [0]


def test_a_value_that_was_just_read_can_be_removed(connect: Connect) -> None:
    """Wrong bytes are noticed by reading them, and the reader's lease must not keep them."""
    backend = connect()
    assert put(backend, KEYS[:2], SIZE) == [0, 0]
    assert get(backend, KEYS[:2], SIZE) == [0, 0]
    assert list(backend.remove(KEYS[:1])) == [0]
    assert list(backend.exists(KEYS[:2])) == [0, 1]


def test_when_there_is_no_room_each_key_is_there_or_refused(connect: Connect) -> None:
    backend = connect()
    keys = [f"full-{n}" for n in range(16 * (1 << 20) // SIZE * 2)]
    codes = put(backend, keys, SIZE)
    assert statuses(codes) == {Status.OK, Status.FULL}
    stored = [key for key, code in zip(keys, codes, strict=True) if code == 0]
    assert get(backend, stored, SIZE) == [0] * len(stored)
    eventually(lambda: put(backend, ["afterwards"], SIZE) == [0], "room after the leases have ended")
    assert get(backend, ["afterwards"], SIZE) == [0]


# -- set-up ------------------------------------------------------------------------------------------------------------


def test_a_missing_master_is_named_at_once(master: MooncakeMaster) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"master_server_address='{address}'"):
        MooncakeBackend(mooncake_config(master, master_server_address=address))


def test_set_ups_that_fail_or_succeed_leave_nothing_behind(master: MooncakeMaster) -> None:
    """After the first, with which the engine starts what it keeps for the process."""

    opened: list[MooncakeBackend] = []

    def opens() -> bool:
        try:
            opened.append(MooncakeBackend(mooncake_config(master)))
        except ConfigError:  # a busy machine's master needs a moment after the thaw
            return False
        return True

    def cycle() -> None:
        master.freeze()  # it accepts the connection, and never answers
        try:
            with pytest.raises(ConfigError, match="answers"):
                MooncakeBackend(mooncake_config(master))
        finally:
            master.thaw()
        eventually(opens, "a set-up after the thaw")
        backend = opened.pop()
        assert put(backend, KEYS, SIZE) == ALL_OK
        backend.close()

    process = psutil.Process()
    cycle()
    before = process.num_fds(), process.num_threads()
    for _ in range(3):
        cycle()
    after = process.num_fds(), process.num_threads()
    assert after[0] - before[0] < 3, f"descriptors: {before[0]}, then {after[0]}"
    assert after[1] - before[1] < 3, f"threads: {before[1]}, then {after[1]}"


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_master_killed_in_mid_traffic_costs_values_and_never_bytes(
    master: MooncakeMaster, connect: Connect, new_peer: NewPeer
) -> None:
    """Four threads go on throughout; when it is back, so are they, without being told."""
    backend, peer = connect(), new_peer()
    seen: set[Status] = set()
    stop = Fence()

    def traffic(thread: int) -> None:
        rounds = 0
        while not stop.revoked:
            keys = [f"{thread}-{rounds}-{n}" for n in range(8)]
            codes = put(backend, keys, SIZE)
            stored = [key for key, code in zip(keys, codes, strict=True) if code == 0]
            seen.update(statuses(codes))
            seen.update(statuses(get(backend, [*stored, "never put"], SIZE)))
            rounds += 1

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(traffic, n) for n in range(4)]
        try:
            eventually(lambda: Status.OK in seen, "traffic")
            master.kill()
            eventually(lambda: Status.UNAVAILABLE in seen, "the loss is noticed")
            master.start()
            eventually(lambda: put(backend, KEYS, SIZE) == ALL_OK, "puts after the restart")
            eventually(lambda: peer.ask("get", keys=KEYS, size=SIZE) == ALL_OK, "gets elsewhere")
        finally:
            stop.revoke(Deadline.after(LIMIT_SECONDS))
        for thread in threads:
            thread.result(LIMIT_SECONDS)
    assert backend.ledger() == {"calls": 0, "slots": 0}


def test_a_frozen_master_is_a_failure_within_its_limit_and_harms_nobody_afterwards(
    master: MooncakeMaster, connect: Connect
) -> None:
    backend, other = connect(), connect()
    assert put(backend, KEYS, SIZE) == ALL_OK
    master.freeze()
    try:
        with ThreadPoolExecutor(3) as pool:
            calls = [
                pool.submit(put, backend, ["late"], SIZE),
                pool.submit(get, backend, KEYS, SIZE),
                pool.submit(lambda: list(backend.exists(KEYS))),
            ]
            for call in calls:
                assert statuses(call.result(LIMIT_SECONDS)) == {Status.UNAVAILABLE}
        other.close()
    finally:
        master.thaw()
    eventually(lambda: put(backend, KEYS, SIZE) == ALL_OK, "puts after the thaw")
    assert get(backend, KEYS, SIZE) == ALL_OK


def test_a_provider_that_dies_takes_its_values_and_nothing_else(connect: Connect, new_peer: NewPeer) -> None:
    provider = new_peer()
    backend = connect(global_segment_size=0)
    assert put(backend, KEYS, SIZE) == ALL_OK
    provider.kill()
    assert Status.OK not in statuses(get(backend, KEYS, SIZE))
    eventually(lambda: not any(backend.exists(KEYS)), "the master notices")
    assert statuses(put(backend, KEYS, SIZE)) == {Status.FULL}
    new_peer()
    eventually(lambda: put(backend, KEYS, SIZE) == ALL_OK, "puts to the next provider")
    assert get(backend, KEYS, SIZE) == ALL_OK


def test_a_get_from_a_frozen_provider_is_given_up_and_its_slot_comes_back(connect: Connect, new_peer: NewPeer) -> None:
    """The lane is replaced, look-ups go on, and what comes late is dropped with the call."""
    provider = new_peer()
    backend = connect(global_segment_size=0, slots=2)
    assert put(backend, KEYS, SIZE) == ALL_OK
    lanes, fence = Lanes("test", size=1), Fence()
    lanes.start(LIMIT_SECONDS)
    provider.freeze()
    try:
        with pytest.raises(DeadlineExceeded):
            lanes.run("stuck", lambda: get(backend, KEYS, SIZE, fence), Deadline.after(0.5), fence)
        assert backend.ledger() == {"calls": 1, "slots": 1}
        found = lanes.run("look-up", lambda: list(backend.exists(["never put"])), Deadline.after(LIMIT_SECONDS))
        assert found == [0]
    finally:
        provider.thaw()
    assert lanes.wait_until(lambda: lanes.late == 1, LIMIT_SECONDS)
    assert lanes.close(LIMIT_SECONDS) == []
    assert backend.ledger() == {"calls": 0, "slots": 0}
    eventually(lambda: put(backend, KEYS, SIZE) == ALL_OK, "puts to the provider again")
    assert get(backend, KEYS, SIZE) == ALL_OK
