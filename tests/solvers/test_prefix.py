from __future__ import annotations

import numpy as np
import pytest
from brute_force import prefix_classes, shared_length
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers import Instance, InvalidItem, PrefixGroup, group_together, prefix_groups, weigh_grouping
from vasuki_solvers.prefix import _RadixTree

prompt_lists = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=14)


@given(prompt_lists, st.integers(1, 4), st.none() | st.integers(1, 6))
def test_groups_are_those_of_comparing_all_pairs(
    prompts: list[list[int]], min_shared: int, max_depth: int | None
) -> None:
    found = prefix_groups(prompts, min_shared=min_shared, max_depth=max_depth)
    seen = [prompt[:max_depth] for prompt in prompts]
    assert {(g.shared, frozenset(g.members), g.saved) for g in found} == prefix_classes(seen, min_shared)
    for group in found:
        pairs = zip(group.members, group.members[1:], strict=False)
        assert group.saved == sum(shared_length(seen[a], seen[b]) for a, b in pairs)


@given(prompt_lists, st.integers(1, 12))
def test_a_small_tree_may_miss_sharing_but_never_invents_it(prompts: list[list[int]], budget: int) -> None:
    everything = sum(group.saved for group in prefix_groups(prompts))
    found = prefix_groups(prompts, max_stored_tokens=budget)
    members = [member for group in found for member in group.members]
    assert len(members) == len(set(members))
    assert sum(group.saved for group in found) <= everything
    for group in found:
        first = prompts[group.members[0]]
        assert all(shared_length(first, prompts[member]) >= group.shared for member in group.members)
        pairs = zip(group.members, group.members[1:], strict=False)
        assert group.saved <= sum(shared_length(prompts[a], prompts[b]) for a, b in pairs)


def test_memory_stays_within_its_budget_and_hot_prefixes_stay_in_it() -> None:
    rng = np.random.default_rng(0)
    template = list(range(1_000, 1_050))
    tree = _RadixTree(2_000)
    for i in range(500):
        tree.insert(i, tuple(template + rng.integers(0, 1_000, 60).tolist()))
        assert tree._stored_tokens <= 2_000
    (group,) = tree.groups(min_shared=20)
    assert group.shared == 50
    assert len(group.members) == 500
    assert group.saved >= 50 * 499


def test_a_template_and_its_documents() -> None:
    prompts = [[9, 9, 1, 1, 5], [9, 9, 2, 2, 5], [9, 9, 1, 1, 6], [7]]
    (group,) = prefix_groups(prompts, min_shared=2)
    assert group.shared == 2
    assert set(group.members[:2]) in ({0, 2}, {1, 0}, {1, 2})
    assert abs(group.members.index(0) - group.members.index(2)) == 1  # they share a document
    assert group.saved == 2 + 4
    assert [set(g.members) for g in prefix_groups(prompts, min_shared=4)] == [{0, 2}]


def test_bringing_groups_together_keeps_everything_else_in_order() -> None:
    groups = [PrefixGroup(3, (5, 1), 3), PrefixGroup(2, (0, 4), 2)]
    assert group_together([3, 1, 0, 2, 5, 4], groups) == [3, 5, 1, 0, 4, 2]


def test_grouping_pays_when_a_token_costs_more_than_the_steps_it_takes() -> None:
    rng = np.random.default_rng(1)
    instance = Instance(rng.integers(20, 60, 60), rng.integers(1, 40, 60), 400)
    # The twenty longest are alike: together they leave holes that short ones would have filled.
    longest = tuple(np.argsort(-instance.durations)[:20].tolist())
    groups = [PrefixGroup(10, longest, 190)]
    dear = weigh_grouping(instance, groups, cost_per_token=1.0, cost_per_step=0.01)
    cheap = weigh_grouping(instance, groups, cost_per_token=1e-6, cost_per_step=1.0)
    assert dear.pays
    assert dear.saved == 190.0
    at = [dear.order.tolist().index(member) for member in longest]
    assert at == list(range(at[0], at[0] + 20))
    assert cheap.spent >= 1.0
    assert not cheap.pays
    for each in (dear, cheap):
        assert sorted(each.order.tolist()) == list(range(60))


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidItem, match="min_shared=0"):
        prefix_groups([], min_shared=0)
