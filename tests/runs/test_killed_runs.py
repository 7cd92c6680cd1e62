"""kill -9 in every phase of `vasuki run`, run again: the answers of a run that nobody disturbed, to the byte.

The clock starts when the run enters a phase, and fires at a moment drawn from a seed. `make test-kill` kills 200 runs
in all phases, and 100 more while they commit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from resumed_job import NUM_ROWS, answers, job_into, reader_beside
from run_nursery import PHASES, Nursery, Order

from vasuki.io.location import Location
from vasuki.io.output.manifest import read_manifest
from vasuki.io.output.trace import read_trace
from vasuki.report.timeline import read_timeline

KILLS = int(os.environ.get("VASUKI_KILLS", "8"))


def kill_at(job: Path, phase: str, rng: random.Random, least_entries: int = 1) -> Order:
    """A run that is killed at some moment of a phase, unless it ends before."""
    _, most_entries, seconds = PHASES[phase]
    return Order(str(job), "kill", phase, least_entries + rng.randrange(most_entries), rng.uniform(0, seconds))


@pytest.mark.parametrize(
    ("phases", "kills"),
    [(list(PHASES), KILLS), (["journal", "commit", "manifest"], KILLS // 2)],
    ids=["anywhere", "in-commits"],
)
def test_answers_are_the_same_whenever_runs_are_killed(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, phases: list[str], kills: int
) -> None:
    assert expected.num_rows == NUM_ROWS
    rng = random.Random(20)
    killed: Counter[str] = Counter()
    jobs = runs = 0
    while killed.total() < kills:
        job, code = job_into(tmp_path / str(jobs), tiny_model), -signal.SIGKILL
        jobs += 1
        with reader_beside(job, expected):
            while code and killed.total() < kills and rng.random() < 0.8:  # else that is enough of this folder
                phase = min(phases, key=lambda name: (killed[name], rng.random()))
                code = nursery.run(kill_at(job, phase, rng))
                assert code in (0, -signal.SIGKILL)
                killed[phase] += code != 0
                runs += 1
                assert runs < 5 * kills
            assert nursery.run(Order(str(job))) == 0
        assert (job.parent / "out" / "_SUCCESS").exists()
        assert answers(job).equals(expected)
    assert min(killed[phase] for phase in phases) >= kills // len(phases)


def test_decodes_before_a_kill_are_not_computed_again(tmp_path: Path, tiny_model: Path, nursery: Nursery) -> None:
    """Long rows, killed in their midst many times: what was journaled counts. Without the journal it is all lost."""
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model, max_tokens=80)
    assert nursery.run(Order(str(undisturbed))) == 0
    computed = {True: decode_tokens(undisturbed), False: decode_tokens(undisturbed)}
    for keeps_journal in (True, False):
        rng = random.Random(5)
        job = job_into(tmp_path / f"killed{keeps_journal}", tiny_model, max_tokens=80)
        for _ in range(5):
            assert nursery.run(kill_at(job, "decodes", rng, 60)) in (0, -signal.SIGKILL)
            if not keeps_journal:
                (job.parent / "out" / ".vasuki-journal.jsonl").unlink(missing_ok=True)
        assert nursery.run(Order(str(job))) == 0
        assert answers(job).equals(answers(undisturbed))
        computed[keeps_journal] = decode_tokens(job)
        out = Location.parse(str(job.parent / "out"))
        killed = [run for run in read_manifest(out).runs if run.killed]
        timeline = read_timeline(out)
        assert timeline is not None
        assert 0 < sum(run.makespan_s for run in killed) == pytest.approx(timeline.earlier_s)
    assert computed[True] <= decode_tokens(undisturbed) < computed[False]


@pytest.mark.sweep
def test_typed_answers_and_their_tries_are_the_same_too(tmp_path: Path, tiny_model: Path, nursery: Nursery) -> None:
    asked: dict[str, dict[str, Any]] = {
        "answer": {"kind": ["cat", "dog"], "ns": ["integer"], "sure": "boolean?"},
        "sampling": {"max_tokens": 70, "temperature": 1.0, "frequency_penalty": 0.4},
        "output": {"check": "kind == 'cat' and len(ns) > 0", "logprobs": 2},
        "errors": {"retries": 3},
    }
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model, changes=asked)
    assert nursery.run(Order(str(undisturbed))) == 0
    expected, rng = answers(undisturbed), random.Random(7)
    assert {1, 2, 3} <= set(expected["tries"].to_pylist())
    assert {"ok", "truncated"} <= set(expected["answer_status"].to_pylist())
    job, resumed = job_into(tmp_path / "killed", tiny_model, changes=asked), 0
    for phase in ["decodes", "journal", "decodes", "commit", "decodes", "journal", "decodes", "decodes"]:
        assert nursery.run(kill_at(job, phase, rng, 4)) in (0, -signal.SIGKILL)
        journal = job.parent / "out" / ".vasuki-journal.jsonl"
        resumed += journal.exists() and b"failed_tries" in journal.read_bytes()
    assert nursery.run(Order(str(job))) == 0
    assert resumed, "no kill came while a row was asked again"
    assert answers(job).equals(expected)


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("c++") is None, reason="rows vary where kernels are not compiled")
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "drawn"])
def test_answers_in_bfloat16_are_the_same_to_the_bit(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, temperature: float
) -> None:
    """Killed in the midst of rows, with parts that are durable and rows in the journal."""
    asked: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "sampling": {"max_tokens": 80, "temperature": temperature, "seed": 5},
        "output": {"logprobs": 1},
        "plan": {"max_loss": 0.02},  # so that parts are written all the time
    }
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model, changes=asked)
    assert nursery.run(Order(str(undisturbed))) == 0
    expected, rng, kills, midst, jobs = answers(undisturbed), random.Random(3), 0, 0, 0
    while kills < max(3, KILLS // 4):
        job, jobs = job_into(tmp_path / f"killed-{jobs}", tiny_model, changes=asked), jobs + 1
        out = job.parent / "out"
        for phase in ["decodes", "decodes", "journal", "decodes"]:
            kills += nursery.run(kill_at(job, phase, rng, 80)) != 0
            journal = out / ".vasuki-journal.jsonl"
            begun = journal.exists() and journal.stat().st_size > 1000
            midst += begun and any(out.glob("part-*.parquet"))
        assert nursery.run(Order(str(job))) == 0
        assert answers(job).equals(expected)
        assert jobs < 2 * KILLS
    assert midst, "no kill came between a part and rows in the journal"


@pytest.mark.sweep
def test_scores_are_the_same_too(tmp_path: Path, tiny_model: Path, nursery: Nursery) -> None:
    asked: dict[str, dict[str, Any]] = {
        "sampling": {"max_tokens": 256},
        "output": {"token_ids": False},
        "input": {"continuation": [" a hill", " two dogs run over there", " here"]},
    }

    def scored(folder: Path) -> Path:
        job = job_into(folder, tiny_model, changes=asked)
        job.write_text(f"task: score\n{job.read_text()}")
        return job

    undisturbed, job, kills = scored(tmp_path / "undisturbed"), scored(tmp_path / "killed"), 0
    assert nursery.run(Order(str(undisturbed))) == 0
    rng = random.Random(7)
    for phase in ["decodes", "journal", "decodes", "commit", "decodes"]:
        kills += nursery.run(kill_at(job, phase, rng, 2)) != 0
    assert nursery.run(Order(str(job))) == 0
    assert kills > 1
    assert answers(job).equals(answers(undisturbed))


def decode_tokens(job: Path) -> int:
    """Decodes in the trace: it reaches the disk behind the journal, so each is counted whose token is kept."""
    return sum(step.decode_tokens for step in read_trace(Location.parse(str(job.parent / "out"))))
