"""Orders at the boundaries of hashes and blocks: each block goes by its own hash, or its request fails alone."""

import numpy as np
import pytest

from fixtures.layer_rank import LayerRank
from fixtures.parts import make_setup
from vllm_ascend_ext.kv_pool.coordinator import NULL_BLOCK
from vllm_ascend_ext.kv_pool.groups import CacheGroup
from vllm_ascend_ext.kv_pool.orders import Orders
from vllm_ascend_ext.kv_pool.requests import LoadSpec, PoolMetadata, ReqMeta, SaveSpec
from vllm_ascend_ext.kv_pool.token_database import ChunkedTokenDatabase, Naming

HASHES = [bytes([number]) * 32 for number in range(16)]


def jobs(naming, hashes, blocks, tokens, scale=1):
    """The jobs that save and load the first ``tokens`` tokens, blocks having 4 * ``scale`` of them."""
    setup = make_setup(groups=(CacheGroup(4 * scale),), hash_unit=4)
    orders = Orders(setup, ChunkedTokenDatabase(setup, naming))
    meta = ReqMeta(
        "a",
        (np.arange(1, blocks + 1),),
        tuple(HASHES[:hashes]),
        LoadSpec(1, 0, tokens, False) if tokens else None,
        SaveSpec(2, 0, tokens),
    )
    return orders.save_job(meta), orders.load_job(meta) if tokens else None


@pytest.mark.parametrize("naming", list(Naming))
@pytest.mark.parametrize(
    ("hashes", "blocks", "tokens", "scale", "last"),
    [
        (0, 0, 0, 1, None),  # none
        (1, 1, 4, 1, 0),  # one
        (4, 4, 16, 1, 3),  # exactly full
        (6, 4, 16, 1, 3),  # more hashes than block ids
        (4, 6, 16, 1, 3),  # fewer hashes than blocks
        (4, 2, 16, 2, 3),  # a hash unit finer than the block: its last unit names it
        (5, 3, 16, 2, 3),  # and a unit of the next one
        (16, 2, 64, 8, 15),
    ],
)
def test_each_block_has_the_hash_of_its_last_unit(naming, hashes, blocks, tokens, scale, last):
    save, load = jobs(naming, hashes, blocks, tokens, scale)
    for job in filter(None, (save, load)):
        (part,) = job.parts
        assert part.block_ids.tolist() == list(range(1, tokens // (4 * scale) + 1))
        assert len(part.keys) == len(part.block_ids)
        for index, key in enumerate(part.keys):
            assert HASHES[(index + 1) * scale - 1].hex() in key
        assert last is None or HASHES[last].hex() in part.keys[-1]


@pytest.mark.parametrize("naming", list(Naming))
def test_blocks_that_the_table_does_not_have_are_not_saved_and_can_not_be_loaded(naming):
    save, _ = jobs(naming, 4, 4, 16)
    assert len(save.parts[0].keys) == 4
    with pytest.raises(IndexError):
        jobs(naming, 4, 2, 16)


@pytest.mark.parametrize("naming", list(Naming))
@pytest.mark.parametrize(("hashes", "tokens"), [(0, 4), (2, 12), (3, 16)])
def test_a_block_without_a_hash_is_an_error_and_never_another_blocks_key(naming, hashes, tokens):
    with pytest.raises(IndexError):
        jobs(naming, hashes, 4, tokens)


@pytest.mark.parametrize("kind", ["gva", "strict", "key"])
@pytest.mark.parametrize(
    ("hashes", "blocks", "tokens"),
    [(0, 4, 16), (3, 4, 16), (4, 3, 16)],
    ids=["no hashes", "fewer hashes than blocks", "fewer blocks than hashes"],
)
def test_orders_beyond_what_there_is_fail_their_request_alone_and_open_nothing(tmp_path, kind, hashes, blocks, tokens):
    rank = LayerRank(tmp_path, kind, checksum=True)
    good = rank.saved("good")
    table = (np.arange(21, 21 + blocks),)
    bad = ReqMeta("bad", table, tuple(HASHES[:hashes]), LoadSpec(91, 0, tokens, False), SaveSpec(92, 0, tokens))
    orders = PoolMetadata([bad, *rank.orders((good, 16, None)).requests], (np.empty(0, dtype=np.int64),))
    rank.worker.start_load_kv(orders)
    rank.forward(orders)
    errors, report = rank.finish(orders)
    assert errors == set(table[0].tolist())
    assert 91 in report.failed_loads
    assert len(report.failed_loads) == 1
    assert report.saved_until[92] == (0, 1)
    assert rank.worker.stats.get("load_failed") == 1
    assert rank.right(good, 16)
    asked = {
        key for method in ("exists", "get", "batch_get_key_info") for keys in rank.store.calls(method) for key in keys
    }
    assert not [key for key in asked if not key or HASHES[0].hex() in key], "nothing of it was asked of the store"
    rank.check_given_back()
    rank.worker.close()


@pytest.mark.parametrize("kind", ["gva", "strict", "key"])
def test_a_save_got_no_further_than_the_blocks_that_there_are(tmp_path, kind):
    """It was told of four blocks, and the table has three: the fourth is not in the store, whatever the orders say."""
    rank = LayerRank(tmp_path, kind)
    orders = rank.orders((rank.request("a", [1, 2, 3]), None, (0, 16)))
    rank.forward(orders)
    assert list(rank.finish(orders)[1].saved_until.values()) == [(12, 1)]
    rank.worker.close()


def test_a_load_into_the_null_block_is_an_error():
    """A block that a sliding window has let go has none on the device."""
    setup = make_setup(groups=(CacheGroup(4),), hash_unit=4)
    orders = Orders(setup, ChunkedTokenDatabase(setup, Naming.BLOCK))
    meta = ReqMeta("a", (np.array([NULL_BLOCK, 2]),), tuple(HASHES[:2]), LoadSpec(1, 0, 8, False), None)
    with pytest.raises(ValueError, match="group 0 of a has no blocks for what is to be loaded"):
        orders.load_job(meta)
