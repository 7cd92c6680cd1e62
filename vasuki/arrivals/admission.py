"""Rows held back until a batch of them is due: the staging queue and the triggers of Dynamic Prefill Packing (3.4).

    arrive --> held back --(due?)--> packed --> batches --> take --> scheduler, a batch at a time

A batch is due when as many rows are held back as the controller says, when arrivals are a burst by their number or
rate, or when the first of them has waited for the timeout. The paper asks so at any time, so that under load every
arrival is packed alone and queues behind others. With the controller `load` it is asked only when the engine has taken
all that was packed before, and rows don't wait for others while the device has nothing to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from vasuki.arrivals.controller import Controller
from vasuki.arrivals.gathering import Gathering
from vasuki.arrivals.packer import pack_requests
from vasuki.arrivals.rounds import FirstCome
from vasuki.engine.sequence import Request

Pack = Callable[[Sequence[Request], Gathering], list[list[Request]]]


class ArrivalAdmission(FirstCome):
    """Gives rows on in packed batches.

    Args:
        config: when a batch is due.
        pack: rows to batches.
    """

    def __init__(self, config: Gathering, pack: Pack = pack_requests) -> None:
        super().__init__()
        self.controller = Controller(config)
        self._pack = pack
        self._config = config
        self._timeout_s = config.timeout * config.target_s
        self._first_at_s = math.inf  # when the first of those held back arrived
        self._batches: deque[list[Request]] = deque()  # packed, not taken

    @property
    def gathers(self) -> int:
        return self.controller.rows

    def __len__(self) -> int:
        return len(self._held) + sum(map(len, self._batches))

    def arrive(self, request: Request, at_s: float) -> None:
        self.controller.arrived(at_s)
        if not self._held:
            self._first_at_s = at_s
        super().arrive(request, at_s)

    def take(self, now_s: float, engine_waits: bool, engine_idle: bool) -> list[Request]:
        """The next batch, once the engine has started the one before; empty if none is due."""
        self.controller.pass_time(now_s)
        ready = self._config.controller == "aimd" or (engine_waits and not self._batches)
        if self._held and ready and self._is_due(now_s, engine_idle):
            self._batches.extend(self._pack(self._held, self._config))
            self._held, self._first_at_s = [], math.inf
        return self._batches.popleft() if engine_waits and self._batches else []

    def next_look_s(self, now_s: float) -> float:
        """When to look again: at a timeout, or when an epoch ends."""
        if not self._held:
            return math.inf
        times_s = (self._first_at_s + self._timeout_s, self.controller.epoch_end_s)
        return min((at_s for at_s in times_s if at_s > now_s), default=math.inf)

    def idle(self, from_s: float, to_s: float) -> None:
        self.controller.idle(from_s, to_s)

    def first_token(self, at_s: float, ttft_s: float) -> None:
        self.controller.first_token(at_s, ttft_s)

    def _is_due(self, now_s: float, engine_idle: bool) -> bool:
        config, held = self._config, len(self._held)
        return (
            held >= min(self.controller.rows, config.burst_rows)
            or self.controller.rows_per_s >= config.burst_rows_per_s
            or now_s >= self._first_at_s + self._timeout_s
            or (engine_idle and config.controller == "load")
        )
