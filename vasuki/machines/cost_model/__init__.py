"""The one predictor of step time.

A step multiplies its tokens with every weight once, attends over the KV of its sequences once, and pays fixed costs:

    total = max(device, launches) + step overhead + exposed copies
    device = layers x (matmuls + attention + elementwise + all-reduces) + embedding + head
             - the last layer's MLP of tokens that are not sampled

    work        StepWork: what a step computes, as sums over its chunks
    unpacked    the work of a step whose chunks share no packed forward
    rooflines   an operator's time from its arithmetic and its memory traffic
    measured    ratios of measured times to rooflines, by size
    operators   single operators on one device: rooflines, corrected by what was measured
    sharding    what each device of a tensor-parallel group holds
    recurrent   layers that carry a state, by the groups that a step's rows pass them in
    layers      the operators of a layer, and of what is outside the layers, on such a device
    network     all-reduces, and sends between stages
    copies      KV and weights on the host link, and how much of them kernels hide
    stages      what runs in one go, a stage or the whole model, and its fixed costs
    step_cost   StepCost: the time of a step, part by part, explained; its energy
    times       adds a step's seconds up, and gives them without the parts: a simulation asks for millions
    curves      operators of many sizes at once
    terms       what any step takes at least, term by term
    model       CostModel puts these together

What differs between cards stands in the hardware profile. docs/cost-model.md derives the equations and checks them.
"""

from vasuki.machines.cost_model.copies import Copies
from vasuki.machines.cost_model.curves import TABLE
from vasuki.machines.cost_model.model import CostModel
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.rooflines import roofline
from vasuki.machines.cost_model.stages import (
    LEAST_RECORDED_TOKENS,
    MOST_RECORDED_ROWS,
    MOST_RECORDED_TOKENS,
    Launches,
    launches_of,
    recorded_steps,
)
from vasuki.machines.cost_model.step_cost import StepCost
from vasuki.machines.cost_model.terms import StepTerms
from vasuki.machines.cost_model.times import StepTime
from vasuki.machines.cost_model.work import StepWork, causal_pairs, windowed_causal_pairs

__all__ = [
    "LEAST_RECORDED_TOKENS",
    "MOST_RECORDED_ROWS",
    "MOST_RECORDED_TOKENS",
    "TABLE",
    "Copies",
    "CostModel",
    "Launches",
    "OperatorModel",
    "StepCost",
    "StepTerms",
    "StepTime",
    "StepWork",
    "causal_pairs",
    "launches_of",
    "recorded_steps",
    "roofline",
    "windowed_causal_pairs",
]
