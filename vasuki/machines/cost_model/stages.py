"""What runs in one go, the whole model or a pipeline stage of it, and what it costs whatever its tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vasuki.engine.settings import MOST_SEQS
from vasuki.machines.experts import MOST_ROWS_OF_ALL_EXPERTS, waits_for_experts
from vasuki.machines.profile import HardwareProfile, Overheads
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape

# What a CPU computes one by one: norm, qkv, rope with the KV write, attention, o, residual, norm, up, activation, down,
# residual; and outside the layers embedding, final norm, gather, head, sampling, copy of the tokens.
KERNELS_PER_LAYER = 11
KERNELS_PER_STEP = 6

# What a GPU's host launches, counted by tests/hf/cuda: for a layer, how many a model's family takes where its operators
# are joined (`models.launches`), and this where they are not; outside the layers, the step's inputs come on top.
LAUNCHED_UNJOINED = 45
LAUNCHED_PER_STEP = 18
# Seconds in which it issues the two copies of a layer whose KV streams, their events, and two stretches of a recorded
# step: by the calls that are made, not timed.
STREAMED_LAYER_S = 100e-6
ROUNDED_PER_LAYER = 4  # what products of a type of their own take is rounded: qkv, o, up, down, where they are joined

# Of steps that a GPU replays, instead of launching their kernels one by one: rows that decode, up to any plan's; and
# tokens of steps with prompts. Up to the least a step waits for memory anyway, and beyond it for the host that launches
# its kernels, up to a size that depends on both: padding costs it nothing.
MOST_RECORDED_ROWS = MOST_SEQS
LEAST_RECORDED_TOKENS, MOST_RECORDED_TOKENS = 256, 2048


class Part(NamedTuple):
    """Some of the model's layers, and what is outside them."""

    layers: int
    embedding: bool
    head: bool
    sends: int  # of hidden states to a next stage
    stages: int = 1

    @classmethod
    def whole(cls, num_layers: int, stages: int) -> Part:
        """All stages, one after the other."""
        return cls(num_layers, embedding=True, head=True, sends=stages - 1, stages=stages)

    @classmethod
    def stage(cls, num_layers: int, stages: int, stage: int) -> Part:
        """Layers are dealt out evenly, earlier stages taking the remainder; the first stage has the embedding, the last
        the head."""
        layers, more = divmod(num_layers, stages)
        is_last = stage == stages - 1
        return cls(layers + (stage < more), embedding=stage == 0, head=is_last, sends=not is_last)

    def launches_s(self, shape: ModelShape, profile: HardwareProfile) -> float:
        """Host time of the kernel launches, one by one."""
        launches = launches_of(shape, profile.kind)
        return (self.layers * launches.layer + launches.outside) * profile.overheads.launch_us * 1e-6

    def overhead_s(self, overheads: Overheads) -> float:
        """Fixed seconds of each step and stage."""
        return self.stages * overheads.step_us * 1e-6


class Launches(NamedTuple):
    """Operators that take the host `launch_us` each."""

    layer: int
    outside: int  # the layers, once a step


def launches_of(shape: ModelShape, kind: Literal["gpu", "cpu"]) -> Launches:
    """What a step of a model launches on a device of that kind."""
    if kind == "cpu":
        return Launches(KERNELS_PER_LAYER, KERNELS_PER_STEP)
    joined = shape.compiles and shape.backend == "ragged"
    rounded = ROUNDED_PER_LAYER if shape.product_dtype else 0
    return Launches((shape.launched_per_layer if joined else LAUNCHED_UNJOINED) + rounded, LAUNCHED_PER_STEP)


class Recorded(NamedTuple):
    """The largest steps that a device replays; 0 if it replays none."""

    rows: int = 0  # that decode
    tokens: int = 0  # of a step with prompts


def recorded_steps(shape: ModelShape, profile: HardwareProfile, layout: Layout) -> Recorded:
    """What a device replays of a model's steps: nothing where rows don't share a packed forward, where weights are
    waited for between layers, or where the job says so; no prompts where layers carry a state."""
    if profile.kind == "cpu" or layout.host_layers:
        return Recorded()
    if not shape.compiles or shape.backend != "ragged":
        return Recorded()
    waits = shape.num_expert_layers and waits_for_experts(profile.generation)
    rows = MOST_ROWS_OF_ALL_EXPERTS if waits else MOST_RECORDED_ROWS
    if profile.attention == "packed" or shape.recurrent is not None:
        return Recorded(rows)
    return Recorded(rows, min(rows, _tokens_to_record(shape, profile, layout)))


def _tokens_to_record(shape: ModelShape, profile: HardwareProfile, layout: Layout) -> int:
    """Tokens whose matrices take the device as long as launching their kernels takes the host."""
    launches_s = Part.whole(shape.num_layers, 1).launches_s(shape, profile)
    peak = profile.peak_flops(shape.product_dtype or shape.dtype) * profile.efficiency.matmul
    tokens = int(launches_s * layout.tensor_parallel * peak / shape.linear_flops_per_token)
    return min(MOST_RECORDED_TOKENS, max(LEAST_RECORDED_TOKENS, tokens))
