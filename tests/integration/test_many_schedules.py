"""Two thousand of the random schedules of ``tests/unit/replay/test_interleavings.py``, in two halves for two cores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1] / "unit" / "replay"))
from test_interleavings import Schedule

pytestmark = [pytest.mark.slow]
HALF = settings(max_examples=1000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class ManySchedules(Schedule):
    """The same schedules under another name, for which Hypothesis keeps separate failures and another seed."""


class ManyMoreSchedules(Schedule):
    """A second copy for the same reason as ``ManySchedules``."""


TestManySchedules, TestManyMoreSchedules = ManySchedules.TestCase, ManyMoreSchedules.TestCase
TestManySchedules.settings = TestManyMoreSchedules.settings = HALF
