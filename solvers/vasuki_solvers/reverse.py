"""List scheduling backwards in time, where items shrink.

Read from its end to its start, a schedule is a schedule again, in which an item arrives at its peak and gives back a
token in every step. So once a set of items fits together, it keeps fitting: to admit the next item it is enough to look
at the tokens held *now*, and no future peak has to be computed. The lists that this decoder can produce also lose
nothing:

    Without a prefill budget, some optimal schedule is the decoding of some order with look-ahead 1.

    Take an optimal schedule, reversed, and decode its items in the order of their (reversed) starts. By induction each
    item starts no later than it did: the items before it started no later than they did, so at its old start and after
    it each of them holds no more than it did there, and the item fits.

The order of the items is therefore a complete search space (`local_search`), and decoding one takes O(n log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

import numpy as np

from vasuki_solvers.items import Instance, Ints


def reverse_schedule(instance: Instance, order: Iterable[int], *, lookahead: int = 1) -> tuple[Ints, Ints]:
    """Place the items in `order`, the first of them at the *end* of the schedule.

    order: a permutation of the items. lookahead: the item placed next is the first of this many that fits (1: strictly
    in order). Returns starts and waits, [num_items] each, of a feasible schedule. O(n (log n + lookahead)).
    """
    return ReverseDecoder(instance).decode(order, lookahead=lookahead)


class ReverseDecoder:
    """Decodes many orders of one instance, whose numbers are converted to plain lists once."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._durations: list[int] = instance.durations.tolist()
        self._peaks: list[int] = instance.peaks.tolist()
        self._prompts: list[int] = instance.prompts.tolist()

    def decode(self, order: Iterable[int], *, lookahead: int = 1) -> tuple[Ints, Ints]:
        """Starts and waits, [num_items] each; see `reverse_schedule`."""
        placed, released = self.place(order, lookahead=lookahead)
        arrivals, departures = np.asarray(placed, np.int64), np.asarray(released, np.int64)
        # Reversed step r of a schedule of M steps is step M - 1 - r, so the interval [arrival, departure) becomes
        # [M - departure, M - arrival).
        return departures.max(initial=0) - departures, departures - arrivals - self.instance.durations

    def place(self, order: Iterable[int], *, lookahead: int = 1) -> tuple[list[int], list[int]]:
        """Reversed arrivals and departures, [num_items] each: item i is there in arrivals[i] <= r < departures[i]."""
        durations, peaks, prompts = self._durations, self._peaks, self._prompts
        capacity = self.instance.capacity
        max_parallel = self.instance.max_parallel or len(peaks)
        budget = self.instance.prefill_tokens_per_step
        intake = None if budget is None else _Intake(budget)

        arrivals, departures = [0] * len(peaks), [0] * len(peaks)
        upcoming = iter(order)
        window = list(islice(upcoming, lookahead))
        # Tokens held now are `level - num_shrinking * now`: a shrinking item counts as peak + arrival - now. Every item
        # shrinks until its prompt is left, and then waits for its prefill (if there is a budget) before it departs.
        now = level = num_shrinking = num_running = 0
        events: list[tuple[int, int]] = []  # (step, i): item i stops shrinking; (step, ~i): item i departs
        while window:
            while events and events[0][0] <= now:
                step, i = heapq.heappop(events)
                if i >= 0:
                    level -= peaks[i] + arrivals[i]
                    num_shrinking -= 1
                    if step < departures[i]:
                        level += prompts[i]
                        heapq.heappush(events, (departures[i], ~i))
                        continue
                else:
                    level -= prompts[~i]
                num_running -= 1
            free = capacity - level + num_shrinking * now
            chosen = -1
            if num_running < max_parallel:
                for position, i in enumerate(window):
                    if peaks[i] <= free:
                        chosen = position
                        break
            if chosen < 0:
                following = events[0][0]
                if num_shrinking and num_running < max_parallel:
                    lacking = min([peaks[i] for i in window]) - free
                    following = min(following, now - (-lacking // num_shrinking))
                now = following
                continue
            i = window.pop(chosen)
            window.extend(islice(upcoming, 1))
            arrivals[i] = now
            level += peaks[i] + now
            num_shrinking += 1
            num_running += 1
            decoded = departures[i] = now + durations[i]
            if intake is not None:
                # The last chunk of a prompt runs in the step of the first token, which is the last one, reversed.
                departures[i] = intake.reserve(decoded - 1, prompts[i])
            heapq.heappush(events, (decoded, i))
        return arrivals, departures


class _Intake:
    """The prefill budget of every step, handed out first come, first served."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._left: dict[int, int] = {}  # budget left in a step; a step that is absent has all of it
        self._next: dict[int, int] = {}  # from an exhausted step towards the next one with some budget left

    def reserve(self, step: int, tokens: int) -> int:
        """Take `tokens` from `step` on, as early as possible, and return the step after the last one used."""
        while True:
            step = self._first_open(step)
            left = self._left.get(step, self._budget)
            if tokens < left:
                self._left[step] = left - tokens
                return step + 1
            tokens -= left
            self._left.pop(step, None)
            self._next[step] = step + 1
            step += 1
            if not tokens:
                return step

    def _first_open(self, step: int) -> int:
        root = step
        while root in self._next:
            root = self._next[root]
        while step != root:  # path compression: the next search from here is one hop
            self._next[step], step = root, self._next[step]
        return root
