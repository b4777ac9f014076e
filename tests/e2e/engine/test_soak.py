"""Law: under faults, however long, the API server answers right and holds no more than before (`make soak`: 10 min)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from .client import Launcher, Request
from .flat import Holding, Sample, not_flat
from .lab import Lab
from .soak import MODES, POOL_BYTES, SHORT, Settings, soak
from .traffic import Answer

SECONDS = 50.0


def test_mixed_requests_and_faults(new_lab: Callable[..., Lab], launcher: Launcher) -> None:
    settings = Settings.of_environment(SECONDS)
    lab = new_lab(pool_bytes=POOL_BYTES, **MODES[settings.mode], **SHORT)
    report = soak(lab, launcher, settings, print)
    assert report.failures == []
    assert report.right == report.requests > 0


# -- what judges it ----------------------------------------------------------------------------------------------------

REQUESTS = 100
"""Between two samples."""


def series(count: int = 40, **per_request: float) -> list[Sample]:
    """A server of two processes that holds a little more or less from time to time, and leaks what is given."""
    samples = []
    for number in range(count):
        requests = number * REQUESTS
        still = Holding("api", 500 << 20, 60 + number % 2, 20)
        resident = (700 << 20) + (number % 5 << 18) + (min(number, 8) << 22)  # it grows until it is warm
        leaky = Holding("core", resident, 80 + (number * 7) % 3, 30 + (number * 5) % 2)
        grown = {what: round(getattr(leaky, what) + each * requests) for what, each in per_request.items()}
        samples.append({1: still, 2: replace(leaky, **grown)})
    return samples


def test_what_comes_and_goes_is_flat() -> None:
    assert not_flat(series()) == []


@pytest.mark.parametrize(
    ("what", "each"),
    [("descriptors", 1.0), ("descriptors", 0.01), ("threads", 1.0), ("threads", 0.01), ("resident", 5_000.0)],
)
@pytest.mark.parametrize("samples", [16, 40])
def test_a_leak_of_each_request_is_not(what: str, each: float, samples: int) -> None:
    if what == "resident":
        each *= 40 / samples  # a shorter soak sees larger leaks only
    (found,) = not_flat(series(samples, **{what: each}))
    assert found.startswith("core (2): ")
    assert ("memory" if what == "resident" else what) in found


def test_a_process_that_goes_or_comes_is_seen() -> None:
    samples = series()
    del samples[30][2]
    assert not_flat(samples) == ["process 2 was not there all the time"]


def test_too_few_samples_are_no_proof() -> None:
    assert "too few" in not_flat(series(5))[0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (Answer(Request((1,)), None, (5, 6, 7)), True),
        (Answer(Request((1,)), None, (5, 6)), False),
        (Answer(Request((1,)), None, (5, 6, 8)), False),
        (Answer(Request((1,)), None, (5, 6, 7), error="HTTP 500"), False),
        (Answer(Request((1,)), 2, (5, 6)), True),
        (Answer(Request((1,)), 2, (5,)), False),
        (Answer(Request((1,)), 2, (5, 7)), False),
        (Answer(Request((1,)), 0, ()), True),
    ],
)
def test_an_answer_is_right_if_it_is_the_oracles_or_begins_so(answer: Answer, right: bool) -> None:
    assert answer.is_right((5, 6, 7)) is right


@pytest.mark.parametrize(("name", "value"), [("SECONDS", "5"), ("SECONDS", "long"), ("SEED", "x"), ("MODE", "slow")])
def test_a_setting_that_can_not_be_used_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SOAK_{name}", value)
    with pytest.raises(ValueError, match=f"SOAK_{name}='{value}': allowed are"):
        Settings.of_environment(50.0)
