"""kill -9 in every phase of `vasuki run`, run again: the answers of a run that nobody disturbed, to the byte.

A process that has imported everything forks one for each run, so that a run takes a second. The clock starts when the
run enters a phase, and fires at a moment drawn from a seed. `make test-kill` kills 200 runs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_job import WORDS, job_tree

from vasuki.io.location import Location
from vasuki.io.output.trace import read_trace

KILLS = int(os.environ.get("VASUKI_KILLS", "14"))
NUM_ROWS = 48

PHASES = {  # what a run calls there, how often at least, and about how long the phase takes from there on
    "load": ("vasuki.hf.loading.load_model:load_model", 1, 0.3),
    "plan": ("vasuki.commands.this_machine:make_plan", 1, 0.1),
    "prompts": ("vasuki.io.input.requests:RequestStream._tokenise", 1, 0.05),
    "decodes": ("vasuki.engine.scheduler:Scheduler.schedule", 12, 0.02),
    "journal": ("vasuki.io.output.journal:Journal.write", 3, 0.002),
    "commit": ("vasuki.io.output.parts:PartWriter._commit", 3, 0.01),
    "manifest": ("vasuki.io.output.output_folder:OutputFolder.finish", 1, 0.02),
}

NURSERY = """
import importlib, os, signal, sys, threading
import vasuki.commands.run, vasuki.hf.loading.load_model, vasuki.hf.ragged_executor, transformers
from vasuki.commands.cli import main
from vasuki.base import commits

commits.COMMIT_S = 0.02  # so that there are several commits in a second
for line in sys.stdin:
    job, place, entries, delay_s = line.split()
    child = os.fork()
    if not child:
        if place != "-":
            module, _, path = place.partition(":")
            *outer, name = path.split(".")
            owner = importlib.import_module(module)
            for part in outer:
                owner = getattr(owner, part)
            wrapped, entered = getattr(owner, name), [0]
            def with_clock(*arguments, **options):
                entered[0] += 1
                if entered[0] == int(entries):
                    threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
                return wrapped(*arguments, **options)
            setattr(owner, name, with_clock)
        code = 0
        try:
            main(["run", job, "--quiet"])
        except SystemExit as end:
            code = end.code or 0
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Run = Callable[..., int]


@pytest.fixture
def run() -> Iterator[Run]:
    """`run(job, phase, rng)`: how a run ended, the signal's number negated if one killed it."""
    nursery = subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    order, answers = nursery.stdin, nursery.stdout

    def run(job: Path, phase: str = "", rng: random.Random | None = None, least_entries: int = 1) -> int:
        place, most_entries, seconds = PHASES.get(phase, ("-", 1, 0.0))
        entries, delay_s = (least_entries + rng.randrange(most_entries), rng.uniform(0, seconds)) if rng else (1, 0.0)
        print(job, place, entries, delay_s, file=order, flush=True)
        return int(answers.readline())

    yield run
    order.close()
    answers.close()
    nursery.wait()


def job_into(folder: Path, model: Path, max_tokens: int = 24) -> Path:
    """A job over the same rows into an output folder of its own."""
    folder.mkdir()
    texts = [" ".join(WORDS[row % 5 : row % 5 + 1 + row * 7 % 13]) for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts}), folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / "out")
    tree["sampling"] = {"max_tokens": max_tokens}
    tree["model"]["dtype"] = "float32"
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def answers(job: Path) -> pa.Table:
    """What is in the output, each row once, by id."""
    parts = sorted((job.parent / "out").glob("part-*.parquet"))
    if not parts:
        return None
    table = pa.concat_tables([pq.read_table(part) for part in parts]).sort_by("id")
    assert len(set(table["id"].to_pylist())) == table.num_rows, "a row is there twice"
    return table


def test_answers_are_the_same_whenever_runs_are_killed(tmp_path: Path, tiny_model: Path, run: Run) -> None:
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model)
    assert run(undisturbed) == 0
    expected = answers(undisturbed)
    assert expected.num_rows == NUM_ROWS

    rng = random.Random(20)
    killed: Counter[str] = Counter()
    jobs = runs = 0
    job = job_into(tmp_path / "0", tiny_model)
    while killed.total() < KILLS:
        phase = min(PHASES, key=lambda name: (killed[name], rng.random()))
        code = run(job, phase, rng)
        runs += 1
        assert runs < 5 * KILLS
        assert code in (0, -signal.SIGKILL)
        killed[phase] += code != 0
        if code == 0 or rng.random() < 0.2:  # enough of this folder
            assert run(job) == 0
            assert (job.parent / "out" / "_SUCCESS").exists()
            assert answers(job).equals(expected)
            jobs += 1
            job = job_into(tmp_path / str(jobs), tiny_model)
        else:
            answers(job)
    assert run(job) == 0
    assert answers(job).equals(expected)
    assert min(killed[phase] for phase in PHASES) >= KILLS // len(PHASES)


def test_decodes_before_a_kill_are_not_computed_again(tmp_path: Path, tiny_model: Path, run: Run) -> None:
    """Long rows, killed in their midst many times: what was journaled counts. Without the journal it is all lost."""
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model, max_tokens=80)
    assert run(undisturbed) == 0
    computed = {True: decode_tokens(undisturbed), False: decode_tokens(undisturbed)}
    for keeps_journal in (True, False):
        rng = random.Random(5)
        job = job_into(tmp_path / f"killed{keeps_journal}", tiny_model, max_tokens=80)
        for _ in range(5):
            assert run(job, "decodes", rng, 60) in (0, -signal.SIGKILL)
            if not keeps_journal:
                (job.parent / "out" / ".vasuki-journal.jsonl").unlink(missing_ok=True)
        assert run(job) == 0
        assert answers(job).equals(answers(undisturbed))
        computed[keeps_journal] = decode_tokens(job)
    assert computed[True] <= decode_tokens(undisturbed) < computed[False]


def decode_tokens(job: Path) -> int:
    """Decodes in the trace: it reaches the disk behind the journal, so each is counted whose token is kept."""
    return sum(step.decode_tokens for step in read_trace(Location.parse(str(job.parent / "out"))))
