"""N moves as the laws say, stays within its bounds, and rests where the load does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.arrivals import Controller, Gathering

LAWS = ("aimd", "load")


def controller_of(**config: Any) -> Controller:
    return Controller(Gathering(**{"target_s": 1.0, **config}))


def epoch(controller: Controller, ttft_s: float | None, busy: float = 1.0, arrivals: int = 0) -> int:
    """N after an epoch of a second in which rows took so long and the device was busy for so much of it."""
    end_s = controller.epoch_end_s
    for _ in range(arrivals):
        controller.arrived(end_s - 0.5)
    if ttft_s is not None:
        controller.first_token(end_s - 0.5, ttft_s)
    controller.idle(end_s - 1, end_s - busy)
    controller.pass_time(end_s)
    return controller.rows


def test_equation_1() -> None:
    controller = controller_of(controller="aimd", smoothing=1.0, min_rows=2, max_rows=5)
    assert [epoch(controller, 0.8, busy=0.5) for _ in range(4)] == [3, 4, 5, 5], "more by one, up to N_max"
    assert epoch(controller, 0.9, busy=0.5) == 5, "within the band"
    assert [epoch(controller, 1.0) for _ in range(3)] == [3, 2, 2], "half of it, rounded up, down to N_min"
    assert epoch(controller, 0.5, busy=0.9) == 2, "none more for a busy device"


def test_load_turns_equation_1_around() -> None:
    controller = controller_of(controller="load", smoothing=1.0, max_rows=5)
    assert [epoch(controller, 3.0) for _ in range(4)] == [1, 2, 3, 4], "after two epochs in a row"
    assert epoch(controller, 0.9) == 4, "within the band"
    assert [epoch(controller, 0.5, busy=0.3) for _ in range(3)] == [4, 2, 1]
    assert epoch(controller, 0.5) == 1, "a device that is busy in time needs no more"


def test_one_slow_epoch_does_not_move_load() -> None:
    controller = controller_of(controller="load", smoothing=1.0)
    assert [epoch(controller, ttft_s) for ttft_s in (3.0, 0.9, 3.0, 0.9, 3.0)] == [1] * 5


@pytest.mark.parametrize("law", LAWS)
def test_an_epoch_without_first_tokens_moves_nothing(law: str) -> None:
    controller = controller_of(controller=law, smoothing=1.0)
    epoch(controller, 0.5, busy=0.1)
    before = controller.rows
    controller.pass_time(3600)
    assert controller.rows == before


def test_means_follow_the_newest_epoch_by_its_weight() -> None:
    controller = controller_of(smoothing=0.3)
    epoch(controller, 1.0, arrivals=10)
    epoch(controller, 2.0, arrivals=20)
    assert controller.ttft_s == pytest.approx(1.3)
    assert controller.rows_per_s == pytest.approx(0.7 * 3 + 0.3 * 20)


def test_the_band_is_as_wide_as_the_job_says() -> None:
    """A row in 0.7 of the target is fast by the usual band, and neither fast nor late by a wider one; likewise 1.2."""
    usual = controller_of(controller="aimd", smoothing=1.0)
    wide = controller_of(controller="aimd", smoothing=1.0, low=0.6, high=1.5)
    assert [epoch(usual, ttft_s, busy=0.5) for ttft_s in (0.7, 0.7, 1.2)] == [2, 3, 2]
    assert [epoch(wide, ttft_s, busy=0.5) for ttft_s in (0.7, 1.2, 0.5, 1.6)] == [1, 1, 2, 1]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_the_95th_percentile_is_numpys(ttfts_s: list[float]) -> None:
    controller = controller_of(smoothing=1.0)
    for ttft_s in ttfts_s:
        controller.first_token(0.5, ttft_s)
    controller.pass_time(1.0)
    assert controller.ttft_s == pytest.approx(np.percentile(ttfts_s, 95), abs=1e-12)


@given(
    law=st.sampled_from(LAWS),
    bounds=st.tuples(st.integers(1, 40), st.integers(0, 40)),
    steps=st.lists(st.tuples(st.floats(0, 10) | st.none(), st.floats(0, 1)), max_size=60),
    increase=st.integers(1, 9),
    decrease=st.floats(0.01, 0.99),
)
def test_n_stays_within_its_bounds(
    law: str, bounds: tuple[int, int], steps: list[tuple[float | None, float]], increase: int, decrease: float
) -> None:
    least, most = bounds[0], bounds[0] + bounds[1]
    controller = controller_of(controller=law, min_rows=least, max_rows=most, increase=increase, decrease=decrease)
    assert controller.rows == least
    for ttft_s, busy in steps:
        assert least <= epoch(controller, ttft_s, busy) <= most


@given(law=st.sampled_from(LAWS), ttft_s=st.floats(0.01, 5), busy=st.floats(0, 1))
def test_what_stays_the_same_leaves_n_at_rest(law: str, ttft_s: float, busy: float) -> None:
    controller = controller_of(controller=law)
    for _ in range(60):
        rows = epoch(controller, ttft_s, busy)
    assert [epoch(controller, ttft_s, busy) for _ in range(20)] == [rows] * 20
