"""The runs of a job over time: is it getting slower, and which runs were slow?

Two rates are watched, seconds per million tokens and seconds per thousand rows. A rate is unusual when it exceeds the
median of the runs before it by more than 3.5 robust standard deviations (1.4826 x the median absolute deviation), and
by at least 5 %, so that a past without scatter does not make an alarm of every second. A run is slow when both rates
are unusual: rows that became longer raise the rate per row alone, shorter ones the rate per token alone. It is late
when it took 15 % longer than the plan said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vasuki.base.errors import InputError
from vasuki.base.units import listing, money_text, percent_text, plural, time_text
from vasuki.io.location import Location
from vasuki.report.job_runs import Result
from vasuki.report.prices import check_prices, price_of
from vasuki.report.runs import Run, load_run, run_folders
from vasuki.report.summary import host_text
from vasuki.report.table import table_width, wrapped

MIN_PAST = 4  # runs before the first that can be called slow
PAST = 30  # runs that count as the past
DEVIATIONS = 3.5
LEAST_EXCESS = 0.05
LATE = 0.15  # longer than predicted by this share
_MAD_TO_SIGMA = 1.4826
_SHOWN = 40
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Usual:
    """The usual range of a rate over the runs before."""

    median: float
    limit: float  # more is unusual


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A run among others of its kind."""

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
        """Say in words what is wrong with the run, and what excuses it."""
        found = []
        if self.is_slow and self.per_token is not None:
            excess = self.s_per_million_tokens / self.per_token.median - 1
            found.append(f"{percent_text(excess)} slower a token than usual")
        if self.is_late:
            found.append(f"{percent_text(self.result.prediction_error)} longer than predicted")
        if found and (excuse := host_text(self.result.run.manifest)):
            found.append(f"the host {excuse}")
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

    name: str  # `job on card`, and whatever else tells it apart from the others
    entries: tuple[Entry, ...]

    @property
    def drift(self) -> float | None:
        """Change of seconds per million tokens from the first run to the last, as a share of the median.

        Theil and Sen: the median slope over all pairs of runs, which single slow runs do not move. None below
        `MIN_PAST` + 1 runs.
        """
        entries = _comparable(self.entries)
        if len(entries) <= MIN_PAST:
            return None
        rates = np.array([entry.s_per_million_tokens for entry in entries[-_SHOWN:]])
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


