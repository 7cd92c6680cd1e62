"""kill -9 at moments spread over a run: the work that is gone is about what the plan foresaw."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_job import WORDS, job_tree

from vasuki.base import commits
from vasuki.runs.planning import placements_of
from vasuki.runs.workload import workload_of

NUM_ROWS, OUTPUT_TOKENS, KILLS = 48, 24, 7  # which meets the waves of rows at as many moments of theirs

# Runs jobs, one in each fork, and prints the steps that each row has taken, shared with the rows in the same steps:
# before that step `JOB STEP` kills the run, or at its end. Steps of so small a model take the same time.
RUNS = """
import json, os, sys
from collections import Counter
import vasuki.runs.run, vasuki.hf.loading.load_model, vasuki.hf.ragged_executor
from vasuki.base import commits
from vasuki.commands.cli import main
from vasuki.engine.scheduler import Scheduler

commits.COMMIT_S = commits.COMMIT_SHARE = 0.0  # rows are durable when they end, however fast the machine is
schedule, taken, steps = Scheduler.schedule, Counter(), [0]

def counted(self):
    if steps[0] == last_step:
        print(json.dumps(taken), flush=True)
        os.kill(os.getpid(), 9)
    batch = schedule(self)
    if batch is not None and isinstance(batch.chunks[0].sequence.request.id, str):  # not of the plan's simulation
        steps[0] += 1
        for chunk in batch.chunks:
            taken[chunk.sequence.request.id] += chunk.num_tokens / batch.num_tokens
    return batch

Scheduler.schedule = counted
for line in sys.stdin:
    job, last_step = line.split()[0], int(line.split()[1])
    child = os.fork()
    if not child:
        try:
            main(["run", job, "--quiet", "--fresh"])
        except SystemExit:
            print(json.dumps(taken), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def write_job(folder: Path, model: Path, side_by_side: int) -> Path:
    """A job of equal rows, of which a number run side by side."""
    folder.mkdir(exist_ok=True)
    texts = [" ".join(WORDS[row % 5 : row % 5 + 4]) for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts}), folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / "out")
    tree["sampling"] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    tree["engine"] = {"max_num_seqs": side_by_side}
    tree["input"]["duplicates"] = "each"
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def durable_rows(job: Path) -> set[str]:
    """Rows in the output."""
    parts = (job.parent / "out").glob("part-*.parquet")
    return {row for part in parts for row in pq.read_table(part, columns=["id"])["id"].to_pylist()}


@pytest.mark.sweep
@pytest.mark.parametrize("side_by_side", [4, NUM_ROWS])
def test_a_kill_loses_what_the_plan_foresaw(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, side_by_side: int
) -> None:
    job = write_job(tmp_path / "job", tiny_model, side_by_side)
    monkeypatch.setattr(commits, "COMMIT_S", 0.0)
    monkeypatch.setattr(commits, "COMMIT_SHARE", 0.0)
    workload = workload_of(str(job))
    plan = placements_of((), workload)[0].plan(workload.lengths)

    runs = subprocess.Popen([sys.executable, "-c", RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert runs.stdin is not None
    assert runs.stdout is not None

    def run(last_step: int) -> tuple[dict[str, float], int]:
        assert runs.stdin is not None
        assert runs.stdout is not None
        print(job, last_step, file=runs.stdin, flush=True)
        return json.loads(runs.stdout.readline()), int(runs.stdout.readline())

    try:
        taken, code = run(-1)
        assert code == 0
        assert len(taken) == len(durable_rows(job)) == NUM_ROWS
        steps, lost = round(sum(taken.values())), []
        for kill in range(KILLS):
            taken, code = run(round((kill + 0.5) / KILLS * steps))
            assert code == -signal.SIGKILL
            lost.append(sum(taken[row] for row in taken.keys() - durable_rows(job)))
    finally:
        runs.communicate()
    assert sum(lost) / KILLS / steps == pytest.approx(plan.at_risk_s / plan.makespan_s, rel=0.15)
    assert max(lost) / steps <= 1.1 * plan.at_risk_most_s / plan.makespan_s
