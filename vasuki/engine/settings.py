"""What an engine is told before it starts: the policy, its limits and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.engine.policy import Policy


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    chunk_tokens: int  # token budget of a step
    max_num_seqs: int
    lookahead: int = 16  # waiting rows kept at hand; the fewer, the later the order is fixed
    prefill_threshold: float = 0.5  # share of the pool that must be free to start a prefill phase, when exclusive
    swap_min_tokens: int | None = None  # preempted rows with at least this much computed are parked on the host
    stalled_share: float = 0.0  # decodes that may wait in place for a block, before one has to make room; below 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that a scheduler is built from, real or simulated."""

    policy: Policy
    limits: Limits
    num_blocks: int
    block_tokens: int
    host_blocks: int = 0
    streamed_layers: int = 0  # layers whose KV passes through shared device buffers in every step

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the device has room for."""
        return self.num_blocks * self.block_tokens
