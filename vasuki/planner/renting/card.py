"""A kind of card that can be rented: how fast one replica is, and what it costs.

A replica that does half of a job takes a little more than half as long: its start, its tail and its longest row stay.
So the job is planned whole, by halves, by quarters, ..., and between them the time is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.base.commits import next_commit_s
from vasuki.machines.cost_model import CostModel
from vasuki.machines.price import Price
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.leases import Work
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import sample_rows
from vasuki.planner.renting.bound import row_prices

_BELOW = 1 / 1024  # shares below the least that was planned take time in proportion


@dataclass(frozen=True, eq=False)
class Pace:
    """How long one replica takes for a share of the job.

    Args:
        plans: of the whole job, of half of it, of a quarter, ...
        least_s: what the longest row takes alone.
    """

    plans: Sequence[Plan]
    least_s: float

    @cached_property
    def _curve(self) -> tuple[Floats, Floats]:
        """Logarithms of rising shares and of the seconds that they take."""
        planned = 0.5 ** np.arange(len(self.plans))[::-1]
        seconds = [max(self.least_s, plan.makespan_s) for plan in reversed(self.plans)]
        rising = np.maximum.accumulate([seconds[0] * _BELOW, *seconds])
        rising *= 1 + 1e-9 * np.arange(len(rising))  # never flat
        return np.log(np.array([planned[0] * _BELOW, *planned])), np.log(rising)

    def seconds(self, share: float) -> float:
        """Seconds that a replica takes for this share of the job."""
        shares, seconds = self._curve
        return math.exp(float(np.interp(math.log(share), shares, seconds)))

    def share(self, seconds: float) -> float:
        """The share of the job that a replica does in these seconds, at most 1."""
        shares, times = self._curve
        return math.exp(float(np.interp(math.log(seconds), times, shares))) if seconds > 0 else 0.0

    def plan(self, share: float) -> Plan:
        """The plan of a part that is nearest to that share."""
        return self.plans[min(len(self.plans) - 1, max(0, round(-math.log2(share))))]


@dataclass(frozen=True, eq=False)
class RentedCard:
    """A kind of replica, as it can be rented: a machine with as many cards as the model is spread over.

    Args:
        pace: of one.
        shape: of the model.
        profile: of the card, with its prices.
        lengths: of the requests.
    """

    pace: Pace
    shape: ModelShape
    profile: HardwareProfile
    lengths: Lengths

    @cached_property
    def row_s(self) -> Floats:
        """`[rows]` seconds of a replica that each row takes at least, see `row_prices`."""
        return row_prices(self.lengths, self.whole.any_schedule)

    @cached_property
    def alone_s(self) -> float:
        """What the slowest row takes alone, at least."""
        schedules = self.whole.any_schedule
        return schedules.least_s(JobSums.of_lengths(self.shape, self.lengths).slowest(self.shape))

    @property
    def name(self) -> str:
        return self.profile.name

    @property
    def price(self) -> Price:
        """The price of one card, on spot and while it boots; on demand the job's price goes before it."""
        return self.profile.price

    @property
    def whole(self) -> Plan:
        """The plan of the whole job on one replica."""
        return self.pace.plans[0]

    @property
    def gpus(self) -> int:
        """Cards of a replica."""
        return self.whole.layout.num_gpus

    @property
    def currency(self) -> str:
        return self.whole.cost.currency

    @property
    def error(self) -> float:
        """By what share predictions have been off."""
        return max(self.whole.error, self.whole.spread)

    def per_hour(self, on_spot: bool) -> float:
        """What a card costs."""
        if on_spot and self.price.spot:
            return self.price.spot.per_hour
        return self.whole.cost.price_per_hour or 0.0

    def interruptions_per_s(self, on_spot: bool) -> float:
        """How often a replica is taken away."""
        return self.price.spot.interruptions_per_hour / 3600 if on_spot and self.price.spot else 0.0

    def cost_model(self, plan: Plan) -> CostModel:
        """The model on a replica that runs a part as planned."""
        return CostModel(self.shape, self.profile, plan.layout)

    def loss_s(self, share: float) -> float:
        """What a replica with such a share of the job has computed in vain when it is taken away, on average: all since
        the last note of how far its rows are, and their KV up to there, which others compute as if it were prompts."""
        plan = self.pace.plan(share)
        row_tokens = (plan.prompt_tokens + plan.output_tokens_estimate / 2) / max(1, plan.requests)
        running = min(plan.max_num_seqs, plan.requests, plan.settings.kv_tokens / max(1.0, row_tokens))
        again_s = Work.of(self.cost_model(plan), plan).prompt_token_s * running * row_tokens
        return _since_note_s(self.pace.seconds(share)) + again_s


def card_of(
    lengths: Lengths,
    plan: Callable[[Lengths], Plan],
    plan_part: Callable[[Lengths, Plan], Plan],
    shape: ModelShape,
    profile: HardwareProfile,
    replicas: int,
) -> RentedCard:
    """Plan a job, and parts of it, on replicas of a kind.

    Args:
        lengths: of the requests.
        plan: plans them on one replica.
        plan_part: plans some of them to run as the whole.
        shape: of the model.
        profile: of the card.
        replicas: that may share the job, of all kinds together.
    """
    parts = [lengths]
    while len(parts[-1]) > 1 and 2 ** (len(parts) - 1) < replicas:
        parts.append(lengths.take(sample_rows(lengths, math.ceil(len(parts[-1]) / 2))))
    longest = lengths.take(np.array([np.argmax(lengths.output_tokens)]))
    whole = plan(lengths)
    plans = [whole, *(plan_part(part, whole) for part in parts[1:])]
    return RentedCard(Pace(plans, plan_part(longest, whole).makespan_s), shape, profile, lengths)


def _since_note_s(job_s: float) -> float:
    """Seconds since the last note, on average over the moments of a job."""
    noted_s = area = 0.0
    while noted_s < job_s:
        next_s = min(job_s, next_commit_s(noted_s))
        area += (next_s - noted_s) ** 2 / 2
        noted_s = next_s
    return area / job_s if job_s else 0.0
