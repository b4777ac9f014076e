"""The pool's configuration, checked before anything starts; must never know vLLM's configuration objects.

Field names are those of vllm-ascend's ``kv_connector_extra_config``; what this pool adds has a default. Every refusal
names the field, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_ascend_ext.kv_pool.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]


def _rpc_base_path() -> str:
    return os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()


class PoolConfig(BaseModel):
    """``kv_connector_extra_config`` plus ``kv_role``. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, populate_by_name=True)

    kv_role: Role = "kv_both"

    # vllm-ascend's fields
    backend: Literal["local", "mooncake", "memcache", "yuanrong"] = "local"
    lookup_rpc_port: int = Field(
        0, ge=0, le=65_535, validation_alias=AliasChoices("lookup_rpc_port", "mooncake_rpc_port")
    )
    load_async: bool = False
    consumer_is_to_put: bool = False
    consumer_is_to_load: bool = False
    use_layerwise: bool = False
    save_decode_cache: bool = False
    discard_partial_chunks: bool = True
    prefill_pp_size: int | None = Field(None, ge=1)
    prefill_pp_layer_partition: str | None = None
    prefill_tp_size: int | None = Field(None, ge=1)
    decode_tp_size: int | None = Field(None, ge=1)
    layerwise_prefetch_layers: int = Field(1, ge=1)
    layerwise_max_transfer_blocks: int | None = Field(None, ge=1)
    layerwise_max_transfer_bytes: int | None = Field(None, ge=1)
    layerwise_num_shared_buffers: int | None = Field(None, ge=1)
    layerwise_independent_layers: list[int] | Literal["all"] | None = None

    # this pool's own
    key_compat: Literal["fingerprint", "vllm-ascend"] = "fingerprint"
    model_id: str | None = Field(None, min_length=1)
    checksum: bool | None = None
    lookup_timeout: Seconds = 1.0
    lookup_backoff: Seconds = 5.0
    store_backoff: Seconds = 5.0
    load_timeout: Seconds = 10.0
    save_timeout: Seconds = 10.0
    layer_timeout: Seconds = 10.0
    start_timeout: Seconds = 30.0
    close_timeout: Seconds = 5.0
    lease_ttl: Seconds = 60.0
    save_retries: int = Field(3, ge=0)
    lanes: int = Field(2, ge=1, le=64)
    rpc_base_path: str = Field(default_factory=_rpc_base_path, min_length=1)
    local_pool_name: str = Field("vllm-ascend-ext", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    local_capacity_bytes: int = Field(1 << 30, ge=4096, le=8 << 40)
    local_keep: bool = False  # leave the embedded pool when its last engine ends, for the next to find
    staging_slots: int = Field(4, ge=1, le=64)
    staging_slot_bytes: int = Field(64 << 20, ge=1, le=8 << 30)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes ``true`` for 1, and so a period of a second for one that was switched on."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation not in (bool, bool | None):
            raise PydanticCustomError("no_boolean", "Input should not be a boolean")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> PoolConfig:
        if self.lease_ttl < self.load_timeout:
            raise ValueError(
                f"lease_ttl ({self.lease_ttl}) must be at least load_timeout ({self.load_timeout}): "
                "a lease that runs out in mid-load lets the block be evicted under it"
            )
        if self.checksum and self.key_compat == "vllm-ascend":
            raise ValueError("checksum=True: values shared with vllm-ascend have none; use key_compat='fingerprint'")
        return self

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer" or self.consumer_is_to_put

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_consumer" or self.consumer_is_to_load

    @classmethod
    def parse(cls, extra: Mapping[str, Any], kv_role: str = "kv_both") -> PoolConfig:
        """Check ``extra``; raises ConfigError that lists every field that can't be used."""
        wrong = []
        if extra.get("kv_role", kv_role) != kv_role:
            wrong.append(f"kv_role={extra['kv_role']!r}: the role belongs beside this, where it is {kv_role!r}")
        try:
            config = cls.model_validate({**extra, "kv_role": kv_role})
        except ValidationError as error:
            wrong += [_explain(detail) for detail in error.errors()]
        if wrong:
            raise ConfigError("kv_connector_extra_config: " + "; ".join(wrong))
        return config


def _explain(detail: Any) -> str:
    """One line of a pydantic error: the field, the value, and what is allowed."""
    field = ".".join(str(part) for part in detail["loc"])
    if not field:
        return str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        known = sorted(PoolConfig.model_fields.keys() - {"kv_role"})
        near = [f"did you mean {name}? " for name in difflib.get_close_matches(field, known, n=1)]
        return f"{field}={detail['input']!r}: unknown field; {''.join(near)}allowed are {', '.join(known)}"
    return f"{field}={detail['input']!r}: {detail['msg']}"
