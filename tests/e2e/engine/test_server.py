"""Law: by configuration alone vLLM's API server has the pool, gives the right tokens, and shows the pool's metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .client import Launcher, Request
from .lab import Lab, prompts


def test_the_api_server_by_its_command_line(new_lab: Callable[..., Lab], launcher: Launcher) -> None:
    """The core is a process of its own here, and requests come at the same time."""
    lab = new_lab()
    requests = [Request(prompt, max_tokens=6) for prompt in prompts("server", 300, 200, 100, 70)]
    right = lab.oracle.tokens(lab.machine, requests)
    with lab.engine() as engine:
        lab.run(engine, requests[:2])
    config = lab.machine.config(lab.transfer() | {"kv_connector_module_path": None})
    with launcher.server(config, lab.folder / "server.log") as server, ThreadPoolExecutor(4) as clients:
        for _ in range(3):
            outputs = list(clients.map(server.complete, requests))
            assert tuple(output.tokens for output in outputs) == right
        metrics = server.metrics("vllm:")
        assert metrics["vllm:ascend_store_hit_tokens_total"] == 288 + 192
        assert metrics["vllm:external_prefix_cache_hits_total"] == 288 + 192
        for name in ("keys_total", "bytes_total", "time_seconds_count", "time_seconds_sum"):
            assert metrics[f"vllm:ascend_store_operation_{name}"] > 0, name
        assert metrics["vllm:ascend_store_lookup_timeouts_total"] == 0
        assert "vllm:ascend_store_faults_total" not in metrics
        for process in ("EngineCore", "Worker"):
            line = rf"^\({process} .*INFO .*KV pool of vllm-ascend-ext: backend='local'"
            assert re.search(line, server.log(), re.M)
