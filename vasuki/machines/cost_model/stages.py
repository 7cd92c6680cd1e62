"""What runs in one go, the whole model or a pipeline stage of it, and what it costs whatever its tokens."""

from __future__ import annotations

from typing import NamedTuple

from vasuki.machines.profile import Overheads

# norm, qkv, rope, KV write, attention, o, residual, norm, up, activation, down, residual
KERNELS_PER_LAYER = 12
KERNELS_PER_STEP = 6  # embedding, final norm, gather, head, sampling, copy of the tokens


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

    def launches_s(self, overheads: Overheads) -> float:
        """Host time of the kernel launches."""
        return (self.layers * KERNELS_PER_LAYER + KERNELS_PER_STEP) * overheads.launch_us * 1e-6

    def overhead_s(self, overheads: Overheads) -> float:
        """Once a step and stage."""
        return self.stages * overheads.step_us * 1e-6
