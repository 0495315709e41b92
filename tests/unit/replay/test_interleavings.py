"""Tests of random schedules of a run, with deaths of every part."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from schedule_cases import Schedule

TestSchedules = Schedule.TestCase
TestSchedules.settings = settings(
    max_examples=25, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
