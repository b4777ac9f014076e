"""What holds for all unit tests: hypothesis measures no time, for a busy machine may take any."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environments of single devices and engines don't have it, nor the tests that need it
    pass
else:
    settings.register_profile("no time limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no time limits")
