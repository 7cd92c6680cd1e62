"""What the log says of steps that take far longer than predicted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from vasuki.engine.batch import StepResult
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.runs.observers.watchdog import SLOW, STUCK_S, Watchdog

PREDICTED_S = 0.1


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog(lambda batch, result, scheduler: PREDICTED_S)
    yield dog
    dog.close()


def step(watchdog: Watchdog, elapsed_s: float) -> None:
    scheduler = Scheduler(EngineSettings(POLICIES["vasuki"], Limits(8, 8), 6, 4))
    scheduler.add(Request(0, "slow", 5, 3))
    batch = scheduler.schedule()
    assert batch is not None
    watchdog.record(elapsed_s, batch, StepResult([1], [False], elapsed_s), scheduler, [])


def test_a_slow_step_is_told_with_what_it_did(watchdog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vasuki"):
        step(watchdog, 0.9 * SLOW * PREDICTED_S)
        assert not caplog.records
        step(watchdog, 1.1 * SLOW * PREDICTED_S)
    (record,) = caplog.records
    assert "step 2 took" in record.message
    assert "0 decodes and 5 prompt tokens" in record.message
    assert "first row 'slow'" in record.message


def test_a_step_that_does_not_end_is_told_once(watchdog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vasuki"):
        step(watchdog, PREDICTED_S)
        now_s = time.monotonic()
        watchdog.look(now_s + STUCK_S - 10)
        assert not caplog.records
        watchdog.look(now_s + STUCK_S + 10)
        watchdog.look(now_s + STUCK_S + 20)
    assert [record.message.split(";")[0].split(" for ")[0] for record in caplog.records] == ["no step has ended"]
