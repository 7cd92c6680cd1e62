"""A lower bound that sees growth: what an arrival needs at once, the rows before it free only token by token.

Read a plan backwards (`reverse`): items arrive at their peak and shrink. An arrival of 50 tokens finds 50 free ones, so
that 25 of them were unused on average while the items before it shrank and made that room, unless someone's departure
did. Area does not see it, nor does any relaxation that lets items pause between steps.

The state is the number k of items that run and the tokens h that they hold together. Three things change it:

    a step         (k, h) -> (k, h - k)              every item shrinks by one; one in its last step, to prompt - 1
    a departure    (k, h) -> (k - 1, h - prompt + 1)
    an arrival     (k, h) -> (k + 1, h + peak)       only if that is no more than the capacity

Give every state a potential f(k, h), and every token held for a step a value v. Whatever these numbers are, they bound
the steps M of any plan. Let

    a_i = the most that an arrival of item i can raise the potential, d_i = the most that its departure can, and
    w   = the most that a step is worth: the maximum of v h + f(k, h - k) - f(k, h).

Over a plan, v h sums up to v x (the area of all items). The changes of the potential, summed up, lead from the empty
memory at the start to the empty memory at the end, for which it may have another value, f_end >= f(0, 0) = 0. Arrivals
and departures contribute at most the sum of all a_i + d_i, so that steps contribute at least the rest:

    M w >= v x area + f_end - sum of (a_i + d_i).

(A memory that is empty in between is an end and a new start, and only adds f_end once more.) With f = 0 and v = 1 this
is the area bound. `potential_lp` finds better numbers. They are whole here, so that no rounding enters the proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vasuki_solvers.items import Instance, Ints


@dataclass(frozen=True, slots=True)
class States:
    """The states (k, h) that a plan of an instance can pass through: low[k] <= h <= high[k], for k = 0, 1, ...

    No k items hold less than the k smallest prompts; `low` is one less for each item, as after its last step.
    """

    low: Ints
    high: Ints

    @classmethod
    def of(cls, instance: Instance) -> States:
        smallest = np.append(0, np.sort(instance.prompts).cumsum())
        largest = np.append(0, np.sort(instance.peaks)[::-1].cumsum())
        most = int((smallest <= instance.capacity).sum()) - 1
        most = min(most, instance.max_parallel or most)
        k = np.arange(most + 1)
        return cls(smallest[k] - k, np.minimum(largest[k], instance.capacity))

    @property
    def most(self) -> int:
        """The largest k."""
        return len(self.low) - 1

    def steps(self, k: int) -> tuple[int, int]:
        """First and last h from which k items can take a step."""
        return int(self.low[k]) + k, int(self.high[k])

    def arrivals(self, k: int, peak: int) -> tuple[int, int]:
        """First and last h at which an item of this peak can join k others; none if the first is larger."""
        return int(max(self.low[k], self.low[k + 1] - peak)), int(min(self.high[k], self.high[k + 1] - peak))

    def departures(self, k: int, prompt: int) -> tuple[int, int]:
        """First and last h at which one of k items can leave that has `prompt` - 1 tokens; none likewise."""
        left = prompt - 1
        return int(max(self.low[k], self.low[k - 1] + left)), int(min(self.high[k], self.high[k - 1] + left))


@dataclass(frozen=True, slots=True)
class Potentials:
    """f and v of the module, in any unit. values: [most + 1, capacity + 1]. end: f_end."""

    values: Ints
    end: int
    per_token_step: int

    def bound(self, instance: Instance) -> int:
        """Steps that no plan of `instance` undercuts. Exact arithmetic: O(items x states)."""
        arrivals, departures = self.rises(instance)
        total = int(instance.areas.sum()) * self.per_token_step + self.lift - int((arrivals + departures).sum())
        step = self.step(instance)
        return -(-total // step) if step > 0 else 0

    @property
    def lift(self) -> int:
        """f_end - f(0, 0), and no less than 0."""
        return max(0, self.end - int(self.values[0, 0]))

    def rises(self, instance: Instance) -> tuple[Ints, Ints]:
        """a and d, [num_items] each: the most that an item's arrival, and its departure, can raise the potential."""
        states, f = States.of(instance), self.values
        arrivals, departures = [], []
        for prompt, peak in zip(instance.prompts.tolist(), instance.peaks.tolist(), strict=True):
            arrival, departure = [], [self.lift + int(f[0, 0] - f[1, prompt - 1])]
            for k in range(states.most):
                first, last = states.arrivals(k, peak)
                if first <= last:
                    rise = f[k + 1, first + peak : last + peak + 1] - f[k, first : last + 1]
                    arrival.append(int(rise.max()))
            for k in range(2, states.most + 1):
                first, last = states.departures(k, prompt)
                if first <= last:
                    rise = f[k - 1, first - prompt + 1 : last - prompt + 2] - f[k, first : last + 1]
                    departure.append(int(rise.max()))
            arrivals.append(max(arrival))
            departures.append(max(departure))
        return np.array(arrivals, np.int64), np.array(departures, np.int64)

    def step(self, instance: Instance) -> int:
        """w: the most that a step is worth."""
        states, f = States.of(instance), self.values
        most = 0
        for k in range(1, states.most + 1):
            first, last = states.steps(k)
            change = f[k, first - k : last - k + 1] - f[k, first : last + 1]
            most = max(most, int((np.arange(first, last + 1) * self.per_token_step + change).max()))
        return most
