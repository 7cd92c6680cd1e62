"""What a run on a machine that nobody has measured knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tiny_job import WORDS, job_tree

from vasuki.base.job_file import load_job
from vasuki.commands.cli import main
from vasuki.machines.here import cpu, measured
from vasuki.machines.here.cpu import typical_of
from vasuki.machines.here.measured import (
    DATASHEET,
    MEASURE_VARIABLE,
    MachineProfile,
    _ago,
    budget_s,
    cache_key,
    look_back,
)
from vasuki.machines.measured_points import Measured
from vasuki.planner.plan import Plan, expected
from vasuki.runs.workload import shape_of


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Path:
    """A job of twelve rows on the tiny model."""
    rows = [{"id": f"r{i}", "text": " ".join(WORDS[: 1 + i])} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_tree(tiny_model, tmp_path / "in.parquet", tmp_path / "out")))
    return path


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No job is too short, and measuring is done as soon as each size has been seen. The cache's folder."""
    monkeypatch.delenv(MEASURE_VARIABLE)
    monkeypatch.setattr(measured, "_TOO_SHORT_S", 0.0)
    monkeypatch.setattr(measured, "_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def sources(job: Path) -> tuple[str, list[Any]]:
    """Where a run and the plan after it have their figures from."""
    run = CliRunner().invoke(main, ["run", str(job), "--fresh", "--quiet", "--json"])
    assert run.exit_code == 0, run.stderr
    plan = CliRunner().invoke(main, ["plan", str(job), "--json"])
    assert plan.exit_code == 0, plan.stderr
    return json.loads(run.stdout)["predicted"]["source"], [each["source"] for each in json.loads(plan.stdout)]


def test_a_job_that_nobody_waits_for_is_not_measured_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEASURE_VARIABLE)
    too_short = f"{DATASHEET}; the job is too short to measure for"
    assert sources(job) == (too_short, [too_short])


def test_nothing_is_measured_where_that_is_switched_off(
    job: Path, measures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEASURE_VARIABLE, "off")
    assert sources(job) == (f"{DATASHEET}; VASUKI_MEASURE is off", [f"{DATASHEET}; VASUKI_MEASURE is off"])
    assert not measures.exists()


def test_the_first_run_measures_and_the_next_one_finds_it(
    job: Path, measures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vasuki.runs.workers.device.look_back", lambda *_: None)  # whatever this machine does meanwhile
    first, plan = sources(job)
    assert first.startswith("measured just now in ")
    assert plan == ["measured less than a minute ago"]
    assert sources(job)[0] == plan[0]
    assert len(list(measures.glob("*.json"))) == 1


def test_a_plan_measures_too(job: Path, measures: Path) -> None:
    plan = CliRunner().invoke(main, ["plan", str(job), "--json", "--quiet"])
    assert json.loads(plan.stdout)[0]["source"].startswith("measured just now in ")


def test_a_named_profile_is_taken_as_it_is(job: Path, measures: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(job), "--quiet", "--json", "--gpu", "cpu"])
    assert json.loads(result.stdout)["predicted"]["source"] == DATASHEET
    assert not measures.exists()


