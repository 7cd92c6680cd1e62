"""Plans side by side, for a terminal and a tired person."""

from __future__ import annotations

from collections.abc import Iterable

from vasuki.plan import Plan
from vasuki.units import duration, money

WIDTH = 100


def plan_table(plans: Iterable[Plan]) -> str:
    """Plans side by side, at most 100 columns wide, and below them what is worth knowing of each."""
    plans = list(plans)
    rows = [("GPU", "policy", "makespan", "bound", "gap", "cost", "/Mtok", "chunk", "seqs", "offload")]
    for plan in plans:
        rows.append(
            (
                plan.gpu,
                plan.policy,
                duration(plan.makespan_s),
                duration(plan.lower_bound_s),
                f"{plan.gap:.0%}",
                money(plan.cost.amount, plan.cost.currency),
                money(plan.cost.per_million_tokens, ""),
                str(plan.chunk_tokens),
                str(plan.max_num_seqs),
                plan.offload.mode + (f" {plan.offload.layers}" if plan.offload.layers else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for plan in plans:
        lines += ["", f"{plan.gpu}, {plan.policy}:", *(f"  {note}" for note in _notes(plan))]
    return "\n".join(line for text in lines for line in _wrapped(text))


def _notes(plan: Plan) -> Iterable[str]:
    tokens = f"{plan.prompt_tokens:,} prompt and about {plan.output_tokens_estimate:,} output tokens"
    yield f"{plan.requests:,} requests, {tokens}; ordered by {plan.solver}{', proved optimal' * plan.optimal}"
    yield f"KV memory for {plan.settings.kv_tokens:,} tokens; the bound counts {plan.bound_by.replace('_', ' ')}"
    yield f"steps: {plan.mixing}"
    yield f"offload {plan.offload.mode}: {plan.offload.reason}"
    if plan.simulated_requests < plan.requests - plan.misfits:
        yield f"simulated {plan.simulated_requests:,} of the requests and scaled up"
    if plan.misfits:
        yield f"{plan.misfits:,} can never run: {plan.misfit}"


def _wrapped(text: str, width: int = WIDTH) -> Iterable[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    while len(text) > width:
        cut = text.rfind(" ", len(indent) + 1, width + 1)
        if cut <= 0:
            break
        yield text[:cut]
        text = indent + "  " + text[cut + 1 :].lstrip()
    yield text
