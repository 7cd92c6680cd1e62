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
from vasuki.base.units import count_text, duration, percent_text, plural
from vasuki.io.output.trace import StepRecord

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
    """How far a phase is, set by the code that works on it."""

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
    """A job's state: on a terminal a bar with words after it, in a log a line now and then.

    Args:
        first_words: after the bar, before there is a state.
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
        """Redraw the bar, with as much of the state as fits the line."""
        room = (terminal_width() or 80) - _BAR_COLUMNS
        while len(state) > 1 and len(", ".join(state)) > room:
            state = state[:-1]
        bar.n = share
        bar.set_description_str(", ".join(state))


@dataclass(frozen=True, slots=True)
class Standing:
    """How the workers of a run stand."""

    running: int  # rows in steps
    kv_share: float  # of their KV blocks, that are held
    left_s: float  # to the last row, as foreseen now
    replicas: int | None = None  # that run rows; None where no replicas do


class RunProgress:
    """Tells the phase, time left, work done, rows, tokens/s, running sequences and KV use.

    The bar shows time, since rows stand still while prompts are computed.

    Args:
        total_rows: of this run, as far as is known now, those left out that earlier ones have done.
        rows_done: rows finished so far in this run.
        standing: how the workers stand.
        quiet: say nothing.
    """

    def __init__(
        self,
        total_rows: Callable[[], int],
        rows_done: Callable[[], int],
        standing: Callable[[], Standing],
        quiet: bool = False,
    ) -> None:
        self._total_rows = total_rows
        self._rows_done = rows_done
        self._standing = standing
        self._tokens = 0
        self._phase = ""
        self._started_s = time.perf_counter()
        self._line = StatusLine("prompts", quiet)

    def count(self, step: StepRecord) -> None:
        """Count a step."""
        self._tokens += step.prefill_tokens + step.decode_tokens
        self._phase = "prompts" if step.prefill_tokens else "decoding"

    def look(self) -> None:
        """Show the state if it is time."""
        if self._line.is_due():
            self._show(self._standing())

    def _show(self, now: Standing) -> None:
        elapsed_s = time.perf_counter() - self._started_s
        left, where = f"{duration(now.left_s)} left", ""
        if now.replicas is None:
            left = f"{self._phase}: {left}"
        else:
            left = left if now.replicas else "waiting for a replica"
            where = f" on {plural(now.replicas, 'replica')}"
        state = [
            left,
            f"{self._rows_done():,}/{self._total_rows():,} rows",
            f"{self._tokens / elapsed_s:,.0f} tokens/s",
            f"{now.running} running{where}",
            f"KV {percent_text(now.kv_share)}",
            f"{count_text(self._tokens)} tokens",
        ]
        self._line.show(elapsed_s / (elapsed_s + now.left_s), state)

    def close(self) -> None:
        """Leave the last state on the screen."""
        rows, elapsed_s = self._rows_done(), time.perf_counter() - self._started_s
        self._line.close(rows >= self._total_rows(), [f"{rows:,} rows", f"{self._tokens / elapsed_s:,.0f} tokens/s"])
