"""Requests as they arrive in virtual time: at once to the scheduler, or gathered into batches first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Vector

from vasuki.arrivals import ArrivalAdmission
from vasuki.engine.queues import Queues
from vasuki.engine.sequence import Request
from vasuki.simulator.simulated_executor import VirtualClock


class Arrivals:
    """An iterator that has nothing more to give until the clock reaches the next arrival.

    It moves the clock on to that arrival when nothing else is left to do.

    Args:
        requests: in order of arrival.
        arrived_at_s: by `Request.row`.
        clock: of the executor.
        queues: of the scheduler, which are told how many rows are held back.
    """

    def __init__(
        self, requests: Iterable[Request], arrived_at_s: Vector[float], clock: VirtualClock, queues: Queues
    ) -> None:
        self._requests = iter(requests)
        self._arrived_at_s = arrived_at_s
        self._clock = clock
        self._queues = queues
        self._next = next(self._requests, None)
        self._given = 0
        queues.held_back = lambda: bisect_right(arrived_at_s, clock.now_s) - self._given

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        clock = self._clock
        clock.next_arrival_s = self._next_at_s
        if clock.now_s < clock.next_arrival_s:
            if self._next is None or not self._queues.is_empty():
                raise StopIteration
            clock.now_s = clock.next_arrival_s
        self._given += 1
        return self._arrived()

    @property
    def _next_at_s(self) -> float:
        return math.inf if self._next is None else self._arrived_at_s[self._next.row]

    def _arrived(self) -> Request:
        """The request that arrived next."""
        request, self._next = self._next, next(self._requests, None)
        assert request is not None
        return request


class GatheredArrivals(Arrivals):
    """The same where `admission` holds rows back, and gives them out in batches once the scheduler has none left.

    It moves the clock on to the next arrival, timeout or epoch.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        arrived_at_s: Vector[float],
        clock: VirtualClock,
        queues: Queues,
        admission: ArrivalAdmission,
    ) -> None:
        super().__init__(requests, arrived_at_s, clock, queues)
        self._admission = admission
        self._batch: deque[Request] = deque()  # being given out

    def __next__(self) -> Request:
        admission, clock, queues = self._admission, self._clock, self._queues
        while not self._batch:
            while (at_s := self._next_at_s) <= clock.now_s:
                admission.arrive(self._arrived(), at_s)
            self._batch.extend(admission.take(clock.now_s, not queues.waiting, queues.is_empty()))
            queues.gathers = admission.controller.rows
            if self._batch:
                break
            clock.next_arrival_s = min(self._next_at_s, admission.next_look_s(clock.now_s))
            if not queues.is_empty() or clock.next_arrival_s == math.inf:
                raise StopIteration
            admission.controller.idle(clock.now_s, clock.next_arrival_s)
            clock.now_s = clock.next_arrival_s
        self._given += 1
        return self._batch.popleft()
