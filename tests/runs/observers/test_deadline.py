"""A run that will be late says so, early and once."""

from __future__ import annotations

import logging
import math

import pytest

from vasuki.runs.observers.deadline import LATE_LOOKS, Deadline


def looks(deadline_s: float, left_s: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said in a run that sees so much left, every ten seconds."""
    foreseen = iter(left_s)
    deadline = Deadline(deadline_s, 100.0, lambda: next(foreseen))
    with caplog.at_level(logging.WARNING, "vasuki"):
        for ten in range(len(left_s)):
            deadline.look(110.0 + 10 * ten)
    return [record.message for record in caplog.records]


def test_a_plan_that_is_too_long_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = looks(3600, [3715, 3600, 3500], caplog)
    assert line == "--deadline 1 h 00 min will be missed: the run should end 1 h 02 min after its start"


def test_a_run_that_falls_behind_is_told_when_it_stays_behind(caplog: pytest.LogCaptureFixture) -> None:
    assert not looks(1000, [900, 1500, 1500, 800, 1500], caplog)
    assert len(looks(1000, [900, *[1500] * LATE_LOOKS, 1500], caplog)) == 1


def test_without_a_deadline_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert not looks(math.inf, [1e9], caplog)
