"""Two thousand of the random schedules of ``tests/unit/test_interleavings.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from test_interleavings import Schedule

pytestmark = [pytest.mark.slow]


class ManySchedules(Schedule):
    """The same under another name, so that the two keep apart the failures that they remember."""


TestManySchedules = ManySchedules.TestCase
TestManySchedules.settings = settings(
    max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
