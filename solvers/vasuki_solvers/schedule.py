"""A schedule: when each item starts, and how far from the lower bound the whole is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vasuki_solvers.bounds import Bound, lower_bound
from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.occupancy import occupancy_profile


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Start steps for every item of an instance (model and formula: `vasuki_solvers.items`).

    starts, waits: [num_items] first step of each item, and steps it then waits for the end of its prefill (zero without
    a prefill budget). method: what built it. bound: no schedule of this instance is shorter.
    """

    instance: Instance
    starts: Ints
    waits: Ints
    method: str
    bound: Bound

    @classmethod
    def build(
        cls, instance: Instance, starts: Ints, waits: Ints | None, method: str, bound: Bound | None = None
    ) -> Schedule:
        """A schedule with read-only arrays; the bound is computed when it isn't given."""
        starts = np.array(starts, np.int64)
        waits = np.zeros(len(starts), np.int64) if waits is None else np.array(waits, np.int64)
        starts.setflags(write=False)
        waits.setflags(write=False)
        return cls(instance, starts, waits, method, lower_bound(instance) if bound is None else bound)

    @property
    def ends(self) -> Ints:
        """[num_items] the first step in which each item holds nothing any more."""
        return self.starts + self.waits + self.instance.durations

    @property
    def makespan(self) -> int:
        return int(self.ends.max(initial=0))

    @property
    def gap(self) -> float:
        """How much longer the schedule is than its lower bound: 0.03 is 3 %. Zero proves that it is optimal."""
        return self.makespan / self.bound.steps - 1 if self.bound.steps else 0.0

    @property
    def optimal(self) -> bool:
        """Whether it is proved that none is shorter: the makespan equals the bound."""
        return self.makespan == self.bound.steps

    @property
    def order(self) -> Ints:
        """[num_items] the items in the order in which they start, longer ones first within a step."""
        return np.lexsort((-self.instance.durations, self.starts))

    @property
    def profile(self) -> Ints:
        """[makespan] tokens held in each step."""
        return occupancy_profile(self.instance, self.starts, self.waits)

    @property
    def utilisation(self) -> float:
        """The mean share of the capacity that is held, over all steps."""
        return float(self.profile.mean()) / self.instance.capacity if len(self.instance) else 0.0

    def __str__(self) -> str:
        proof = "proved optimal" if self.optimal else f"gap {self.gap:.2%}"
        return (
            f"{self.method}: {len(self.instance)} items in {self.makespan} steps, "
            f"lower bound {self.bound.steps} ({self.bound.reason}), {proof}"
        )
