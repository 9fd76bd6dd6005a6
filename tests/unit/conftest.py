"""Settings of the property tests: no deadline, nothing kept on disk, in CI the same draws."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "local", deadline=None, max_examples=100, database=None, suppress_health_check=_slow
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
