"""Law: our log lines look like those of the program that we run in, unless somebody has said where they go."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from vllm_ascend_ext import logs

host = logging.getLogger("host")
host.setLevel("INFO")
host.propagate = False
host.addHandler(logging.StreamHandler(sys.stdout))
host.handlers[0].setFormatter(logging.Formatter("host %(levelname)s %(message)s"))
{configured}
logs.follow("host")
logs.follow("host")
logging.getLogger("vllm_ascend_ext.kv_pool").error("broken")
logging.getLogger("vllm_ascend_ext.kv_pool.backend").info("told")
logging.getLogger("vllm_ascend_ext.kv_pool").debug("too much")
"""


@pytest.mark.parametrize(
    ("configured", "printed"),
    [
        ("", "host ERROR broken\nhost INFO told\n"),
        ("logging.basicConfig(format='root %(message)s', stream=sys.stdout)", "root broken\n"),
        ("logging.getLogger('vllm_ascend_ext').addHandler(logging.StreamHandler(sys.stdout))", "broken\n"),
    ],
    ids=["nothing", "the root logger", "this package"],
)
def test_records_go_where_the_programs_go_unless_they_have_a_place(configured: str, printed: str) -> None:
    script = SCRIPT.format(configured=configured)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (printed, "")
