"""The fleets to choose from, and the cheapest that holds the deadline.

Of each kind of card alone as many are looked at as may be had; where all of the cheapest kind are too few, cards of the
next one are added to them, and so on. Of fleets that differ by numbers alone the best one is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vasuki.machines.price import Cost
from vasuki.planner.plan import Plan
from vasuki.planner.renting.card import RentedCard
from vasuki.planner.renting.ends import Fleet, FleetEnd, Members, fleet_end

HOLDS = 0.9  # a deadline holds if this share of the draws keeps it


@dataclass(frozen=True)
class Choice:
    """A fleet, and what is to be expected of it."""

    end: FleetEnd
    deadline_s: float | None = None  # from now

    @property
    def fleet(self) -> Fleet:
        return self.end.fleet

    @property
    def name(self) -> str:
        """`3 a10 on spot`."""
        return f"{self.fleet.label} {'on spot' if self.fleet.on_spot else 'on demand'}"

    @property
    def in_time(self) -> float | None:
        """The probability that the deadline holds; None where there is none."""
        return None if self.deadline_s is None else self.end.in_time(self.deadline_s)

    @property
    def holds(self) -> bool:
        """Whether the deadline may be relied on."""
        return self.in_time is None or self.in_time >= HOLDS

    @property
    def amount(self) -> float:
        """Expected cost."""
        return self.end.cost(self.end.mean_s)

    @property
    def interruptions_cost(self) -> float:
        """What interruptions add to it."""
        return self.end.cost(self.end.delay_s)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the whole job. Its makespan is that of an undisturbed run, and its cost that of the mean end."""
        fleet, ends = self.fleet, self.end
        first = fleet.members[0][0]
        whole, part = first.whole, first.pace.plan(1 / fleet.replicas)
        num_gpus = sum(count * card.gpus for card, count in fleet.members)
        tokens = whole.prompt_tokens + whole.output_tokens_estimate
        return replace(
            part,
            gpu="+".join(card.name for card, _ in fleet.members),
            requests=whole.requests,
            prompt_tokens=whole.prompt_tokens,
            output_tokens_estimate=whole.output_tokens_estimate,
            makespan_s=fleet.end_s(boots=False),
            lower_bound_s=min(card.whole.lower_bound_s for card, _ in fleet.members) / fleet.replicas,
            schedule_bound_s=fleet.bound_s,
            cost=Cost.of(ends.mean_s, num_gpus, fleet.per_hour / num_gpus, whole.cost.currency, tokens),
            order=(),
            shared_tokens=whole.shared_tokens,
            misfits=whole.misfits,
            misfit=whole.misfit,
            plan_s=sum(plan.plan_s for card, _ in fleet.members for plan in card.pace.plans),
            layout=replace(part.layout, data_parallel=num_gpus // first.gpus),
            host_bytes=part.host_bytes * fleet.replicas,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan's object in `plan --json`, with the fleet's figures below `fleet`."""
        fleet, ends = self.fleet, self.end
        return self.plan.to_dict() | {
            "fleet": {
                "cards": {card.name: count * card.gpus for card, count in fleet.members},
                "market": "spot" if fleet.on_spot else "on demand",
                "price_per_hour": {card.name: card.per_hour(fleet.on_spot) for card, _ in fleet.members},
                "deadline_s": self.deadline_s,
                "in_time": self.in_time,
                "holds": self.holds,
                "ends_s": {
                    "mean": ends.mean_s,
                    **{f"p{share}": ends.quantile_s(share / 100) for share in (5, 50, 90, 95)},
                },
                "interruptions": ends.interruptions,
                "interruptions_cost": self.interruptions_cost,
            }
        }


@dataclass(frozen=True, slots=True)
class Flip:
    """The price of a card from which on another choice is cheaper."""

    card: str
    per_hour: float
    other: Choice

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"card": self.card, "per_hour": self.per_hour, "to": self.other.name}


def choices_of(groups: Sequence[Members], deadline_s: float | None, markets: Sequence[bool]) -> list[Choice]:
    """The fleets to choose from, the best first: those that hold by cost, then the others by how likely they are to.

    Args:
        groups: fleets as they are; with a deadline, all that may be had of each kind.
        deadline_s: from now.
        markets: on demand (False), on spot (True), or both.
    """
    best = [
        choice
        for on_spot in markets
        for choice in (
            _as_they_are(groups, on_spot) if deadline_s is None else _best_of_each(groups, deadline_s, on_spot)
        )
    ]
    return sorted(best, key=_rank)


def _as_they_are(groups: Sequence[Members], on_spot: bool) -> Iterator[Choice]:
    return (Choice(fleet_end(Fleet(tuple(members), on_spot))) for members in groups)


def _best_of_each(groups: Sequence[Members], deadline_s: float, on_spot: bool) -> Iterator[Choice]:
    """The best number of cards of each kind, and of the next kind in addition to all cards of cheaper kinds."""
    cards = [member for members in groups for member in members]
    cards.sort(key=lambda member: _job_cost(member[0], on_spot))
    cheaper: list[tuple[RentedCard, int]] = []
    is_enough = False
    for card, most in cards:
        alone = _best_number(card, most, (), deadline_s, on_spot)
        yield alone
        if cheaper and not is_enough:
            mixed = _best_number(card, most, cheaper, deadline_s, on_spot)
            yield mixed
            is_enough = mixed.holds
        is_enough = is_enough or alone.holds
        cheaper.append((card, most))


def _job_cost(card: RentedCard, on_spot: bool) -> float:
    """What the whole job costs on one replica."""
    return card.gpus * card.per_hour(on_spot) * card.pace.seconds(1.0)


def _best_number(card: RentedCard, most: int, others: Members, deadline_s: float, on_spot: bool) -> Choice:
    fleets = (Fleet((*others, (card, number)), on_spot) for number in range(1, most + 1))
    return min((Choice(fleet_end(fleet), deadline_s) for fleet in fleets), key=_rank)


def _rank(choice: Choice) -> tuple[bool, float, float]:
    return (False, choice.amount, 0.0) if choice.holds else (True, -(choice.in_time or 0.0), choice.amount)


def flip_of(choices: Sequence[Choice]) -> Flip | None:
    """At which price of a card that it has the best choice is not the cheapest any more; None if nothing else holds."""
    best, flips = choices[0], []
    hours = best.end.mean_s / 3600
    for other in choices[1:] if best.holds else ():
        if not other.holds:
            continue
        for card, count in best.fleet.members:
            theirs = dict(other.fleet.members).get(card, 0) if other.fleet.on_spot == best.fleet.on_spot else 0
            more_hours = (count * hours - theirs * other.end.mean_s / 3600) * card.gpus
            if more_hours > 0:
                per_hour = card.per_hour(best.fleet.on_spot) + (other.amount - best.amount) / more_hours
                flips.append(Flip(card.name, per_hour, other))
    return min(flips, key=lambda flip: flip.per_hour, default=None)
