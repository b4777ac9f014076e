"""Loading whole blocks, one status each; must never know what is done about a block that did not arrive."""

from __future__ import annotations

import numpy as np

from vllm_ascend_ext.kv_pool.errors import Status
from vllm_ascend_ext.kv_pool.fence import Fence
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, JobResult, TransferJob
from vllm_ascend_ext.kv_pool.transfer.worker_thread import KVCacheTransferThread


class KVCacheStoreRecvingThread(KVCacheTransferThread):
    role = "load"

    rotation: int = 0
    """Ranks start at different blocks, so that they don't all ask the same server for the same block at once."""

    def _handle_request(self, job: TransferJob, fence: Fence) -> JobResult:
        result = JobResult(job, [])
        for part in job.parts:
            statuses, cause = self._get(part, fence)
            result.statuses.append(statuses)
            result.cause = result.cause or cause
        return result

    def _get(self, part: GroupBlocks, fence: Fence) -> tuple[list[Status], BaseException | None]:
        order = np.roll(np.arange(len(part.keys)), -self.rotation)
        addrs, sizes = self._layout_of(part).addresses(part.block_ids[order])
        answer = self._client.get([part.keys[i] for i in order], addrs, sizes, fence)
        statuses = [Status.FAILED] * len(part.keys)
        for position, status in zip(order.tolist(), answer.statuses, strict=True):
            statuses[position] = status
        return statuses, answer.cause
