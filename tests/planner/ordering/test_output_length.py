"""What is expected of outputs, from rows that ended and rows that still run."""

from __future__ import annotations

import numpy as np
import pytest

from vasuki.planner.ordering.output_length import ENOUGH_ROWS, OutputLengths


def estimate(lengths: OutputLengths, prompt: int, limit: int = 1000) -> int:
    return int(lengths.estimates(np.array([prompt]), np.array([limit]))[0])


def test_until_enough_rows_ended_max_tokens_is_expected() -> None:
    lengths = OutputLengths()
    for _ in range(ENOUGH_ROWS - 1):
        lengths.observe(100, 10)
    assert estimate(lengths, 100) == 1000
    lengths.observe(100, 10)
    assert estimate(lengths, 100) < 100


def test_the_mean_is_learned_for_each_prompt_length() -> None:
    lengths = OutputLengths()
    for index in range(400):
        lengths.observe(100, 40 + index % 21)
        lengths.observe(2000, 200 + index % 21)
    assert estimate(lengths, 100) == pytest.approx(50, rel=0.1)
    assert estimate(lengths, 2000) == pytest.approx(210, rel=0.1)
    assert estimate(lengths, 1900) == pytest.approx(210, rel=0.1), "a range without rows asks its neighbours"
    assert estimate(lengths, 2000, limit=60) == 60


def test_quantiles_bound_their_share_of_rows() -> None:
    random = np.random.default_rng(1)
    seen = random.geometric(0.01, 2000)
    lengths = OutputLengths(0.9)
    for output in seen.tolist():
        lengths.observe(100, output)
    assert 0.88 < float((seen <= estimate(lengths, 100, 10_000)).mean()) < 0.94


def test_rows_that_still_run_correct_the_bias_of_those_that_ended() -> None:
    """Of outputs that end at a constant rate, those that ended early say a twentieth of the truth."""
    random = np.random.default_rng(2)
    outputs = random.geometric(1 / 500, 400)
    now = 30
    ended, running = outputs[outputs <= now], outputs[outputs > now]
    naive, lengths = OutputLengths(), OutputLengths()
    for output in ended.tolist():
        naive.observe(100, output)
        lengths.observe(100, output)
    lengths.watch((100, now) for _ in running)
    assert estimate(naive, 100) < 100
    assert estimate(lengths, 100) == pytest.approx(500, rel=0.4)
    lengths.watch([])
    assert estimate(lengths, 100) == estimate(naive, 100), "only who runs now counts"


def test_long_outputs_that_all_still_run_are_not_taken_for_the_short_ones_of_distant_prompts() -> None:
    lengths = OutputLengths()
    for _ in range(ENOUGH_ROWS):
        lengths.observe(2000, 50)
    assert estimate(lengths, 100) < 150
    lengths.watch([(100, 400)] * ENOUGH_ROWS)
    assert estimate(lengths, 100) == 1000
    assert estimate(lengths, 2000) < 150
