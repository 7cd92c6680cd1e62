"""The picture of a run in at most ten lines, printed when it is over."""

from __future__ import annotations

from vasuki.arrivals.percentiles import Percentiles
from vasuki.base.units import bytes_text, count_text, money_text, percent_text, plural, significant, time_text
from vasuki.io.output.manifest import Manifest
from vasuki.machines.here.stolen_time import NOISE
from vasuki.report.savings import could_save, knowing_saves

WORTH_A_WORD = 0.005  # share of the time
SHORTEST_S = 1.0  # of a run whose prediction is held against it


def summary_lines(manifest: Manifest) -> list[str]:
    """Rows, tokens, time against prediction, what the host took, how long rows that arrived or are urgent waited, what
    could be saved, batch, KV memory, cost.

    What is not known is left out.
    """
    lines = {
        "rows": _rows(manifest),
        "tokens": _tokens(manifest),
        "time": _time(manifest),
        "host": host_text(manifest),
        "first": _waited("token after", manifest.ttft),
        "answer": _waited("after", manifest.latency),
        "urgent": _waited("rows after", manifest.urgent_latency),
        "late": _late(manifest),
        "bound": _schedule_bound(manifest),
        "known": _known_lengths(manifest),
        "card": _datasheet_bound(manifest),
        "batch": _batch(manifest),
        "KV": _kv(manifest),
        "cost": _cost(manifest),
    }
    return [f"{name:<7}{text}" for name, text in lines.items() if text]


def _rows(manifest: Manifest) -> str:
    rows = manifest.rows
    left = rows.total - rows.succeeded - rows.failed
    return f"{rows.succeeded:,} of {rows.total:,} succeeded, {rows.failed:,} failed" + f", {left:,} left" * (left > 0)


def _tokens(manifest: Manifest) -> str:
    tokens = manifest.tokens
    if not tokens.prompt + tokens.output:
        return ""
    output = f"{count_text(tokens.output)} output"
    again = f"; {count_text(tokens.recomputed)} computed again" if tokens.recomputed else ""
    shared = f" ({count_text(tokens.shared)} of them shared)" if tokens.shared else ""
    return f"{count_text(tokens.prompt)} prompt{shared}, {output}{again}"


def _time(manifest: Manifest) -> str:
    timings, predicted_s = manifest.timings, manifest.predicted.makespan_s
    predicted = f"predicted {time_text(predicted_s)}" if predicted_s else ""
    if not timings.makespan_s:
        return predicted
    taken = time_text(timings.makespan_s)
    if timings.load_s:
        taken += f": loading {time_text(timings.load_s)}, then {time_text(timings.foreseen_s)}"
    if predicted_s and max(predicted_s, timings.foreseen_s) >= SHORTEST_S:
        predicted += f" ({percent_text(timings.foreseen_s / predicted_s - 1, signed=True)})"
    several = ""
    if len(manifest.runs) > 1:
        several = f"{_at_least(manifest)}{time_text(sum(run.makespan_s for run in manifest.runs))}"
        several += f" in {len(manifest.runs)} runs{_killed(manifest)}"
    return ", ".join(filter(None, [taken + " simulated" * manifest.simulated, predicted, several]))


def _at_least(manifest: Manifest) -> str:
    """A word before what all runs took, where nobody knows how long killed ones loaded their model."""
    return "at least " * any(run.killed for run in manifest.runs)


def _killed(manifest: Manifest) -> str:
    killed = sum(run.killed for run in manifest.runs)
    return f", {killed} of them killed" if killed else ""


def host_text(manifest: Manifest) -> str:
    """Say what the host of a virtual machine took from a run; empty if it is not worth a word."""
    stolen = float(manifest.device.get("stolen_share", 0))
    return f"gave {percent_text(stolen)} of the processors' time to others" if stolen > NOISE else ""


def _waited(what: str, waited: Percentiles | None) -> str:
    if waited is None:
        return ""
    within = "/".join(f"{seconds:.3g}" for seconds in (waited.p50_s, waited.p95_s, waited.p99_s))
    return f"{what} {significant(waited.mean_s)} s on average; 50/95/99 % within {within} s"


def _late(manifest: Manifest) -> str:
    """Rows that missed their deadline, of a job that names one."""
    if not manifest.job.get("input", {}).get("deadline"):
        return ""
    missed = manifest.missed_deadlines
    return f"{plural(missed, 'row')} ended after the deadline" if missed else "no row ended after its deadline"


def _schedule_bound(manifest: Manifest) -> str:
    saved = could_save(manifest)
    if saved is None:
        return ""
    least = f"at least {time_text(manifest.bounds.schedule_s)}{_after_loading(manifest)}"
    return f"{least}: at most {percent_text(saved)} could be saved"


def _known_lengths(manifest: Manifest) -> str:
    saved = knowing_saves(manifest)
    if saved is None or saved < WORTH_A_WORD:
        return ""
    return f"knowing all lengths beforehand would have saved about {percent_text(saved)}"


def _datasheet_bound(manifest: Manifest) -> str:
    bound_s = manifest.bounds.datasheet_s
    return f"at least {time_text(bound_s)}{_after_loading(manifest)} at datasheet rates" if bound_s else ""


def _after_loading(manifest: Manifest) -> str:
    return " after loading" if manifest.timings.load_s else ""


def _batch(manifest: Manifest) -> str:
    batch = manifest.batch
    if not batch.max_seqs:
        return ""
    steps = f" over {manifest.steps:,} steps" if manifest.steps else ""
    return f"{batch.mean_seqs:,.1f} sequences on average, {batch.max_seqs:,} at most{steps}"


def _kv(manifest: Manifest) -> str:
    kv = manifest.kv
    if not kv.peak_device_bytes:
        return ""
    text = f"peak {bytes_text(kv.peak_device_bytes)} on device"
    if kv.peak_host_bytes:
        text += f", {bytes_text(kv.peak_host_bytes)} on host"
    if kv.offloaded_bytes:
        text += f"; {bytes_text(kv.offloaded_bytes)} moved, waited {time_text(kv.exposed_copy_s)}"
    return text


def _cost(manifest: Manifest) -> str:
    cost, rows = manifest.cost, manifest.rows
    amounts = [run.amount for run in manifest.runs if run.currency == cost.currency]
    amount, per_million = cost.amount, cost.per_million_tokens
    if len(manifest.runs) > 1:  # rows and cost are of all runs
        amount = None if None in amounts or len(amounts) < len(manifest.runs) else sum(filter(None, amounts))
        per_million = None
    if amount is None:
        return ""
    text = _at_least(manifest) + money_text(amount, cost.currency)
    tokens = manifest.tokens.prompt + manifest.tokens.output
    per_million = per_million or (amount / tokens * 1e6 if tokens else None)
    if per_million is not None:
        text += f": {money_text(per_million)} a million tokens"
    if counted := rows.succeeded + rows.failed or rows.total:
        text += f", {money_text(amount / counted * 1e3)} a thousand rows"
    return text
