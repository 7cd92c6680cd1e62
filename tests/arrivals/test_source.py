"""Rows that have arrived, and wait where the engine takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from vasuki.arrivals.source import MOST_BYTES, MOST_HERE, ArrivingRows, admission_for
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.simulator.arrivals import VirtualFeed
from vasuki.simulator.simulated_executor import VirtualClock


class Counted(VirtualFeed):
    """A feed that counts what was taken from it."""

    taken = 0

    def arrived(self) -> Any:
        row = super().arrived()
        self.taken += row is not None
        return row


def test_rows_beyond_a_number_of_bytes_are_left_with_the_feed() -> None:
    for num_bytes, most in ((10, MOST_HERE), (MOST_BYTES // 10, 10)):
        count = 5000
        requests = [Request(row, row, 4, 4, np.zeros(4, np.int32), carried_bytes=num_bytes) for row in range(count)]
        feed = Counted(requests, [0.0] * count, VirtualClock())
        policy = POLICIES["vasuki"]
        scheduler = Scheduler(EngineSettings(policy, Limits(16, 4), 64, 4))
        rows = ArrivingRows(feed, scheduler, admission_for(policy))
        for given, request in zip(range(1000), rows, strict=False):
            assert request.row == given
            assert feed.taken <= given + most
        assert feed.taken >= most
