"""The largest value of a constant with which a kernel still fits; asks for compilations and runs none itself.

That a value "fits" was monotone in every kernel tried; the Unified Buffer's figure was not (the compiler plans anew
each time), so the search looks at nothing but whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .check import Job, Report
from .jobs import UsageError


@dataclass(frozen=True)
class Steps:
    """The values that are tried: powers of two, or multiples of a number, up to ``most``."""

    most: int
    multiple_of: int | None = None

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.most // self.multiple_of if self.multiple_of else self.most.bit_length()

    def value(self, step: int) -> int:
        """The value of a step, counted from 1."""
        return step * self.multiple_of if self.multiple_of else 1 << (step - 1)


@dataclass
class Search:
    """The search for one setting of one case: ``low`` fits or is too small to compile, ``too_large`` doesn't fit."""

    job: Job
    constant: str
    steps: Steps
    too_large: int
    low: int = 0
    best: Report | None = None
    #: The report of the smallest value that doesn't fit; None if all fit.
    limit: Report | None = None
    #: The report of the largest value that was refused as too small, or for what no value mends; None if none was.
    refused: Report | None = None

    @property
    def is_over(self) -> bool:
        """Whether the answer is known."""
        return self.too_large - self.low <= 1

    @property
    def step(self) -> int:
        """The step to try next."""
        return (self.low + self.too_large) // 2

    @property
    def largest(self) -> int | None:
        """The largest value that fits; None if none does."""
        return self.steps.value(self.low) if self.best else None

    def next_job(self) -> Job:
        """The compilation to make next."""
        constants = {**self.job.case.constants, self.constant: self.steps.value(self.step)}
        return replace(self.job, case=replace(self.job.case, constants=constants), probe=False)

    def learn(self, report: Report) -> None:
        """Take the outcome of ``next_job``."""
        too_small = self.best is None and not any(finding.code in _TOO_LARGE for finding in report.findings)
        if report.stage == "hivm" and not report.retried:
            self.low, self.best = self.step, report
        elif too_small and report.stage != "hivm":
            # Other constants may need a least value of this one, so a refusal says nothing before one value fitted.
            self.low, self.refused = self.step, report
        else:
            self.too_large, self.limit = self.step, report


#: Findings that a smaller value may mend.
_TOO_LARGE = ("overflow", "retried", "time-out", "crash")


def search(
    jobs: Sequence[Job], constant: str, steps: Steps, run: Callable[[Sequence[Job]], Sequence[Report]]
) -> list[Search]:
    """Find the largest value for each job; ``run`` makes compilations, one round for all searches at a time.

    Raises UsageError if a kernel's case has no such constant, or there is no value to try.
    """
    for job in jobs:
        if constant not in job.case.constants:
            raise UsageError(f"{job.case.title} has no constant {constant!r}; it has {sorted(job.case.constants)}")
    if steps.multiple_of is not None and steps.multiple_of < 1:
        raise UsageError(f"multiples of {steps.multiple_of} can't be tried; allowed are 1 and more")
    if steps.count < 1:
        raise UsageError(f"no value to try: {steps.multiple_of or 1} is above the most allowed, {steps.most}")
    searches = [Search(job, constant, steps, steps.count + 1) for job in jobs]
    while unfinished := [one for one in searches if not one.is_over]:
        for one, report in zip(unfinished, run([one.next_job() for one in unfinished]), strict=True):
            one.learn(report)
    return searches
