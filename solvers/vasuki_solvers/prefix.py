"""Groups of items whose prompts begin alike, found with a radix tree in one pass and bounded memory.

A prompt is here any sequence of integers. Sharing at least L leading integers is an equivalence (two prompts that share
L with a third share them with each other), so the groups are the subtrees at depth L, whatever the order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vasuki_solvers.errors import InvalidItem
from vasuki_solvers.greedy import greedy_plan
from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.plan import Plan
from vasuki_solvers.reverse import reverse_schedule

MAX_STORED_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Items that share their first `shared` tokens. members: depth first, so that deeper sharing lies side by side.

    saved: tokens that need no computing when the members run in this order and each reuses what it shares with the one
    before it; at least shared x (members - 1), and more where some of them share more.
    """

    shared: int
    members: tuple[int, ...]
    saved: int


@dataclass(slots=True, eq=False)
class _Node:
    """A stretch of tokens below its parent. `depth`: tokens from the root to its end."""

    tokens: tuple[int, ...]
    depth: int
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by the first token of each
    members: list[int] = field(default_factory=list)  # items known to share exactly this much with the tree


def prefix_groups(
    prompts: Iterable[Sequence[int]],
    *,
    min_shared: int = 1,
    max_depth: int | None = None,
    max_stored_tokens: int = MAX_STORED_TOKENS,
) -> list[PrefixGroup]:
    """All groups of two or more prompts that share at least `min_shared` leading tokens, by their first member.

    max_depth: tokens beyond this many aren't looked at. max_stored_tokens: the tree holds no more than this (each node
    holds at least one, so this bounds its nodes too), except for the prompt that is being added. Above it, the leaf
    that has gone untouched the longest is cut off, and its items stand at its parent, whose tokens they also share.
    What is returned is then still true of every group, but a group can be missed, split, or credited with less.

    Memory is that of the stored tokens and one integer per prompt. Raises InvalidItem for limits below 1.
    """
    if min_shared < 1 or max_stored_tokens < 1 or (max_depth is not None and max_depth < 1):
        raise InvalidItem(f"{min_shared=}, {max_depth=} and {max_stored_tokens=} must be positive")
    tree = _RadixTree(max_stored_tokens)
    for i, prompt in enumerate(prompts):
        tree.insert(i, tuple(prompt[:max_depth]))
    return sorted(tree.groups(min_shared), key=lambda group: min(group.members))


class _RadixTree:
    def __init__(self, max_stored_tokens: int) -> None:
        self._root = _Node((), 0, None)
        self._max_stored_tokens = max_stored_tokens
        self._stored_tokens = 0
        self._leaves: OrderedDict[_Node, None] = OrderedDict()  # coldest first

    def insert(self, item: int, prompt: tuple[int, ...]) -> None:
        node = self._root
        while node.depth < len(prompt):
            child = node.children.get(prompt[node.depth])
            if child is None:
                node = self._add_leaf(node, prompt[node.depth :])
                break
            shared = _shared_length(child.tokens, prompt[node.depth : child.depth])
            node = child if shared == len(child.tokens) else self._split(child, shared)
        node.members.append(item)
        if node in self._leaves:
            self._leaves.move_to_end(node)
        while self._stored_tokens > self._max_stored_tokens and len(self._leaves) > 1:
            self._cut_coldest_leaf()

    def _add_leaf(self, parent: _Node, tokens: tuple[int, ...]) -> _Node:
        leaf = _Node(tokens, parent.depth + len(tokens), parent)
        parent.children[tokens[0]] = leaf
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self._stored_tokens += len(tokens)
        return leaf

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a node between `node` and its parent that holds the first `length` tokens; that new node."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.parent.depth + length, node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[length:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _cut_coldest_leaf(self) -> None:
        leaf, _ = self._leaves.popitem(last=False)
        parent = leaf.parent
        assert parent is not None
        parent.members += leaf.members
        del parent.children[leaf.tokens[0]]
        self._stored_tokens -= len(leaf.tokens)
        if not parent.children and parent.parent is not None:
            # As cold as what it lost; at the front it is also the next to go, which frees whole chains.
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)

    def groups(self, min_shared: int) -> list[PrefixGroup]:
        """One group for each topmost node of depth `min_shared` or more, with all that is below it."""
        groups = []
        pending = [self._root]
        while pending:
            node = pending.pop()
            if node.depth < min_shared:
                pending += node.children.values()
                continue
            # A chain of single children shares more than its top does.
            while len(node.children) == 1 and not node.members:
                (node,) = node.children.values()
            members, distinct = _collect(node)
            if len(members) > 1:
                groups.append(PrefixGroup(node.depth, tuple(members), distinct))
        return groups


def _collect(top: _Node) -> tuple[list[int], int]:
    """Members below `top`, depth first, and the tokens that each shares with the one before it, summed."""
    members: list[int] = []
    saved = 0
    pending = [(top, top.depth)]  # (node, tokens that its first member shares with the member before it)
    while pending:
        node, shared = pending.pop()
        for item in node.members:
            saved += shared if members else 0
            members.append(item)
            shared = node.depth
        # The first child follows this node's members, or stands in for them; the others follow what is below it.
        children = list(node.children.values())
        pending += [(child, node.depth) for child in reversed(children[1:])]
        pending += [(child, shared) for child in children[:1]]
    return members, saved


def _shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Leading tokens that a and b have in common."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def group_together(order: Iterable[int], groups: Iterable[PrefixGroup]) -> list[int]:
    """`order` with every group brought to the place of its first member, in the group's own sequence."""
    group_of = {member: group for group in groups for member in group.members}
    done: set[int] = set()
    together: list[int] = []
    for item in order:
        if item not in done:
            members = group_of[item].members if item in group_of else (item,)
            together += members
            done.update(members)
    return together


@dataclass(frozen=True, slots=True)
class Grouping:
    """Is it worth to run groups together? saved and spent: in the unit of the two costs given to `weigh_grouping`."""

    saved: float
    spent: float
    order: Ints  # [num_items] the order to use: grouped when it pays, else the one it was compared with

    @property
    def pays(self) -> bool:
        return self.saved > self.spent


def weigh_grouping(
    instance: Instance,
    groups: Sequence[PrefixGroup],
    *,
    cost_per_token: float,
    cost_per_step: float,
    plan: Plan | None = None,
) -> Grouping:
    """Compare what grouping saves, shared tokens x `cost_per_token`, with the extra steps x `cost_per_step` it spends.

    The extra steps are those by which the plan becomes longer (never less than 0) when the order of `plan`, greedy's by
    default, is rearranged to have every group in one place. Both costs are in one unit of the caller's choice, such as
    seconds: the time to prefill a token, and the time of a step.
    """
    plan = greedy_plan(instance) if plan is None else plan
    backwards = np.argsort(-plan.ends, kind="stable").tolist()
    reversed_groups = [PrefixGroup(group.shared, group.members[::-1], group.saved) for group in groups]
    grouped = group_together(backwards, reversed_groups)
    starts, waits = reverse_schedule(instance, grouped)
    makespan = int((starts + waits + instance.durations).max(initial=0))
    saved = cost_per_token * sum(group.saved for group in groups)
    spent = cost_per_step * max(0, makespan - plan.makespan)
    return Grouping(saved, spent, np.array(grouped[::-1], np.int64) if saved > spent else plan.order)
