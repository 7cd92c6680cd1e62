from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from run_folders import write_run

from vasuki.arrivals import Percentiles
from vasuki.base.errors import InputError, JobFileError
from vasuki.commands.cli import main
from vasuki.io.output.manifest import Predicted
from vasuki.report import compare, history, history_table
from vasuki.report.history import MIN_PAST, Series
from vasuki.report.runs import load_runs
from vasuki.report.words import caveats

DAY_S = 86_400


def write_day(
    folder: Path,
    day: int,
    *,
    seconds_per_row: float = 0.6,
    rows: int = 1000,
    tokens_per_row: int = 2000,
    gpu: str = "a10",
    device: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    run = write_run(
        folder / f"2026-10-{day + 1:02d}",
        gpu=gpu,
        device=device,
        makespan_s=seconds_per_row * rows,
        predicted_s=0.58 * rows * tokens_per_row / 2000,
        rows=rows,
        prompt_tokens=rows * tokens_per_row * 3 // 4,
        output_tokens=rows * tokens_per_row // 4,
        **changes,
    )
    ended = 1_790_000_000 + day * DAY_S
    os.utime(run / "manifest.json", (ended, ended))


def only(folder: Path) -> Series:
    (series,) = history(str(folder)).series
    return series


def slow_days(folder: Path) -> list[str]:
    return [entry.result.label for entry in only(folder).entries if entry.is_slow]


def test_scatter_is_not_flagged_and_a_slow_day_is(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for day in range(20):
        slowness = 1.4 if day == 12 else 1.0
        write_day(tmp_path, day, seconds_per_row=0.6 * slowness * generator.normal(1, 0.01), rows=900 + 10 * day)
    assert slow_days(tmp_path) == ["2026-10-13"]
    (flagged,) = [entry for entry in only(tmp_path).entries if entry.flags]
    assert flagged.is_late
    assert any("slower a token than usual" in flag for flag in flagged.flags)


def test_longer_rows_are_not_slower(tmp_path: Path) -> None:
    for day in range(8):
        longer = 1.5 if day == 6 else 1.0
        write_day(tmp_path, day, seconds_per_row=0.6 * longer, tokens_per_row=int(2000 * longer))
    assert slow_days(tmp_path) == []


def test_a_slow_past_does_not_hide_what_comes_after(tmp_path: Path) -> None:
    for day in range(10):
        write_day(tmp_path, day, seconds_per_row=1.2 if day in (4, 9) else 0.6)
    assert slow_days(tmp_path) == ["2026-10-05", "2026-10-10"]


def test_nothing_is_slow_before_there_is_a_past(tmp_path: Path) -> None:
    for day in range(MIN_PAST):
        write_day(tmp_path, day, seconds_per_row=0.6 * (1 + day))
    assert slow_days(tmp_path) == []
    assert only(tmp_path).drift is None


def test_a_run_that_waits_for_rows_is_neither_slow_nor_anybodys_past(tmp_path: Path) -> None:
    """It lasts as long as rows go on arriving."""
    for day in range(12):
        waits = day % 2 == 1
        changes: dict[str, Any] = {"latency": Percentiles(1, 1, 2, 3), "predicted": Predicted()} if waits else {}
        write_day(tmp_path, day, seconds_per_row=20.0 + day if waits else 0.6, **changes)
    entries = only(tmp_path).entries
    assert not [flag for entry in entries for flag in entry.flags]
    assert only(tmp_path).drift == 0
    assert entries[-2].per_token is not None
    assert entries[-2].per_token.median == entries[0].s_per_million_tokens
    (note,) = {
        note for note in caveats(compare(load_runs([str(tmp_path / "2026-10-02")])).workloads[0]) if "arrived" in note
    }
    assert "its makespan says when they came" in note


def test_late_is_against_the_prediction_alone(tmp_path: Path) -> None:
    write_day(tmp_path, 0, seconds_per_row=0.58 * 1.2)
    (entry,) = only(tmp_path).entries
    assert (entry.is_slow, entry.is_late) == (False, True)
    assert entry.flags == ("20 % longer than predicted",)


@pytest.mark.parametrize(("seconds_per_row", "has_flags"), [(0.58 * 1.2, True), (0.58, False)])
def test_a_flag_names_what_the_host_took(tmp_path: Path, seconds_per_row: float, has_flags: bool) -> None:
    write_day(tmp_path, 0, seconds_per_row=seconds_per_row, device={"type": "cpu", "stolen_share": 0.312})
    (entry,) = only(tmp_path).entries
    excuse = "the host gave 31 % of the processors' time to others"
    assert entry.flags == (("20 % longer than predicted", excuse) if has_flags else ())


def test_drift_is_seen_through_outliers(tmp_path: Path) -> None:
    for day in range(11):
        write_day(tmp_path, day, seconds_per_row=0.5 + 0.01 * day + (2.0 if day == 3 else 0.0))
    assert only(tmp_path).drift == pytest.approx(0.1 / 0.55, rel=0.1)
    assert "slower a token over the last 11 runs" in history_table(history(str(tmp_path)))


def test_runs_are_sorted_by_time_and_cards_kept_apart(tmp_path: Path) -> None:
    write_day(tmp_path / "b", 0)
    write_day(tmp_path / "a", 1)
    write_day(tmp_path / "c", 2, gpu="a40")
    found = history(str(tmp_path))
    assert [[entry.result.label for entry in series.entries] for series in found.series] == [
        ["b/2026-10-01", "a/2026-10-02"],
        ["c/2026-10-03"],
    ]
    assert [series.name for series in found.series] == ["translate on A10", "translate on A40"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "empty", rows=0)
    with pytest.raises(InputError, match=r"has no run that can be read; the first: .*no finished rows"):
        history(str(tmp_path))
    write_day(tmp_path, 0)
    found = history(str(tmp_path))
    assert len(found.skipped) == 1
    assert "Left out: " in history_table(found)


def test_predictions_that_are_always_short_are_doubted(tmp_path: Path) -> None:
    for day in range(6):
        write_day(tmp_path, day, seconds_per_row=0.58 * 1.25)
    text = " ".join(history_table(history(str(tmp_path))).split())
    assert "6 runs took over 15 % longer than predicted, the latest 2026-10-02 (25 %)" in text
    assert "Half of all runs took 25 % longer or more, so the predictions are too short here" in text
    for day in range(6):
        write_day(tmp_path, day, seconds_per_row=0.58 * (1.25 if day == 5 else 1.0))
    text = " ".join(history_table(history(str(tmp_path))).split())
    assert "1 run took over 15 % longer than predicted: 2026-10-06 (25 %)." in text
    assert "too short" not in text


def test_prices_are_given_as_for_a_comparison(tmp_path: Path) -> None:
    write_day(tmp_path, 0)
    (series,) = history(str(tmp_path), {"a10": 6.0}).series
    assert series.entries[0].result.amount == pytest.approx(1.0)
    with pytest.raises(JobFileError, match="no run goes by that name"):
        history(str(tmp_path), {"a11": 6.0})


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "translating-everything" / "in-a-long-folder-name"
    for day in range(9):
        write_day(folder, day, seconds_per_row=0.6 if day < 5 else 60.0, rows=1_000_000)
    text = history_table(history(str(tmp_path)))
    assert max(map(len, text.splitlines())) <= 100
    assert "2026-10-09" in text
    assert "slow late" in text


def test_table_and_dict(tmp_path: Path) -> None:
    for day in range(50):
        write_day(tmp_path, day)
    found = history(str(tmp_path))
    text = history_table(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "(10 earlier runs are not shown)" in text
    tree = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(tree["series"][0]["runs"]) == 50
    assert tree["series"][0]["runs"][-1]["usual_s_per_million_tokens"] == pytest.approx(300)


def test_a_history_has_no_page(tmp_path: Path) -> None:
    write_run(tmp_path / "day", makespan_s=3600)
    result = CliRunner().invoke(main, ["report", "--history", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert (result.exit_code, "--html is for comparisons" in result.stderr) == (2, True)
