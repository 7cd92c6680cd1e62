"""Rows that the driver hands out, as the engine's loop sees them: its source, its sink, and one of its observers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import NOTHING_SAID, Decoded, Progress, Request, Sequence
from vasuki.io.output.trace import StepRecord
from vasuki.runs.workers.messages import Ended, Finish, Note, Report, Stop, Take, ToDriver, ToReplica
from vasuki.simulator.replicas import ASK_BELOW

REPORT_EVERY_S = 0.2  # while there is nothing that the driver waits for


class DriverLink(Protocol):
    """The driver, as a replica sees it."""

    def send(self, message: ToDriver) -> None: ...

    def wait(self) -> ToReplica:
        """The driver's next message; waits for it."""
        ...

    def said(self) -> Iterator[ToReplica]:
        """The messages that the driver has sent since."""
        ...


class RowsOnLoan:
    """Takes leases and reports rows that have ended.

    Args:
        driver: hands rows out.
        scheduler: where they go.
        decode: output text of a finished sequence.
    """

    def __init__(self, driver: DriverLink, scheduler: Scheduler, decode: Callable[[Sequence], Decoded]) -> None:
        self._driver = driver
        self._scheduler = scheduler
        self._decode = decode
        self._rows: deque[Request] = deque()
        self._running = 0  # rows that the scheduler was given and that have not ended
        self._ended: list[Ended] = []
        self.steps: list[StepRecord] = []  # since the last report, filled by a `StepTracer`
        self.num_tokens = 0  # of rows that have ended
        self._has_asked = self._is_asked = self._is_last = self.is_stopped = False
        self._reported_s = 0.0

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        """The next row, or StopIteration for now: where others run, the loop goes on with those and asks again."""
        self._listen()
        while not (self._rows or self._running or self._is_last or self.is_stopped):
            self._report()
            self._hear(self._driver.wait())
        if not self._rows:
            raise StopIteration
        self._running += 1
        return self._rows.popleft()

    def write(self, sequence: Sequence) -> None:
        """Take a row that has ended."""
        request = sequence.request
        error = request.error or sequence.error
        said = NOTHING_SAID if error else self._decode(sequence)
        self._ended.append(Ended(request.key, sequence.progress, said, error))
        self._running -= 1
        if not error:
            self.num_tokens += sequence.num_tokens

    def commit_if_due(self, now_s: float) -> None:
        """Report, if the driver waits for something or has heard nothing for long."""
        self._listen()
        asks = len(self._rows) < ASK_BELOW and not self._has_asked
        if self._ended or asks or self._is_asked or time.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report()

    def should_stop(self) -> bool:
        return self.is_stopped

    def last_words(self) -> None:
        """Report what is left to report."""
        self._is_asked = self.is_stopped
        self._report()

    def _report(self) -> None:
        asks = len(self._rows) < ASK_BELOW and not self._has_asked
        queues = self._scheduler.queues
        in_flight: dict[tuple[int, int], Progress] | None = None
        if self._is_asked:
            in_flight = {s.request.key: s.progress for s in self._scheduler.unfinished()}
        kv_share = queues.pool.num_held / queues.pool.num_blocks
        self._driver.send(Report(self._ended, self.steps[:], asks, in_flight, queues.num_running, kv_share))
        self._has_asked = self._has_asked or asks
        self._is_asked = False
        self._ended = []
        self.steps.clear()
        self._reported_s = time.perf_counter()

    def _listen(self) -> None:
        for message in self._driver.said():
            self._hear(message)

    def _hear(self, message: ToReplica) -> None:
        match message:
            case Take(requests):
                self._rows.extend(requests)
                self._has_asked = False
            case Note():
                self._is_asked = True
            case Finish():
                self._is_last = True
            case Stop():
                self.is_stopped = True
