"""What a plan is made from, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vasuki.engine.sequence import Request, SamplingParams
from vasuki.runs import workload
from vasuki.runs.observers.progress import HowFar
from vasuki.runs.workload import first_rows


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


def taken(requests: Iterator[Request], num_requests: int, keeps: bool = True) -> list[Request]:
    far = HowFar()
    found = list(first_rows(requests, num_requests, far, 1000, keeps))
    assert far.share >= 1
    assert far.words == f"{len({request.row for request in found})} rows"
    return found


def test_planning_takes_rows_up_to_a_number_and_to_bytes() -> None:
    assert len(taken(rows(), 7)) == 7
    assert len(taken(rows(), 500)) == 10
    assert len(taken(rows(samples=4), 6)) == 8, "a row's samples stay together"


def test_what_is_copied_to_the_output_counts_where_it_is_kept() -> None:
    assert len(taken(rows(carried_bytes=4_000), 500)) == 5
    assert len(taken(rows(carried_bytes=4_000, refused=1000), 500)) == 10
    assert len(taken(rows(carried_bytes=4_000), 500, keeps=False)) == 10


def test_a_plan_looks_for_a_row_that_can_be_run() -> None:
    planned = taken(rows(refused=50), 500, keeps=False)
    assert len(planned) == 51
    assert not planned[-1].error
