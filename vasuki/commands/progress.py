"""What a person sees while a job runs: a bar on a terminal, a line every 30 seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from vasuki.base.units import duration, percent_text
from vasuki.commands.logs import is_json
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence

log = logging.getLogger(__name__)

_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 30.0


class Progress:
    """An engine observer that tells rows, tokens/s, running sequences, KV use and time left.

    Args:
        total_rows: of this run, those that are already done left out.
        rows_done: rows finished so far in this run.
        predicted_s: the makespan by the plan and the pace so far; time left is read off it at first, and off the rows
            more and more.
        quiet: say nothing.
    """

    def __init__(
        self,
        total_rows: int,
        rows_done: Callable[[], int],
        predicted_s: Callable[[], float],
        quiet: bool = False,
    ) -> None:
        self._total_rows = total_rows
        self._rows_done = rows_done
        self._predicted_s = predicted_s
        self._quiet = quiet
        self._tokens = 0
        self._started_s = self._shown_s = time.perf_counter()
        on_terminal = sys.stderr.isatty() and not quiet and not is_json()
        self._bar = (
            tqdm(
                total=total_rows,
                dynamic_ncols=True,
                bar_format="{l_bar}{bar:10} {n_fmt}/{total_fmt} rows{postfix}",
            )
            if on_terminal
            else None
        )

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Count a step, and show the state if it is time."""
        self._tokens += batch.num_tokens
        wall_s = time.perf_counter()
        if wall_s - self._shown_s >= (_BAR_EVERY_S if self._bar else _LINE_EVERY_S):
            self._shown_s = wall_s
            self._show(scheduler.queues.num_running, scheduler.queues.pool.num_held / scheduler.queues.pool.num_blocks)

    def _show(self, running: int, kv_share: float) -> None:
        rows, elapsed_s = self._rows_done(), time.perf_counter() - self._started_s
        state = (
            f"{self._time_left(rows, elapsed_s)} left, {self._tokens / elapsed_s:,.0f} tok/s, {running} running, "
            f"KV {percent_text(kv_share)}"
        )
        if self._bar is not None:
            self._bar.n = rows
            self._bar.set_postfix_str(state)
        elif not self._quiet:
            log.info("%d/%d rows, %s", rows, self._total_rows, state)

    def _time_left(self, rows: int, elapsed_s: float) -> str:
        done = rows / self._total_rows if self._total_rows else 1.0
        by_rows = elapsed_s / done - elapsed_s if done else 0.0
        by_plan = max(0.0, self._predicted_s() - elapsed_s)
        return duration(done * by_rows + (1 - done) * by_plan)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.n = self._rows_done()
            self._bar.set_postfix_str(f"{self._tokens / (time.perf_counter() - self._started_s):,.0f} tok/s")
            self._bar.close()
