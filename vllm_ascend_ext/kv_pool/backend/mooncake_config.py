"""Mooncake's configuration, read from where vllm-ascend reads it; must never know the pool or import mooncake.

``MOONCAKE_CONFIG_PATH`` names a JSON file; ``MOONCAKE_MASTER`` and ``MOONCAKE_GLOBAL_SEGMENT_SIZE`` go before its
``master_server_address`` and ``global_segment_size``. The names are vllm-ascend's, so one file serves both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_ascend_ext.kv_pool.errors import ConfigError
from vllm_ascend_ext.kv_pool.observe import logger

MIN_SEGMENT = 16 << 20
"""The engine answers -600 to a smaller segment that isn't 0 (0.3.13)."""

MAX_BYTES = 1 << 50
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|mb|kb|b)?", re.IGNORECASE)
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|etcd|redis|k8s)://\S+|[^\s/]+:\d+")


def parse_bytes(value: Any) -> int:
    """A whole number of bytes, or a text like "1.5 GB" (units of 1024: B, KB, MB, GB); ValueError otherwise."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError('allowed are whole numbers of bytes, and texts like "512MB" with B, KB, MB or GB')
        value = float(found[1]) * _UNITS[(found[2] or "").lower()]
        if not value.is_integer():
            raise ValueError("allowed are whole numbers of bytes")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError('allowed are whole numbers of bytes, and texts like "512MB" with B, KB, MB or GB')
    if not 0 <= value <= MAX_BYTES:
        raise ValueError(f"allowed are 0 to {MAX_BYTES} bytes")
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class MooncakeConfig(BaseModel):
    """One client of a Mooncake store. Sizes are in bytes; both are per client, so per rank.

    ``local_hostname`` (the engine's word) is the address that other clients reach this one at; without it, that from
    which this host reaches the master.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["ascend", "rdma", "tcp"] = "ascend"
    device_name: str = ""
    global_segment_size: Bytes = 1 << 30
    local_buffer_size: Bytes = 0
    preferred_segment: bool = False
    prefer_alloc_in_same_node: bool = True
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    local_hostname: str | None = Field(None, min_length=1)

    @field_validator("master_server_address")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if "://" not in value:
            split_address(value)
        elif not re.fullmatch(r"(etcd|redis|k8s)://\S+", value):
            raise ValueError("allowed are host:port, etcd://..., redis://... and k8s://...")
        return value

    @field_validator("metadata_server")
    @classmethod
    def _a_metadata_server(cls, value: str) -> str:
        if not _METADATA.fullmatch(value):  # anything else is taken for etcd, which is waited for in vain
            raise ValueError("allowed are P2PHANDSHAKE, http://..., etcd://..., redis://... and host:port (etcd)")
        return value

    @field_validator("global_segment_size")
    @classmethod
    def _a_segment(cls, value: int) -> int:
        if 0 < value < MIN_SEGMENT:
            raise ValueError(f"allowed are 0 (no memory of this client's) and {MIN_SEGMENT} bytes or more")
        return value

    @model_validator(mode="after")
    def _no_disk(self) -> MooncakeConfig:
        if self.enable_ssd_offload:
            raise ValueError("enable_ssd_offload=True: not supported by this pool; allowed is false")
        return self

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> MooncakeConfig:
        """Read the file that MOONCAKE_CONFIG_PATH names; ConfigError lists every field that can't be used."""
        path = environment.get("MOONCAKE_CONFIG_PATH")
        if not path:
            raise ConfigError("MOONCAKE_CONFIG_PATH is not set: it must name a JSON file with Mooncake's settings")
        values = _read(path)
        unknown = sorted(set(values) - set(cls.model_fields))
        if unknown:
            logger.warning("%s: %s: not used by this pool", path, ", ".join(unknown))
        for variable, field in (
            ("MOONCAKE_MASTER", "master_server_address"),
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
        ):
            if variable in environment:
                values[field] = environment[variable]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{path}: " + "; ".join(_explain(detail) for detail in error.errors())) from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:50051" for IPv6); ValueError otherwise."""
    host, separator, port = address.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    right = bool(separator and plain) and (plain != host or ":" not in host) and not re.search(r"[\s/]", host)
    if not right or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ValueError("allowed are host:port with a port of 1 to 65535, and [address]:port for IPv6")
    return plain, int(port)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as cause:
        raise ConfigError(f"MOONCAKE_CONFIG_PATH={path!r}: can't be read as JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise ConfigError(f"MOONCAKE_CONFIG_PATH={path!r}: a JSON object is needed, not {type(values).__name__}")
    return values


def _explain(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{field} is missing: set it, or MOONCAKE_MASTER, to the host:port of the mooncake_master"
    return f"{field}={detail['input']!r}: {message}" if field else message
