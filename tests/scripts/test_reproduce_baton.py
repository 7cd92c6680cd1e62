"""Baton's systems: what the cache with holes takes, and what the figure shows."""

from __future__ import annotations

import draw_baton
import numpy as np
import pytest
from reproduce_baton import BATON, HOLES, METHODS, SHORT, STATIC, Holes, over_time, short

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.sequence import Request, Sequence
from vasuki.planner.lengths import Lengths

CARD = "rtx4090"


def widths(holes: Holes, *batches: Batch) -> list[int]:
    return [shaped.columns for batch in batches for shaped in holes(batch)]


def test_who_joins_widens_the_cache_by_its_prompt_and_releases_what_nobody_needs() -> None:
    a, b, c = (Sequence(Request(row, row, 4, 9)) for row in range(3))
    holes = Holes()
    together = Batch([], [], [ScheduledChunk(a, 0, 5, True), ScheduledChunk(b, 0, 3, True)], [])
    assert widths(holes, together, Batch([a, b], [5, 3], [], [])) == [5, 6]
    # The tokens of b begin in the third of six columns, so that two are released.
    joined = Batch([b], [4], [ScheduledChunk(c, 0, 4, True)], [])
    assert widths(holes, joined, Batch([b, c], [5, 4], [], [])) == [6 - 2 + 4, 9]
    # The tokens of c begin in the fifth of nine.
    assert widths(holes, Batch([c], [5], [ScheduledChunk(a, 0, 2, True)], [])) == [9 - 4 + 2]
    assert holes.most_cells == 18


def test_holes_cost_columns_and_no_rows() -> None:
    lengths = short(8)
    seen = {method.name: over_time(method, lengths, 3, CARD) for method in (STATIC, BATON, HOLES)}
    assert {each.answered[-1] for each in seen.values()} == {8}
    assert {each.tokens[-1] for each in seen.values()} == {int(lengths.output_tokens.sum())}
    assert max(seen[HOLES.name].cells) > max(seen[BATON.name].cells)
    assert seen[HOLES.name].seconds[-1] > seen[BATON.name].seconds[-1]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_rows_that_come_one_by_one_take_the_cells_of_their_tokens(method) -> None:  # type: ignore[no-untyped-def]
    seen = over_time(method, Lengths(np.array([5, 3]), np.array([3, 2])), 1, CARD)
    assert seen.cells == [5, 6, 7, 3, 4]


def test_the_figure_has_all_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_baton, "BATCHES", (8,))
    answered, tokens, kv = draw_baton.draw().figure.axes
    assert [np.max(line.get_ydata()) for line in answered.lines] == [SHORT] * 3
    assert all(np.diff(line.get_ydata()).min() >= 0 for line in tokens.lines)
    assert len(kv.lines) == 3
