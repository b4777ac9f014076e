"""Waivers: known broken injections, each bound to an issue; knows nothing of how injections are run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from faultinject.judge import BROKEN

_ISSUE = re.compile(r"#\d+|https?://\S+")


@dataclass(frozen=True)
class Waiver:
    """Injections whose token matches `pattern` (`*`, `?` are wildcards) may end as `outcome` until `issue` is closed.

    Another broken outcome still fails, and a waiver whose injections all pass is flagged: it must go.
    """

    pattern: str
    issue: str
    outcome: str

    def __post_init__(self) -> None:
        if not _ISSUE.fullmatch(self.issue):
            raise ValueError(f"waiver {self.pattern!r}: issue {self.issue!r} must be '#NUMBER' or a URL")
        if self.outcome not in BROKEN:
            raise ValueError(f"waiver {self.pattern!r}: outcome {self.outcome!r} must be one of {sorted(BROKEN)}")

    def matches(self, token: str) -> bool:
        pattern = re.escape(self.pattern).replace(r"\*", ".*").replace(r"\?", ".")
        return re.fullmatch(pattern, token) is not None
