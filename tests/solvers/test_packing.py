from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from brute_force import fewest_bins
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers import (
    InfeasibleItem,
    InvalidItem,
    Packing,
    best_fit,
    best_fit_decreasing,
    bins_bound,
    first_fit,
    first_fit_decreasing,
    pack_exact,
)

PACKERS = [first_fit, best_fit, first_fit_decreasing, best_fit_decreasing, pack_exact]
lengths_of_20 = st.lists(st.integers(1, 20), max_size=9)


def check(packing: Packing, lengths: list[int], max_items: int | None) -> None:
    assert sorted(i for content in packing.bins for i in content) == list(range(len(lengths)))
    for content in packing.bins:
        assert 0 < sum(lengths[i] for i in content) <= packing.capacity
        assert max_items is None or len(content) <= max_items
    assert packing.waste == len(packing.bins) * packing.capacity - sum(lengths)
    assert packing.bound <= len(packing.bins)


@given(lengths_of_20, st.none() | st.integers(1, 4))
def test_every_packer_packs_and_the_exact_one_needs_the_fewest(lengths: list[int], max_items: int | None) -> None:
    optimum = fewest_bins(lengths, 20, max_items)
    assert bins_bound(lengths, 20, max_items=max_items) <= optimum
    for pack in PACKERS:
        packing = pack(lengths, 20, max_items=max_items)
        check(packing, lengths, max_items)
        assert len(packing.bins) >= optimum
    exact = pack_exact(lengths, 20, max_items=max_items)
    assert len(exact.bins) == optimum
    assert exact.optimal


def test_the_example_of_dynamic_prefill_packing() -> None:
    """Section 3.3: lengths 7, 6, 4, 3 into bins of 10; online packing wastes 10 tokens, the optimum none."""
    packing = pack_exact([7, 6, 4, 3], 10)
    assert {frozenset(content) for content in packing.bins} == {frozenset({0, 3}), frozenset({1, 2})}
    assert packing.waste == 0
    assert packing.optimal
    # Its greedy keeps only the last bin open; any first fit finds the two bins as well.
    assert len(first_fit([7, 6, 4, 3], 10).bins) == 2


def test_items_keep_their_places_in_the_simple_packers() -> None:
    assert first_fit([4, 7, 5, 3], 10).bins == ((0, 2), (1, 3))
    assert best_fit([5, 7, 3], 10).bins == ((0,), (1, 2))  # first fit would put the 3 with the 5
    assert first_fit([5, 7, 3], 10).bins == ((0, 2), (1,))
    assert first_fit_decreasing([3, 5, 7], 10).bins == ((2, 0), (1,))


def test_the_exact_packer_beats_both_heuristics() -> None:
    lengths = [25, 18, 14, 13, 12, 6, 5, 5, 2]  # 100 in all, and 25 + 18 + 6 leaves a hole that nothing fills
    assert len(first_fit_decreasing(lengths, 50).bins) == 3
    assert len(best_fit_decreasing(lengths, 50).bins) == 3
    packing = pack_exact(lengths, 50)
    check(packing, lengths, None)
    assert len(packing.bins) == 2
    assert packing.waste == 0


def test_a_node_limit_leaves_a_packing_that_does_not_claim_to_be_proved() -> None:
    lengths = [25, 18, 14, 13, 12, 6, 5, 5, 2]
    packing = pack_exact(lengths, 50, max_nodes=1)
    check(packing, lengths, None)
    assert not packing.optimal


def test_first_fit_is_that_of_a_plain_scan() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(300)]
    rooms: list[int] = []
    bins: list[list[int]] = []
    for i, length in enumerate(lengths):
        b = next((b for b, room in enumerate(rooms) if room >= length), None)
        if b is None:
            b = len(bins)
            bins.append([])
            rooms.append(120)
        bins[b].append(i)
        rooms[b] -= length
    assert first_fit(lengths, 120).bins == tuple(map(tuple, bins))


def test_never_more_bins_than_the_binpacking_package() -> None:
    binpacking = pytest.importorskip("binpacking")
    rng = random.Random(1)
    for _ in range(20):
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 40))]
        theirs = binpacking.to_constant_volume(lengths, 130)
        assert len(pack_exact(lengths, 130, max_nodes=20_000).bins) <= len(theirs)


@pytest.mark.parametrize("pack", PACKERS)
def test_bad_lengths_are_refused(pack: Callable[..., Packing]) -> None:
    with pytest.raises(InfeasibleItem, match="item 1 needs a capacity of 11"):
        pack([3, 11], 10)
    with pytest.raises(InvalidItem, match="item 0 has length 0"):
        pack([0], 10)
    with pytest.raises(InvalidItem, match="can't hold anything"):
        pack([1], 10, max_items=0)
    assert pack([], 10).bins == ()
