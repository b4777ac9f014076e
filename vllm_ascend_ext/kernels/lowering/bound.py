"""A lower bound on time from published figures of the device; never a time, and nothing here was measured.

All figures are for an Ascend 910B3 (CANN 9.0.0) and come from the public repository vTriton / TritonSim, measured in
June 2026. They are quoted, not checked: no NPU was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .cases import A2
from .counts import Counts
from .symbolic import Count

SOURCE = "vTriton / TritonSim, Ascend 910B3, CANN 9.0.0, June 2026"
CORES = 40
CLOCK_GHZ = 1.85
#: Contiguous copy by all cores, bytes read and written.
ALL_CORES_GB_S = 1167.0
#: The same by one core alone.
ONE_CORE_GB_S = 86.5
LAUNCH_US = 0.12
#: Bytes of one transfer -> share of the bandwidth that it reaches.
EFFICIENCY = (
    *((128, 0.04), (256, 0.07), (512, 0.14), (1_024, 0.24), (2_048, 0.39), (4_096, 0.58)),
    *((8_192, 0.76), (16_384, 0.94), (32_768, 0.99)),
)


@dataclass(frozen=True)
class Bound:
    """No launch takes less than ``us`` microseconds, if the published figures hold; ``limit`` says what limits it."""

    us: float
    limit: str
    parts: tuple[tuple[str, float], ...]


def efficiency(size: float) -> float:
    """Highest share of the bandwidth that a transfer of at most ``size`` bytes was seen to reach."""
    return next((share for limit, share in EFFICIENCY if size <= limit), 1.0)


def lower_bound(counts: Sequence[Counts], known: Mapping[str, int], target: str) -> Bound | None:
    """The bound for a launch of ``known["grid"]`` programs in which every condition of the kernel holds.

    None for another chip, or where a count depends on what ``known`` lacks. Transfers and scalar steps of a core may
    overlap, and so may all else, so the bound is the largest of the parts, not their sum.
    """
    grid = known.get("grid")
    if target != A2 or grid is None or grid < 1:
        return None
    differ = "program_id(0)" in _symbols(counts)
    moved = busy = longest = steps = most_steps = 0.0
    for program in range(grid if differ else 1):
        shares = [_program(one, at(known, program)) for one in counts]
        if any(share is None for share in shares):
            return None
        for share in filter(None, shares):
            times = 1 if differ else grid
            moved += times * share[0]
            busy += times * share[1]
            steps += times * share[2]
            longest, most_steps = max(longest, share[1]), max(most_steps, share[2])
    cycles = max(most_steps, steps / CORES)
    parts = {
        "transfers of a core": max(longest, busy / CORES) * 1e6,
        "bytes of all cores": moved / (ALL_CORES_GB_S * 1e9) * 1e6,
        "scalar steps of a core": cycles / (CLOCK_GHZ * 1e3),
        "launching programs": -(-grid // CORES) * LAUNCH_US,
    }
    limit = max(parts, key=lambda name: parts[name])
    return Bound(parts[limit], limit, tuple(parts.items()))


def at(known: Mapping[str, int], program: int = 0) -> dict[str, int]:
    """What is known inside one program of a one-dimensional launch."""
    return {"grid_y": 1, "grid_z": 1, "program_id(1)": 0, "program_id(2)": 0, **known, "program_id(0)": program}


def _program(counts: Counts, known: Mapping[str, int]) -> tuple[float, float, float] | None:
    """Bytes, seconds of transfers and scalar steps of one program; None if one is unknown."""
    moved = seconds = 0.0
    for size, times in counts.certain_transfers.items():
        number = times.value(known)
        if number is None:
            return None
        moved += number * size
        seconds += number * size / (ONE_CORE_GB_S * 1e9 * efficiency(size))
    steps = counts.certain_steps.value(known)
    return None if steps is None else (moved, seconds, steps)


def unknowns(counts: Sequence[Counts], known: Mapping[str, int]) -> list[str]:
    """Names whose values a bound would need and ``known`` lacks."""
    given = {"grid_y", "grid_z", *known, *(f"program_id({axis})" for axis in range(3))}
    return sorted(name for name in _symbols(counts) | {"grid"} if not {name, name.partition("@")[0]} & given)


def _symbols(counts: Sequence[Counts]) -> set[str]:
    needed: list[Count] = [count.certain_steps for count in counts]
    needed += [times for count in counts for times in count.certain_transfers.values()]
    return {name for count in needed for name in count.symbols()}
