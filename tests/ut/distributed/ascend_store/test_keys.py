"""Keys: the formats shared with vllm-ascend to the letter, and nothing that changes the bytes left out of them."""

from dataclasses import replace
from itertools import product

import pytest

from vllm_ascend_ext.kv_pool import keys as keys_module
from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.keys import BytesIdentity, KeyScheme, Topology, block_keys, group_hashes, hash_hex

IDENTITY = BytesIdentity("/models/org/Tiny-7B/", "bfloat16", (128,))
PLAIN = KeyScheme(IDENTITY, plain=True)
NAMED = KeyScheme(IDENTITY)
RANK = Topology(tp_size=4, tp_rank=3, pp_size=2, pp_rank=1, pcp_size=2, pcp_rank=1, dcp_size=2, dcp_rank=1)


class TestPlainFormats:
    """Byte for byte those of vllm-ascend's ascend_store of August 2026."""

    def test_block_key(self):
        rank = Topology(tp_size=4, tp_rank=3, num_kv_heads=4)
        (key,) = block_keys(PLAIN.block_prefix(rank, 0), [bytes.fromhex("00ff")])
        assert key == "Tiny-7B@pcp0@dcp0@head_or_tp_rank:3@pp_rank:0@group:0@cache_role:kv@cache_family:default@00ff"

    def test_layer_key(self):
        assert block_keys(PLAIN.layer_prefix(Topology(), 0, 7), ["ab"]) == [
            "Tiny-7B@pcp0@dcp0@head_or_tp_rank:0@group:0@cache_role:kv@cache_family:default@layer_id:7@ab"
        ]

    def test_gva_key_names_the_group_only_if_there_are_several(self):
        two = KeyScheme(IDENTITY, ("default", "compressed"), plain=True)
        assert PLAIN.gva_key(Topology(tp_size=2, tp_rank=1, num_kv_heads=2), 0, "ab") == "Tiny-7B@ab@1"
        assert two.gva_key(Topology(), 1, "ab") == "Tiny-7B@1@ab@0"

    def test_partial_block_key(self):
        assert PLAIN.partial_key(Topology(), "req-1", 0, 5, 700) == "Tiny-7B@partial@req-1@0@5@700@0"

    def test_the_family_is_that_of_the_group(self):
        two = KeyScheme(IDENTITY, ("default", "compressed"), plain=True)
        assert two.block_prefix(Topology(), 1).endswith("@group:1@cache_role:kv@cache_family:compressed@")


class TestWhatChangesTheBytesIsInTheKey:
    @pytest.mark.parametrize(
        "other",
        [
            replace(IDENTITY, model_path="/models/other/Tiny-7B"),
            replace(IDENTITY, kv_dtype="float8_e4m3fn"),
            replace(IDENTITY, block_sizes=(64,)),
            replace(IDENTITY, cache_shapes=((2, 128, 8, 128),)),
            replace(IDENTITY, extra="rope=yarn"),
        ],
        ids=lambda other: str(other),
    )
    def test_a_change_of_any_field_gives_other_keys(self, other):
        """A55. The directory's name is the same in all of them."""
        assert other.basename == IDENTITY.basename
        changed = KeyScheme(other)
        for rank in (Topology(), RANK):
            assert changed.block_prefix(rank, 0) != NAMED.block_prefix(rank, 0)
            assert changed.layer_prefix(rank, 0, 0) != NAMED.layer_prefix(rank, 0, 0)
            assert changed.gva_key(rank, 0, "ab") != NAMED.gva_key(rank, 0, "ab")
            assert changed.partial_key(rank, "r", 0, 0, 1) != NAMED.partial_key(rank, "r", 0, 0, 1)

    def test_a_new_layout_version_gives_other_keys(self, monkeypatch):
        before = NAMED.model
        monkeypatch.setattr(keys_module, "LAYOUT_VERSION", keys_module.LAYOUT_VERSION + 1)
        assert NAMED.model != before

    def test_equal_identities_give_equal_keys(self):
        assert BytesIdentity("/models/org/Tiny-7B/", "bfloat16", (128,)).fingerprint() == IDENTITY.fingerprint()

    @pytest.mark.parametrize("dimension", ["pp_size", "pcp_size", "dcp_size"])
    def test_a_shard_of_a_split_block_has_another_key_than_the_whole(self, dimension):
        """Rank 0 of two holds half the layers or tokens of what the only rank of one holds."""
        whole, split = Topology(), Topology(**{dimension: 2})
        assert NAMED.block_prefix(whole, 0) != NAMED.block_prefix(split, 0)

    def test_all_shards_of_a_block_have_distinct_keys(self):
        """A23: whatever the path, two ranks that own different bytes never share a key."""
        whole = Topology(tp_size=4, pp_size=2, pcp_size=2, dcp_size=2, num_kv_heads=2)
        owners = list(whole.owners())
        assert len(owners) == 2 * 2 * 2 * 2
        for scheme in (NAMED, PLAIN):
            for name in (
                lambda rank, scheme=scheme: scheme.block_prefix(rank, 0),
                lambda rank, scheme=scheme: scheme.layer_prefix(rank, 0, 0),
                lambda rank, scheme=scheme: scheme.gva_key(rank, 0, "ab"),
                lambda rank, scheme=scheme: scheme.partial_key(rank, "r", 0, 0, 1),
            ):
                assert len({name(rank) for rank in owners}) == len(owners)