def test_a_cache_that_cannot_be_written_costs_a_line(job: Path, measures: Path) -> None:
    measures.write_text("a file where the folder should be")
    result = CliRunner().invoke(main, ["run", str(job), "--quiet", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["predicted"]["source"].startswith("measured just now in ")
    assert sum("cannot be kept" in line for line in result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"profile": {"name": 3}}', '{"key": {}}'])
def test_a_broken_cache_is_measured_anew(job: Path, measures: Path, text: str) -> None:
    sources(job)
    for file in measures.glob("*.json"):
        file.write_text(text)
    first, plan = sources(job)
    assert first.startswith("measured just now in ")
    assert plan[0].startswith("measured ")


def test_a_cache_that_is_broken_in_a_place_is_not_believed(measures: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = {"device": "this"}
    measured.keep(key, typical_of(cpu.processor()), 1.0)
    file = measured._file(key)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pressure": "much"}))
    assert measured.read_cached(key) is None
    assert "is broken" in caplog.text


@pytest.mark.parametrize(
    ("pace", "stolen_share", "forgotten"),
    [(1.1, 0.0, False), (1.3, 0.0, True), (0.7, 0.0, True), (1.3, 0.2, False), (None, 0.0, False)],
)
def test_a_profile_that_a_run_contradicts_is_not_used_again(
    measures: Path, pace: float | None, stolen_share: float, forgotten: bool
) -> None:
    key = {"device": "this"}
    profile = typical_of(cpu.processor())
    measured.keep(key, profile, 1.0)
    assert measured.read_cached(key) is not None
    look_back(MachineProfile(profile, "measured", key), pace, stolen_share)
    assert (measured.read_cached(key) is None) == forgotten


@pytest.mark.parametrize(
    ("spread", "then", "now", "used"),
    [
        (0.4, 60.0, 2.0, False),  # whoever worked beside it is gone
        (0.4, 60.0, 50.0, True),
        (0.4, 0.0, 2.0, True),  # disturbed by the host of a virtual machine, which is never seen to go
        (0.0, 60.0, 2.0, True),  # steps that did not differ were not disturbed
    ],
)
def test_what_was_measured_beside_others_is_used_as_long_as_they_stay(
    spread: float, then: float, now: float, used: bool, measures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, profile = {"device": "this"}, typical_of(cpu.processor())
    disturbed = Measured(source="steps", spread=spread)
    measured.keep(key, profile.model_copy(update={"measured": disturbed}), 1.0, then)
    monkeypatch.setattr(measured, "cpu_pressure", lambda: now)
    assert (measured.read_cached(key) is not None) == used


def test_what_another_machine_measured_is_not_believed(measures: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = {"device": "this"}, {"device": "that"}
    measured.keep(theirs, typical_of(cpu.processor()), 1.0)
    measured._file(theirs).rename(measured._file(ours))
    assert measured.read_cached(ours) is None
    assert "another machine" in caplog.text


def test_what_one_backend_measured_says_nothing_of_the_other(job: Path) -> None:
    shape = shape_of(load_job(str(job), []))
    as_chosen, *others = (cache_key(shape.served_by(asked)) for asked in ("auto", "ragged", "padded"))
    assert [key == as_chosen for key in others] == [True, False]


def test_a_plan_with_a_cached_profile_imports_nothing_large(job: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from vasuki.runs.workload import shape_of
from vasuki.base.job_file import load_job
from vasuki.machines.here import cpu, device
from vasuki.machines.here.measured import cache_key, keep
from vasuki.machines.here.cpu import typical_of
from vasuki.commands.cli import main
config = load_job({str(job)!r}, ())
keep(cache_key(shape_of(config)), typical_of(cpu.processor()), 1.0)
device.gpu = lambda: None
main(["plan", {str(job)!r}, "--json"], standalone_mode=False)
assert not (large := {{"torch", "transformers", "pandas"}} & set(sys.modules)), large
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["source"] == "measured less than a minute ago"


@pytest.mark.parametrize(
    ("age_s", "text"), [(5, "less than a minute ago"), (90, "2 minutes ago"), (3700, "1 hour ago"), (3e5, "3 days ago")]
)
def test_ages_are_told_as_people_do(age_s: float, text: str) -> None:
    assert _ago(age_s) == text


@given(st.floats(0, 1e6))
def test_measuring_takes_five_seconds_or_three_percent_at_most(rough_s: float) -> None:
    """And of a short job no more than a fifth, or half a second."""
    taken_s = budget_s(rough_s)
    assert taken_s <= max(5.0, 0.03 * rough_s)
    assert taken_s <= max(0.5, 0.2 * rough_s)


def test_a_job_of_two_seconds_is_not_measured_for_five() -> None:
    assert budget_s(2.0) == 0.5
    assert budget_s(10.0) == 2.0
    assert budget_s(60.0) == 5.0
    assert budget_s(600.0) == 18.0


@pytest.mark.parametrize(
    ("makespan_s", "spread", "words"),
    [
        (0.04, 0.0, "less than a second"),
        (0.04, 3.0, "less than a second"),
        (0.4, 3.0, "0.4 s (0.1 to 1.6 s)"),
        (300.0, 0.0, "5 min 00 s"),
        (300.0, 0.5, "5 min 00 s (3.3 to 7.5 min)"),
    ],
)
def test_what_is_expected_of_a_run(makespan_s: float, spread: float, words: str) -> None:
    range_s = (makespan_s / (1 + spread), makespan_s * (1 + spread))
    assert expected(cast(Plan, SimpleNamespace(makespan_s=makespan_s, spread=spread, range_s=range_s))) == words
