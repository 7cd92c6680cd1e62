"""A run that will end after its deadline says so while something can still be done about it; one that is stopped says
whether its time could ever do."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vasuki.base.errors import Interrupted
from vasuki.base.units import duration

LOOK_EVERY_S = 1.0
LATE_LOOKS = 3  # in a row, so that a slow step or two are not taken for the job

log = logging.getLogger(__name__)


class Deadline:
    """Warns once that a run will end after its deadline.

    Args:
        deadline_s: after the start; infinite where there is none.
        started_s: of the run, on `time.perf_counter`'s clock.
        left_s: seconds that the run takes from now on, as foreseen now.
    """

    def __init__(self, deadline_s: float, started_s: float, left_s: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._started_s = started_s
        self._left_s = left_s
        self._looked_s = started_s
        self._late_looks = LATE_LOOKS - 1  # the plan is trusted at once
        self._told = False

    def look(self, now_s: float) -> None:
        """Warn if the end has been foreseen too late for long enough; `now_s` is on that clock."""
        if self._told or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        end_s = now_s - self._started_s + self._left_s()
        self._late_looks = self._late_looks + 1 if end_s > self._deadline_s else 0
        if self._late_looks >= LATE_LOOKS:
            self._told = True
            log.warning(
                "--deadline %s will be missed: the run should end %s after its start",
                duration(self._deadline_s),
                duration(end_s),
            )


def time_over(max_time_s: float, ready_s: float | None) -> Interrupted:
    """The message when `--max-time` is over; `ready_s` is from the start to the first step, None before it."""
    over = f"the {duration(max_time_s)} of --max-time are over"
    if ready_s is None:
        return Interrupted(f"{over} before the model is loaded; allow more")
    if ready_s >= max_time_s:
        return Interrupted(f"{over}, and loading and planning alone took {duration(ready_s)}; allow more")
    return Interrupted(over)
