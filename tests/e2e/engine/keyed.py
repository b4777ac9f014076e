"""The pool's connector on an embedded store without global addresses: there each layer has a key of its own.

Use it with `"kv_connector_module_path": "keyed"`; every process of the engine imports it.
"""

from __future__ import annotations

from vllm_ascend_ext.kv_pool.backend.local import LocalBackend
from vllm_ascend_ext.kv_pool.connector import AscendStoreConnector

__all__ = ["AscendStoreConnector"]

LocalBackend.has_gva = False
