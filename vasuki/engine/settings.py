"""What an engine is told before it starts: the policy, its limits, its memory, and what moves to the host."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.engine.offload import NO_OFFLOAD, OffloadPlan
from vasuki.engine.policy import Policy

MOST_SEQS = 2048  # that any plan runs side by side


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    chunk_tokens: int  # token budget of a step
    max_num_seqs: int
    lookahead: int = 16  # waiting rows kept at hand; the fewer, the later the order is fixed
    prefill_threshold: float = 0.5  # share of the pool that must be free to start a prefill phase, when exclusive
    short_step_tokens: int = 0  # the budget while memory has less room than for a usual row; 0: the same as ever
    usual_row_tokens: int = 0  # KV of that row
    longest_row_tokens: int = 0  # KV of the longest row that is foreseen; 0: whatever the model allows


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that a scheduler is built from, real or simulated."""

    policy: Policy
    limits: Limits
    num_blocks: int
    block_tokens: int
    offload: OffloadPlan = NO_OFFLOAD
    lost_blocks: int = 0  # that were planned, and found no memory

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the device has room for."""
        return self.num_blocks * self.block_tokens
