"""Plans side by side, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple

from vasuki.base.units import UNKNOWN, bytes_text, listing, money_text, percent_text, plural, time_range, time_text
from vasuki.models.shape import BACKENDS
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, Spread
from vasuki.report.columns import COLUMN_WIDTH, Rows, blocks, terminal_width, wrapped

WIDTH = 100


def plan_table(plans: Iterable[Plan], width: int | None = None) -> str:
    """Plans side by side: what the job is, the figures of each, and below them what takes a sentence.

    Args:
        plans: one for each card or policy, of the same job.
        width: columns to fill at most; the terminal's if not given.
    """
    plans, width = list(plans), width or terminal_width()
    names = _names(plans)
    notes: dict[str, list[str]] = {}
    for name, plan in zip(names, plans, strict=True):
        for note in _notes(plan):
            notes.setdefault(note, []).append(name)
    lines = [job_line(plans[0]), *blocks(names, _figures(plans), width), ""]
    lines += [note if len(cards) == len(plans) else f"{', '.join(cards)}: {note}" for note, cards in notes.items()]
    return "\n".join(line for text in lines for line in wrapped(text, min(width, WIDTH)))


def _names(plans: Sequence[Plan]) -> list[str]:
    """What tells the plans apart: card, layout, and policy if there are several."""
    several = len({plan.policy for plan in plans}) > 1
    return [" ".join(filter(None, [plan.gpu, plan.layout.label, several * plan.policy])) for plan in plans]


def job_line(plan: Plan) -> str:
    """The line that says what the job is: requests and tokens."""
    about = "at most" if plan.outputs_at_most else "about"
    outputs = f"{about} {plural(plan.output_tokens_estimate, 'output token')}"
    return f"{plural(plan.requests, 'request')}: {plural(plan.prompt_tokens, 'prompt token')}, {outputs}"


def _figures(plans: Sequence[Plan]) -> Rows:
    """(name, one cell for each plan), each fact once."""
    cells: list[tuple[str, Callable[[Plan], str]]] = [
        ("makespan", lambda p: time_text(p.makespan_s)),
        ("  may be", lambda p: time_range(*p.range_s) if p.range_s else UNKNOWN),
        ("  could be saved, at most", lambda p: percent_text(p.could_save)),
        ("  unknown outputs add", lambda p: percent_text(p.uncertainty, signed=True)),
        ("  datasheet bound", lambda p: time_text(p.lower_bound_s)),
        ("  predicted from", lambda p: plural(p.simulated_requests, "row")),
        ("  samples may be off by", lambda p: percent_text(p.sample_spread) if p.sample_spread else UNKNOWN),
        ("cost", lambda p: money_text(p.cost.amount, p.cost.currency)),
        ("  may be", lambda p: _money_range(*p.cost_range) if p.cost_range else UNKNOWN),
        ("  an hour", _price),
        ("  GPUs", lambda p: str(p.layout.num_gpus) if p.layout.num_gpus > 1 else UNKNOWN),
        ("  million input tokens", lambda p: money_text(p.per_million_input_tokens)),
        ("  million output tokens", lambda p: money_text(p.per_million_output_tokens)),
        ("policy", lambda p: p.policy),
        ("order", _order),
        ("tokens a step, at most", lambda p: f"{p.chunk_tokens:,}"),
        ("rows at a time, at most", lambda p: f"{p.max_num_seqs:,}"),
        ("KV memory, tokens", lambda p: f"{p.settings.kv_tokens:,}"),
        ("memory for states", lambda p: bytes_text(p.max_num_seqs * p.state_bytes) if p.state_bytes else UNKNOWN),
        ("host memory", lambda p: bytes_text(p.host_bytes) if p.host_bytes else "none"),
        ("offload", _offload),
        ("a kill loses, on average", lambda p: time_text(p.at_risk_s)),
        ("  at the worst moment", lambda p: time_text(p.at_risk_most_s)),
    ]
    return [(name, [cell(plan) for plan in plans]) for name, cell in cells]


def _order(plan: Plan) -> str:
    if plan.optimal or not plan.order_gap:
        return plan.solver + ", optimal" * plan.optimal
    return f"{plan.solver}, gap {percent_text(plan.order_gap)}"


def _price(plan: Plan) -> str:
    per_hour = plan.cost.price_per_hour
    if per_hour is None:
        return UNKNOWN
    return f"{money_text(per_hour)} ({plan.price_date or 'given'})"


def _money_range(*amounts: float) -> str:
    low, high = (f"{amount:,.{max(0, 1 - math.floor(math.log10(amount)))}f}" if amount else "0" for amount in amounts)
    text = f"{low} to {high}"
    return text if len(text) <= COLUMN_WIDTH - 2 else f"{low}-{high}"


def _offload(plan: Plan) -> str:
    streamed = plan.offload.streamed_layers
    return plan.offload.mode + f" {plural(streamed, 'layer')}" * bool(streamed)


def plan_verdict(plans: Sequence[Plan], width: int | None = None) -> str:
    """Which of several plans to take, by what margin, and how wrong predictions may be before that changes.

    Empty for a single plan; silent on costs where a price is not known.
    """
    if len(plans) < 2:
        return ""
    return "\n".join(line for text in _verdict(plans) for line in wrapped(text, min(width or terminal_width(), WIDTH)))


def _verdict(plans: Sequence[Plan]) -> Iterable[str]:
    first, second = sorted(plans, key=lambda plan: plan.makespan_s)[:2]
    error = max(plan.error for plan in plans)
    faster = second.makespan_s / first.makespan_s
    times = f"{time_text(first.makespan_s)} against {time_text(second.makespan_s)} on {second.gpu}"
    times += f", {faster:.2f} times as fast" * (faster >= 1.005)
    if None in {plan.cost.amount for plan in plans} or len({plan.cost.currency for plan in plans}) > 1:
        yield f"{first.gpu} would finish first: {times}."
        yield from _holds({"time": faster}, error)
        yield from _hosts(plans)
        return
    least, next_least = sorted(plans, key=lambda plan: plan.cost.amount or 0.0)[:2]
    amount, other = least.cost.amount or 0.0, next_least.cost.amount or 0.0
    less = f", {percent_text(1 - amount / other)} less" if other else ""
    costs = f"{money_text(amount, least.cost.currency)} against {money_text(other)} on {next_least.gpu}{less}"
    if least.gpu == first.gpu:
        yield f"Take {first.gpu}: it would finish first and cost least."
        yield f"  {times}"
        yield f"  {costs}"
    else:
        yield f"{first.gpu} would finish first: {times}."
        yield f"{least.gpu} would be cheapest: {costs}."
    yield from _holds({"time": faster, "cost": other / amount if amount else float("inf")}, error)
    yield from _hosts(plans)


def _hosts(plans: Sequence[Plan]) -> Iterable[str]:
    """That the hosts of some cards were measured, and those of others not, where steps take their time of the host."""
    measured, assumed = ([plan for plan in plans if plan.host_is_measured is so] for so in (True, False))
    if not (measured and assumed):
        return
    measured_ms, assumed_ms = (max(plan.host_step_us for plan in some) / 1e3 for some in (measured, assumed))
    names, others = (listing(list(dict.fromkeys(plan.gpu for plan in some))) for some in (measured, assumed))
    yield (
        f"A step takes {measured_ms:g} ms of the host of {names}, as measured, and {assumed_ms:g} ms of that of "
        f"{others}, as assumed: where steps are short, that is the difference."
    )


def _holds(margins: Mapping[str, float], error: float) -> Iterable[str]:
    """Whether the answers on time and on cost would survive errors of the predictions."""
    sure = {of: margin for of, margin in margins.items() if margin > 1 + error}
    if draws := [of for of in margins if of not in sure]:
        yield f"Call it a draw on {listing(draws)}: predictions may be {percent_text(error)} off."
    if sure:
        factor = f"misjudge one card against the other by a factor of {min(sure.values()):.2f}"
        yield f"The answer on {listing(list(sure))} holds unless predictions {factor}."


def sorted_plans(plans: Iterable[Plan], by: str | None) -> list[Plan]:
    """Plans by `time` or by `cost`, the best first and unknown prices last; in their own order if by neither."""
    if by == "time":
        return sorted(plans, key=lambda plan: plan.makespan_s)
    if by == "cost":
        return sorted(plans, key=lambda plan: float("inf") if plan.cost.amount is None else plan.cost.amount)
    return list(plans)


def bubble_table(simulated: Iterable[Simulated]) -> str:
    """Bubbles of each run whose model is cut into stages. Empty if there is none."""
    runs = [run for run in simulated if run.plan.layout.pipeline_parallel > 1]
    if not runs:
        return ""
    rows: list[tuple[str, ...]] = [("GPU", "policy", "bubbles", "of each", "mean", "median", "90 %", "longest")]
    for run in runs:
        name, bubbles = run.plan.gpu, run.bubbles
        rows.append((name, run.plan.policy, f"{bubbles.share:.1%}", "micro-batch", *_spread(bubbles.micro_batch_s)))
        rows.append(("", "", "", "request", *_spread(bubbles.request_s)))
    return "\n".join(_columns(rows))


def waiting_table(simulated: Iterable[Simulated]) -> str:
    """How long rows waited, run by run, where they arrive over time, and how many were late. Empty if neither."""
    rows: list[tuple[str, ...]] = [("GPU", "policy", "seconds from arrival", "mean", "50 %", "95 %", "99 %")]
    for run in simulated:
        for name, waited in (
            ("to the first token", run.ttft),
            ("to the last token", run.latency),
            ("the same, urgent rows", run.urgent_latency),
        ):
            if waited:
                cells = [f"{seconds:.3g}" for seconds in astuple(waited)]
                rows.append((run.plan.gpu, run.plan.policy, name, *cells))
        if run.missed_deadlines is not None:
            rows.append((run.plan.gpu, run.plan.policy, "deadlines missed", str(run.missed_deadlines), "", "", ""))
    return "\n".join(_columns(rows)) if len(rows) > 1 else ""


def _spread(spread: Spread) -> tuple[str, str, str, str]:
    mean, median, p90, longest = (f"{s:.3g} s" for s in (spread.mean, spread.median, spread.p90, spread.max))
    return mean, median, p90, longest


def _columns(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _notes(plan: Plan) -> Iterable[str]:
    """Lines below the table: what takes a sentence."""
    if plan.outputs_at_most:
        yield "outputs: only max_tokens is known, so the job gets shorter and cheaper with each row that ends sooner"
    if plan.shared_tokens:
        share = percent_text(plan.shared_tokens / plan.prompt_tokens)
        yield f"prompts: {plan.shared_tokens:,} of their tokens ({share}) are shared with other rows"
    if plan.misfits:
        yield f"{plan.misfits:,} can never run: {plan.misfit}"
    off = max(plan.spread, plan.error)
    busy = "; this machine is busy" * bool(plan.spread)
    yield f"rates: {plan.source or 'datasheet'}{busy}; makespans may be {percent_text(off)} off"
    if plan.backend != "ragged":
        why = "rows are filled up to rectangles" if plan.backend == "padded" else "rows share no step"
        yield f"backend: {BACKENDS[plan.backend]}; {why}, where packed steps would save {percent_text(plan.padding)}"
        yield "backend: a row may get other last bits with other rows beside it"
    if plan.in_8_bits:
        yield f"8 bits: {plan.in_8_bits} are rounded to them, so answers are others than with 16"
    yield f"steps: {plan.mixing}"
    if plan.layout.num_streams > 1:
        yield "steps, rows and KV memory are for one micro-batch, of which every stage of a replica has one"
    if plan.one_replica_s is not None:
        yield f"one replica alone takes {time_text(plan.one_replica_s)}, no longer than all together: take one"
    yield f"offload: {plan.offload.reason}"
    if plan.risks_too_much:
        yield plan.risks_too_much
