"""Jobs and their results: one status per block, however a job ended."""

import numpy as np
import pytest

from vllm_ascend_ext.kv_pool.errors import Cancelled, ClosedError, DeadlineExceeded, NotRunning, Status
from vllm_ascend_ext.kv_pool.jobs import GroupBlocks, JobResult, TransferJob, status_of


def part(group, *block_ids):
    ids = np.asarray(block_ids, dtype=np.int64)
    return GroupBlocks(group, np.arange(len(ids)), ids, [f"{group}-{block}" for block in block_ids])


JOB = TransferJob(1, "a", (part(0, 5, 6, 7), part(1), part(2, 9)))


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (DeadlineExceeded("get"), Status.TIMEOUT),
        (TimeoutError("the engine's own"), Status.FAILED),
        (Cancelled("aborted"), Status.CANCELLED),
        (ClosedError("closed"), Status.CANCELLED),
        (NotRunning("failed"), Status.FAILED),
        (OSError("down"), Status.FAILED),
        (SystemExit(), Status.FAILED),
    ],
)
def test_a_job_that_ended_with_a_cause_has_its_status_for_every_block(cause, status):
    result = JobResult.all_failed(JOB, cause)
    assert result.statuses == [[status] * 3, [], [status]]
    assert result.cause is cause
    assert status_of(cause) is status
    assert not result.ok
    assert result.stored == []


def test_only_blocks_that_did_not_arrive_are_failures():
    result = JobResult(JOB, [[Status.OK, Status.MISSING, Status.OK], [], [Status.TIMEOUT]])
    assert [(p.group, int(p.block_ids[i]), s) for p, i, s in result.failures()] == [
        (0, 6, Status.MISSING),
        (2, 9, Status.TIMEOUT),
    ]
    assert not result.ok
    assert result.describe() == "2 of 4 blocks: {'MISSING': 1, 'TIMEOUT': 1}"


def test_a_job_without_failures_is_ok():
    assert JobResult(JOB, [[Status.OK] * 3, [], [Status.OK]]).ok
    assert JOB.num_blocks == 4


def test_statuses_that_do_not_fit_the_job_are_not_taken_for_a_success():
    with pytest.raises(ValueError, match="zip"):
        list(JobResult(JOB, [[Status.FAILED] * 3]).failures())
