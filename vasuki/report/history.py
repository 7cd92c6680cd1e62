"""The runs of a job over time: is it getting slower, and which runs were slow?

Two rates are watched, seconds per million tokens and seconds per thousand rows. A rate is unusual when it exceeds the
median of the runs before it by more than 3.5 robust standard deviations (1.4826 x the median absolute deviation), and
by at least 5 %, so that a past without scatter does not make an alarm of every second. A run is slow when both rates
are unusual: rows that became longer raise the rate per row alone, shorter ones the rate per token alone. It is late
when it took 15 % longer than the plan said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vasuki.errors import InputError
from vasuki.report.comparison import Result
from vasuki.report.prices import price_of
from vasuki.report.runs import Run, load_run, run_folders
from vasuki.units import count_text, listing, money_text, percent_text, plural, time_text

MIN_PAST = 4  # runs before the first that can be called slow
PAST = 30  # runs that count as the past
DEVIATIONS = 3.5
LEAST_EXCESS = 0.05
LATE = 0.15  # longer than predicted by this share
_MAD_TO_SIGMA = 1.4826
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Usual:
    """What the runs before made of a rate."""

    median: float
    limit: float  # more is unusual


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One run among its like."""

    result: Result
    per_token: Usual | None  # of seconds per million tokens; None while there is too little past
    per_row: Usual | None  # of seconds per thousand rows

    @property
    def s_per_million_tokens(self) -> float:
        return self.result.makespan_s / max(1, self.result.run.tokens) * 1e6

    @property
    def s_per_thousand_rows(self) -> float:
        return self.result.makespan_s / self.result.run.rows_done * 1e3

    @property
    def is_slow(self) -> bool:
        """Slower than its past, per token and per row."""
        if self.per_token is None or self.per_row is None:
            return False
        return self.s_per_million_tokens > self.per_token.limit and self.s_per_thousand_rows > self.per_row.limit

    @property
    def is_late(self) -> bool:
        """Slower than its prediction."""
        return (self.result.prediction_error or 0.0) > LATE

    @property
    def flags(self) -> tuple[str, ...]:
        """What is wrong with the run, in words."""
        found = []
        if self.is_slow and self.per_token is not None:
            excess = self.s_per_million_tokens / self.per_token.median - 1
            found.append(f"{percent_text(excess)} slower a token than usual")
        if self.is_late:
            found.append(f"{percent_text(self.result.prediction_error)} longer than predicted")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.result.to_dict(),
            "s_per_million_tokens": self.s_per_million_tokens,
            "s_per_thousand_rows": self.s_per_thousand_rows,
            "usual_s_per_million_tokens": self.per_token.median if self.per_token is not None else None,
            "limit_s_per_million_tokens": self.per_token.limit if self.per_token is not None else None,
            "is_slow": self.is_slow,
            "is_late": self.is_late,
            "flags": list(self.flags),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Runs of one job with one model and policy on one kind of card, by time."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def drift(self) -> float | None:
        """Change of seconds per million tokens from the first run to the last, as a share of the median.

        Theil and Sen: the median slope over all pairs of runs, which single slow runs do not move. None below
        `MIN_PAST` + 1 runs.
        """
        if len(self.entries) <= MIN_PAST:
            return None
        rates = np.array([entry.s_per_million_tokens for entry in self.entries[-_SHOWN:]])
        first, second = np.triu_indices(rates.size, 1)
        slope = float(np.median((rates[second] - rates[first]) / (second - first)))
        return slope * (rates.size - 1) / float(np.median(rates))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"name": self.name, "drift": self.drift, "runs": [entry.to_dict() for entry in self.entries]}


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """All runs below a folder."""

    path: str
    series: tuple[Series, ...]
    skipped: tuple[str, ...]  # why folders could not be read, one line each

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": self.path,
            "findings": findings(self),
            "series": [series.to_dict() for series in self.series],
            "skipped": list(self.skipped),
        }


