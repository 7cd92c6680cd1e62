"""What a plan is made from, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vasuki.base.errors import InputError
from vasuki.engine.sequence import Request, SamplingParams
from vasuki.runs import workload
from vasuki.runs.observers.progress import HowFar
from vasuki.runs.workload import first_rows, workload_of


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


# --- recorded lengths that a model has no context for -----------------------------------------------------------------


def recorded(folder: Path, *rows: str) -> str:
    path = folder / "lengths.csv"
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens,arrived_at", *rows]), encoding="utf-8")
    return str(path)


def test_outputs_end_where_the_context_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a run cuts `max_tokens`; the limit is the longest output, where nothing else is known."""
    path = recorded(tmp_path, "100,500,0", "8000,500,1", "7000,10,2")
    lengths = workload_of(path, ("model.shape=llama-3-8b",)).lengths
    assert lengths.output_tokens.tolist() == [500, 192, 10]
    assert lengths.limits.tolist() == [500, 192, 500]
    assert caplog.messages == [
        "1 row is shorter than recorded: after 8,000 prompt tokens the first has 192 left of the model's context, 8,192"
    ]


def test_prompts_that_fill_the_context_never_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recorded(tmp_path, "100,5,0", "8192,5,1", "9000,5,2", "8191,1,3")
    lengths = workload_of(path, ("model.shape=llama-3-8b",)).lengths
    assert lengths.prompt_tokens.tolist() == [100, 8191]
    assert lengths.arrived_at_s is not None
    assert lengths.arrived_at_s.tolist() == [0, 3]
    assert caplog.messages == ["2 rows can never run: row 1 has a prompt of 8,192 tokens, the model a context of 8,192"]
    with pytest.raises(InputError, match="has no row that can be run: row 0 has a prompt of 9,000 tokens"):
        workload_of(recorded(tmp_path, "9000,5,0"), ("model.shape=llama-3-8b",))


def test_what_fits_is_taken_as_it_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = workload_of(recorded(tmp_path, "100,50,0", "7900,20,1"), ("model.shape=llama-3-8b",)).lengths
    assert lengths.max_tokens is None
    assert not caplog.messages
