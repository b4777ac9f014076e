"""Says whether what a group of processes holds stays flat over a soak; must never know what they do.

The law. Samples are taken when nothing is under way. The first quarter is warm-up, the rest is parted in three. In each
process, the fewest descriptors (and threads) of the last third are at most the most of the first: a thread that comes
when it is wanted and goes when it is stuck is none too many, and a leak adds to all. The median of the last third's
resident memory is at most that of the middle third plus some slack: allocators never quite settle, and a leak doesn't
end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

WARM_UP = 0.25
SLACK_BYTES = 4 << 20
"""In a soak of ten minutes with 60 requests a second, that is less than 500 bytes a request."""
WARMING_BYTES = 64 << 20
"""For a short one: in its first minute the worker of vLLM 0.32 grows by 70 MiB, also without any connector."""
FEWEST_SAMPLES = 12
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Holding:
    """One process: resident bytes, open descriptors, threads."""

    name: str
    resident: int
    descriptors: int
    threads: int


Sample = dict[int, Holding]
"""By process id."""


def sample(session: int, least: Sample | None = None) -> Sample:
    """All processes of a session. What is just being closed is waited for: until there is no more than in `least`, but
    at most for `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = {pid: holding for pid in _members(session) if (holding := _holding(pid)) is not None}
        settled = least is not None and all(
            pid in least and holding.descriptors <= least[pid].descriptors and holding.threads <= least[pid].threads
            for pid, holding in found.items()
        )
        if settled or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def not_flat(samples: Sequence[Sample], slack: int = SLACK_BYTES) -> list[str]:
    """What breaks the law, one sentence each."""
    if len(samples) < FEWEST_SAMPLES:
        return [f"{len(samples)} samples are too few to judge; {FEWEST_SAMPLES} are needed"]
    judged = samples[int(len(samples) * WARM_UP) :]
    third = len(judged) // 3
    first, middle, last = judged[:third], judged[third : 2 * third], judged[-third:]
    found = []
    for pid in sorted({pid for part in judged for pid in part}):
        if not all(pid in part for part in judged):
            found.append(f"process {pid} was not there all the time")
            continue
        name = f"{judged[0][pid].name} ({pid})"

        def series(part: Sequence[Sample], what: str, pid: int = pid) -> list[int]:
            return [getattr(one[pid], what) for one in part]

        for what in ("descriptors", "threads"):
            before, after = max(series(first, what)), min(series(last, what))
            if after > before:
                found.append(f"{name}: {what} rose from at most {before} to at least {after}")
        usual, late = median(series(middle, "resident")), median(series(last, "resident"))
        if late > usual + slack:
            found.append(f"{name}: resident memory rose from {_mib(usual)} to {_mib(late)}")
    return found


def folder_bytes(folder: Path) -> int:
    """What a folder's files take up."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def total(found: Sample, what: Callable[[Holding], int]) -> int:
    return sum(map(what, found.values()))


def _mib(number: float) -> str:
    return f"{number / (1 << 20):.1f} MiB"


def _members(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError):  # ended meanwhile
                if os.getsid(int(entry)) == session:
                    found.append(int(entry))
    return sorted(found)


def _holding(pid: int) -> Holding | None:
    """None for a process that has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        if "VmRSS" not in status:
            return None
        descriptors = len(os.listdir(folder / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    resident = int(status["VmRSS"].split()[0]) * 1024
    return Holding(status["Name"].strip(), resident, descriptors, int(status["Threads"]))
