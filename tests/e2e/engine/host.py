"""Engine processes that obey JSON lines on a socket; must never know which connector they run.

`python host.py FD` imports vLLM once and then forks an engine process for each message on FD (importing takes 8 s,
starting an engine 2 s). An engine process answers each request line with one line: `{"ok": result}` or
`{"error": traceback}`. Its core runs in the process itself (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that `call` can reach
the connector's two halves and put faults in.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

# What an engine would import when it starts, besides what this module names.
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine


class Host:
    """The commands. Each public method is one; its keyword arguments are the request's, its result the answer."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        if arguments.get("kv_events_config"):
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core = self.engine.engine_core.engine_core
        self.served = 0

    # What a fault module may hold on to.
    @property
    def scheduler_connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        return get_kv_transfer_group() if has_kv_transfer_group() else None

    def generate(self, requests: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Run requests to their ends. A request: prompt (token ids), max_tokens, arrive (step at which it is added),
        abort (its age in steps at which it is aborted, or None), abort_mid_step, salt, adapter (name, number, path, or
        None). Raises TimeoutError past `seconds`."""
        names = [f"r{self.served + i}" for i in range(len(requests))]
        self.served += len(names)
        waiting = dict(zip(names, requests, strict=True))
        added: dict[str, int] = {}
        ends: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            for name in [n for n, r in waiting.items() if r["arrive"] <= step]:
                self._add(name, waiting.pop(name))
                added[name] = step
            for name, request in zip(names, requests, strict=True):
                if request["abort"] is not None and name in added and step - added[name] >= request["abort"]:
                    self._abort(name, ends, request["abort_mid_step"])
            for output in self.engine.step():
                if output.finished:
                    ends.setdefault(output.request_id, _end(output))
            step += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{sorted(set(names) - set(ends))} unfinished after {seconds} s and {step} steps")
        self._drain(deadline)
        return {"outputs": [ends[name] for name in names], "steps": step}

    def _add(self, name: str, request: dict[str, Any]) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": request["prompt"]}
        if request["salt"]:
            prompt["cache_salt"] = request["salt"]
        sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        adapter = LoRARequest(*request["adapter"]) if request["adapter"] else None
        self.engine.add_request(name, prompt, sampling, lora_request=adapter)

    def _abort(self, name: str, ends: dict[str, dict[str, Any]], mid_step: bool) -> None:
        if name not in ends:
            if mid_step:  # as for a server, whose core hears of it on a thread of its own
                self.core.aborts_queue.put_nowait(self.engine.output_processor.abort_requests([name], internal=False))
            else:
                self.engine.abort_request([name])
            ends[name] = {"tokens": [], "finish": "abort", "cached": 0}

    def _drain(self, deadline: float) -> None:
        """Step until the scheduler holds nothing more, so that transfers still in flight end too."""
        while self.core.scheduler.has_requests():
            self.engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the scheduler still holds {list(self.core.scheduler.requests)}")

    def reset_prefix_cache(self, connector: bool) -> bool:
        return bool(self.core.reset_prefix_cache(reset_connector=connector))

    def metrics(self, prefix: str) -> dict[str, float]:
        """Prometheus samples by name, and by the label `operation`, `fault` or `source` where there is one."""
        from prometheus_client import REGISTRY

        totals: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.startswith(prefix) or sample.name.endswith(("_created", "_bucket")):
                    continue
                kinds = [sample.labels[label] for label in ("operation", "fault", "source") if label in sample.labels]
                name = f"{sample.name}[{kinds[0]}]" if kinds else sample.name
                totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    def blocks_in_use(self) -> int:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def footprint(self) -> dict[str, Any]:
        """Threads and open descriptors of this process, and its resident memory in bytes."""
        gc.collect()
        with open("/proc/self/statm") as pages:
            resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads = sorted(thread.name for thread in threading.enumerate())
        return {"threads": threads, "descriptors": len(os.listdir("/proc/self/fd")), "resident": resident}

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Run `module:function(host, **arguments)` of the test directory inside this process."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self, **arguments)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def _end(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    return {"tokens": list(best.token_ids), "finish": best.finish_reason, "cached": output.num_cached_tokens}


def obey(connection: socket.socket, arguments: dict[str, Any]) -> None:
    """Start an engine, answer for that, and then obey request lines until `close` or the end of the connection."""
    lines = connection.makefile("rw", encoding="utf-8", newline="\n")

    def answer(act: Any) -> Any:
        result = None
        try:
            result = act()
            text = {"ok": result if not isinstance(result, Host) else os.getpid()}
        except Exception:
            text = {"error": traceback.format_exc()}
        lines.write(json.dumps(text) + "\n")
        lines.flush()
        return result

    host = answer(lambda: Host(arguments))
    for line in lines if host is not None else ():
        request = json.loads(line)
        command = request.pop("do")
        answer(lambda: getattr(host, command)(**request))  # noqa: B023  # called at once
        if command == "close":
            return


def run_script(connection: socket.socket, script: str) -> None:
    """Run a script in this process, and answer what it printed or how it failed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(script, "script", "exec"), {"__name__": "script"})
        text = {"ok": printed.getvalue()}
    except Exception:
        text = {"error": traceback.format_exc()}
    connection.sendall(json.dumps(text).encode() + b"\n")


def serve(connection: socket.socket, arguments: list[str]) -> None:
    """Run vLLM's API server in this process until it is killed; answers its process id first."""
    connection.sendall(json.dumps({"ok": os.getpid()}).encode() + b"\n")
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def fork_engines(control: socket.socket) -> None:
    """One process per message of `control`, which comes with the descriptors of its connection and its log."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        line, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not line:
            return
        order = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            control.close()
            connection, log = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.update(order["environment"])
            if "script" in order:
                run_script(socket.socket(fileno=connection), order["script"])
            elif "serve" in order:
                serve(socket.socket(fileno=connection), order["serve"])
            else:
                obey(socket.socket(fileno=connection), order["arguments"])
            sys.exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    fork_engines(socket.socket(fileno=int(sys.argv[1])))
