"""Law: what docs/users-guide.md says can be typed, and does what it says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_ext.kv_pool.config import PoolConfig

from .client import Launcher, Request
from .lab import Lab, prompts

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "users-guide.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", TEXT, flags=re.DOTALL)


COMMANDS = fenced("sh")
CONFIGURATIONS = [json.loads(text) for text in fenced("json")]


def command(start: str) -> list[str]:
    """The words of the one command of the guide that begins so."""
    (found,) = [shlex.split(line) for line in COMMANDS if line.startswith(start)]
    return found


def test_every_command_is_one_that_is_run_here() -> None:
    known = (
        "pip install",
        "vllm serve",
        "curl",
        "python -m vllm_ascend_ext.plugin",
        "python -m vllm_ascend_ext.kv_pool",
    )
    assert [line for line in COMMANDS if not line.startswith(known)] == []


def test_install(tmp_path: Path) -> None:
    words = [sys.executable, "-m", *command("pip install"), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*words, "--target", str(tmp_path / "site")], cwd=ROOT, check=True, timeout=240)
    assert (tmp_path / "site" / "vllm_ascend_ext" / "kv_pool" / "connector.py").exists()
    entries = next((tmp_path / "site").glob("vllm_ascend_ext-*/entry_points.txt")).read_text()
    assert "[vllm.general_plugins]" in entries


def test_serve_and_its_metrics(new_lab: Callable[..., Lab], launcher: Launcher) -> None:
    lab = new_lab()
    words = command("vllm serve")
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert words[3] == "--kv-transfer-config"
    requests = [Request(prompt) for prompt in prompts("guide", 200, 100)]
    with launcher.server(lab.machine.config(_isolated(json.loads(words[4]), lab)), lab.folder / "guide.log") as server:
        for _ in range(2):
            outputs = [server.complete(request).tokens for request in requests]
            assert tuple(outputs) == lab.oracle.tokens(lab.machine, requests)
        (url,) = command("curl")[1:]
        status, text = server.get(url.removeprefix("http://127.0.0.1:8000"))
    assert status == 200
    named = re.findall(r"`(vllm:ascend_store_[a-z_]+)`", TEXT)
    assert named
    shown = {name for name in named if re.search(rf"^# HELP {name.removesuffix('_total')}(_total)? ", text, re.M)}
    assert set(named) == shown


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_configurations(new_lab: Callable[..., Lab], launcher: Launcher, number: int) -> None:
    lab = new_lab()
    requests = [Request(prompt) for prompt in prompts(("guide", number), 200, 100)]
    config = lab.machine.config(_isolated(CONFIGURATIONS[number], lab))
    with launcher.engine(config, lab.folder / f"guide-{number}.log") as engine:
        lab.run(engine, requests)
        engine.reset_prefix_cache()
        assert lab.run(engine, requests).cached == (192, 96)


def test_the_command_that_removes_a_pool(tmp_path: Path) -> None:
    removal = command("python -m vllm_ascend_ext.kv_pool")
    assert removal[3:] == ["remove", PoolConfig.model_fields["local_pool_name"].default]
    words = [sys.executable, *removal[1:4], str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split(": ")[1]) == (1, "there is no such pool")


def test_the_kernels_command(launcher: Launcher, tmp_path: Path) -> None:
    assert command("python -m vllm_ascend_ext.plugin")
    printed = launcher.script("from vllm_ascend_ext import plugin; plugin.main()", tmp_path / "log")
    assert "would be replaced" in printed


def test_the_options_and_their_defaults() -> None:
    """Each option of the table exists, and a default that is a number or a name is what it says."""
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", TEXT[TEXT.index("## Options") : TEXT.index("For instance")], re.M)
    assert len(rows) > 10
    for names, defaults in rows:
        fields = re.findall(r"`([a-z_]+)`", names)
        assert set(fields) <= set(PoolConfig.model_fields), names
        said = [part.strip(" `s").lower() for part in defaults.split(",")]
        for name, value in zip(fields, said, strict=False):
            default = PoolConfig.model_fields[name].default
            if isinstance(default, bool) or re.fullmatch(r"[0-9.]+", value):
                assert str(default).lower().removesuffix(".0") == value, name


def _isolated(transfer: dict[str, Any], lab: Lab) -> dict[str, Any]:
    """The configuration with this test's sockets and, if it names no pool, with this test's pool."""
    extra = transfer.get("kv_connector_extra_config", {})
    own = {"rpc_base_path": lab.sockets}
    if "local_pool_name" not in extra and "local_capacity_bytes" not in extra:
        own |= {"local_pool_name": lab.pool, "local_capacity_bytes": 64 << 20}
    return transfer | {"kv_connector_extra_config": extra | own}
