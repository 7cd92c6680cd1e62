from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from brute_force import prefix_classes, shared_length
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers import (
    Instance,
    InvalidItem,
    PrefixGroup,
    group_together,
    prefix_groups,
    shared_prefixes,
    sharing_steps,
)
from vasuki_solvers.prefix import NODE_BYTES, _RadixTree

prompt_lists = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=14)


@given(prompt_lists, st.integers(1, 4), st.none() | st.integers(1, 6))
def test_groups_are_those_of_comparing_all_pairs(
    prompts: list[list[int]], min_shared: int, max_depth: int | None
) -> None:
    found = prefix_groups(prompts, min_shared=min_shared, max_depth=max_depth)
    seen = [prompt[:max_depth] for prompt in prompts]
    assert [(g.shared, g.members) for g in found] == sorted(prefix_classes(seen, min_shared), key=lambda g: g[1])
    for group in found:
        inside = [prompt if i in group.members else [] for i, prompt in enumerate(seen)]
        deeper = prefix_classes(inside, group.shared + min_shared)
        assert {(g.shared, g.members) for g in group.subgroups} == deeper


@given(prompt_lists, st.integers(1, 3))
def test_every_prompt_has_the_longest_prefix_that_it_shares(prompts: list[list[int]], min_shared: int) -> None:
    prefix_of, prefixes = shared_prefixes(prompts, min_shared=min_shared)
    for i, prompt in enumerate(prompts):
        longest = max((shared_length(prompt, other) for j, other in enumerate(prompts) if j != i), default=0)
        assert prefixes[prefix_of[i]].tolist() == prompt[: longest if longest >= min_shared else 0]


@given(prompt_lists, st.integers(1, 12))
def test_a_small_tree_may_miss_sharing_but_never_invents_it(prompts: list[list[int]], nodes: int) -> None:
    found = prefix_groups(prompts, max_bytes=nodes * NODE_BYTES)
    members = [member for group in found for member in group.members]
    assert len(members) == len(set(members))
    for group in found:
        first = prompts[group.members[0]]
        assert all(shared_length(first, prompts[member]) >= group.shared for member in group.members)
    prefix_of, prefixes = shared_prefixes(prompts, max_bytes=nodes * NODE_BYTES)
    for i, prompt in enumerate(prompts):
        prefix = prefixes[prefix_of[i]].tolist()
        assert prompt[: len(prefix)] == prefix
        others = prompts[:i] + prompts[i + 1 :]
        assert not prefix or any(other[: len(prefix)] == prefix for other in others)


def test_memory_stays_within_its_budget_and_hot_prefixes_stay_in_it() -> None:
    rng = np.random.default_rng(0)
    template = list(range(1_000, 1_050))
    tree = _RadixTree(20_000)
    for _ in range(500):
        tree.insert(np.array(template + rng.integers(0, 1_000, 60).tolist(), np.int32).tobytes())
        assert tree._num_bytes <= 20_000
    (group,) = tree.groups(min_shared=20)
    assert group.shared == 50
    assert len(group.members) == 500


def test_a_template_and_its_documents() -> None:
    prompts = [[9, 9, 1, 1, 5], [9, 9, 2, 2, 5], [9, 9, 1, 1, 6], [7]]
    (group,) = prefix_groups(prompts, min_shared=2)
    assert group == PrefixGroup(2, (0, 1, 2), (PrefixGroup(4, (0, 2)),))
    assert group_together([3, 0, 1, 2], [group]) == [3, 0, 2, 1]


def test_bringing_groups_together_keeps_everything_else_in_order() -> None:
    groups = [PrefixGroup(3, (1, 5)), PrefixGroup(2, (0, 4))]
    assert group_together([3, 1, 0, 2, 5, 4], groups) == [3, 1, 5, 0, 4, 2]


def test_memory_is_what_the_tree_counts() -> None:
    rng = np.random.default_rng(0)
    tree = _RadixTree(2_000_000)
    tracemalloc.start()
    for _ in range(4_000):
        tree.insert(rng.integers(0, 100_000, 40).astype(np.int32).tobytes())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1_900_000 < tree._num_bytes <= 2_000_000
    assert taken < 1.5 * tree._num_bytes


def two_groups() -> tuple[Instance, list[PrefixGroup]]:
    """Eight items of 20 + 3 tokens and 5 steps, every second of which has the same first 20."""
    groups = [PrefixGroup(20, tuple(range(first, 8, 2))) for first in (0, 1)]
    return Instance(np.full(8, 23), np.full(8, 5), 45, prefill_tokens_per_step=23), groups


def test_a_prefix_is_held_and_computed_once_for_all_that_run() -> None:
    instance, groups = two_groups()
    # One prefix leaves room for all four of its group, at 5 tokens each; two leave room for nobody.
    together = [0, 2, 4, 6, 1, 3, 5, 7]
    assert sharing_steps(instance, together, groups) < sharing_steps(instance, range(8), groups)
    roomy = replace(instance, capacity=500)
    assert sharing_steps(roomy, together, groups) == pytest.approx(sharing_steps(roomy, range(8), groups))
    assert sharing_steps(roomy, range(8), []) > sharing_steps(roomy, range(8), groups)


def test_one_item_after_the_other_takes_the_sum_of_all() -> None:
    instance = Instance(np.array([8, 7, 9]), np.array([3, 4, 2]), 10)
    assert sharing_steps(instance, range(3), []) == 9


def test_what_subgroups_share_counts_on_top() -> None:
    instance = Instance(np.full(4, 30), np.full(4, 5), 500, prefill_tokens_per_step=10)
    flat = [PrefixGroup(10, (0, 1, 2, 3))]
    nested = [PrefixGroup(10, (0, 1, 2, 3), (PrefixGroup(20, (0, 1)), PrefixGroup(20, (2, 3))))]
    assert sharing_steps(instance, range(4), flat) == 3 + 3 * 2 + 5
    assert sharing_steps(instance, range(4), nested) == 3 + 1 + 2 + 1 + 5


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidItem, match="min_shared=0"):
        prefix_groups([], min_shared=0)
