"""The scheduler's question to the worker, how many tokens the pool holds; must never know keys or stores."""

from vllm_ascend_ext.kv_pool.lookup.client import LookupKeyClient
from vllm_ascend_ext.kv_pool.lookup.endpoint import lookup_path
from vllm_ascend_ext.kv_pool.lookup.server import LookupKeyServer
from vllm_ascend_ext.kv_pool.lookup.wire import LookupRequest, WireError, WireLimits

__all__ = ["LookupKeyClient", "LookupKeyServer", "LookupRequest", "WireError", "WireLimits", "lookup_path"]
