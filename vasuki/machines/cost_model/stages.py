"""What runs in one go, the whole model or a pipeline stage of it, and what it costs whatever its tokens."""

from __future__ import annotations

from typing import NamedTuple

from vasuki.machines.profile import HardwareProfile, Overheads
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape

# norm, qkv, rope, KV write, attention, o, residual, norm, up, activation, down, residual
KERNELS_PER_LAYER = 12
KERNELS_PER_STEP = 6  # embedding, final norm, gather, head, sampling, copy of the tokens

# What is launched on a GPU for the same twelve in steps with prompts: attention is three kernels, rotation and the KV
# write are one. That one and the activation are Triton's, and count twice: launching them takes the host 9 to 11 us
# (tritonbench, pull request 1002; vLLM, pull request 34838; both of 2026), one of torch's operators about 5.
LAUNCHED_PER_LAYER = 15
LAUNCHED_BY_TRITON = 2
MOST_RECORDED_ROWS = 512  # of a step of decodes that a GPU replays, instead of launching its kernels one by one


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

    def launches_s(self, profile: HardwareProfile) -> float:
        """Host time of the kernel launches, one by one."""
        kernels = self.layers * launched_per_layer(profile.kind) + KERNELS_PER_STEP
        return kernels * profile.overheads.launch_us * 1e-6

    def overhead_s(self, overheads: Overheads) -> float:
        """Once a step and stage."""
        return self.stages * overheads.step_us * 1e-6


def launched_per_layer(kind: str) -> int:
    """Kernels of a layer that take `launch_us` each: on a CPU those that the cost model counts, on a GPU all."""
    return KERNELS_PER_LAYER if kind == "cpu" else LAUNCHED_PER_LAYER


def is_ever_recorded(shape: ModelShape, profile: HardwareProfile, layout: Layout) -> bool:
    """Whether a model's steps of decodes are recorded on a device: not where layers carry a state, nor where weights
    are waited for between layers."""
    return profile.kind == "gpu" and shape.recurrent is None and not layout.host_layers
