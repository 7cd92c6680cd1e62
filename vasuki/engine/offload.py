"""What a plan moves to host memory, and everything that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vasuki.engine.batch import Batch
from vasuki.engine.depth_control import DepthRule

OffloadMode = Literal["none", "stream", "park", "ahead", "by_batch"]


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What moves to host memory, and why that or nothing.

    The mode names what was chosen; parking may be combined with streamed layers.
    """

    mode: OffloadMode = "none"
    reason: str = ""
    streamed_layers: int = 0  # layers whose KV passes through shared device buffers in every step
    host_blocks: int = 0  # room on the host for sequences that are parked there
    park_min_tokens: int = 0  # a preempted row is parked from this many computed tokens on, else computed again
    prefills_ahead: bool = False  # a prompt is computed where it fits, though its row does not, and waits on the host
    depth: DepthRule | None = None  # how many layers live on the host is decided batch by batch

    def streamed_in(self, batch: Batch) -> int:
        """Layers whose KV passes through the device in a batch's step."""
        return self.streamed_layers if batch.depth is None else len(batch.depth.depth.streamed)

    def to_dict(self) -> dict[str, Any]:
        """Return what `plan --json` prints."""
        return {"mode": self.mode, "layers": self.streamed_layers, "reason": self.reason}


NO_OFFLOAD = OffloadPlan()
