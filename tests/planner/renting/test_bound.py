"""No fleet beats the bound, and the prices of rows add up to no more than their card takes for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import fleet_gap, lengths_of

from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner.any_schedule import AnySchedule
from vasuki.planner.renting.bound import row_prices


@pytest.mark.parametrize("card", ["a10", "a40", "l4", "h100"])
@pytest.mark.parametrize("offload", [False, True])
def test_prices_of_rows_add_up_to_the_bound(card: str, offload: bool) -> None:
    lengths = lengths_of(300, seed=1)
    schedules = AnySchedule(named_shape("llama-3-8b"), find_profile(card), (Layout(),), 0.9, offload)
    prices = row_prices(lengths, schedules)

    def bound_s(rows: np.ndarray) -> float:
        return schedules.least_of_lengths_s(lengths.take(rows))

    everything = np.arange(len(lengths))
    assert 0.85 * bound_s(everything) <= prices.sum() <= bound_s(everything) * (1 + 1e-6)
    random = np.random.default_rng(2)
    for size in (1, 10, 100):
        rows = np.sort(random.choice(everything, size, replace=False))
        assert prices[rows].sum() <= bound_s(rows) * (1 + 1e-6)
    short, long = (np.argsort(lengths.output_tokens)[part] for part in (slice(0, 50), slice(-50, None)))
    assert prices[short].sum() <= bound_s(short)
    assert prices[long].sum() <= bound_s(long)


@pytest.mark.parametrize(
    ("kinds", "counts", "most"),
    [(["a40"], [3], 0.08), (["a40", "rtx4090"], [2, 1], 0.15), (["l4", "a100"], [1, 1], 0.35)],
)
def test_fleets_end_behind_the_bound_and_not_far(kinds: list[str], counts: list[int], most: float) -> None:
    gap, _ = fleet_gap(kinds, counts, rows_each=300, seed=3)
    assert 0 <= gap <= most
