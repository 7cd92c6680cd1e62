"""How long rows that arrive wait for their first token, and for their last."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence


class WaitingTimes:
    """An observer that looks at the clock when a row has its first token, and when it ends.

    Args:
        arrived_at_s: when a row arrived, on that clock.
        now_s: of the clock; that of the steps if not given.

    Attributes:
        ttft_s: time to first token of each row that has one, in the order in which they got it.
        latency_s: of each row that ended, from its arrival.
        urgent_latency_s: the same of urgent rows alone.
        missed_deadlines: rows that ended later than they were due.
        on_first_token: told of each first token: the time, and the seconds since the row arrived.
    """

    def __init__(self, arrived_at_s: Callable[[Request], float], now_s: Callable[[], float] | None = None) -> None:
        self.ttft_s = array("d")
        self.latency_s = array("d")
        self.urgent_latency_s = array("d")
        self.missed_deadlines = 0
        self._arrived_at_s = arrived_at_s
        self._now_s = now_s
        self.on_first_token: Callable[[float, float], None] = lambda at_s, ttft_s: None

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note which rows have a first token, and which have ended."""
        at_s = self._now_s() if self._now_s else now_s
        for chunk in batch.prefills:
            if chunk.samples and chunk.sequence.num_output_tokens == 1:  # no prompt that is computed again
                ttft_s = at_s - self._arrived_at_s(chunk.sequence.request)
                self.ttft_s.append(ttft_s)
                self.on_first_token(at_s, ttft_s)
        self.ended(finished, at_s)

    def ended(self, finished: list[Sequence], at_s: float) -> None:
        """Note which rows have ended at that time."""
        for sequence in finished:
            request = sequence.request
            self.latency_s.append(at_s - self._arrived_at_s(request))
            if request.is_urgent:
                self.urgent_latency_s.append(self.latency_s[-1])
            self.missed_deadlines += at_s > request.due_s
