"""What a person sees while a job runs: on a terminal seconds that count up, then a bar; in a log a line for each phase,
then one every 30 seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from vasuki.base.logs import is_json, terminal_width
from vasuki.base.units import count_text, duration, percent_text
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.planner import RunningPrediction

log = logging.getLogger(__name__)

_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 30.0
_SLOW_S = 2.0
_BAR_FORMAT = "{percentage:3.0f}% {bar:10} {desc}"
_SHORT_BAR_FORMAT = "{percentage:3.0f}% {bar:10}"
_BAR_COLUMNS = 17  # of it, before what is said in words
_CLEAR = "\r\x1b[2K"  # to the start of the line, which is then empty


@dataclass(slots=True)
class HowFar:
    """How far a phase is, set by whoever works on it."""

    share: float = 0.0  # of it that is done; 0 while nobody knows
    words: str = ""  # such as `240 rows`


@contextmanager
def busy_with(phase: str, quiet: bool = False, after_s: float = 0.0) -> Iterator[HowFar]:
    """Name a phase, how far it is and how long it has taken: each second on a terminal; in a log at its start, then
    every 30 seconds.

    Args:
        phase: what is done.
        quiet: say nothing on a terminal.
        after_s: seconds before it is named first. A shorter one never is.
    """
    far, ended, on_terminal = HowFar(), threading.Event(), _has_terminal(quiet)
    started_s = time.perf_counter()
    if not on_terminal and not after_s:
        log.info("%s", phase)

    def tell() -> None:
        every_s = 1.0 if on_terminal else _LINE_EVERY_S
        wait_s = after_s if on_terminal or after_s else every_s
        while not (wait_s and ended.wait(wait_s)):
            wait_s = every_s
            parts = (phase, far.words, f"{time.perf_counter() - started_s:.0f} s")
            state = ", ".join(part for part in parts if part)
            if on_terminal:
                # The cursor goes back to the start, so that what is logged meanwhile writes over it.
                sys.stderr.write(f"{_CLEAR}{_bar_of(far.share)}{state}\r")
                sys.stderr.flush()
            elif far.share:
                log.info("%s of the work done; %s", percent_text(far.share), state)
            else:
                log.info("%s", state)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield far
    finally:
        ended.set()
        thread.join()
        if on_terminal:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def busy_if_slow(phase: str) -> AbstractContextManager[HowFar]:
    """Name a phase that takes longer than anybody waits without wondering, unless logs are quiet."""
    return busy_with(phase, not log.isEnabledFor(logging.INFO), _SLOW_S)


def _bar_of(share: float) -> str:
    bar = tqdm.format_meter(min(share, 1.0), 1.0, 0.0, bar_format=_SHORT_BAR_FORMAT) if share else ""
    return f"{bar} " if bar else ""


def _has_terminal(quiet: bool) -> bool:
    return terminal_width() is not None and not quiet and not is_json()


class StatusLine:
    """A job's state: on a terminal a bar with words beside it, in a log a line now and then.

    Args:
        first_words: beside the bar, before there is a state.
        quiet: say nothing.
    """

    def __init__(self, first_words: str, quiet: bool = False) -> None:
        self._quiet = quiet
        self._shown_s = time.perf_counter()
        self._bar = tqdm(total=1.0, bar_format=_BAR_FORMAT, desc=first_words) if _has_terminal(quiet) else None

    def is_due(self) -> bool:
        """Whether it is time to show the state."""
        return time.perf_counter() - self._shown_s >= (_BAR_EVERY_S if self._bar else _LINE_EVERY_S)

    def show(self, done_share: float, state: list[str]) -> None:
        """Show so much of the work as done, and the state, which begins with what matters most."""
        self._shown_s = time.perf_counter()
        if self._bar is not None:
            self._draw(self._bar, done_share, state)
        elif not self._quiet:
            log.info("%s of the work done; %s", percent_text(done_share), ", ".join(state))

    def close(self, is_done: bool, state: list[str]) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._draw(self._bar, 1.0 if is_done else self._bar.n, state)
            self._bar.close()

    @staticmethod
    def _draw(bar: Any, share: float, state: list[str]) -> None:
        """Redraw the bar, with as much of the state as has room beside it."""
        room = (terminal_width() or 80) - _BAR_COLUMNS
        while len(state) > 1 and len(", ".join(state)) > room:
            state = state[:-1]
        bar.n = share
        bar.set_description_str(", ".join(state))


class Progress:
    """An engine observer that tells the phase, time left, work done, rows, tokens/s, running sequences and KV use.

    The bar shows work, since rows stand still while prompts are computed.

    Args:
        total_rows: of this run, as far as is known now, those left out that earlier ones have done.
        rows_done: rows finished so far in this run.
        prediction: of the time left, at the pace so far; it has to see each step first.
        quiet: say nothing.
    """

    def __init__(
        self,
        total_rows: Callable[[], int],
        rows_done: Callable[[], int],
        prediction: RunningPrediction,
        quiet: bool = False,
    ) -> None:
        self._total_rows = total_rows
        self._rows_done = rows_done
        self._prediction = prediction
        self._tokens = 0
        self._started_s = time.perf_counter()
        self._line = StatusLine("prompts", quiet)

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Count a step, and show the state if it is time."""
        self._tokens += batch.num_tokens
        if self._line.is_due():
            phase = "prompts" if batch.prefills else "decoding"
            queues = scheduler.queues
            self._show(phase, queues.num_running, queues.pool.num_held / queues.pool.num_blocks)

    def _show(self, phase: str, running: int, kv_share: float) -> None:
        elapsed_s, prediction = time.perf_counter() - self._started_s, self._prediction
        state = [
            f"{phase}: {duration(prediction.left_s)} left",
            f"{self._rows_done():,}/{self._total_rows():,} rows",
            f"{self._tokens / elapsed_s:,.0f} tokens/s",
            f"{running} running",
            f"KV {percent_text(kv_share)}",
            f"{count_text(self._tokens)} tokens",
        ]
        self._line.show(prediction.done_share, state)

    def close(self) -> None:
        """Leave the last state on the screen."""
        rows, elapsed_s = self._rows_done(), time.perf_counter() - self._started_s
        self._line.close(rows >= self._total_rows(), [f"{rows:,} rows", f"{self._tokens / elapsed_s:,.0f} tokens/s"])
