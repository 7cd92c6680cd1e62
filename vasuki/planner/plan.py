"""A plan as data: what a job will take, and how it will be run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vasuki.base.units import duration, time_range
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.settings import EngineSettings
from vasuki.machines.price import Cost
from vasuki.models.layout import Layout
from vasuki.models.shape import Backend
from vasuki.planner.any_schedule import AnySchedule

Solver = Literal["greedy", "local_search", "milp", "fifo", "prompt_length"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job will run on one kind of GPU, and how long that takes."""

    gpu: str
    requests: int
    prompt_tokens: int
    output_tokens_estimate: int
    makespan_s: float
    lower_bound_s: float  # at datasheet rates
    schedule_bound_s: float  # no schedule ends sooner under the cost model that says the makespan
    any_schedule: AnySchedule  # what that speaks of
    at_risk_s: float  # work that a kill loses, on average over the moments of the job
    at_risk_most_s: float  # and at the worst of them
    risks_too_much: str  # why more is at risk than plan.max_loss; empty if it is not, or nobody asked and none has less
    solver: Solver
    policy: str
    chunk_tokens: int
    max_num_seqs: int
    cost: Cost
    plan_s: float
    settings: EngineSettings
    mixing: str  # `mixed`, `exclusive` or `prefill first`, and why
    prompt_steps_share: float  # of the time, in steps that carry prompts
    simulated_requests: int  # of all, which the makespan is told from
    simulated_row_s: float = 0.0  # what simulating a row takes, about
    sample_spread: float = 0.0  # by what share the makespan may be off, since other rows might have been simulated
    shared_tokens: int = 0  # of prompts, which rows find in memory because others share the prefix
    source: str = ""  # of the profile's rates: measured, by whom and when, or a datasheet
    host_step_us: float = 0.0  # that the host takes for each step
    host_is_measured: bool = True  # rather than assumed
    layout: Layout = field(default_factory=Layout)  # where the weights live
    state_bytes: int = 0  # that each of `max_num_seqs` rows keeps in addition to its KV
    one_replica_s: float | None = None  # what one replica takes for the job, where all together take no less
    outputs_at_most: bool = False  # nothing but `max_tokens` is known of outputs, and all are taken to be as long
    uncertainty: float | None = None  # what not knowing the outputs adds to the makespan: 0.02 is 2 %; None: not known
    optimal: bool = False  # proved: no order takes fewer steps
    order_gap: float | None = None  # by what share the steps exceed those that no order undercuts; None: not looked for
    order: tuple[
        int, ...
    ] = ()  # of all requests that can run, where planning found one; else they are ordered as they come
    misfits: int = 0  # requests that can never run
    misfit: str = ""  # the first of them, with the capacity that it needs
    spread: float = 0.0  # by what share the makespan may be off, since the machine was busy when it was measured
    error: float = 0.0  # by what share predictions with such a profile have been off
    price_date: str = ""  # month of the price that the profile knows; empty where it was given
    prompt_share: float = 0.0  # of the makespan, see `price_split`
    backend: Backend = "ragged"
    in_8_bits: str = ""  # what is rounded to them; empty for nothing
    padding: float = 0.0  # share of the makespan that packed steps would save, of a model that knows none
    host_bytes: int = 0  # of host memory, for KV and weights

    @property
    def offload(self) -> OffloadPlan:
        """What moves to host memory."""
        return self.settings.offload

    @property
    def gap(self) -> float:
        """How far the makespan lies above what no schedule beats under the cost model: 0.2 is 20 %."""
        return self.makespan_s / self.schedule_bound_s - 1 if self.schedule_bound_s else 0.0

    @property
    def could_save(self) -> float:
        """The share of the makespan that another schedule could save at most."""
        return 1 - self.schedule_bound_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Least and most seconds by what predictions have been off, and samples may be; None where that is not known.

        Where nothing but `max_tokens` is known of outputs, rows may also end at once and leave the prompts' share.
        """
        if not (off := max(self.spread, self.error)):
            return None
        least_s = self.makespan_s * (self.prompt_share if self.outputs_at_most else 1.0)
        factor = (1 + off) * (1 + self.sample_spread)
        return least_s / factor, self.makespan_s * factor

    @property
    def cost_range(self) -> tuple[float, float] | None:
        """Least and most cost over `range_s`; None where there is no price."""
        if self.range_s is None or self.cost.amount is None or not self.makespan_s:
            return None
        low, high = (self.cost.amount * seconds / self.makespan_s for seconds in self.range_s)
        return low, high

    @property
    def per_million_input_tokens(self) -> float | None:
        """What a million prompt tokens cost; None where there is no price."""
        return self._per_million(self.prompt_share, self.prompt_tokens)

    @property
    def per_million_output_tokens(self) -> float | None:
        """What a million output tokens cost; None where there is no price."""
        return self._per_million(1 - self.prompt_share, self.output_tokens_estimate)

    def _per_million(self, share: float, tokens: int) -> float | None:
        return None if self.cost.amount is None or not tokens else share * self.cost.amount / tokens * 1e6

    def to_dict(self) -> dict[str, Any]:
        """The object that `plan --json` prints."""
        return {
            "gpu": self.gpu,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens_estimate": self.output_tokens_estimate,
            "shared_tokens": self.shared_tokens,
            "makespan_s": self.makespan_s,
            "range_s": self.range_s,
            "predicted_from": {"rows": self.simulated_requests, "spread": self.sample_spread},
            "lower_bound_s": self.lower_bound_s,
            "schedule_bound_s": self.schedule_bound_s,
            "gap": self.gap,
            "at_risk_s": self.at_risk_s,
            "at_risk_most_s": self.at_risk_most_s,
            "source": self.source,
            "solver": self.solver,
            "optimal": self.optimal,
            "order_gap": self.order_gap,
            "policy": self.policy,
            "chunk_tokens": self.chunk_tokens,
            "max_num_seqs": self.max_num_seqs,
            "offload": {**self.offload.to_dict(), "weights_on_host": self.layout.host_layers},
            "cost": {
                **self.cost.to_dict(),
                "per_million_input_tokens": self.per_million_input_tokens,
                "per_million_output_tokens": self.per_million_output_tokens,
                "range": self.cost_range,
            },
            "host_bytes": self.host_bytes,
            "backend": {"way": self.backend, "padding": self.padding},
            "one_replica_s": self.one_replica_s,
            "uncertainty": self.uncertainty,
            "plan_s": self.plan_s,
        }


def expected(plan: Plan) -> str:
    """The makespan for a log line; with its range where the machine was too busy to tell."""
    range_s = plan.range_s if plan.spread else None
    if max((plan.makespan_s, *(range_s or ()))) < 1:
        return "less than a second"
    text = duration(plan.makespan_s)
    return f"{text} ({time_range(*range_s)})" if range_s else text
