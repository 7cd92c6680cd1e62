"""What a plan is made from, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vasuki.commands import workload
from vasuki.commands.workload import first_rows
from vasuki.engine.sequence import Request, SamplingParams


@pytest.fixture(autouse=True)
def planned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "PLANNED_BYTES", 40_000)


def rows(carried_bytes: int = 0, refused: int = 0, samples: int = 1) -> Iterator[Request]:
    """Prompts of a thousand tokens, of which the first are refused."""
    for row in range(1000):
        for index in range(samples):
            error = "no room" if row < refused else ""
            yield Request(
                row, row, 1000, 5, sampling=SamplingParams(n=samples), sample_index=index, error=error,
                carried_bytes=carried_bytes,
            )  # fmt: skip


def test_planning_takes_rows_up_to_a_number_and_to_bytes() -> None:
    assert len(list(first_rows(rows(), 7))) == 7
    assert len(list(first_rows(rows(), 500))) == 10
    assert len(list(first_rows(rows(samples=4), 6))) == 8, "a row's samples stay together"


def test_what_is_copied_to_the_output_counts_where_it_is_kept() -> None:
    assert len(list(first_rows(rows(carried_bytes=4_000), 500))) == 5
    assert len(list(first_rows(rows(carried_bytes=4_000, refused=1000), 500))) == 10
    assert len(list(first_rows(rows(carried_bytes=4_000), 500, keeps=False))) == 10


def test_a_plan_looks_for_a_row_that_can_be_run() -> None:
    planned = list(first_rows(rows(refused=50), 500, keeps=False))
    assert len(planned) == 51
    assert not planned[-1].error
