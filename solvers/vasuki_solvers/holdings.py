"""What an exact model sees of the items: the tokens that each of them holds at each age."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from vasuki_solvers.items import Instance, Ints


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the items hold, and the limits that they share.

    tokens: for each item, the tokens it holds at each age, in steps; never fewer than at the age before. durations:
    steps after which each item has ended; it may hold its tokens for longer (`static_holdings`).
    """

    tokens: list[Ints]
    durations: list[int]
    capacity: int
    max_parallel: int | None

    @property
    def longest(self) -> int:
        return max(self.durations)

    def makespan(self, starts: Ints) -> int:
        return int((starts + np.asarray(self.durations)).max())

    def num_coefficients(self, horizon: int) -> int:
        """How many coefficients a model of `horizon` steps has, with a variable for every item and step."""
        return sum(
            len(tokens) * (horizon - duration + 1) for tokens, duration in zip(self.tokens, self.durations, strict=True)
        )

    def identical(self) -> list[list[int]]:
        """The items, grouped by what they hold at every age. Which item of a group starts first makes no difference."""
        groups: dict[bytes, list[int]] = defaultdict(list)
        for i, tokens in enumerate(self.tokens):
            groups[tokens.tobytes()].append(i)
        return list(groups.values())

    def in_order(self, starts: Ints) -> Ints:
        """[num_items] the starts of the same schedule when identical items start in the order of their numbers."""
        ordered = starts.copy()
        for group in self.identical():
            ordered[group] = np.sort(starts[group])
        return ordered

    def list_schedule(self, order: Ints) -> Ints:
        """[num_items] starts of a feasible schedule: each item in turn at the earliest step at which it fits."""
        horizon = sum(map(len, self.tokens))
        room = np.full(horizon, self.capacity, np.int64)
        places = np.full(horizon, self.max_parallel or len(order), np.int64)
        starts = np.zeros(len(order), np.int64)
        for i in order.tolist():
            ages, s = len(self.tokens[i]), 0
            while (self.tokens[i] > room[s : s + ages]).any() or (places[s : s + ages] < 1).any():
                s += 1
            room[s : s + ages] -= self.tokens[i]
            places[s : s + ages] -= 1
            starts[i] = s
        return starts


def growing_holdings(instance: Instance, clock: int = 1) -> Holdings:
    """The items as they are hold prompt + age, or where several steps make a tick of the clock, the most that they hold
    in one of them."""
    tokens = [
        item.prompt + np.minimum(np.arange(clock - 1, item.duration + clock - 1, clock), item.duration - 1)
        for item in instance.items
    ]
    return Holdings(tokens, [len(each) for each in tokens], instance.capacity, instance.max_parallel)


def static_holdings(instance: Instance) -> Holdings:
    """In Appendix A of the Vasuki paper, items hold their largest size S_i throughout and for one step longer."""
    tokens = [np.full(item.duration + 1, item.peak, np.int64) for item in instance.items]
    return Holdings(tokens, instance.durations.tolist(), instance.capacity, instance.max_parallel)
