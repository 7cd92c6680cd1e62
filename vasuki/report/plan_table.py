"""Plans side by side, for a terminal and a tired person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

from vasuki.base.units import bytes_text, money_text, percent_text, time_text
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, Spread

WIDTH = 100
_BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory traffic",
    "kv_area": "KV memory over time",
    "longest_request": "the longest request",
}


def plan_table(plans: Iterable[Plan]) -> str:
    """Plans side by side, at most 100 columns wide, and below them what is worth knowing of each."""
    plans = list(plans)
    rows: list[tuple[str, ...]] = [("GPU", "policy", "makespan", "bound", "cost", "/Mtok", "chunk", "seqs", "offload")]
    for plan in plans:
        rows.append(
            (
                plan.gpu,
                plan.policy,
                time_text(plan.makespan_s),
                time_text(plan.schedule_bound_s),
                money_text(plan.cost.amount, plan.cost.currency),
                money_text(plan.cost.per_million_tokens, ""),
                str(plan.chunk_tokens),
                str(plan.max_num_seqs),
                plan.offload.mode + (f" {plan.offload.streamed_layers}" if plan.offload.streamed_layers else ""),
            )
        )
    lines = list(_columns(rows))
    for plan in plans:
        lines += ["", f"{plan.gpu}, {plan.policy}:", *(f"  {note}" for note in _notes(plan))]
    return "\n".join(line for text in lines for line in _wrapped(text))


def plan_verdict(plans: Sequence[Plan]) -> str:
    """Which of several plans to take, by what margin, and how wrong predictions may be before that changes.

    Empty for a single plan; silent on costs where a price is not known.
    """
    if len(plans) < 2:
        return ""
    first, second = sorted(plans, key=lambda plan: plan.makespan_s)[:2]
    ratio = second.makespan_s / first.makespan_s
    times = f"{time_text(first.makespan_s)} against {time_text(second.makespan_s)} on {second.gpu}"
    times += f", {ratio:.2f} times as fast"
    if None in {plan.cost.amount for plan in plans} or len({plan.cost.currency for plan in plans}) > 1:
        return f"{first.gpu} would finish first: {times}.\n{_holds(ratio)}"
    least, next_least = sorted(plans, key=lambda plan: plan.cost.amount or 0.0)[:2]
    amount, other = least.cost.amount or 0.0, next_least.cost.amount or 0.0
    less = f", {percent_text(1 - amount / other)} less" if other else ""
    costs = f"{money_text(amount, least.cost.currency)} against {money_text(other)} on {next_least.gpu}{less}"
    margin = other / amount if amount else float("inf")
    holds = _holds(min(ratio, margin))
    if least.gpu == first.gpu:
        return f"Take {first.gpu}: it would finish first and cost least.\n  {times}\n  {costs}\n{holds}"
    return f"{first.gpu} would finish first: {times}.\n{least.gpu} would be cheapest: {costs}.\n{holds}"


def _holds(margin: float) -> str:
    return f"This holds unless the predictions misjudge one card against the other by a factor of {margin:.2f}."


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
    """How long rows waited, run by run, where they arrive over time. Empty if they don't."""
    rows: list[tuple[str, ...]] = [("GPU", "policy", "seconds from arrival", "mean", "50 %", "95 %", "99 %")]
    for run in simulated:
        for name, waited in (("to the first token", run.ttft), ("to the last token", run.latency)):
            if waited:
                cells = [f"{seconds:.3g}" for seconds in astuple(waited)]
                rows.append((run.plan.gpu, run.plan.policy, name, *cells))
    return "\n".join(_columns(rows)) if len(rows) > 1 else ""


def _spread(spread: Spread) -> tuple[str, str, str, str]:
    mean, median, p90, longest = (f"{s:.3g} s" for s in (spread.mean, spread.median, spread.p90, spread.max))
    return mean, median, p90, longest


def _columns(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _notes(plan: Plan) -> Iterable[str]:
    tokens = f"{plan.prompt_tokens:,} prompt and about {plan.output_tokens_estimate:,} output tokens"
    yield f"{plan.requests:,} requests, {tokens}; ordered by {plan.solver}{', proved optimal' * plan.optimal}"
    if plan.shared_tokens:
        share = plan.shared_tokens / plan.prompt_tokens
        yield f"{plan.shared_tokens:,} of the prompt tokens ({share:.0%}) are shared with rows that begin alike"
    if plan.source:
        yield f"figures: {plan.source}"
    if plan.range_s is not None:
        low_s, high_s = plan.range_s
        yield f"this machine is busy, so it may take {time_text(low_s)} to {time_text(high_s)}"
    layout = plan.layout
    if layout.num_gpus > 1:
        degrees = (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel)
        yield "{} GPUs: {} tensor x {} pipeline x {} data parallel".format(layout.num_gpus, *degrees)
    if layout.num_streams > 1:
        yield "chunk, seqs and KV memory are those of one micro-batch, of which every stage of a replica has one"
    if plan.uncertainty is not None:
        yield f"not knowing output lengths beforehand changes the makespan by {plan.uncertainty:+.1%}"
    yield _to_save(plan)
    yield _to_lose(plan)
    yield f"at datasheet rates no schedule beats {time_text(plan.lower_bound_s)}, for {_BOUNDS[plan.bound_by]}"
    states = plan.max_num_seqs * plan.state_bytes
    beside = f", {bytes_text(states)} for the states of {plan.max_num_seqs:,} rows" if states else ""
    yield f"KV memory for {plan.settings.kv_tokens:,} tokens{beside}"
    yield f"steps: {plan.mixing}"
    yield f"offload {plan.offload.mode}: {plan.offload.reason}"
    if plan.simulated_requests < plan.requests - plan.misfits:
        yield f"simulated {plan.simulated_requests:,} of the requests and scaled up"
    if plan.misfits:
        yield f"{plan.misfits:,} can never run: {plan.misfit}"


def _to_save(plan: Plan) -> str:
    """What a better schedule could save at most; where outputs are recorded but not known beforehand, also then."""
    known = ""
    if plan.uncertainty is not None:
        left = 1 - plan.schedule_bound_s * (1 + plan.uncertainty) / plan.makespan_s
        known = f" ({percent_text(max(0.0, left))} if output lengths were known beforehand)"
    elif plan.outputs_at_most:
        known = " (if all outputs are as long as they may be)"
    saved, bound = percent_text(plan.could_save), time_text(plan.schedule_bound_s)
    return f"at most {saved} could still be saved{known}: no schedule beats {bound} under the cost model"


def _to_lose(plan: Plan) -> str:
    """What a kill costs, and whether that is more than the job allows."""
    text = f"a kill loses {time_text(plan.at_risk_s)} of work on average, at most {time_text(plan.at_risk_most_s)}"
    if plan.at_risk_s <= plan.max_loss_s:
        return text
    return f"{text}; that is more than plan.max_loss, {time_text(plan.max_loss_s)}, but nothing tried loses less"


def _wrapped(text: str, width: int = WIDTH) -> Iterable[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    while len(text) > width:
        cut = text.rfind(" ", len(indent) + 1, width + 1)
        if cut <= 0:
            break
        yield text[:cut]
        text = indent + "  " + text[cut + 1 :].lstrip()
    yield text
