"""Batches hold every row once, within both limits, in order of arrival, and the exact packer needs no more of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vasuki.arrivals import Gathering, pack_requests
from vasuki.engine.sequence import Request


def packed(lengths: list[int], **config: Any) -> list[list[int]]:
    requests = [Request(row, row, length, 8) for row, length in enumerate(lengths)]
    batches = pack_requests(requests, Gathering(**config))
    return [[request.row for request in batch] for batch in batches]


@given(st.lists(st.integers(1, 130), max_size=30), st.integers(1, 6), st.sampled_from(["greedy", "exact"]))
def test_limits_hold_and_no_row_is_lost(lengths: list[int], batch_rows: int, packing: str) -> None:
    batches = packed(lengths, packing=packing, batch_tokens=100, batch_rows=batch_rows)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert [batch[0] for batch in batches] == sorted(batch[0] for batch in batches), "who came first starts first"
    for batch in batches:
        assert batch == sorted(batch)
        assert len(batch) <= batch_rows
        assert sum(lengths[row] for row in batch) <= 100 or len(batch) == 1
    assert len(packed(lengths, packing="exact", batch_tokens=100, batch_rows=batch_rows)) <= len(batches)


def test_the_example_of_figure_2() -> None:
    """Its greedy packer takes three batches of ten tokens, and would if it were next fit; first fit finds the two."""
    assert packed([7, 6, 4, 3], packing="exact", batch_tokens=10) == [[0, 3], [1, 2]]
    assert packed([7, 6, 4, 3], packing="greedy", batch_tokens=10) == [[0, 3], [1, 2]]


def test_exact_saves_a_batch() -> None:
    assert len(packed([3, 3, 7, 7], packing="greedy", batch_tokens=10)) == 3
    assert packed([3, 3, 7, 7], packing="exact", batch_tokens=10) == [[0, 2], [1, 3]]
