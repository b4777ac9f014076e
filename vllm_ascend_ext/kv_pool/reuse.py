"""Orders for an engine whose layers share device buffers; must never know layers, addresses or stores.

There, a step leaves nothing behind on the device but in layers with a buffer of their own. So each step loads all that
its requests have computed and saves what it computes, down to the last block, full or not. A block that could not be
saved is one that can't be loaded in the next step: it is reported as such, and computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_ascend_ext.kv_pool.groups import PoolSetup
from vllm_ascend_ext.kv_pool.requests import LoadSpec, ReqMeta, RequestView, SaveSpec, ScheduledRequest


def reuse_orders(
    setup: PoolSetup, request: RequestView, scheduled: ScheduledRequest, hit: LoadSpec | None, job_ids: Iterator[int]
) -> ReqMeta:
    """One request's part of a step. ``hit``: the load of a hit that the request begins with."""
    before = scheduled.num_computed_tokens
    computed = before + scheduled.num_scheduled_tokens
    load = None
    if before:
        resident = hit.vllm_cached_tokens if hit is not None else before
        job_id = hit.job_id if hit is not None else next(job_ids)
        load = LoadSpec(job_id, resident, before, is_async=False, reload=True)
    end = setup.floor(min(computed, len(request.block_hashes) * setup.hash_unit))
    save = SaveSpec(next(job_ids), min(setup.floor(before), end), end, tail=computed)
    return ReqMeta(
        request.request_id,
        tuple(np.asarray(ids, dtype=np.int64) for ids in scheduled.block_ids),
        tuple(request.block_hashes[: computed // setup.hash_unit]),
        load,
        save,
        tuple(request.all_token_ids[save.start_token : end]) if setup.enable_kv_events else (),
    )
