"""Times one request inside an engine's process; called through the engine tier's `Engine.call`."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from vllm import SamplingParams

_numbers = count()


def first_token(host: Any, prompt: list[int]) -> float:
    """Seconds from adding a request to its first token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    host.engine.add_request(f"timed-{next(_numbers)}", {"prompt_token_ids": prompt}, sampling)
    while host.engine.has_unfinished_requests():
        host.engine.step()
    seconds = time.perf_counter() - start
    host._drain(time.monotonic() + 30)
    return seconds
