"""Hidden states between devices: all-reduces within a tensor-parallel group, and sends from stage to stage."""

from __future__ import annotations

from vasuki.base.errors import ModelError
from vasuki.machines.cost_model.stages import Part
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape


class Network:
    """The profile's interconnect between all devices. Raises ModelError if there are several and it has none."""

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout) -> None:
        self._token_bytes = shape.hidden_size * shape.dtype_bytes
        self._profile = profile
        self._layout = layout

    def part_s(self, num_tokens: int, part: Part) -> float:
        """Seconds that a part of the model waits for the network in a step of `num_tokens`."""
        return part.sends * self.send_s(num_tokens) + 2 * part.layers * self.all_reduce_s(num_tokens)

    def all_reduce_s(self, num_tokens: int) -> float:
        """Ring all-reduce of the hidden states over the tensor-parallel group; a layer needs two."""
        group = self._layout.tensor_parallel
        if group == 1:
            return 0.0
        bandwidth, latency_s = self._interconnect()
        num_bytes = num_tokens * self._token_bytes
        return 2 * (group - 1) * (num_bytes / group / bandwidth + latency_s)

    def send_s(self, num_tokens: int) -> float:
        """Hidden states from one pipeline stage to the next."""
        if self._layout.pipeline_parallel == 1:
            return 0.0
        bandwidth, latency_s = self._interconnect()
        num_bytes = num_tokens * self._token_bytes
        return latency_s + num_bytes / self._layout.tensor_parallel / bandwidth

    def _interconnect(self) -> tuple[float, float]:
        """Bytes a second in each direction, and seconds of a hop."""
        interconnect = self._profile.interconnect
        if interconnect is None:
            raise ModelError(f"profile {self._profile.name} has no interconnect; several GPUs need one")
        return interconnect.gb_per_s * 1e9, interconnect.latency_us * 1e-6