class TestTopology:
    @pytest.mark.parametrize(
        ("tp_size", "kv_heads", "step", "heads"), [(1, 1, 1, 1), (1, 8, 1, 1), (8, 8, 1, 8), (8, 2, 4, 2), (4, 1, 4, 1)]
    )
    def test_ranks_that_share_a_kv_head_share_a_head_rank(self, tp_size, kv_heads, step, heads):
        ranks = [Topology(tp_size=tp_size, tp_rank=rank, num_kv_heads=kv_heads) for rank in range(tp_size)]
        assert {rank.put_step for rank in ranks} == {step}
        assert [rank.head_rank for rank in ranks] == [rank // step for rank in range(tp_size)]
        assert {rank.head_ranks for rank in ranks} == {heads}
        assert len(list(ranks[0].owners())) == heads

    def test_every_rank_is_the_same_shard_as_one_of_the_owners(self):
        topology = Topology(tp_size=4, pp_size=2, num_kv_heads=2)
        owned = {NAMED.block_prefix(owner, 0) for owner in topology.owners()}
        everybody = {
            NAMED.block_prefix(replace(topology, tp_rank=tp, pp_rank=pp), 0) for tp, pp in product(range(4), range(2))
        }
        assert owned == everybody

    def test_the_world_counts_processes(self):
        assert Topology(tp_size=4, pp_size=2, pcp_size=2, dcp_size=2, num_kv_heads=2).world_size == 16

    def test_only_one_rank_is_the_first(self):
        sizes = {"tp_size": 2, "pp_size": 2, "pcp_size": 2, "dcp_size": 2}
        first = [
            (tp, pp, pcp)
            for tp, pp, pcp in product(range(2), repeat=3)
            if Topology(**sizes, tp_rank=tp, pp_rank=pp, pcp_rank=pcp, dcp_rank=tp).is_first
        ]
        assert first == [(0, 0, 0)]

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"tp_size": 0}, "tp_size=0"),
            ({"pp_size": -1}, "pp_size=-1"),
            ({"num_kv_heads": 0}, "num_kv_heads=0"),
            ({"tp_size": 2, "tp_rank": 2, "num_kv_heads": 2}, "tp_rank=2"),
            ({"pp_rank": 1}, "pp_rank=1"),
            ({"pcp_rank": -1}, "pcp_rank=-1"),
            ({"dcp_rank": 1}, "dcp_rank=1"),
            ({"tp_size": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
        ],
    )
    def test_what_can_not_be_is_refused_by_name(self, fields, named):
        with pytest.raises(ConfigError, match=named):
            Topology(**fields)


class TestHashes:
    @pytest.mark.parametrize("scale", [1, 2, 8])
    def test_bytes_and_hex_text_give_the_same_keys(self, scale):
        """A32."""
        raw = [bytes([i, 255 - i]) * 16 for i in range(19)]
        text = [block_hash.hex() for block_hash in raw]
        from_raw = block_keys("p@", group_hashes(raw, scale))
        assert from_raw == block_keys("p@", group_hashes(text, scale))
        assert from_raw == ["p@" + hash_hex(raw[end - 1]) for end in range(scale, len(raw) + 1, scale)]

    def test_mixed_forms_are_allowed(self):
        assert block_keys("", [b"\x01", "02"]) == ["01", "02"]
        assert [hash_hex(b"\x01"), hash_hex("02")] == ["01", "02"]

    def test_units_of_an_incomplete_block_are_left_out(self):
        assert list(group_hashes([b"a", b"b", b"c"], 2)) == [b"b"]
        assert list(group_hashes([b"a"], 2)) == []
        assert list(group_hashes([], 1)) == []
