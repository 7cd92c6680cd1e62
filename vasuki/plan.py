"""A plan as data: what a job will take, and how it will be run."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.blocks import BlockPool
from vasuki.scheduler import Limits, Policy, Scheduler


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that a scheduler is built from, real or simulated."""

    policy: Policy
    limits: Limits
    num_blocks: int
    block_tokens: int
    host_blocks: int = 0
    streamed_layers: int = 0  # layers whose KV passes through shared device buffers in every step

    def build(self) -> Scheduler:
        """A fresh scheduler with empty pools."""
        host_pool = BlockPool(self.host_blocks, self.block_tokens) if self.host_blocks else None
        return Scheduler(self.policy, self.limits, BlockPool(self.num_blocks, self.block_tokens), host_pool)
