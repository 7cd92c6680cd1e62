"""What a job would have gained by knowing the lengths of its outputs beforehand."""

from __future__ import annotations

from dataclasses import replace

from vasuki.models.layout import Layout
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import PLANNING_SHARE, ROW_S
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.placement import ONE_DEVICE, Placement


def cost_of_uncertainty(
    placement: Placement, plan: Plan, lengths: Lengths, makespan_s: float | None = None, layout: Layout = ONE_DEVICE
) -> float | None:
    """How much longer a job takes than by the best plan known for it once all lengths are, both simulated on every row:
    0.02 is 2 %, and 0 where a plan made with all lengths is no faster.

    None where they are known, where rows run in their own order, and where none ends before its limit.

    Args:
        placement: of the model on its machine.
        plan: as it is run, without knowing.
        lengths: that rows turn out to have.
        makespan_s: simulated with this plan, where it was.
        layout: over several devices.
    """
    if not plan.settings.policy.ordered or lengths.known:
        return None
    if lengths.arrived_at_s is not None or (lengths.output_tokens >= lengths.limits).all():
        return None
    shape, profile = placement.shape, placement.profile
    config, known = placement.config.plan, replace(lengths, known=True)
    told = placement.plan(known, layout)
    told_s = simulate_plan(told, known, shape, profile, plan_config=config).plan.makespan_s
    if makespan_s is None:
        makespan_s = simulate_plan(plan, lengths, shape, profile, plan_config=config).plan.makespan_s
    return max(0.0, makespan_s / told_s - 1)


def is_affordable(plan: Plan, rows: int, makespan_s: float) -> bool:
    """Whether planning and looking back take no more than planning may, of a run that has taken so long."""
    return 2 * plan.plan_s + 2 * ROW_S * rows <= PLANNING_SHARE * makespan_s
