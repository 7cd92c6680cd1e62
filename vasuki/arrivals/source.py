"""Requests as they arrive, in the order in which they should start. Real and simulated runs share it.

feed --arrived--> admission --in their turn--> ready, the urgent ones first --> scheduler
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Protocol

from vasuki.arrivals.admission import ArrivalAdmission
from vasuki.arrivals.gathering import Gathering
from vasuki.arrivals.rounds import FirstCome, Rounds
from vasuki.engine.policy import Policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request

MOST_HERE, MOST_BYTES = 4096, 48_000_000  # more rows are left with the feed


class Feed(Protocol):
    """Where rows come from, and the time there."""

    @property
    def now_s(self) -> float: ...

    def is_over(self) -> bool:
        """Whether to stop starting rows, including rows already taken."""
        ...

    def arrived(self) -> tuple[Request, float] | None:
        """The next row that has arrived, and when; None if there is none yet."""
        ...

    def num_arrived(self) -> int:
        """Rows that have arrived, including rows already taken."""
        ...

    def work_until(self, at_s: float) -> None:
        """The engine has work, but should look again at that time, or when a row arrives."""
        ...

    def wait_until(self, at_s: float) -> bool:
        """The engine has none: let time pass, to that moment or the next arrival. False if there is nothing to wait
        for."""
        ...


def admission_for(policy: Policy, config: Gathering | None = None) -> FirstCome:
    """What a policy does with rows that wait. The config says how it gathers them, if it does that."""
    if policy.gathers:
        return ArrivalAdmission(config or Gathering())
    return Rounds() if policy.ordered and not policy.as_they_come else FirstCome()


class ArrivingRows:
    """An iterator that has nothing more to give until a row arrives; then it goes on. While the engine has nothing else
    to do it waits.

    Args:
        feed: the rows, in order of arrival.
        scheduler: is told how many rows wait here.
        admission: says whose turn it is. Urgent rows pass it by.
    """

    def __init__(self, feed: Feed, scheduler: Scheduler, admission: FirstCome) -> None:
        self._feed = feed
        self._scheduler = scheduler
        self._admission = admission
        self._ready: list[tuple[tuple[float, float], int, Request]] = []  # heap
        self._numbers = itertools.count()
        self._given = 0
        self._num_bytes = 0  # of rows that are here
        scheduler.queues.held_back = lambda: feed.num_arrived() - self._given
        scheduler.queues.urgent_held_back = self._holds_urgent

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        feed, scheduler, admission = self._feed, self._scheduler, self._admission
        while True:
            if feed.is_over():
                raise StopIteration
            self._take_in()
            if self._ready:
                break
            look_s = admission.next_look_s(feed.now_s)
            if not scheduler.is_idle:
                feed.work_until(look_s)
                raise StopIteration
            idle_since_s = feed.now_s
            if not feed.wait_until(look_s):
                raise StopIteration
            admission.idle(idle_since_s, feed.now_s)
        feed.work_until(math.inf)
        self._given += 1
        request = heapq.heappop(self._ready)[-1]
        self._num_bytes -= request.num_bytes
        return request

    def _take_in(self) -> None:
        """Take what has arrived, and whose turn it is."""
        admission, queues = self._admission, self._scheduler.queues
        while self._has_room() and (row := self._feed.arrived()):
            request, at_s = row
            self._num_bytes += request.num_bytes
            if request.is_urgent:
                self._add(request)
            else:
                admission.arrive(request, at_s)
        if not self._ready:
            for request in admission.take(self._feed.now_s, not queues.waiting, self._scheduler.is_idle):
                self._add(request)
            queues.gathers = admission.gathers

    def _has_room(self) -> bool:
        return len(self._ready) + len(self._admission) < MOST_HERE and self._num_bytes < MOST_BYTES

    def _add(self, request: Request) -> None:
        heapq.heappush(self._ready, (request.urgency, next(self._numbers), request))

    def _holds_urgent(self) -> bool:
        self._take_in()
        return bool(self._ready) and self._ready[0][-1].is_urgent
