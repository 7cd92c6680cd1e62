from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import simulate_run, write_run

from vasuki.arrivals import Percentiles
from vasuki.base.units import (
    bytes_text,
    count_text,
    listing,
    longer_text,
    money_text,
    only_longer_text,
    percent_text,
    plural,
    time_text,
)
from vasuki.io.location import Location
from vasuki.io.output.manifest import Manifest, RowCounts, RunTaken, Timings, TokenCounts, read_manifest
from vasuki.machines.price import Cost
from vasuki.report import summary_lines


def test_a_run_in_eight_lines_that_fit_any_terminal(tmp_path: Path) -> None:
    simulate_run(tmp_path, "a10", num_rows=30, parks=True, simulated=False, noise=0.05)
    lines = summary_lines(read_manifest(Location.parse(str(tmp_path))))
    assert [line.split()[0] for line in lines] == ["rows", "tokens", "time", "bound", "card", "batch", "KV", "cost"]
    assert "30 of 30 succeeded, 0 failed" in lines[0]
    assert "predicted" in lines[2]
    assert max(map(len, lines)) <= 80


def test_figures_of_a_run(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"lower_bound_s": 2200, "schedule_bound_s": 2805}
    write_run(tmp_path, makespan_s=3300, predicted_s=3000, **bounds, failed=2, left=5, price_per_hour=1.2)
    rows, tokens, time, bound, card, cost = summary_lines(read_manifest(Location.parse(str(tmp_path))))
    assert rows == "rows   998 of 1,005 succeeded, 2 failed, 5 left"
    assert tokens == "tokens 1.50 million prompt, 0.50 million output"
    assert time == "time   55 min 00 s, predicted 50 min 00 s (+10 %)"
    assert bound == "bound  at least 46 min 45 s: at most 15 % could be saved"
    assert card == "card   at least 36 min 40 s at datasheet rates"
    assert cost == "cost   1.10 USD: 0.55 a million tokens, 1.10 a thousand rows"


def test_what_knowing_the_lengths_would_have_saved_is_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, makespan_s=3000, schedule_bound_s=2700, uncertainty=0.05)
    lines = summary_lines(read_manifest(Location.parse(str(tmp_path))))
    assert "bound  at least 45 min 00 s: at most 10 % could be saved" in lines
    assert "known  knowing all lengths beforehand would have saved about 5 %" in lines
    write_run(tmp_path, makespan_s=3000, schedule_bound_s=2700, uncertainty=0.0)
    assert not any(line.startswith("known") for line in summary_lines(read_manifest(Location.parse(str(tmp_path)))))


def test_prediction_and_bound_are_compared_with_what_comes_after_loading(tmp_path: Path) -> None:
    timings = Timings(load_s=12.3, plan_s=0.7, generate_s=3287.0, makespan_s=3300.0)
    write_run(tmp_path, predicted_s=3000, lower_bound_s=2200, schedule_bound_s=2629.6, timings=timings)
    _, _, time, bound, card, *_ = summary_lines(read_manifest(Location.parse(str(tmp_path))))
    assert time == "time   55 min 00 s: loading 12.3 s, then 54 min 47 s, predicted 50 min 00 s (+10 %)"
    assert bound == "bound  at least 43 min 50 s after loading: at most 20 % could be saved"
    assert card == "card   at least 36 min 40 s after loading at datasheet rates"


@pytest.mark.parametrize(
    ("share", "lines"), [(0.41, ["host   gave 41 % of the processors' time to others"]), (0.02, [])]
)
def test_what_the_host_took_is_said_if_it_matters(tmp_path: Path, share: float, lines: list[str]) -> None:
    write_run(tmp_path, device={"type": "cpu", "stolen_share": share})
    found = summary_lines(read_manifest(Location.parse(str(tmp_path))))
    assert [line for line in found if line.startswith("host")] == lines


def test_a_run_of_a_moment_is_not_held_against_its_prediction(tmp_path: Path) -> None:
    write_run(tmp_path, makespan_s=0.3, predicted_s=0.04)
    (time,) = [line for line in summary_lines(read_manifest(Location.parse(str(tmp_path)))) if "time" in line]
    assert time == "time   0.3 s, predicted 0.04 s"


def test_nothing_is_claimed_of_what_is_not_known(tmp_path: Path) -> None:
    """Of rows that arrived, or of a folder that an earlier version wrote."""
    write_run(tmp_path, makespan_s=3000, predicted_s=3000)
    names = [line.split()[0] for line in summary_lines(read_manifest(Location.parse(str(tmp_path))))]
    assert not {"bound", "known", "card"} & set(names)