def history(path: str) -> History:
    """Read the runs below a folder. One that cannot be read is skipped and named.

    Raises:
        InputError: there is no run that can be read.
    """
    runs: list[Run] = []
    skipped: list[str] = []
    for place in run_folders(path):
        try:
            runs.append(load_run(place))
        except InputError as error:
            skipped.append(str(error))
    if not runs:
        raise InputError(f"{path} has no run that can be read; the first: {skipped[0]}")
    runs.sort(key=lambda run: (run.finished_at, run.name))
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        how = "simulated" if run.manifest.simulated else ""
        groups.setdefault((run.job, run.gpu, run.model, run.policy, how), []).append(run)
    series = (Series(", ".join(filter(None, key)), _entries(members)) for key, members in groups.items())
    return History(path, tuple(series), tuple(skipped))


def _entries(runs: Sequence[Run]) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for run in runs:
        past = entries[-PAST:]
        per_token = _usual(entry.s_per_million_tokens for entry in past)
        per_row = _usual(entry.s_per_thousand_rows for entry in past)
        entries.append(Entry(Result(run, run.name, price_of(run, {})), per_token, per_row))
    return tuple(entries)


def _usual(past: Iterable[float]) -> Usual | None:
    rates = np.array(list(past))
    if rates.size < MIN_PAST:
        return None
    median = float(np.median(rates))
    deviation = _MAD_TO_SIGMA * float(np.median(np.abs(rates - median)))
    return Usual(median, median + max(DEVIATIONS * deviation, LEAST_EXCESS * median))


def findings(history: History) -> list[str]:
    """What a person should know, in sentences."""
    sentences = []
    for series in history.series:
        entries = series.entries
        first, last = (entry.result.run.finished_at for entry in (entries[0], entries[-1]))
        span = f"on {last:%Y-%m-%d}" if first.date() == last.date() else f"from {first:%Y-%m-%d} to {last:%Y-%m-%d}"
        slow = [entry for entry in entries if entry.flags]
        named = [f"{entry.result.label} ({listing(list(entry.flags))})" for entry in slow[-5:]]
        verdict = f"{len(slow)} of them slow: {listing(named)}" if slow else "none of them slow"
        if len(slow) > len(named):
            verdict = f"{len(slow)} of them slow, the latest: {listing(named)}"
        sentences.append(f"{series.name}: {plural(len(entries), 'run')} {span}, {verdict}.")
        if series.drift is not None and abs(series.drift) >= LEAST_EXCESS:
            direction = "slower" if series.drift > 0 else "faster"
            shown = min(_SHOWN, len(entries))
            sentences.append(
                f"{series.name}: {percent_text(abs(series.drift))} {direction} a token over the last {shown} runs."
            )
    if history.skipped:
        sentences.append(f"Left out: {'; '.join(history.skipped)}.")
    return sentences


def entry_cells(series: Series) -> tuple[list[str], list[list[str]]]:
    """Headings and one row of cells for each run."""
    headings = ["run", "ended (UTC)", "rows", "makespan", "predicted", "s/M tokens", "s/k rows", "cost", ""]
    return headings, [_cells(entry) for entry in series.entries]


def _cells(entry: Entry) -> list[str]:
    result = entry.result
    return [
        result.label,
        f"{result.run.finished_at:%m-%d %H:%M}",
        count_text(result.run.rows_done),
        time_text(result.makespan_s),
        percent_text(result.prediction_error, signed=True),
        f"{entry.s_per_million_tokens:,.1f}",
        f"{entry.s_per_thousand_rows:,.1f}",
        money_text(result.amount, result.price.currency if result.price is not None else ""),
        " ".join(["slow"] * entry.is_slow + ["late"] * entry.is_late),
    ]


def history_table(history: History) -> str:
    """Findings and the last forty runs of each series, for a terminal of 100 columns."""
    lines = [f"- {sentence}" for sentence in findings(history)]
    for series in history.series:
        headings, rows = entry_cells(series)
        shown = [headings, *rows[-_SHOWN:]]
        shown = [[cell if len(cell) <= 20 else f"...{cell[-17:]}" for cell in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines += ["", series.name]
        if len(rows) > _SHOWN:
            lines.append(f"({len(rows) - _SHOWN} earlier runs are not shown)")
        lines += [_aligned(row, widths) for row in shown]
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *cells = zip(row, widths, strict=True)
    return f"{name[0]:<{name[1]}}" + "".join(f"  {cell:>{width}}" for cell, width in cells).rstrip()
