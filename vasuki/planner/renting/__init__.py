"""Which cards to rent for a job, and how many: when each choice ends, how surely, and what it costs.

card        what one replica does in how long, and what it costs on demand and on spot
bound       how soon a fleet, the cards rented together, can be done at best
ends        when a fleet ends, machines that are taken away and wrong predictions included
choice      the cheapest that holds the deadline, the next ones, and the price at which they change places

Symbols: a replica does the share s(t) of a job in t seconds, so n of them end when n s(t) = 1.
"""

from vasuki.planner.renting.card import Pace, RentedCard, card_of
from vasuki.planner.renting.choice import Choice, Flip, choices_of, flip_of
from vasuki.planner.renting.ends import Fleet, FleetEnd, Members, fleet_end

__all__ = [
    "Choice",
    "Fleet",
    "FleetEnd",
    "Flip",
    "Members",
    "Pace",
    "RentedCard",
    "card_of",
    "choices_of",
    "fleet_end",
    "flip_of",
]
