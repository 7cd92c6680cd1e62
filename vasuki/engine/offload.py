"""What a plan moves to host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OffloadMode = Literal["none", "stream", "park", "ahead"]


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What moves to host memory, and why that or nothing."""

    mode: OffloadMode
    layers: int  # streamed in every step
    reason: str