def test_time_and_cost_are_those_of_all_runs() -> None:
    runs = (RunTaken(makespan_s=30, amount=0.3), RunTaken(makespan_s=10, amount=0.1))
    manifest = Manifest(
        job={},
        config_hash="",
        input_fingerprint="",
        rows=RowCounts(200, 200, 0),
        tokens=TokenCounts(500_000, 500_000),
        timings=Timings(makespan_s=10),
        cost=Cost(amount=0.1, per_million_tokens=0.1),
        runs=runs,
    )
    lines = summary_lines(manifest)
    assert "time   10.0 s, 40.0 s in 2 runs" in lines
    assert "cost   0.40 USD: 0.40 a million tokens, 2.00 a thousand rows" in lines
    killed = RunTaken(makespan_s=20, amount=0.2, killed=True)
    lines = summary_lines(replace(manifest, runs=(killed, *runs)))
    assert "time   10.0 s, at least 1 min 00 s in 3 runs, 1 of them killed" in lines
    assert "cost   at least 0.60 USD: 0.60 a million tokens, 3.00 a thousand rows" in lines
    unpriced = replace(manifest, runs=(RunTaken(makespan_s=30), runs[1]))
    assert not any(line.startswith("cost") for line in summary_lines(unpriced))


def test_tokens_that_were_shared_or_computed_again() -> None:
    manifest = Manifest(
        job={}, config_hash="", input_fingerprint="", tokens=TokenCounts(9000, 700, recomputed=40, shared=800)
    )
    (line,) = (line for line in summary_lines(manifest) if line.startswith("tokens"))
    expected = "tokens 9,000 prompt (800 of them shared), 700 output; 40 computed again"
    assert line == expected


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.00"), (12.3, "12.30"), (1234.5, "1,234.50"), (0.75, "0.75"), (0.0512, "0.0512"), (0.00001234, "0.0000123")],
)
def test_money(amount: float, text: str) -> None:
    assert money_text(amount) == text
    assert money_text(amount, "EUR") == f"{text} EUR"


def test_other_units() -> None:
    assert [time_text(s) for s in (None, 0.0523, 3.21, 245, 7620)] == [
        "-",
        "0.052 s",
        "3.2 s",
        "4 min 05 s",
        "2 h 07 min",
    ]
    assert [bytes_text(b) for b in (0, 1536, 5 * 2**30, 2**41)] == ["0 B", "1.5 KiB", "5.0 GiB", "2.0 TiB"]
    assert [count_text(n) for n in (950, 12_345, 1_234_567, 2.5e9)] == ["950", "12,345", "1.23 million", "2.50 billion"]
    assert [percent_text(p, signed=True) for p in (0.041, -0.02, 0.004, -0.0001)] == [
        "+4 %",
        "-2 %",
        "+0.4 %",
        "0 %",
    ]
    changes = [longer_text(change) for change in (0.041, -0.02, 0.004, -0.0001, 0.0004, 0.0)]
    assert changes == ["4 % longer", "2 % shorter", "0.4 % longer", "unchanged", "unchanged", "unchanged"]
    unpaid = [only_longer_text(change) for change in (0.041, -0.004, -0.0001)]
    assert unpaid == ["4 % longer", "only 0.4 % shorter", "unchanged"]
    assert [listing(list(words)) for words in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert [plural(n, "row") for n in (1, 2000)] == ["1 row", "2,000 rows"]


def test_a_run_whose_rows_arrive_says_how_long_they_waited(tmp_path: Path) -> None:
    waited: dict[str, Any] = {"ttft": Percentiles(0.1234, 0.1, 0.5, 0.9), "latency": Percentiles(1.5, 1.0, 2.0, 3.0)}
    write_run(tmp_path, makespan_s=100, **waited, urgent_latency=Percentiles(0.5, 0.4, 0.6, 0.7), missed_deadlines=2)
    manifest = read_manifest(Location.parse(str(tmp_path)))
    job = {**manifest.job, "input": {"deadline": "within"}}
    for missed, late in ((2, "late   2 rows ended after the deadline"), (0, "late   no row ended after its deadline")):
        assert summary_lines(replace(manifest, job=job, missed_deadlines=missed))[2:] == [
            "time   1 min 40 s",
            "first  token after 0.123 s on average; 50/95/99 % within 0.1/0.5/0.9 s",
            "answer after 1.50 s on average; 50/95/99 % within 1/2/3 s",
            "urgent rows after 0.500 s on average; 50/95/99 % within 0.4/0.6/0.7 s",
            late,
        ]
    assert not [line for line in summary_lines(manifest) if line.startswith("late")]
