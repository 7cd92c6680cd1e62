"""Comparisons as text for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from vasuki.arrivals.percentiles import Percentiles
from vasuki.base.units import UNKNOWN, bytes_text, count_text, money_text, percent_text, significant, time_text
from vasuki.report.columns import COLUMN_WIDTH, Rows, blocks, terminal_width
from vasuki.report.comparison import Comparison
from vasuki.report.job_runs import JobRuns, Result
from vasuki.report.words import answer, caveats, headline, paper_metric

WIDTH = 100


def terminal_table(comparison: Comparison) -> str:
    """Return, for each workload, the answer, the figures of each run, and what to keep in mind."""
    parts = [_workload_text(workload) for workload in comparison.workloads]
    if overview := overview_of(comparison):
        parts.insert(0, "\n".join(wrapped(sentence) for sentence in overview))
    return "\n\n".join(parts)


def overview_of(comparison: Comparison) -> list[str]:
    """Sentences on several jobs together; none where there is one job."""
    workloads = comparison.workloads
    if len(workloads) < 2:
        return []
    return [
        f"Runs of {len(workloads)} jobs. Jobs are not compared with one another.",
        *(f"{workload.name}: {headline(workload)}" for workload in workloads),
    ]


def _workload_text(workload: JobRuns) -> str:
    lines = [workload.name, "=" * len(workload.name), *(wrapped(sentence) for sentence in answer(workload))]
    lines += blocks([result.label for result in workload.results], figures_of(workload.results), table_width())
    if note := paper_metric(workload):
        lines += ["", wrapped(note)]
    if notes := caveats(workload):
        lines += ["", *(wrapped(note) for note in notes)]
    return "\n".join(lines)


def wrapped(sentence: str) -> str:
    """A sentence as an item of a list, broken between words."""
    return textwrap.fill(sentence, table_width(), initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def table_width() -> int:
    """Columns to fill: the terminal's, at most `WIDTH`."""
    return min(WIDTH, terminal_width())


def figures_of(results: Sequence[Result]) -> Rows:
    """(name, one cell for each run) of everything that is known of at least one of them."""
    cells: list[tuple[str, Callable[[Result], str | None]]] = [
        ("how", lambda r: "simulated" if r.simulated else "measured"),
        ("makespan", lambda r: time_text(r.makespan_s)),
        ("  of which loading", lambda r: _if_any(r.load_s, time_text)),
        ("  predicted after loading", lambda r: _if_known(r.predicted_s, time_text)),
        ("  took, against predicted", lambda r: _if_known(r.prediction_error, lambda e: percent_text(e, signed=True))),
        ("  lower bound", lambda r: _if_known(r.schedule_bound_s, time_text)),
        ("  could be saved, at most", lambda r: _if_known(r.could_save, lambda s: percent_text(s))),
        ("  by knowing the lengths", lambda r: _if_known(r.knowing_saves, percent_text)),
        ("  datasheet bound", lambda r: _if_known(r.lower_bound_s, time_text)),
        ("first token after, mean", lambda r: _mean(r.run.manifest.ttft)),
        ("  50/95/99 % of rows (s)", lambda r: _percentiles(r.run.manifest.ttft)),
        ("last token after, mean", lambda r: _mean(r.run.manifest.latency)),
        ("  50/95/99 % of rows (s)", lambda r: _percentiles(r.run.manifest.latency)),
        ("  of urgent rows (s)", lambda r: _percentiles(r.run.manifest.urgent_latency)),
        ("deadlines missed", _missed_deadlines),
        ("rows", lambda r: count_text(r.run.rows_done)),
        ("tokens, prompt", lambda r: count_text(r.run.manifest.tokens.prompt)),
        ("tokens, output", lambda r: count_text(r.run.manifest.tokens.output)),
        ("tokens a second", lambda r: count_text(r.tokens_per_s)),
        ("price an hour", lambda r: None if r.price is None else money_text(r.price.per_hour, r.price.currency)),
        ("cost of the job", lambda r: _money(r, r.amount)),
        ("  a million tokens", lambda r: _money(r, r.per_million_tokens)),
        ("  a thousand rows", lambda r: _money(r, r.per_thousand_rows)),
        ("energy", _energy),
        ("batch, mean / most", lambda r: f"{r.run.manifest.batch.mean_seqs:,.1f} / {r.run.manifest.batch.max_seqs:,}"),
        ("steps", lambda r: f"{r.run.manifest.steps:,}"),
        ("tail, under half a batch", _tail),
        ("KV peak, device", lambda r: _if_any(r.run.manifest.kv.peak_device_bytes, bytes_text)),
        ("KV peak, host", lambda r: _if_any(r.run.manifest.kv.peak_host_bytes, bytes_text)),
        ("KV moved", lambda r: _if_any(r.run.manifest.kv.offloaded_bytes, bytes_text)),
        ("copies hidden / waited", _copies),
        ("preempted, swap/recompute", _preemptions),
        ("policy", lambda r: r.run.policy),
        ("model", lambda r: textwrap.shorten(r.run.model, COLUMN_WIDTH - 2, placeholder="...")),
    ]
    rows = [(name, [cell(result) for result in results]) for name, cell in cells]
    return [(name, [text or UNKNOWN for text in texts]) for name, texts in rows if any(texts)]


def energy_text(kwh: float) -> str:
    """`315 J`, `41.9 Wh`, `1.20 kWh`."""
    if kwh < 1e-3:
        return f"{significant(3.6e6 * kwh)} J"
    return f"{significant(1e3 * kwh)} Wh" if kwh < 1 else f"{significant(kwh)} kWh"


def _if_known(value: float | None, text: Callable[[float], str]) -> str | None:
    return None if value is None else text(value)


def _if_any(value: float, text: Callable[[float], str]) -> str | None:
    return text(value) if value else None


def _money(result: Result, amount: float | None) -> str | None:
    return None if amount is None or result.price is None else money_text(amount, result.price.currency)


def _mean(waited: Percentiles | None) -> str | None:
    return f"{significant(waited.mean_s)} s" if waited else None


def _percentiles(waited: Percentiles | None) -> str | None:
    return "/".join(f"{s:.3g}" for s in (waited.p50_s, waited.p95_s, waited.p99_s)) if waited else None


def _missed_deadlines(result: Result) -> str | None:
    return count_text(result.run.manifest.missed_deadlines) if result.run.setting("input", "deadline") else None


def _energy(result: Result) -> str | None:
    if result.energy_kwh is not None:
        return energy_text(result.energy_kwh)
    return None if result.energy_limit_kwh is None else f"< {energy_text(result.energy_limit_kwh)}"


def _tail(result: Result) -> str | None:
    timeline = result.run.timeline
    return None if timeline is None else f"{percent_text(timeline.tail_s / timeline.total_s)} of the time"


def _copies(result: Result) -> str | None:
    kv = result.run.manifest.kv
    if not kv.hidden_copy_s and not kv.exposed_copy_s:
        return None
    return f"{kv.hidden_copy_s:,.1f} / {kv.exposed_copy_s:,.1f} s"


def _preemptions(result: Result) -> str | None:
    counts = result.run.manifest.preemptions
    return f"{counts.swap:,} / {counts.recompute:,}" if counts.swap or counts.recompute else None
