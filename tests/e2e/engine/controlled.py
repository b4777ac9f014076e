"""The pool's connector with a door for tests, for engines whose core and worker are processes of their own.

Use it with `"kv_connector_module_path": "controlled"`. Each half listens on a socket at ENGINE_TIER_DOOR plus
`-scheduler` or `-worker`, and obeys lines like `{"function": "faults:heal", "arguments": {}}` as `Host.call` does. One
rank only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import threading
import traceback
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from vllm_ascend_ext.kv_pool import connector


class AscendStoreConnector(connector.AscendStoreConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        inside = SimpleNamespace()  # what a fault module may hold on to, as `Host` offers it
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        if role == KVConnectorRole.SCHEDULER:
            inside.scheduler_connector = self
        else:
            inside.worker_connector = self
            init_none_hash(hash_function)  # as the engine's core does in its own process
        hasher = get_request_block_hasher(self._setup.hash_unit, hash_function)
        inside.core = SimpleNamespace(request_block_hasher=hasher)
        door = socket.socket(socket.AF_UNIX)
        door.bind(f"{os.environ['ENGINE_TIER_DOOR']}-{role.name.lower()}")
        door.listen()
        threading.Thread(target=_obey, args=(door, inside), name="door", daemon=True).start()


def _obey(door: socket.socket, inside: SimpleNamespace) -> None:
    while True:
        connection, _ = door.accept()
        with connection, connection.makefile("rw", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                request = json.loads(line)
                module, _, name = request["function"].partition(":")
                try:
                    answer = {"ok": getattr(importlib.import_module(module), name)(inside, **request["arguments"])}
                except Exception:
                    answer = {"error": traceback.format_exc()}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
