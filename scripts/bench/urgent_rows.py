"""What urgent rows wait for in the midst of a long job, whether they keep to a target, and what the job loses.

    python scripts/bench/urgent_rows.py MODEL [--target 1] [--rows 64] [--urgent 20] [--repeats 3]

The rows of the job come at once through `vasuki watch --stdin`, in process, eight times as many as have a place in a
step; the urgent ones, a tenth as long, one after another while it lasts. Runs alternate between three: without urgent
rows, with them as usual rows, and with `input.priority`. Each is simulated as well. The target is kept if 95 of 100
short rows have their answer within `--target` seconds. Since rows run all the time, seconds are processor time on one
thread, which other programs hardly change. The last line is one
JSON object: of each kind the seconds until the job's own rows have ended, the 95th percentile of what short rows
waited, and the share of them that missed the target, as measured (medians) and as simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch

from vasuki.base.config import JobConfig
from vasuki.base.job_file import parse_job
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.options import RunOptions
from vasuki.runs.planning import placements_of
from vasuki.runs.run import answer_rows
from vasuki.runs.workload import Workload, shape_of

KINDS = ("alone", "as usual rows", "urgent")
PROMPT_TOKENS, OUTPUT_TOKENS, TENTH, PLACES = 160, 80, 0.1, 8


@dataclass(frozen=True, slots=True)
class Figures:
    """A run, or the medians of several."""

    job_s: float  # until the last row of the job itself has ended
    p95_s: float = 0.0  # of what short rows waited
    missed: float = 0.0  # share of them that waited longer than the target

    @classmethod
    def of(cls, job_s: float, waited_s: list[float], target_s: float) -> Figures:
        """The figures of a run whose short rows waited this long."""
        if not waited_s:
            return cls(job_s)
        return cls(job_s, float(np.percentile(waited_s, 95)), float(np.mean(np.array(waited_s) > target_s)))

    def words(self, alone: Figures, target_s: float) -> str:
        """In a line."""
        if self is alone:
            return f"{self.job_s:.1f} s"
        kept = "keep" if self.p95_s <= target_s else "miss"
        return (
            f"{self.job_s:.1f} s, {self.job_s / alone.job_s - 1:+.1%}; short rows, within {self.p95_s:.2f} s (p95), "
            f"{kept} the target of {target_s:g} s, {self.missed:.0%} of them late"
        )


class Ends:
    """An observer: when each row has ended."""

    def __init__(self) -> None:
        self.at_s: dict[int, float] = {}

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.at_s |= {row.request.row: now_s for row in finished}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--target", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--rows", type=int, default=8 * PLACES)
    parser.add_argument("--urgent", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the profile of this machine
    model, target_s = options.model, options.target
    every_s = _measured(model, _lengths(options.rows, 0, 0.0, "alone"), "alone", target_s).job_s / (options.urgent + 2)
    found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    lengths = {kind: _lengths(options.rows, 0 if kind == "alone" else options.urgent, every_s, kind) for kind in KINDS}
    for _ in range(options.repeats):
        for kind in KINDS:
            found[kind].append(run := _measured(model, lengths[kind], kind, target_s))
            print(f"{kind}: {run.job_s:.1f} s, p95 {run.p95_s:.2f} s", flush=True)
    measured = {
        kind: Figures(*(statistics.median(column) for column in zip(*map(astuple, runs), strict=True)))
        for kind, runs in found.items()
    }
    simulated = {kind: _simulated(model, lengths[kind], kind, target_s) for kind in KINDS}
    for how, figures in (("measured", measured), ("simulated", simulated)):
        for kind, each in figures.items():
            print(f"{how}, {kind}: {each.words(figures['alone'], target_s)}")
    everything = {"measured": measured, "simulated": simulated}
    plain = {how: {kind: asdict(each) for kind, each in kinds.items()} for how, kinds in everything.items()}
    print(json.dumps({"target_s": target_s, **plain}))


def _lengths(rows: int, short: int, every_s: float, kind: str) -> Lengths:
    """The rows of the job, and the short ones, in order of arrival."""
    shares = np.concatenate([np.random.default_rng(0).uniform(0.5, 1.5, rows), np.full(short, TENTH)])
    outputs = (OUTPUT_TOKENS * shares).astype(np.int64)
    return Lengths(
        (PROMPT_TOKENS * shares).astype(np.int64),
        outputs,
        np.concatenate([np.zeros(rows), every_s * np.arange(1, short + 1)]),
        outputs,
        priority=np.where(shares == TENTH, 1.0, 0.0) if kind == "urgent" else None,
        known=True,
    )


def _job(model: str, output: str, kind: str) -> JobConfig:
    columns = {"id": "id", "prompt_token_ids": "tokens"} | ({"priority": "urgency"} if kind == "urgent" else {})
    return parse_job(
        {
            "model": {"path": model},
            "input": {"path": "-", **columns},
            "output": {"path": output},
            "sampling": {"max_tokens": {"column": "most"}, "ignore_eos": True},
            "plan": {"output_length": {"column": "most"}},
            "engine": {"max_num_seqs": PLACES},
        }
    )


def _first_short(lengths: Lengths) -> int:
    assert lengths.arrived_at_s is not None
    return int((lengths.arrived_at_s == 0).sum())


def _simulated(model: str, lengths: Lengths, kind: str, target_s: float) -> Figures:
    """By the cost model, as measured on this machine."""
    config = _job(model, "-", kind)
    (placement,) = placements_of((), Workload(config, shape_of(config), lengths))
    first, arrived_at_s = _first_short(lengths), lengths.arrived_at_s
    assert arrived_at_s is not None
    ends = Ends()
    plan = placement.plan(lengths)
    simulate_plan(
        plan, lengths, placement.shape, placement.profile, plan_config=config.plan, observers=[ends], one_by_one=True
    )
    waited_s = [ends.at_s[row] - float(arrived_at_s[row]) for row in range(first, len(lengths))]
    return Figures.of(max(ends.at_s[row] for row in range(first)), waited_s, target_s)


def _measured(model: str, lengths: Lengths, kind: str, target_s: float) -> Figures:
    """From the first answer to the last of the job itself."""
    random, (read, write) = np.random.default_rng(0), os.pipe()
    first, arrived_at_s = _first_short(lengths), lengths.arrived_at_s
    assert arrived_at_s is not None
    sent_s: dict[int, float] = {}
    answered_s: dict[int, float] = {}
    has_begun = threading.Event()

    def line(row: int) -> bytes:
        values = {
            "id": row,
            "tokens": random.integers(10, 1000, int(lengths.prompt_tokens[row])).tolist(),
            "most": int(lengths.output_tokens[row]),
            "urgency": int(row >= first),
        }
        return json.dumps(values).encode() + b"\n"

    def send() -> None:
        with os.fdopen(write, "wb", buffering=0) as pipe:
            for row in range(first):
                pipe.write(line(row))
            has_begun.wait()
            start_s = time.process_time()
            for row in range(first, len(lengths)):
                while len(answered_s) < row and time.process_time() < start_s + float(arrived_at_s[row]):
                    time.sleep(0.002)  # unless all is answered, and time stands still
                sent_s[row] = time.process_time()
                pipe.write(line(row))

    def answered(answer: dict[str, Any]) -> None:
        assert answer["finish_reason"] != "error", answer["error"]
        answered_s[answer["id"]] = time.process_time()
        has_begun.set()

    with tempfile.TemporaryDirectory() as output:
        threading.Thread(target=send, daemon=True).start()
        answer_rows(_job(model, output, kind), read, answered, options=RunOptions(quiet=True))
        os.close(read)
    assert len(answered_s) == len(lengths)
    waited_s = [answered_s[row] - at_s for row, at_s in sent_s.items()]
    job_s = max(answered_s[row] for row in range(first)) - min(answered_s.values())
    return Figures.of(job_s, waited_s, target_s)


if __name__ == "__main__":
    main()
