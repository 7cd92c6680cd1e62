"""How long rows that arrive wait for their first token, and for their last."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Vector

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.simulator.simulated_executor import VirtualClock


class WaitingTimes:
    """An observer that looks at the clock when a row has its first token, and when it ends.

    Args:
        arrived_at_s: by `Request.row`.
        clock: of the executor.
        on_first_token: told of each, with the time, and the seconds since the row arrived.

    Attributes:
        ttft_s: time to first token of each row that has one, in the order in which they got it.
        latency_s: of each row that ended, from its arrival.
    """

    def __init__(
        self,
        arrived_at_s: Vector[float],
        clock: VirtualClock,
        on_first_token: Callable[[float, float], None] = lambda at_s, ttft_s: None,
    ) -> None:
        self.ttft_s: list[float] = []
        self.latency_s: list[float] = []
        self._arrived_at_s = arrived_at_s
        self._clock = clock
        self._on_first_token = on_first_token

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note who has a first token, and who is done."""
        at_s = self._clock.now_s
        for chunk in batch.prefills:
            if chunk.samples and chunk.sequence.num_output_tokens == 1:  # no prompt that is computed again
                ttft_s = at_s - self._arrived_at_s[chunk.sequence.request.row]
                self.ttft_s.append(ttft_s)
                self._on_first_token(at_s, ttft_s)
        self.latency_s += [at_s - self._arrived_at_s[sequence.request.row] for sequence in finished]
