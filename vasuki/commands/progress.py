"""What a person sees while a job runs: a bar on a terminal, a line every 30 seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from vasuki.base.units import count_text, duration, percent_text
from vasuki.commands.logs import is_json
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.planner import RunningPrediction

log = logging.getLogger(__name__)

_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 30.0


class Progress:
    """An engine observer that tells the phase, time left, work done, rows, tokens/s, running sequences and KV use.

    The bar shows work, since rows stand still while prompts are computed.

    Args:
        total_rows: of this run, those that are already done left out.
        rows_done: rows finished so far in this run.
        prediction: of the time left, at the pace so far; it has to see each step first.
        quiet: say nothing.
    """

    def __init__(
        self,
        total_rows: int,
        rows_done: Callable[[], int],
        prediction: RunningPrediction,
        quiet: bool = False,
    ) -> None:
        self._total_rows = total_rows
        self._rows_done = rows_done
        self._prediction = prediction
        self._quiet = quiet
        self._tokens = 0
        self._started_s = self._shown_s = time.perf_counter()
        on_terminal = sys.stderr.isatty() and not quiet and not is_json()
        self._bar = (
            tqdm(
                total=1.0,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar:10}|{postfix}",
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
            phase = "prompts" if batch.prefills else "decoding"
            queues = scheduler.queues
            self._show(phase, queues.num_running, queues.pool.num_held / queues.pool.num_blocks)

    def _show(self, phase: str, running: int, kv_share: float) -> None:
        elapsed_s, prediction = time.perf_counter() - self._started_s, self._prediction
        state = (
            f"{phase}: {duration(prediction.left_s)} left, {self._rows_done():,}/{self._total_rows:,} rows, "
            f"{count_text(self._tokens)} tokens at {self._tokens / elapsed_s:,.0f} a second, {running} running, "
            f"KV {percent_text(kv_share)}"
        )
        if self._bar is not None:
            self._bar.n = prediction.done_share
            self._bar.set_postfix_str(state, refresh=True)
        elif not self._quiet:
            log.info("%s of the work done; %s", percent_text(prediction.done_share), state)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            rows, elapsed_s = self._rows_done(), time.perf_counter() - self._started_s
            self._bar.n = 1.0 if rows >= self._total_rows else self._bar.n
            self._bar.set_postfix_str(f"writing: {rows:,} rows, {self._tokens / elapsed_s:,.0f} tokens a second")
            self._bar.close()
