"""Tests of two thousand random schedules of a run, with deaths of every part, in two halves for two cores."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from schedule_cases import Schedule

pytestmark = [pytest.mark.slow]
HALF = settings(max_examples=1000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class ManySchedules(Schedule):
    """The same schedules under another name, for which Hypothesis keeps separate failures and another seed."""


class ManyMoreSchedules(Schedule):
    """A second copy for the same reason as ``ManySchedules``."""


TestManySchedules, TestManyMoreSchedules = ManySchedules.TestCase, ManyMoreSchedules.TestCase
TestManySchedules.settings = TestManyMoreSchedules.settings = HALF
