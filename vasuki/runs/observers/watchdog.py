"""Warnings of steps that take far longer than predicted, also while they last."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from vasuki.base.units import duration
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence

SLOW = 50  # times what was predicted
LEAST_S = 1.0  # below, a step hurts nobody
STUCK_S = 60.0  # without the end of a step

log = logging.getLogger(__name__)


class Watchdog:
    """An engine observer. Close it, lest its thread goes on.

    Args:
        step_s: what was predicted of a step that is over; 0 if nothing was.
    """

    def __init__(self, step_s: Callable[[Batch, StepResult, Scheduler], float]) -> None:
        self._step_s = step_s
        self._steps = 0
        self._predicted_s = 0.0  # of the last step
        self._ended_s = time.monotonic()
        self._told = False  # that the step under way takes long
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Compare a step with its prediction."""
        self._predicted_s = self._step_s(batch, result, scheduler)
        self._steps += result.num_steps
        self._ended_s, self._told = time.monotonic(), False
        if self._predicted_s and result.elapsed_s > max(LEAST_S, SLOW * self._predicted_s):
            log.warning(
                "step %d took %s instead of %s: %d decodes and %d prompt tokens, %d bytes of KV moved; %s",
                self._steps,
                duration(result.elapsed_s),
                duration(self._predicted_s),
                batch.num_decode_tokens,
                batch.num_prefill_tokens,
                result.copied_bytes,
                scheduler.snapshot(),
            )

    def look(self, now_s: float) -> None:
        """Tell, once, of a step that has not ended for long; `now_s` is on the monotonic clock."""
        waited_s = now_s - self._ended_s
        if not self._told and waited_s > max(STUCK_S, SLOW * self._predicted_s):
            self._told = True
            log.warning(
                "no step has ended for %s; the last one, step %d, was predicted to take %s",
                duration(waited_s),
                self._steps,
                duration(self._predicted_s),
            )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(STUCK_S / 6):
            self.look(time.monotonic())
