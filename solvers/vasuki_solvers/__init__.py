"""Ordering and packing items that grow while they run, so that the last one ends as early as possible.

    items           Item, Instance: what has to run and what it has to fit into; the model, in one formula
    occupancy       the growth-aware peak of what runs, and the profile of a schedule
    bounds          lower bounds on the makespan, each with its argument
    convex          what many steps cost at least when only their totals are known
    schedule        Schedule: start steps, makespan and gap
    verify          a referee that replays a schedule step by step
    forward         list scheduling in the present: what an online step scheduler makes of an order
    reverse         list scheduling backwards in time, where items shrink: the decoder behind the next two
    greedy          orders and schedules for any number of items; first come, first served as the baseline
    local_search    better schedules for hundreds to thousands of items
    milp            the best schedules, and proofs, for tens of items (import it by name: it alone needs PuLP)
    holdings        what an exact model sees of the items
    machines        how soon items can be done at best by machines of several kinds
    packing         lengths into the fewest bins
    prefix          prompts with a common prefix, and what running them together saves
    exceptions      what all of these raise

Plain Python and numpy. Nothing here knows what an item computes: its prompt is a size, its duration a number of steps.
"""

from __future__ import annotations

from vasuki_solvers.bounds import Bound, lower_bound, quick_bound
from vasuki_solvers.exceptions import (
    HorizonTooLong,
    InfeasibleItem,
    InvalidItem,
    InvalidSchedule,
    SolverError,
    UnsupportedLimit,
)
from vasuki_solvers.forward import forward_schedule
from vasuki_solvers.greedy import fifo_schedule, greedy_order, greedy_schedule
from vasuki_solvers.items import Instance, Item
from vasuki_solvers.local_search import local_search, moved
from vasuki_solvers.machines import makespan_bound
from vasuki_solvers.occupancy import future_peak, occupancy_profile
from vasuki_solvers.packing import (
    Packing,
    best_fit,
    best_fit_decreasing,
    bins_bound,
    first_fit,
    first_fit_decreasing,
    pack_exact,
)
from vasuki_solvers.prefix import PrefixGroup, group_together, prefix_groups, shared_prefixes, sharing_steps
from vasuki_solvers.reverse import reverse_schedule
from vasuki_solvers.schedule import Schedule
from vasuki_solvers.verify import verify

__all__ = [
    "Bound",
    "HorizonTooLong",
    "InfeasibleItem",
    "Instance",
    "InvalidItem",
    "InvalidSchedule",
    "Item",
    "Packing",
    "PrefixGroup",
    "Schedule",
    "SolverError",
    "UnsupportedLimit",
    "best_fit",
    "best_fit_decreasing",
    "bins_bound",
    "fifo_schedule",
    "first_fit",
    "first_fit_decreasing",
    "forward_schedule",
    "future_peak",
    "greedy_order",
    "greedy_schedule",
    "group_together",
    "local_search",
    "lower_bound",
    "makespan_bound",
    "moved",
    "occupancy_profile",
    "pack_exact",
    "prefix_groups",
    "quick_bound",
    "reverse_schedule",
    "shared_prefixes",
    "sharing_steps",
    "verify",
]
