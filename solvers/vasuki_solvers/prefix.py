"""Prompts with a common prefix, found with a radix tree in one pass and bounded memory.

A prompt is here any sequence of integers of 32 bits. Sharing at least L leading integers is an equivalence (two prompts
that share L with a third share them with each other), so the groups are the subtrees at depth L, whatever the order of
arrival.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vasuki_solvers.exceptions import InvalidItem
from vasuki_solvers.items import Instance, Ints

MAX_BYTES = 100_000_000
TOKEN_BYTES = 4
MAX_NESTING = 8
NODE_BYTES = 600  # what a node takes in addition to its tokens, as measured: objects, a dictionary and a list


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Items, in rising order, that share their first `shared` tokens. subgroups: the groups among them that share yet
    more."""

    shared: int
    members: tuple[int, ...]
    subgroups: tuple[PrefixGroup, ...] = ()


@dataclass(slots=True, eq=False)
class _Node:
    """A stretch of tokens below its parent. `depth`: tokens from the root to its end."""

    tokens: bytes
    depth: int
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)  # keyed by the first token of each
    members: list[int] = field(default_factory=list)  # items known to share exactly this much with the tree


def prefix_groups(
    prompts: Iterable[ArrayLike],
    *,
    min_shared: int = 1,
    max_depth: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[PrefixGroup]:
    """All groups of two or more prompts that share at least `min_shared` leading tokens, by their first member.

    Subgroups share at least `min_shared` tokens more than the group that they are in, `MAX_NESTING` deep. max_depth:
    tokens beyond this many aren't looked at. max_bytes: the tree takes no more than about this, except for the prompt
    that is being added. Above it, the leaf that has gone untouched the longest is cut off, and its items stand at its
    parent, whose tokens they also share. What is returned is then still true of every group, but a group can be missed,
    split, or credited with less.

    Memory is that of the tree and one integer per prompt. Raises InvalidItem for limits below 1.
    """
    return _grown(prompts, min_shared, max_depth, max_bytes).groups(min_shared)


def shared_prefixes(
    prompts: Iterable[ArrayLike],
    *,
    min_shared: int = 1,
    max_depth: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[Ints, list[NDArray[np.int32]]]:
    """The longest beginning that each prompt has in common with another one.

    Returns, for each prompt, an index into a list of prefixes, [num_prompts]. The first of the list is empty: it
    belongs to all prompts that share less than `min_shared` tokens. Arguments, memory and errors as for
    `prefix_groups`.
    """
    tree = _grown(prompts, min_shared, max_depth, max_bytes)
    return tree.prefixes(min_shared)


def _grown(prompts: Iterable[ArrayLike], min_shared: int, max_depth: int | None, max_bytes: int) -> _RadixTree:
    if min_shared < 1 or max_bytes < 1 or (max_depth is not None and max_depth < 1):
        raise InvalidItem(f"{min_shared=}, {max_depth=} and {max_bytes=} must be positive")
    tree = _RadixTree(max_bytes)
    for prompt in prompts:
        tree.insert(np.asarray(prompt, np.int32)[:max_depth].tobytes())
    return tree


class _RadixTree:
    def __init__(self, max_bytes: int) -> None:
        self._root = _Node(b"", 0, None)
        self._max_bytes = max_bytes
        self._num_items = 0
        self._num_bytes = 0
        self._leaves: OrderedDict[_Node, None] = OrderedDict()  # coldest first

    def insert(self, prompt: bytes) -> None:
        """Add the next item; `prompt`: its tokens, of `TOKEN_BYTES` each."""
        node, end = self._root, 0
        while end < len(prompt):
            child = node.children.get(prompt[end : end + TOKEN_BYTES])
            if child is None:
                node = self._add_leaf(node, prompt[end:])
                break
            shared = _shared_bytes(child.tokens, prompt[end : end + len(child.tokens)])
            node = child if shared == len(child.tokens) else self._split(child, shared)
            end += shared
        node.members.append(self._num_items)
        self._num_items += 1
        if node in self._leaves:
            self._leaves.move_to_end(node)
        while self._num_bytes > self._max_bytes and len(self._leaves) > 1:
            self._cut_coldest_leaf()

    def _add_leaf(self, parent: _Node, tokens: bytes) -> _Node:
        leaf = _Node(tokens, parent.depth + len(tokens) // TOKEN_BYTES, parent)
        parent.children[tokens[:TOKEN_BYTES]] = leaf
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self._num_bytes += NODE_BYTES + len(tokens)
        return leaf

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a node between `node` and its parent that holds the first `length` bytes; return that new node."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.parent.depth + length // TOKEN_BYTES, node.parent)
        node.parent.children[upper.tokens[:TOKEN_BYTES]] = upper
        node.tokens, node.parent = node.tokens[length:], upper
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        self._num_bytes += NODE_BYTES
        return upper

    def _cut_coldest_leaf(self) -> None:
        leaf, _ = self._leaves.popitem(last=False)
        parent = leaf.parent
        assert parent is not None
        parent.members += leaf.members
        del parent.children[leaf.tokens[:TOKEN_BYTES]]
        self._num_bytes -= NODE_BYTES + len(leaf.tokens)
        if not parent.children and parent.parent is not None:
            # As cold as what it lost; at the front it is also the next to go, which frees whole chains.
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)

    def groups(self, min_shared: int) -> list[PrefixGroup]:
        """The answer of `prefix_groups`."""
        return _groups([self._root], min_shared, min_shared, MAX_NESTING)

    def prefixes(self, min_shared: int) -> tuple[Ints, list[NDArray[np.int32]]]:
        """The answer of `shared_prefixes`. There is a node wherever items meet, and a leaf with a single item has its
        parent's prefix."""
        prefix_of = np.zeros(self._num_items, np.int64)
        prefixes = [np.zeros(0, np.int32)]
        pending = [(self._root, b"", 0)]  # (node, tokens above it, index of its parent's prefix)
        while pending:
            node, above, index = pending.pop()
            tokens = above + node.tokens
            if node.depth >= min_shared and (node.children or len(node.members) > 1):
                index = len(prefixes)
                prefixes.append(np.frombuffer(tokens, np.int32))
            prefix_of[node.members] = index
            pending += [(child, tokens, index) for child in node.children.values()]
        return prefix_of, prefixes


def _groups(pending: list[_Node], depth: int, more: int, nesting: int) -> list[PrefixGroup]:
    """Make a group of each topmost node of at least this depth, with subgroups that are deeper by `more`."""
    groups = []
    while pending:
        node = pending.pop()
        children = list(node.children.values())
        if node.depth < depth:
            pending += children
        elif len(members := _members(node)) > 1:
            subgroups = _groups(children, node.depth + more, more, nesting - 1) if nesting else ()
            groups.append(PrefixGroup(node.depth, tuple(members), tuple(subgroups)))
    return sorted(groups, key=lambda group: group.members[0])


def _members(top: _Node) -> list[int]:
    """Items at and below a node, in rising order."""
    members: list[int] = []
    pending = [top]
    while pending:
        node = pending.pop()
        members += node.members
        pending += node.children.values()
    return sorted(members)


def _shared_bytes(a: bytes, b: bytes) -> int:
    """Leading bytes that a and b have in common, in whole tokens."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low - low % TOKEN_BYTES


def group_together(order: Iterable[int], groups: Sequence[PrefixGroup]) -> list[int]:
    """Bring every group to the place of its first member in `order`, and inside a group every subgroup."""
    group_of = {member: group for group, each in enumerate(groups) for member in each.members}
    places: dict[int, list[int]] = {}  # keyed by item, or by ~group; in order of the first member
    for item in order:
        places.setdefault(~group_of[item] if item in group_of else item, []).append(item)
    together: list[int] = []
    for place, items in places.items():
        together += group_together(items, groups[~place].subgroups) if place < 0 else items
    return together


def sharing_steps(instance: Instance, order: Iterable[int], groups: Sequence[PrefixGroup]) -> float:
    """Count about how many steps an online scheduler takes for `order` if what a group shares is held once for all of
    its members that run, and has to be computed again when none does: what bringing groups together saves and spends,
    in one number.

    Items start in order as soon as there is room, each at its mean size, so that this takes O(n log n).
    """
    stretches, of_item = _stretches(groups)
    users = [0] * len(stretches)
    prompts, durations = instance.prompts.tolist(), instance.durations.tolist()
    budget = instance.prefill_tokens_per_step or float("inf")
    max_parallel = instance.max_parallel or len(prompts)
    running: list[tuple[float, int, float]] = []  # (end, item, mean size without what it shares)
    now = held = taken_in_at = last_end = 0.0
    for i in order:
        path = of_item.get(i, ())
        own = prompts[i] - sum([stretches[k] for k in path])
        size = own + (durations[i] - 1) / 2
        while True:
            lacking = sum([stretches[k] for k in path if not users[k]])
            if not running or (held + size + lacking <= instance.capacity and len(running) < max_parallel):
                break
            now, ended, released = heapq.heappop(running)
            held -= released
            for k in of_item.get(ended, ()):
                users[k] -= 1
                held -= 0 if users[k] else stretches[k]
        held += size + lacking
        for k in path:
            users[k] += 1
        taken_in_at = max(taken_in_at, now) + (own + lacking) / budget
        heapq.heappush(running, (taken_in_at + durations[i], i, size))
        last_end = max(last_end, taken_in_at + durations[i])
    return last_end


def _stretches(groups: Sequence[PrefixGroup]) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The tokens that each group shares beyond the group around it, and for each item which of them it begins with."""
    stretches: list[int] = []
    of_item: dict[int, tuple[int, ...]] = {}
    pending = [(group, 0) for group in groups]
    while pending:
        group, above = pending.pop()
        for member in group.members:
            of_item[member] = (*of_item.get(member, ()), len(stretches))
        stretches.append(group.shared - above)
        pending += [(subgroup, group.shared) for subgroup in group.subgroups]
    return stretches, of_item
