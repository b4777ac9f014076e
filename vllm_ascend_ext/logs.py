"""Where this package's log lines go inside another program; must never know which program that is."""

from __future__ import annotations

import logging


def follow(program: str) -> None:
    """Let our records go where those of the logger ``program`` go, at its level.

    Python writes records that meet no handler bare, without time and level, and leaves out those below WARNING. Whoever
    has configured handlers that ours reach, of the root logger or of this package, keeps them.
    """
    ours = logging.getLogger("vllm_ascend_ext")
    if not ours.hasHandlers():
        ours.parent = logging.getLogger(program)
