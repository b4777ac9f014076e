"""The frames of a look-up and of its answer, both ways; must never know sockets, or what a hash stands for.

Request, as vllm-ascend's peers send and read it: ``token_len`` as 4 bytes big-endian; one msgpack list of KV-cache
group ids; the tokens already hit in HBM as 4 bytes big-endian; a msgpack list of block hashes as hex text. Answer: the
hit tokens as 4 bytes big-endian. The peers' encoder may put a value into several frames: the msgpack text first, then
large buffers that it refers to. A list of text refers to none, so frames behind a whole list mean nothing; a list that
was cut into several frames is put together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from vllm_ascend_ext.kv_pool.errors import PoolError
from vllm_ascend_ext.kv_pool.keys import hash_hex

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_TOKENS = 2**32 - 1
"""The largest count that 4 bytes hold."""

_COUNT_BYTES = 4
_FRAMES = 4
_encode = msgspec.msgpack.Encoder().encode


class WireError(PoolError, ValueError):
    """Frames that are not a look-up or not its answer; the message is the reason."""


@dataclass(frozen=True)
class LookupRequest:
    """One question: how many of the first ``token_len`` tokens, named by their block hashes, does the pool hold?"""

    token_len: int
    group_ids: Sequence[int]
    hbm_hit_tokens: int
    hashes: Sequence[bytes | str]


@dataclass(frozen=True)
class WireLimits:
    """What a server takes. The defaults carry a prompt of 2 Mi tokens at 16 tokens a hash of 32 bytes."""

    max_hashes: int = 128 * 1024
    max_groups: int = 256
    max_frames: int = 64
    max_frame_bytes: int = 16 << 20
    max_total_bytes: int = 32 << 20


DEFAULT_LIMITS = WireLimits()


def encode_request(request: LookupRequest) -> list[bytes]:
    """The four frames of ``request``; WireError if a field can't be put into them."""
    return [
        _encode_count("token_len", request.token_len),
        _encode(list(request.group_ids)),
        _encode_count("hbm_hit_tokens", request.hbm_hit_tokens),
        _encode(_hex_texts(request.hashes)),
    ]


def decode_request(frames: Sequence[Buffer], limits: WireLimits = DEFAULT_LIMITS) -> LookupRequest:
    """The question in ``frames`` (without the envelope); WireError says what is wrong with them.

    Sizes are checked first: nothing of a request above ``limits`` is decoded.
    """
    _check_sizes(frames, limits)
    group_decoder, hash_decoder = _decoders(limits)
    token_len = _decode_count("token_len", frames[0])
    group_ids = _decode("group ids", group_decoder, frames[1])
    hbm_hit_tokens = _decode_count("hbm_hit_tokens", frames[2])
    hashes = _decode_split("hashes", hash_decoder, frames[3:])
    return LookupRequest(token_len, group_ids, hbm_hit_tokens, hashes)


def encode_reply(hit_tokens: int) -> bytes:
    """The one frame of an answer; WireError if ``hit_tokens`` is not within 4 bytes."""
    return _encode_count("hit tokens", hit_tokens)


def decode_reply(frames: Sequence[Buffer], token_len: int) -> int:
    """The hit tokens; WireError unless ``frames`` is one frame of 4 bytes with 0 to ``token_len`` in it."""
    if len(frames) != 1:
        raise WireError(f"answer: {len(frames)} frames where 1 is due")
    hit = _decode_count("answer", frames[0])
    if hit > token_len:
        raise WireError(f"answer: {hit} hit tokens where at most {token_len} were asked for")
    return hit


def _encode_count(field: str, value: int) -> bytes:
    try:
        return value.to_bytes(_COUNT_BYTES, "big")
    except (OverflowError, AttributeError):
        raise WireError(f"{field} is {value!r}; it must be an integer from 0 to {MAX_TOKENS}") from None


def _decode_count(field: str, frame: Buffer) -> int:
    if len(frame) != _COUNT_BYTES:
        raise WireError(f"{field}: {len(frame)} bytes where {_COUNT_BYTES} are due")
    return int.from_bytes(bytes(frame), "big")


def _hex_texts(hashes: Sequence[bytes | str]) -> list[str]:
    try:
        return list(map(bytes.hex, hashes))  # type: ignore[arg-type]  # vLLM's form is all raw bytes: half the time
    except TypeError:
        pass
    try:
        return [hash_hex(block_hash) for block_hash in hashes]
    except (TypeError, AttributeError) as error:
        raise WireError(f"hashes: each must be bytes or hex text: {error}") from None


def _check_sizes(frames: Sequence[Buffer], limits: WireLimits) -> None:
    if not _FRAMES <= len(frames) <= limits.max_frames:
        raise WireError(f"request: {len(frames)} frames where {_FRAMES} to {limits.max_frames} are due")
    sizes = [len(frame) for frame in frames]
    if max(sizes) > limits.max_frame_bytes:
        raise WireError(f"request: a frame of {max(sizes)} bytes where at most {limits.max_frame_bytes} are allowed")
    if sum(sizes) > limits.max_total_bytes:
        raise WireError(f"request: {sum(sizes)} bytes where at most {limits.max_total_bytes} are allowed")


@lru_cache(maxsize=8)
def _decoders(
    limits: WireLimits,
) -> tuple[msgspec.msgpack.Decoder[tuple[int, ...]], msgspec.msgpack.Decoder[list[str]]]:
    """Typed decoders that count before they build anything."""
    group = Annotated[int, msgspec.Meta(ge=0)]
    groups = Annotated[tuple[group, ...], msgspec.Meta(min_length=1, max_length=limits.max_groups)]
    hashes = Annotated[list[str], msgspec.Meta(max_length=limits.max_hashes)]
    return msgspec.msgpack.Decoder(groups), msgspec.msgpack.Decoder(hashes)


def _decode(field: str, decoder: msgspec.msgpack.Decoder[T], frame: Buffer) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{field}: {error}") from None


def _decode_split(field: str, decoder: msgspec.msgpack.Decoder[T], frames: Sequence[Buffer]) -> T:
    """The value in the first frame, or in all of them together if that one alone is not a whole value."""
    try:
        return _decode(field, decoder, frames[0])
    except WireError:
        if len(frames) == 1:
            raise
    return _decode(field, decoder, b"".join(bytes(frame) for frame in frames))
