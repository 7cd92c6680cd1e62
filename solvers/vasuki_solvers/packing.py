"""Packing lengths into the fewest bins of one capacity.

Prepacking (3.1) packs prompts into rows with first-fit decreasing. Dynamic Prefill Packing (3.3) asks for the optimum,
with a recurrence (its eq. 3) that indexes prefixes of the list but subtracts arbitrary subsets of it, and whose value
is the same for every packing that places all items. What is wanted is the fewest bins, and `pack_exact` finds it.

Every packer takes `lengths`, positive integers, the `capacity` of a bin in the same unit, and optionally `max_items`
per bin. It raises InvalidItem for what is not positive, and InfeasibleItem for a length above the capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vasuki_solvers.exceptions import InfeasibleItem, InvalidItem


@dataclass(frozen=True, slots=True)
class Packing:
    """Which items share a bin: `bins` holds indices into the lengths. `bound`: no packing has fewer bins."""

    bins: tuple[tuple[int, ...], ...]
    capacity: int
    waste: int  # capacity that stays empty, over all bins
    bound: int

    @property
    def optimal(self) -> bool:
        """True only when proved: as many bins as the bound."""
        return len(self.bins) == self.bound


def first_fit(lengths: Sequence[int], capacity: int, *, max_items: int | None = None) -> Packing:
    """Put each item in turn into the first bin with room. O(n log n), by a tournament over the room in every bin."""
    limit = _check(lengths, capacity, max_items)
    bins: list[list[int]] = []
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[k] = max(room[2k], room[2k + 1]); bin b is leaf `leaves + b`
    for i, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        chosen = bins[node - leaves]
        chosen.append(i)
        room[node] = room[node] - length if len(chosen) < limit else 0
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return _packing(bins, lengths, capacity, max_items)


def best_fit(lengths: Sequence[int], capacity: int, *, max_items: int | None = None) -> Packing:
    """Put each item in turn into the fullest bin with room."""
    limit = _check(lengths, capacity, max_items)
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), fullest first
    for i, length in enumerate(lengths):
        at = bisect_left(open_bins, (length, -1))
        if at < len(open_bins):
            room, chosen = open_bins.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(i)
        if len(bins[chosen]) < limit and room > length:
            insort(open_bins, (room - length, chosen))
    return _packing(bins, lengths, capacity, max_items)


def first_fit_decreasing(lengths: Sequence[int], capacity: int, *, max_items: int | None = None) -> Packing:
    """Apply first fit to the longest items first: at most 11/9 of the optimum plus 6/9 of a bin (Dosa, 2007)."""
    return _decreasing(first_fit, lengths, capacity, max_items)


def best_fit_decreasing(lengths: Sequence[int], capacity: int, *, max_items: int | None = None) -> Packing:
    """Apply best fit to the longest items first."""
    return _decreasing(best_fit, lengths, capacity, max_items)


def pack_exact(
    lengths: Sequence[int], capacity: int, *, max_items: int | None = None, max_nodes: int = 100_000
) -> Packing:
    """Find the fewest bins by depth-first branch and bound (after Martello and Toth, 1990, 8.5).

    Items are placed longest first, into every bin with room and at last into a new one; of bins that look the same only
    one is tried, and of equal items the later one goes no further left. A node is cut when its bins, and those that the
    items still to come need beyond the room in them, are no fewer than the best packing so far.

    Gives up after `max_nodes` nodes with the best packing found; `Packing.optimal` says whether it is proved.
    """
    limit = _check(lengths, capacity, max_items)
    heuristics = (pack(lengths, capacity, max_items=max_items) for pack in (first_fit_decreasing, best_fit_decreasing))
    best = min(heuristics, key=lambda packing: len(packing.bins))
    if best.optimal:
        return best

    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [lengths[i] for i in order]
    to_come = [sum(sizes[k:]) for k in range(len(sizes) + 1)]
    fewest, found = len(best.bins), [list(content) for content in best.bins]
    bins: list[list[int]] = []  # items as positions in `sizes`
    rooms: list[int] = []
    chosen: list[int] = []  # the bin of each item placed so far

    def choices(k: int) -> Iterator[int]:
        """Bins to try for item k, `len(bins)` standing for a new one; none when the node is cut."""
        usable = sum(
            room for room, content in zip(rooms, bins, strict=True) if room >= sizes[-1] and len(content) < limit
        )
        if len(bins) + max(0, -((usable - to_come[k]) // capacity)) >= fewest:
            return iter(())
        leftmost = chosen[-1] if k and sizes[k] == sizes[k - 1] else 0
        tried: dict[tuple[int, int], int] = {}
        for b in range(leftmost, len(bins)):
            if rooms[b] >= sizes[k] and len(bins[b]) < limit:
                if rooms[b] == sizes[k] and max_items is None:
                    return iter((b,))  # it fills the bin: whatever else would go there can take its place elsewhere
                tried.setdefault((rooms[b], len(bins[b]) if max_items is not None else 0), b)
        return iter([*tried.values(), *([len(bins)] if len(bins) + 1 < fewest else [])])

    nodes = 0
    stack = [choices(0)]
    while stack and fewest > best.bound and nodes < max_nodes:
        if len(chosen) == len(stack):  # back at a node whose last choice is still in place
            b = chosen.pop()
            rooms[b] += sizes[bins[b].pop()]
            if not bins[b]:  # only the newest bin can be left empty
                del bins[b], rooms[b]
        following = next(stack[-1], None)
        if following is None:
            stack.pop()
            continue
        nodes += 1
        k = len(chosen)
        if following == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[following].append(k)
        rooms[following] -= sizes[k]
        chosen.append(following)
        if k + 1 < len(sizes):
            stack.append(choices(k + 1))
        elif len(bins) < fewest:
            fewest, found = len(bins), [[order[position] for position in content] for content in bins]
    bound = best.bound if stack and fewest > best.bound else fewest
    return Packing(tuple(map(tuple, found)), capacity, best.waste - (len(best.bins) - fewest) * capacity, bound)


def bins_bound(lengths: Sequence[int], capacity: int, *, max_items: int | None = None) -> int:
    """No packing has fewer bins (bound L2 of Martello and Toth, 1990, and the count of items).

    For any a <= capacity / 2: items above capacity - a share a bin with nothing of size >= a; items between that and
    half the capacity have a bin each, with some room; the items in [a, capacity / 2] that exceed this room need more.
    """
    if not len(lengths):
        return 0
    sizes = np.sort(np.asarray(lengths, np.int64))
    sums = np.concatenate(([0], np.cumsum(sizes)))
    half = int(np.searchsorted(2 * sizes, capacity, side="right"))  # sizes[half:] have a bin each
    thresholds = np.concatenate(([0], np.unique(sizes[:half])))
    small = np.searchsorted(sizes, thresholds, side="left")
    alone = np.searchsorted(sizes, capacity - thresholds, side="right")
    room = (alone - half) * capacity - (sums[alone] - sums[half])
    excess = np.maximum(0, sums[half] - sums[np.minimum(small, half)] - room)
    by_size = len(sizes) - half + int((-(-excess // capacity)).max())
    return max(by_size, -(-len(sizes) // max_items) if max_items else 0)


def _decreasing(pack: Callable[..., Packing], lengths: Sequence[int], capacity: int, max_items: int | None) -> Packing:
    _check(lengths, capacity, max_items)  # in the caller's order, to name the right item
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packing = pack([lengths[i] for i in order], capacity, max_items=max_items)
    bins = tuple(tuple(order[k] for k in content) for content in packing.bins)
    return Packing(bins, capacity, packing.waste, packing.bound)


def _packing(bins: list[list[int]], lengths: Sequence[int], capacity: int, max_items: int | None) -> Packing:
    waste = len(bins) * capacity - sum(lengths)
    return Packing(tuple(map(tuple, bins)), capacity, waste, bins_bound(lengths, capacity, max_items=max_items))


def _check(lengths: Sequence[int], capacity: int, max_items: int | None) -> int:
    """Return the most items that a bin may hold. Raises InvalidItem or InfeasibleItem."""
    if capacity < 1 or (max_items is not None and max_items < 1):
        raise InvalidItem(f"a bin of capacity {capacity} for at most {max_items} items can't hold anything")
    for i, length in enumerate(lengths):
        if length < 1:
            raise InvalidItem(f"item {i} has length {length}, and must be positive")
        if length > capacity:
            raise InfeasibleItem(i, length, capacity)
    return len(lengths) if max_items is None else max_items
