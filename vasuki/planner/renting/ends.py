"""When a rented fleet ends its job: 10,000 draws of all that is not known.

    end = boot + what the job takes on it                  by the paces of its cards
               x how wrong predictions are                 of which 90 of 100 lie within the known error
               x how much of max_tokens rows make use of   where nothing else is known of outputs
               + interruptions x what each costs           a Poisson number

An interruption costs its replica the time until another machine computes, and what was computed in vain. All others go
on meanwhile, so it delays the end by the share that the replica has in the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.planner.renting.bound import fleet_bound_s
from vasuki.planner.renting.card import RentedCard

Members = Sequence[tuple[RentedCard, int]]

DRAWS = 10_000
_WITHIN = 1.645  # standard deviations that 90 of 100 draws lie within
_LEAST_USEFUL = 1e-3  # share of its time, of a machine that is taken away before it gets anything done


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a job rents: replicas of some kinds, all on demand or all on spot."""

    members: tuple[tuple[RentedCard, int], ...]
    on_spot: bool = False

    @property
    def label(self) -> str:
        """`3 a10 + 1 a40`, in cards."""
        return " + ".join(f"{count * card.gpus} {card.name}" for card, count in self.members)

    @property
    def replicas(self) -> int:
        return sum(count for _, count in self.members)

    @property
    def per_hour(self) -> float:
        """What all of them cost."""
        return sum(count * card.gpus * card.per_hour(self.on_spot) for card, count in self.members)

    @property
    def bound_s(self) -> float:
        """Seconds that no schedule beats, see `vasuki.planner.renting.bound`."""
        cards, counts = [card for card, _ in self.members], [count for _, count in self.members]
        alone_s = min(card.alone_s for card in cards)
        if len(cards) == 1:
            return max(alone_s, cards[0].whole.schedule_bound_s / counts[0])
        return fleet_bound_s([card.row_s for card in cards], counts, alone_s)

    def shares(self, seconds: float, useful: Mapping[str, float], boots: bool = True) -> list[float]:
        """The share of the job that one replica of each kind has done by that time."""
        return [
            card.pace.share((seconds - boots * card.price.boot_s) * useful.get(card.name, 1.0))
            for card, _ in self.members
        ]

    def end_s(self, useful: Mapping[str, float] = MappingProxyType({}), boots: bool = True) -> float:
        """When all is done, if replicas of each kind compute for these shares of their time.

        Args:
            useful: by name of the card; 1 where it is not said.
            boots: whether the time counts until machines compute.
        """
        low, high = 0.0, math.inf
        for card, _ in self.members:
            high = min(high, boots * card.price.boot_s + card.pace.seconds(1.0) / useful.get(card.name, 1.0))
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            shares = self.shares(middle, useful, boots)
            done = sum(count * share for (_, count), share in zip(self.members, shares, strict=True))
            low, high = (low, middle) if done >= 1 else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class FleetEnd:
    """What is to be expected of a fleet."""

    fleet: Fleet
    calm_s: float  # until the end, boot included, if nothing is taken away and predictions are right
    ends_s: Floats  # `[draws]`
    interruptions: float  # expected
    delay_s: float  # by all of them

    @property
    def mean_s(self) -> float:
        return float(self.ends_s.mean())

    def quantile_s(self, share: float) -> float:
        """When this share of the draws has ended."""
        return float(np.quantile(self.ends_s, share))

    def in_time(self, deadline_s: float) -> float:
        """The probability that all is done by then."""
        return float((self.ends_s <= deadline_s).mean())

    def cost(self, seconds: float) -> float:
        """What the fleet costs for that time."""
        return self.fleet.per_hour * seconds / 3600


def fleet_end(fleet: Fleet, error: float | None = None) -> FleetEnd:
    """When a fleet ends its job.

    Args:
        fleet: that does it.
        error: by what share predictions may be off; what is known of the worst of its cards if not given.
    """
    random = np.random.default_rng(0)  # the same draws for all, so that they differ by what they are
    error = max(card.error for card, _ in fleet.members) if error is None else error
    calm_s = fleet.end_s()
    part = 1 / fleet.replicas
    losses = {card.name: card.loss_s(part) for card, _ in fleet.members}
    rates = {card.name: card.interruptions_per_s(fleet.on_spot) for card, _ in fleet.members}
    useful = {
        card.name: max(_LEAST_USEFUL, 1 - rates[card.name] * losses[card.name])
        / (1 + rates[card.name] * card.price.boot_s)
        for card, _ in fleet.members
    }
    mean_s = fleet.end_s(useful)
    factors = np.exp(math.log1p(error) / _WITHIN * random.standard_normal(DRAWS)) * _outputs(fleet, random)
    boot_s = min(card.price.boot_s for card, _ in fleet.members)
    ends_s = calm_ends_s = boot_s + (calm_s - boot_s) * factors
    expected = 0.0
    for (card, count), speed in zip(fleet.members, _speeds(fleet, mean_s, useful), strict=True):
        rate, loss_s = rates[card.name], losses[card.name]
        number = random.poisson(count * rate * (mean_s - card.price.boot_s) / (1 + rate * card.price.boot_s) * factors)
        expected += float(number.mean())
        lost_s = loss_s * number + random.standard_normal(DRAWS) * loss_s * np.sqrt(number / 3)  # since a note, evenly
        ends_s = ends_s + speed * (card.price.boot_s * number + np.maximum(0.0, lost_s))
    return FleetEnd(fleet, calm_s, ends_s, expected, float((ends_s - calm_ends_s).mean()))


def _outputs(fleet: Fleet, random: np.random.Generator) -> Floats | float:
    """`[draws]` how long the job takes, where plans took every row for as long as it may be, and none is less likely
    to be short than long."""
    whole = fleet.members[0][0].whole
    drawn = random.random(DRAWS)
    return whole.prompt_share + (1 - whole.prompt_share) * drawn if whole.outputs_at_most else 1.0


def _speeds(fleet: Fleet, seconds: float, useful: Mapping[str, float]) -> list[float]:
    """How much later all is done for each second that one replica of a kind computes in vain."""
    step = 0.01 * seconds
    before, after = fleet.shares(seconds - step, useful), fleet.shares(seconds + step, useful)
    rates = [(late - early) / (2 * step) for early, late in zip(before, after, strict=True)]
    together = sum(count * rate for (_, count), rate in zip(fleet.members, rates, strict=True))
    return [rate / together if together else 0.0 for rate in rates]
