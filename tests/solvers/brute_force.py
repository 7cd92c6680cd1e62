"""Exact answers for tiny inputs, by trying everything: slow, obvious, and independent of the library."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np


def shortest_makespan(items: list[tuple[int, int]], capacity: int, max_parallel: int | None = None) -> int:
    """The shortest makespan over all start steps. items: (prompt, duration) pairs, at most about five short ones."""
    longest_first = sorted(items, key=lambda item: -item[1])

    def fits(k: int, held: list[int], running: list[int]) -> bool:
        """Can items k, k + 1, ... be added to the tokens held and items running in each step?"""
        if k == len(longest_first):
            return True
        prompt, duration = longest_first[k]
        for start in range(len(held) - duration + 1):
            ages = range(duration)
            if all(held[start + age] + prompt + age <= capacity for age in ages) and all(
                max_parallel is None or running[start + age] < max_parallel for age in ages
            ):
                more_held, more_running = held[:], running[:]
                for age in ages:
                    more_held[start + age] += prompt + age
                    more_running[start + age] += 1
                if fits(k + 1, more_held, more_running):
                    return True
        return False

    makespan = max(duration for _, duration in items)
    while not fits(0, [0] * makespan, [0] * makespan):
        makespan += 1
    return makespan


def fewest_bins(lengths: list[int], capacity: int, max_items: int | None = None) -> int:
    """The fewest bins, by dynamic programming over all subsets of at most about ten items."""
    limit = max_items or len(lengths)

    @cache
    def bins_for(items: frozenset[int]) -> int:
        if not items:
            return 0
        first, *others = sorted(items)
        best = len(items)
        for chosen in product((False, True), repeat=len(others)):
            content = {first, *(item for item, taken in zip(others, chosen, strict=True) if taken)}
            if sum(lengths[i] for i in content) <= capacity and len(content) <= limit:
                best = min(best, 1 + bins_for(items - content))
        return best

    return bins_for(frozenset(range(len(lengths))))


def shared_length(a: list[int], b: list[int]) -> int:
    """Leading integers that a and b have in common."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


Classes = set[tuple[int, tuple[int, ...]]]


def prefix_classes(prompts: list[list[int]], min_shared: int) -> Classes:
    """(shared, members) of every group of two or more prompts, by comparing all pairs."""
    groups = set()
    for i in range(len(prompts)):
        if len(prompts[i]) < min_shared:
            continue
        members = tuple(j for j in range(len(prompts)) if shared_length(prompts[i], prompts[j]) >= min_shared)
        if len(members) > 1:
            groups.add((min(shared_length(prompts[j], prompts[k]) for j in members for k in members), members))
    return groups


def random_items(rng: np.random.Generator, count: int, max_prompt: int, max_duration: int) -> list[tuple[int, int]]:
    """(prompt, duration) pairs, uniform from 1."""
    prompts = rng.integers(1, max_prompt + 1, count).tolist()
    durations = rng.integers(1, max_duration + 1, count).tolist()
    return list(zip(prompts, durations, strict=True))
