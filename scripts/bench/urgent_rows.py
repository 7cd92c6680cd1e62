"""A trickle of urgent rows into a long job, on this machine: how soon they are answered, and what the job loses.

    python scripts/bench/urgent_rows.py MODEL [--rows 200] [--urgent 20] [--repeats 3]

The rows of the job come at once through `vasuki watch --stdin`, in process; the urgent ones, a tenth as long, one after
another while it lasts. Runs alternate between three: without urgent rows, with them as usual rows, and with
`input.priority`. Each is simulated as well. The last line is one JSON object: of each kind the seconds of the whole,
and the 95th percentile of those from a short row's arrival to its answer, as measured (medians) and as simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np

from vasuki.base.config import JobConfig, parse_job
from vasuki.commands.forecast import placements_of
from vasuki.commands.stream import answer_rows
from vasuki.commands.workload import Workload, shape_of
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan

KINDS = ("alone", "as usual rows", "urgent")
PROMPT_TOKENS, OUTPUT_TOKENS, TENTH = 160, 80, 0.1
Figures = tuple[float, float]  # seconds of the whole, and 95th percentile of what short rows waited


class ShortRows:
    """An observer: when each row from this one on has ended."""

    def __init__(self, first: int) -> None:
        self.ended_s: dict[int, float] = {}
        self._first = first

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.ended_s |= {row.request.row: now_s for row in finished if row.request.row >= self._first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--urgent", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    every_s = _measured(options.model, _lengths(options.rows, 0, 0.0, "alone"), "alone")[0] / (options.urgent + 2)
    found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    lengths = {kind: _lengths(options.rows, 0 if kind == "alone" else options.urgent, every_s, kind) for kind in KINDS}
    for _ in range(options.repeats):
        for kind in KINDS:
            found[kind].append(_measured(options.model, lengths[kind], kind))
            print(f"{kind}: {found[kind][-1][0]:.1f} s, p95 {found[kind][-1][1]:.2f} s", flush=True)
    measured = {kind: [statistics.median(column) for column in zip(*runs, strict=True)] for kind, runs in found.items()}
    simulated = {kind: _simulated(options.model, lengths[kind], kind) for kind in KINDS}
    for how, figures in (("measured", measured), ("simulated", simulated)):
        for kind, (whole_s, p95_s) in figures.items():
            short = "" if kind == "alone" else f", short rows within {p95_s:.2f} s (p95)"
            print(f"{how}, {kind}: {whole_s:.1f} s, {whole_s / figures['alone'][0] - 1:+.1%}{short}")
    print(json.dumps({"measured": measured, "simulated": simulated}))


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
            "engine": {"max_num_seqs": 32},
        }
    )


def _first_short(lengths: Lengths) -> int:
    assert lengths.arrived_at_s is not None
    return int((lengths.arrived_at_s == 0).sum())


def _simulated(model: str, lengths: Lengths, kind: str) -> Figures:
    """By the cost model, as measured on this machine."""
    config = _job(model, "-", kind)
    (placement,) = placements_of((), Workload(config, shape_of(config), lengths))
    first, arrived_at_s = _first_short(lengths), lengths.arrived_at_s
    assert arrived_at_s is not None
    seen = ShortRows(first)
    plan = placement.plan(lengths)
    result = simulate_plan(
        plan, lengths, placement.shape, placement.profile, plan_config=config.plan, observers=[seen], one_by_one=True
    )
    waited_s = [at_s - float(arrived_at_s[row]) for row, at_s in seen.ended_s.items()]
    return result.plan.makespan_s, float(np.percentile(waited_s, 95)) if waited_s else 0.0


def _measured(model: str, lengths: Lengths, kind: str) -> Figures:
    """From the first answer to the last one."""
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
            start_s = time.monotonic()
            for row in range(first, len(lengths)):
                time.sleep(max(0.0, start_s + float(arrived_at_s[row]) - time.monotonic()))
                sent_s[row] = time.monotonic()
                pipe.write(line(row))

    def answered(answer: dict[str, Any]) -> None:
        assert answer["finish_reason"] != "error", answer["error"]
        answered_s[answer["id"]] = time.monotonic()
        has_begun.set()

    with tempfile.TemporaryDirectory() as output:
        threading.Thread(target=send, daemon=True).start()
        answer_rows(_job(model, output, kind), read, answered, quiet=True)
        os.close(read)
    assert len(answered_s) == len(lengths)
    waited_s = [answered_s[row] - at_s for row, at_s in sent_s.items()]
    return max(answered_s.values()) - min(answered_s.values()), float(np.percentile(waited_s, 95)) if sent_s else 0.0


if __name__ == "__main__":
    main()
