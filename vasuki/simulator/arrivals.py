"""Rows that arrive in virtual time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Vector

from vasuki.engine.sequence import Request
from vasuki.simulator.simulated_executor import VirtualClock


class VirtualFeed:
    """See `vasuki.arrivals.source.Feed`. Waiting moves the clock on.

    Args:
        requests: in order of arrival.
        arrived_at_s: by `Request.row`.
        clock: of the executor.
    """

    def __init__(self, requests: Iterable[Request], arrived_at_s: Vector[float], clock: VirtualClock) -> None:
        self._requests = iter(requests)
        self._arrived_at_s = arrived_at_s
        self._clock = clock
        self._next = next(self._requests, None)

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def is_over(self) -> bool:
        return False

    def arrived(self) -> tuple[Request, float] | None:
        request, at_s = self._next, self._next_at_s
        if request is None or at_s > self._clock.now_s:
            return None
        self._next = next(self._requests, None)
        return request, at_s

    def num_arrived(self) -> int:
        return bisect_right(self._arrived_at_s, self._clock.now_s)

    def work_until(self, at_s: float) -> None:
        self._clock.next_arrival_s = min(self._next_at_s, at_s)

    def wait_until(self, at_s: float) -> bool:
        at_s = min(self._next_at_s, at_s)
        if at_s == math.inf:
            return False
        self._clock.now_s = at_s
        return True

    @property
    def _next_at_s(self) -> float:
        return math.inf if self._next is None else self._arrived_at_s[self._next.row]