def history(path: str, prices: Mapping[str, float] | None = None) -> History:
    """Read the runs below a folder. One that cannot be read is skipped and named.

    Args:
        prices: price per hour by card, profile or folder name, as for `compare`.

    Raises:
        InputError: there is no run that can be read.
        JobFileError: a price is given for a name that no run goes by.
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
    prices = prices or {}
    check_prices(runs, prices)
    runs.sort(key=lambda run: (run.finished_at, str(run.place)))
    root = str(Location.parse(path))
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for run in runs:
        how = "simulated" if run.manifest.simulated else ""
        entries = groups.setdefault((run.job, run.gpu, run.model, run.policy, how), [])
        past = [] if run.waits_for_rows else _comparable(entries)[-PAST:]
        per_token = _usual(entry.s_per_million_tokens for entry in past)
        per_row = _usual(entry.s_per_thousand_rows for entry in past)
        label = str(run.place).removeprefix(root).strip("/") or run.name
        entries.append(Entry(Result(run, label, price_of(run, prices)), per_token, per_row))
    series = (Series(_series_name(key, groups), tuple(entries)) for key, entries in groups.items())
    return History(path, tuple(series), tuple(skipped))


def _series_name(key: tuple[str, ...], keys: Collection[tuple[str, ...]]) -> str:
    job, card, *others = key
    telling = [part for place, part in enumerate(others, 2) if part and len({each[place] for each in keys}) > 1]
    if others[-1] and others[-1] not in telling:
        telling.append(others[-1])  # that a run is simulated is always said
    return f"{job} on {card}" + f" ({', '.join(telling)})" * bool(telling)


def _comparable(entries: Sequence[Entry]) -> list[Entry]:
    """Runs whose makespan says how fast they were."""
    return [entry for entry in entries if not entry.result.run.waits_for_rows]


def _usual(past: Iterable[float]) -> Usual | None:
    rates = np.array(list(past))
    if rates.size < MIN_PAST:
        return None
    median = float(np.median(rates))
    deviation = _MAD_TO_SIGMA * float(np.median(np.abs(rates - median)))
    return Usual(median, median + max(DEVIATIONS * deviation, LEAST_EXCESS * median))


def findings(history: History) -> list[str]:
    """The sentences that a person should read."""
    sentences = []
    for series in history.series:
        entries = series.entries
        first, last = (entry.result.run.finished_at for entry in (entries[0], entries[-1]))
        span = f"on {last:%Y-%m-%d}" if first.date() == last.date() else f"from {first:%Y-%m-%d} to {last:%Y-%m-%d}"
        slow = [(e, e.s_per_million_tokens / e.per_token.median - 1) for e in entries if e.is_slow and e.per_token]
        verdict = f"{len(slow)} slower a token than usual{_latest(slow)}" if slow else "none slower than usual"
        sentences.append(f"{series.name}: {plural(len(entries), 'run')} {span}, {verdict}.")
        if late := [(entry, entry.result.prediction_error or 0.0) for entry in entries if entry.is_late]:
            took = f"took over {percent_text(LATE)} longer than predicted{_latest(late)}"
            sentences.append(f"{series.name}: {plural(len(late), 'run')} {took}.{_doubt(entries)}")
        if series.drift is not None and abs(series.drift) >= LEAST_EXCESS:
            direction = "slower" if series.drift > 0 else "faster"
            shown = min(_SHOWN, len(entries))
            sentences.append(
                f"{series.name}: {percent_text(abs(series.drift))} {direction} a token over the last {shown} runs."
            )
    if history.skipped:
        sentences.append(f"Left out: {'; '.join(history.skipped)}.")
    return sentences


def _latest(flagged: Sequence[tuple[Entry, float]]) -> str:
    """The last few that were flagged, and by how much."""
    named = listing([f"{entry.result.label} ({percent_text(excess)})" for entry, excess in flagged[-_NAMED:]])
    return f", the latest {named}" if len(flagged) > _NAMED else f": {named}"


def _doubt(entries: Sequence[Entry]) -> str:
    """Return whether the predictions rather than the runs are to blame."""
    errors = [error for entry in entries if (error := entry.result.prediction_error) is not None]
    usual = float(np.median(errors))
    if len(errors) <= MIN_PAST or usual <= LATE:
        return ""
    return (
        f" Half of all runs took {percent_text(usual)} longer or more, so the predictions are too short here: vasuki "
        "profile measures the machine."
    )


def _entry_cells(series: Series) -> tuple[list[str], list[list[str]]]:
    """Headings and one row of cells for each run."""
    currencies = {entry.result.price.currency for entry in series.entries if entry.result.price is not None}
    currency = next(iter(currencies)) if len(currencies) == 1 else ""
    headings = ["run", "flag", "ended (UTC)", "rows", "makespan", "vs plan", "s/M tokens"]
    return [*headings, f"cost, {currency}" if currency else "cost"], [
        _cells(entry, currency) for entry in series.entries
    ]


def _cells(entry: Entry, currency: str) -> list[str]:
    result = entry.result
    own_currency = result.price.currency if result.price is not None and not currency else ""
    return [
        result.label,
        " ".join(["slow"] * entry.is_slow + ["late"] * entry.is_late),
        f"{result.run.finished_at:%m-%d %H:%M}",
        f"{result.run.rows_done:,}",
        time_text(result.makespan_s),
        percent_text(result.prediction_error, signed=True),
        f"{entry.s_per_million_tokens:,.1f}",
        money_text(result.amount, own_currency),
    ]


def history_table(history: History) -> str:
    """Findings and the last forty runs of each series, for a terminal."""
    lines = [wrapped(sentence) for sentence in findings(history)]
    for series in history.series:
        headings, rows = _entry_cells(series)
        shown = [headings, *rows[-_SHOWN:]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        widths[0] = max(8, min(widths[0], table_width() - sum(widths[1:]) - 2 * len(widths[1:])))
        lines += ["", series.name]
        if len(rows) > _SHOWN:
            lines.append(f"({len(rows) - _SHOWN} earlier runs are not shown)")
        lines += [_aligned([clipped(name, widths[0]), *cells], widths) for name, *cells in shown]
    return "\n".join(lines)


def clipped(label: str, width: int) -> str:
    """The end of a label, which tells runs apart more often than its beginning."""
    return label if len(label) <= width else f"...{label[3 - width :]}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    sides = "<<" + ">" * (len(row) - 2)  # names and flags are words
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
