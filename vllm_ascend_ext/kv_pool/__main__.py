"""Looks after embedded pools from the command line; must never know vLLM.

python -m vllm_ascend_ext.kv_pool remove NAME_OR_PATH [--force]    # a pool that was kept, or whose engines are gone
"""

from __future__ import annotations

import argparse
import sys

from vllm_ascend_ext.kv_pool.backend.arena import pool_folder
from vllm_ascend_ext.kv_pool.backend.local import destroy
from vllm_ascend_ext.kv_pool.errors import ConfigError

_DESCRIPTION = "Looks after the embedded pools of this host (backend: local), which lie in /dev/shm."
_REMOVE = "remove a pool that was kept (local_keep), or whose engines were killed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_ascend_ext.kv_pool", description=_DESCRIPTION)
    remove = parser.add_subparsers(dest="command", required=True).add_parser(
        "remove", help=_REMOVE, description=_REMOVE
    )
    remove.add_argument("pool", help="its name (local_pool_name), or the absolute path of its folder")
    remove.add_argument("--force", action="store_true", help="also if engines use it; they keep what they have mapped")
    given = parser.parse_args(arguments)
    try:
        found = destroy(given.pool, force=given.force)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{given.pool}: {'removed' if found else f'there is no such pool: no {pool_folder(given.pool)}'}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
