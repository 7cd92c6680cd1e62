"""Fleets that the command line names: which of them to rent, and how a job goes on them in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vasuki.base.errors import JobFileError
from vasuki.machines.price import Spot, parse_prices
from vasuki.models.layout import Layout
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.renting import Choice, Members, card_of, choices_of
from vasuki.planner.simulated import Member, Simulated, simulate_fleet
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.placement import Placement
from vasuki.runs.planning import by_card, placements_of, priced
from vasuki.runs.workload import Workload

MOST_CARDS = 1024
Counts = Mapping[str, int]  # replicas, by name of the card


def parse_fleets(texts: Iterable[str], gpus: int = 1, unsaid: int = 1) -> list[Counts]:
    """`["a10:4+a40:2", "h100"]` -> `[{"a10": 4, "a40": 2}, {"h100": 1}]`, in replicas.

    Args:
        texts: as given.
        gpus: that each replica takes.
        unsaid: replicas of a card without a number.

    Raises:
        JobFileError: any other text.
    """
    fleets: list[Counts] = []
    for text in texts:
        fleet: dict[str, int] = {}
        for part in text.split("+"):
            name, colon, number = part.rpartition(":")
            if not colon:
                name, number = part, str(gpus * unsaid)
            if not name or not number.isdecimal() or not 1 <= int(number) <= MOST_CARDS:
                raise JobFileError(f"--gpu {text}: write it like a10:4, or a10:4+a40:2, of each 1 to {MOST_CARDS:,}")
            if int(number) % gpus:
                raise JobFileError(f"--gpu {text}: a replica takes {gpus} GPUs, so give a multiple of {gpus}")
            if name in fleet:
                raise JobFileError(f"--gpu {text}: names {name} twice")
            fleet[name] = int(number) // gpus
        fleets.append(fleet)
    return fleets


@dataclass(frozen=True, slots=True)
class Market:
    """What the command line says of prices and of machines that are taken away; profiles say the rest."""

    prices: Mapping[str, float] = field(default_factory=dict)  # an hour of a card on demand
    on_spot: bool = False
    spot_prices: Mapping[str, float] = field(default_factory=dict)
    interruptions_per_hour: Mapping[str, float] = field(default_factory=dict)
    boot_s: float | None = None

    def placed(self, placements: list[Placement]) -> list[Placement]:
        """The placements with these figures.

        Raises JobFileError for a card that is not among them, or of which nobody says what it is on spot.
        """
        if not self.on_spot and (self.spot_prices or self.interruptions_per_hour):
            raise JobFileError("--spot-price and --interruptions go with --spot")
        per_hour = by_card("--spot-price", placements, self.spot_prices)
        rate = by_card("--interruptions", placements, self.interruptions_per_hour)
        return [
            self._placed(placement, per_hour.get(placement.profile.name), rate.get(placement.profile.name))
            for placement in priced(placements, self.prices)
        ]

    def _placed(self, placement: Placement, per_hour: float | None, rate: float | None) -> Placement:
        profile = placement.profile
        price = profile.price
        if self.boot_s is not None:
            price = price.model_copy(update={"boot_s": self.boot_s})
        if self.on_spot:
            known = price.spot
            if known is None and (per_hour is None or rate is None):
                give = f"--spot-price {profile.name}=AMOUNT and --interruptions {profile.name}=RATE"
                raise JobFileError(f"--spot: the profile {profile.name} does not say what it is on spot; give {give}")
            spot = known or Spot(per_hour=0, interruptions_per_hour=0, date="", source="given")
            given = {"per_hour": per_hour, "interruptions_per_hour": rate}
            given = {name: value for name, value in given.items() if value is not None}
            price = price.model_copy(update={"spot": spot.model_copy(update={**given, "date": ""} if given else {})})
        machine = replace(placement.machine, profile=profile.model_copy(update={"price": price}))
        return replace(placement, machine=machine)


def market_of(
    prices: Iterable[str],
    on_spot: bool,
    spot_prices: Iterable[str],
    interruptions: Iterable[str],
    boot_s: float | None,
) -> Market:
    """The market that options describe. Raises JobFileError for what is no figure."""
    return Market(
        parse_prices(prices),
        on_spot,
        parse_prices(spot_prices, "--spot-price"),
        parse_prices(interruptions, "--interruptions", "RATE"),
        boot_s,
    )


def fleet_choices(
    workload: Workload, fleets: Sequence[Counts], tensor: int, deadline_s: float | None, market: Market
) -> list[Choice]:
    """The fleets to choose from, the best first, see `choices_of`. On spot both markets are compared.

    Args:
        workload: the job.
        fleets: as `parse_fleets` reads them; none is this machine, with the replicas that the job wants.
        tensor: GPUs that share each layer.
        deadline_s: from now; None takes the fleets as they are.
        market: prices and interruptions.

    Raises:
        VasukiError: as a plan for one card does.
    """
    if deadline_s is not None:
        names = [name for fleet in fleets for name in fleet]
        if len(names) > len(set(names)):
            raise JobFileError("--gpu: name each card once, with as many as may be had, such as a10:4")
    groups = _groups(workload, fleets, tensor, market)
    currencies = sorted({card.currency for members in groups for card, _ in members})
    if len(currencies) > 1:
        raise JobFileError(f"prices in {' and '.join(currencies)} cannot be compared; set cost.price_per_hour")
    return choices_of(groups, deadline_s, [True, False] if market.on_spot else [False])


def simulate_fleets(
    workload: Workload, fleets: Sequence[Counts], tensor: int, market: Market, seed: int
) -> list[Simulated]:
    """A simulated run of each fleet. Raises as `fleet_choices` does."""
    groups = _groups(workload, fleets, tensor, market)
    choices = [choices_of([members], None, [market.on_spot])[0] for members in groups]
    return [play(choice, workload, seed) for choice in choices]


def play(choice: Choice, workload: Workload, seed: int) -> Simulated:
    """A simulated run of a fleet, whose machines are taken away at moments that the seed says."""
    fleet = choice.fleet
    members = []
    for card, count in fleet.members:
        plan = card.pace.plan(1 / fleet.replicas)
        rate = 3600 * card.interruptions_per_s(fleet.on_spot)
        members.append(Member(plan, card.cost_model(plan), count, rate, card.price.boot_s))
    return simulate_fleet(choice.plan, members, workload.lengths, plan_config=workload.config.plan, seed=seed)


def _groups(workload: Workload, fleets: Sequence[Counts], tensor: int, market: Market) -> list[Members]:
    """The cards of each fleet, planned, with the number of replicas."""
    lengths, layout = workload.lengths, Layout(tensor)
    refuse_ignored(workload.config)
    layout.check(workload.shape)
    if lengths.arrived_at_s is not None:
        raise JobFileError("arrived_at is not known to fleets; leave the column out")
    most = {name: max(fleet.get(name, 0) for fleet in fleets) for fleet in fleets for name in fleet}
    placements = market.placed(placements_of([most], workload))
    replicas = sum(most.values()) or placements[0].replicas
    cards = {
        name: card_of(
            lengths,
            partial(placement.plan, layout=layout),
            partial(_plan_part, placement, layout),
            placement.shape,
            placement.profile,
            replicas,
        )
        for name, placement in zip(most or [""], placements, strict=True)
    }
    return [tuple((cards[name], number) for name, number in fleet.items()) for fleet in fleets or [{"": replicas}]]


def _plan_part(placement: Placement, layout: Layout, part: Lengths, whole: Plan) -> Plan:
    """The plan of a part of the job, run as the whole: that is quicker than to choose again."""
    config, kv = placement.config, placement.kv.model_copy(update={"offload": whole.offload.mode})
    steps = {"chunk_tokens": whole.chunk_tokens, "max_num_seqs": whole.max_num_seqs}
    engine = config.engine.model_copy(update=steps)
    return replace(placement, config=config.model_copy(update={"engine": engine}), kv=kv).plan(part, layout)
