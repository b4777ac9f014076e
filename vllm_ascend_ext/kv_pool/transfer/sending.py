"""Saving whole blocks: puts what the store doesn't have yet; must never know who decided what to save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, JobResult, TransferJob
from vllm_ascend_ext.kv_pool.transfer.worker_thread import KVCacheTransferThread


class KVCacheStoreSendingThread(KVCacheTransferThread):
    role = "save"

    def _handle_request(self, job: TransferJob, fence: Fence) -> JobResult:
        if job.ready is not None:
            job.ready.synchronize()
        result = JobResult(job, [])
        for part in job.parts:
            present = self._client.exists(part.keys)
            statuses = list(present.statuses)
            missing = [i for i, status in enumerate(statuses) if status is Status.MISSING]
            stored = [False] * len(statuses)
            cause = present.cause
            if missing:
                statuses, stored, cause = self._put(part, missing, statuses, fence)
            result.statuses.append(statuses)
            result.stored.append(stored)
            result.cause = result.cause or cause
        return result

    def _put(
        self, part: GroupBlocks, missing: Sequence[int], statuses: list[Status], fence: Fence
    ) -> tuple[list[Status], list[bool], BaseException | None]:
        """Put the blocks at positions ``missing``; their statuses replace those of the existence check."""
        addrs, sizes = self._layout_of(part).addresses(part.block_ids[np.asarray(missing)])
        answer = self._client.put([part.keys[i] for i in missing], addrs, sizes, fence)
        stored = [False] * len(statuses)
        for position, status in zip(missing, answer.statuses, strict=True):
            statuses[position] = Status.FAILED if status is Status.MISSING else status
            stored[position] = status is Status.OK
        return statuses, stored, answer.cause
