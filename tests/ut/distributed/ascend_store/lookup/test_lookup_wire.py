"""The frames of a look-up are those of vllm-ascend's peers, byte for byte; anything else is refused with a reason."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_ext.kv_pool.keys import block_keys, group_hashes
from vllm_ascend_ext.kv_pool.lookup.wire import (
    DEFAULT_LIMITS,
    LookupRequest,
    WireError,
    WireLimits,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

HASH = bytes(range(32))
TEXT = HASH.hex().encode()

RECORDED = [
    (
        LookupRequest(256, (0,), 16, [HASH, HASH]),
        [b"\x00\x00\x01\x00", b"\x91\x00", b"\x00\x00\x00\x10", b"\x92" + (b"\xd9\x40" + TEXT) * 2],
    ),
    (  # a short hash is a fixstr; a group id above 127 a uint8
        LookupRequest(1, (0, 1, 200), 0, [b"\xab\xcd"]),
        [b"\x00\x00\x00\x01", b"\x93\x00\x01\xcc\xc8", b"\x00\x00\x00\x00", b"\x91\xa4abcd"],
    ),
    (  # from 16 entries on an array16, from 65,536 on an array32
        LookupRequest(2**32 - 1, (0,), 2**32 - 1, [HASH] * 16),
        [b"\xff\xff\xff\xff", b"\x91\x00", b"\xff\xff\xff\xff", b"\xdc\x00\x10" + (b"\xd9\x40" + TEXT) * 16],
    ),
    (
        LookupRequest(7, (0,), 0, [b"\x01"] * 65536),
        [b"\x00\x00\x00\x07", b"\x91\x00", b"\x00\x00\x00\x00", b"\xdd\x00\x01\x00\x00" + b"\xa201" * 65536],
    ),
]
GOOD = RECORDED[0][1]


def as_text(request: LookupRequest) -> LookupRequest:
    """What the other side sees: hashes as hex text."""
    hexes = [h if isinstance(h, str) else h.hex() for h in request.hashes]
    return LookupRequest(request.token_len, tuple(request.group_ids), request.hbm_hit_tokens, hexes)


@pytest.mark.parametrize(("request_", "frames"), RECORDED, ids=["two", "small", "array16", "array32"])
def test_a_request_is_the_recorded_frames_in_both_directions(request_: LookupRequest, frames: list[bytes]) -> None:
    assert encode_request(request_) == frames
    assert decode_request(frames) == as_text(request_)


def test_lists_are_what_msgspec_writes_as_vllms_encoder_does() -> None:
    hexes = [bytes([i]).hex() * 32 for i in range(200)]
    frames = encode_request(LookupRequest(200, [0, 3], 0, hexes))
    assert frames[1] == msgspec.msgpack.encode([0, 3])
    assert frames[3] == msgspec.msgpack.encode(hexes)


@given(
    st.builds(
        LookupRequest,
        token_len=st.integers(0, 2**32 - 1),
        group_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=8).map(tuple),
        hbm_hit_tokens=st.integers(0, 2**32 - 1),
        hashes=st.lists(st.binary(min_size=1, max_size=64) | st.binary(min_size=1, max_size=64).map(bytes.hex)),
    ),
    st.lists(st.integers(0, 400), max_size=5),
)
def test_what_was_encoded_is_decoded_also_when_the_hashes_are_cut_into_frames(
    request_: LookupRequest, cuts: list[int]
) -> None:
    *head, hashes = encode_request(request_)
    edges = [0, *sorted(cuts), len(hashes)]
    pieces = [hashes[a:b] for a, b in pairwise(edges)]
    assert decode_request([*head, *pieces]) == as_text(request_)


@pytest.mark.parametrize("extra", [[b""], [b"a large buffer"], [b"\xc1", b"\x91\x00"]])
def test_buffers_behind_a_whole_list_mean_nothing(extra: list[bytes]) -> None:
    assert decode_request([*GOOD, *extra]) == as_text(RECORDED[0][0])


@pytest.mark.parametrize("scale", [1, 2, 8])
def test_raw_hex_and_transported_hashes_make_the_same_keys(scale: int) -> None:  # A32
    raw = [bytes([i]) * 32 for i in range(24)]
    sent = decode_request(encode_request(LookupRequest(384, (0,), 0, raw))).hashes
    sent_as_text = decode_request(encode_request(LookupRequest(384, (0,), 0, [h.hex() for h in raw]))).hashes
    keys = block_keys("model@", group_hashes(raw, scale))
    assert len(keys) == 24 // scale
    assert (
        keys
        == block_keys("model@", group_hashes(sent, scale))
        == block_keys("model@", group_hashes(sent_as_text, scale))
    )


SMALL = WireLimits(max_hashes=3, max_groups=2, max_frames=5, max_frame_bytes=300, max_total_bytes=400)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "0 frames"),
        (GOOD[:1], "1 frames where 4 to 5 are due"),
        (GOOD[:3], "3 frames"),
        ([*GOOD, b"", b""], "6 frames"),
        ([b"\x00\x01\x00", *GOOD[1:]], "token_len: 3 bytes where 4 are due"),
        ([b"\x00\x00\x00\x01\x00", *GOOD[1:]], "token_len: 5 bytes"),
        ([*GOOD[:2], b"", GOOD[3]], "hbm_hit_tokens: 0 bytes"),
        ([GOOD[0], b"", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\xc1", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x90", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x91\xff", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x91\xc3", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x91\xcb" + bytes(8), *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x93\x00\x01\x02", *GOOD[2:]], "group ids: "),
        ([GOOD[0], b"\x00", *GOOD[2:]], "group ids: "),
        ([*GOOD[:3], b""], "hashes: "),
        ([*GOOD[:3], GOOD[3][:-1]], "hashes: "),
        ([*GOOD[:3], GOOD[3][:40], GOOD[3][41:]], "hashes: "),
        ([*GOOD[:3], b"\x91\x05"], "hashes: "),
        ([*GOOD[:3], b"\x91\xc4\x01a"], "hashes: "),
        ([*GOOD[:3], b"\xa4abcd"], "hashes: "),
        ([*GOOD[:3], b"\x91\xa1\xff"], "hashes: "),
        ([*GOOD[:3], b"\x91" * 290], "hashes: "),
        ([*GOOD[:3], b"\x94\xa1a\xa1b\xa1c\xa1d"], "hashes: "),
        ([*GOOD[:3], b"\xdd\xff\xff\xff\xff"], "hashes: "),
        ([*GOOD[:3], b"\xc1" * 301], "a frame of 301 bytes where at most 300 are allowed"),
        ([b"\xc1" * 301, *GOOD[1:]], "a frame of 301 bytes"),
        ([*GOOD[:3], b"\xc1" * 300, b"\xc1" * 100], "410 bytes where at most 400 are allowed"),
    ],
)
def test_anything_else_is_refused_with_the_reason(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_request(frames, SMALL)


def test_the_default_limits_take_a_prompt_of_two_mi_tokens() -> None:
    frames = encode_request(LookupRequest(2 << 20, (0,), 0, [HASH] * (128 * 1024)))
    assert len(decode_request(frames, DEFAULT_LIMITS).hashes) == 128 * 1024


@pytest.mark.parametrize("frame", [bytearray, memoryview])
def test_frames_may_be_any_bytes(frame: type) -> None:
    assert decode_request([frame(part) for part in GOOD]) == as_text(RECORDED[0][0])
    assert decode_reply([frame(b"\x00\x00\x00\x05")], 5) == 5


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("token_len is -1", LookupRequest(-1, (0,), 0, [HASH])),
        ("token_len is 4294967296", LookupRequest(2**32, (0,), 0, [HASH])),
        ("token_len is 1.5", LookupRequest(1.5, (0,), 0, [HASH])),  # type: ignore[arg-type]
        ("hbm_hit_tokens is None", LookupRequest(1, (0,), None, [HASH])),  # type: ignore[arg-type]
        ("hashes: ", LookupRequest(1, (0,), 0, [HASH, None])),  # type: ignore[list-item]
        ("hashes: ", LookupRequest(1, (0,), 0, ["ab", 5])),  # type: ignore[list-item]
    ],
)
def test_a_field_that_does_not_fit_is_named(field: str, request_: LookupRequest) -> None:
    with pytest.raises(WireError, match=field):
        encode_request(request_)


def test_an_answer_is_four_bytes_big_endian() -> None:
    assert encode_reply(0x01020304) == b"\x01\x02\x03\x04"
    assert decode_reply([b"\x00\x00\x01\x00"], 256) == 256
    assert decode_reply([b"\x00\x00\x00\x00"], 0) == 0
    with pytest.raises(WireError, match="hit tokens is -1"):
        encode_reply(-1)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "0 frames where 1 is due"),
        ([b"\x00\x00\x00\x01"] * 2, "2 frames"),
        ([b""], "0 bytes where 4 are due"),
        ([b"\x00\x00\x01"], "3 bytes"),
        ([b"\x00\x00\x00\x00\x01"], "5 bytes"),
        ([b"\x00\x00\x01\x01"], "257 hit tokens where at most 256 were asked for"),
        ([b"\xff\xff\xff\xff"], "4294967295 hit tokens"),
    ],
)
def test_an_answer_that_is_not_one_is_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_reply(frames, 256)
