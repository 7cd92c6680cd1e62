"""Requests as they arrive: at once to the scheduler, or gathered into batches first. Real and simulated runs share it.

feed --arrived--> [held back, where batches are gathered] --> ready, the urgent ones first --> scheduler
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Protocol

from vasuki.arrivals.admission import ArrivalAdmission
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request

MOST_READY = 4096  # more are left with the feed


class Feed(Protocol):
    """Where rows come from, and the time there."""

    @property
    def now_s(self) -> float: ...

    def is_over(self) -> bool:
        """Whether no row should start any more, of those that were taken either."""
        ...

    def arrived(self) -> tuple[Request, float] | None:
        """The next row that has arrived, and when; None if there is none yet."""
        ...

    def num_arrived(self) -> int:
        """Rows that have arrived, those that were taken included."""
        ...

    def work_until(self, at_s: float) -> None:
        """The engine has work, but should look again at that time, or when a row arrives."""
        ...

    def wait_until(self, at_s: float) -> bool:
        """The engine has none: let time pass, to that moment or the next arrival. False if there is nothing to wait
        for."""
        ...


class ArrivingRows:
    """An iterator that has nothing more to give until a row arrives; then it goes on. While the engine has nothing else
    to do it waits.

    Args:
        feed: the rows, in order of arrival.
        scheduler: is told how many rows are held back.
        admission: holds rows back until a batch is due, once the scheduler has started all that it has; None to give
            each at once. Urgent rows are never held back.
    """

    def __init__(self, feed: Feed, scheduler: Scheduler, admission: ArrivalAdmission | None = None) -> None:
        self._feed = feed
        self._scheduler = scheduler
        self._admission = admission
        self._ready: list[tuple[tuple[float, float], int, Request]] = []  # heap
        self._numbers = itertools.count()
        self._given = 0
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
            look_s = admission.next_look_s(feed.now_s) if admission is not None else math.inf
            if not scheduler.is_idle:
                feed.work_until(look_s)
                raise StopIteration
            idle_since_s = feed.now_s
            if not feed.wait_until(look_s):
                raise StopIteration
            if admission is not None:
                admission.controller.idle(idle_since_s, feed.now_s)
        feed.work_until(math.inf)
        self._given += 1
        return heapq.heappop(self._ready)[-1]

    def _take_in(self) -> None:
        """Take what has arrived, and what is due of it."""
        admission, queues = self._admission, self._scheduler.queues
        while len(self._ready) < MOST_READY and (row := self._feed.arrived()):
            request, at_s = row
            if admission is not None and not request.is_urgent:
                admission.arrive(request, at_s)
            else:
                self._add(request)
        if admission is not None and not self._ready:
            for request in admission.take(self._feed.now_s, not queues.waiting, self._scheduler.is_idle):
                self._add(request)
            queues.gathers = admission.controller.rows

    def _add(self, request: Request) -> None:
        heapq.heappush(self._ready, (request.urgency, next(self._numbers), request))

    def _holds_urgent(self) -> bool:
        self._take_in()
        return bool(self._ready) and self._ready[0][-1].is_urgent
