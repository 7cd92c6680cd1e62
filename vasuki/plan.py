"""A plan as data: what a job will take, and how it will be run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vasuki.engine.blocks import BlockPool
from vasuki.engine.policy import Policy
from vasuki.engine.scheduler import Limits, Scheduler
from vasuki.models.layout import Layout, spread_buffers
from vasuki.models.shape import ModelShape

OffloadMode = Literal["none", "stream", "park", "ahead"]
Solver = Literal["greedy", "local_search", "milp", "fifo", "prompt_length"]


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

    def kv_tokens_at_most(self, shape: ModelShape) -> int:
        """The same if no row kept a state beside its KV: those of fewer rows would leave their memory to blocks."""
        states = self.limits.max_num_seqs * shape.state_bytes
        return self.kv_tokens + math.ceil(states / shape.kv_bytes_per_token)

    def footprint(self, block_bytes: int, num_layers: int, device_blocks: int, host_blocks: int) -> tuple[int, int]:
        """Bytes that so many blocks of the two pools take on the device and on the host.

        Streamed layers live on the host for every block of the device, and share its buffers there.
        """
        buffers = spread_buffers(num_layers, self.streamed_layers)
        resident = device_blocks * block_bytes * (num_layers - self.streamed_layers + buffers) // num_layers
        homes = device_blocks * block_bytes * self.streamed_layers // num_layers
        return resident, homes + host_blocks * block_bytes

    def build(self) -> Scheduler:
        """A fresh scheduler with empty pools."""
        host_pool = BlockPool(self.host_blocks, self.block_tokens) if self.host_blocks else None
        return Scheduler(self.policy, self.limits, BlockPool(self.num_blocks, self.block_tokens), host_pool)


@dataclass(frozen=True, slots=True)
class Offload:
    """What moves to host memory, and why that or nothing."""

    mode: OffloadMode
    layers: int  # streamed in every step
    reason: str


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Money. Amounts are None where no price is known."""

    gpu_hours: float
    amount: float | None
    currency: str
    per_million_tokens: float | None
    price_per_hour: float | None = None  # of one GPU
    num_gpus: int = 1

    @classmethod
    def of(
        cls, seconds: float, num_gpus: int, price_per_hour: float | None, currency: str, tokens: int
    ) -> CostEstimate:
        """What so many seconds on so many GPUs cost, also for a million of the prompt and output tokens."""
        hours = seconds * num_gpus / 3600
        amount = None if price_per_hour is None else hours * price_per_hour
        per_million = amount / tokens * 1e6 if amount is not None and tokens else None
        return cls(hours, amount, currency, per_million, price_per_hour, num_gpus)

    def scaled(self, seconds: float, tokens: int) -> CostEstimate:
        """The same machine for another time."""
        return CostEstimate.of(seconds, self.num_gpus, self.price_per_hour, self.currency, tokens)

    def to_dict(self) -> dict[str, Any]:
        """As in a manifest."""
        return {
            "gpu_hours": self.gpu_hours,
            "amount": self.amount,
            "currency": self.currency,
            "per_million_tokens": self.per_million_tokens,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job will run on one kind of GPU, and how long that takes."""

    gpu: str
    requests: int
    prompt_tokens: int
    output_tokens_estimate: int
    makespan_s: float
    lower_bound_s: float
    solver: Solver
    optimal: bool  # proved: no order takes fewer steps, and the plan takes as many
    policy: str
    chunk_tokens: int
    max_num_seqs: int
    offload: Offload
    cost: CostEstimate
    plan_s: float
    settings: EngineSettings
    mixing: str  # `mixed`, `exclusive` or `prefill first`, and why
    bound_by: str  # what the lower bound counts: compute, memory, kv_area or longest_request
    prompt_steps_share: float  # of the time, in steps that carry prompts
    simulated_requests: int  # as many were simulated; the rest is scaled up if there are more
    shared_tokens: int = 0  # of prompts, which rows find in memory since others begin alike
    layout: Layout = field(default_factory=Layout)  # where the weights live
    state_bytes: int = 0  # that each of `max_num_seqs` rows keeps beside its KV
    uncertainty: float | None = None  # what not knowing the outputs adds to the makespan: 0.02 is 2 %; None: not known
    misfits: int = 0  # requests that can never run
    misfit: str = ""  # the first of them, with the capacity that it needs

    @property
    def gap(self) -> float:
        """How far the makespan lies above the lower bound: 0.2 is 20 %."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `plan --json` prints."""
        return {
            "gpu": self.gpu,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens_estimate": self.output_tokens_estimate,
            "shared_tokens": self.shared_tokens,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "solver": self.solver,
            "optimal": self.optimal,
            "policy": self.policy,
            "chunk_tokens": self.chunk_tokens,
            "max_num_seqs": self.max_num_seqs,
            "offload": {**asdict(self.offload), "weights_on_host": self.layout.host_layers},
            "cost": self.cost.to_dict(),
            "uncertainty": self.uncertainty,
            "plan_s": self.plan_s,
        }
