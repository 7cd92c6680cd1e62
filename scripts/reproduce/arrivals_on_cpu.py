"""The systems of `reproduce_arrivals.py` for real, on this machine: time to first token as measured and as simulated.

    python scripts/reproduce/arrivals_on_cpu.py MODEL --data DIR [--trace coding] [--load 1] [--window 0] [--write]

The first rows of a window of a trace arrive as fast as the machine finishes them when all are there, times the load.
Prompts, outputs and T_max are divided by `--shrink`. The systems take turns on one thread, with the admission,
scheduler and kernels of `vasuki watch`, but rows come from a list, not through a pipe. The clock is that of the
thread's processor, and is put forward while nothing is there to do: what other programs take from the machine does not
count. Each run is simulated twice: as foreseen, at the pace of a run before it in which all rows are there, and at the
pace of its own steps. With --write the figures of a trace, load and window are kept as soon as they are there.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import reproduce_arrivals
import torch
import write_page
from on_cpu import arguments, tell
from reproduce_arrivals import BEST_FIXED, FIXED, LOADS, SYSTEMS, TRACES, at_times
from reproduce_table import Figures, Options

from vasuki.arrivals import ArrivalAdmission, ArrivingRows, Percentiles, WaitingTimes, admission_for
from vasuki.arrivals.admission import Pack
from vasuki.arrivals.gathering import Gathering
from vasuki.base.config import JobConfig
from vasuki.base.job_file import parse_job
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams
from vasuki.engine.sequence import Sequence as Row
from vasuki.hf.loading.load_model import load_model
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.cost_model import CostModel
from vasuki.planner import TimeLeft
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.placement import Placement, placed_as_loaded
from vasuki.runs.workload import tokens_of
from vasuki.simulator import CountingSink, VirtualFeed, simulate
from vasuki.simulator.simulated_executor import VirtualClock

CLAIM = "packing-on-cpu"
WINDOWS = (0, 1, 2)
COMPARED = ("padding", "Prepacking", "greedy", "exact", "mended", "continuous", "watch")
FIXED_ROWS = tuple(f"N = {n}" for n in FIXED)
ROWS, SHRINK, MOST_RUNNING = 30, 4, 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """One of `reproduce_arrivals.SYSTEMS`, as it runs here."""

    plan: Plan
    gathering: Gathering
    pack: Pack | None  # None: nothing is held back


@dataclass(frozen=True, slots=True)
class Measured:
    """A run."""

    ttft: Percentiles
    answer_s: float  # mean from arrival to last token
    pace: float  # time worked over what was predicted of its steps
    steps: int
    busy_s: float
    control_s: float  # in the admission and the controller


class ProcessorClock(VirtualClock):
    """Seconds since its start that the processor has worked for this process, and those that it waited for a row."""

    def __init__(self) -> None:
        self._start_s = time.process_time()
        self.waited_s = 0.0
        super().__init__()

    @property
    def busy_s(self) -> float:
        """Seconds worked."""
        return time.process_time() - self._start_s

    @property
    def now_s(self) -> float:
        return self.busy_s + self.waited_s

    @now_s.setter
    def now_s(self, at_s: float) -> None:
        self.waited_s = max(0.0, at_s - self.busy_s)


class Priced:
    """An observer that adds up what was predicted of the steps."""

    def __init__(self, prediction: TimeLeft) -> None:
        self.seconds = 0.0
        self._prediction = prediction

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Row]) -> None:
        self.seconds += self._prediction.step_s(batch, result, scheduler)


class TimedAdmission(ArrivalAdmission):
    """Counts the processor's seconds that it takes."""

    spent_s = 0.0

    def arrive(self, request: Request, at_s: float) -> None:
        start_s = time.thread_time()
        super().arrive(request, at_s)
        self.spent_s += time.thread_time() - start_s

    def take(self, now_s: float, engine_waits: bool, engine_idle: bool) -> list[Request]:
        start_s = time.thread_time()
        batch = super().take(now_s, engine_waits, engine_idle)
        self.spent_s += time.thread_time() - start_s
        return [filled(row) for row in batch]

    def first_token(self, at_s: float, ttft_s: float) -> None:
        start_s = time.thread_time()
        super().first_token(at_s, ttft_s)
        self.spent_s += time.thread_time() - start_s


def filled(row: Request) -> Request:
    """A row with as many token ids as its prompt is padded to."""
    if len(row.prompt_token_ids) == row.num_prompt_tokens:
        return row
    return replace(row, prompt_token_ids=np.resize(row.prompt_token_ids, row.num_prompt_tokens))


def job(model: str) -> JobConfig:
    """A job over rows of token ids."""
    return parse_job(
        {
            "model": {"path": model},
            "input": {"path": "-", "prompt_token_ids": "tokens"},
            "output": {"path": "-"},
            "plan": {"output_length": {"column": "most"}},
            "engine": {"max_num_seqs": MOST_RUNNING},
        }
    )


def prepared(name: str, placement: Placement, rows: Lengths, batch_tokens: int) -> Prepared:
    """The settings of a system. Unless they are `watch`'s, steps have room for a batch in addition to all decodes."""
    system = SYSTEMS[name]
    chunk_tokens = "auto" if system.step_tokens is None else batch_tokens + MOST_RUNNING
    placement = placement.with_engine(policy=system.policy, chunk_tokens=chunk_tokens)
    plan = placement.plan(replace(rows, arrived_at_s=np.zeros(len(rows)), known=True))
    gathering = replace(system.gathering, batch_tokens=batch_tokens)
    if system.gathers:
        limits = replace(plan.settings.limits, lookahead=gathering.batch_rows + 1)
        plan = replace(plan, settings=replace(plan.settings, limits=limits))
    return Prepared(plan, gathering, system.pack if system.gathers else None)


def simulated(system: Prepared, cost_model: CostModel, lengths: Lengths, pace: float = 1.0) -> Percentiles:
    """Time to first token where each step takes `pace` times as long: all other times are that much shorter."""
    config = system.gathering
    config = replace(
        config,
        target_s=config.target_s / pace,
        epoch_s=config.epoch_s / pace,
        burst_rows_per_s=config.burst_rows_per_s * pace,
    )
    assert lengths.arrived_at_s is not None
    waited = simulate(
        lengths.requests(known=True),
        lengths.output_tokens.tolist(),
        system.plan.settings,
        cost_model,
        arrived_at_s=(lengths.arrived_at_s / pace).tolist(),
        admission=ArrivalAdmission(config, system.pack) if system.pack else None,
    ).waited
    assert waited is not None
    found = Percentiles.of([seconds * pace for seconds in waited.ttft_s])
    assert found is not None
    return found


def measured(system: Prepared, loaded: LoadedModel, cost_model: CostModel, lengths: Lengths) -> Measured:
    """The same for real."""
    random, arrived_at_s = np.random.default_rng(0), lengths.arrived_at_s
    assert arrived_at_s is not None
    rows = [
        replace(
            request,
            prompt_token_ids=random.integers(10, 1000, request.num_prompt_tokens).astype(np.int32),
            sampling=SamplingParams(max_tokens=request.max_tokens, ignore_eos=True),
            arrived_s=float(arrived_at_s[request.row]),
        )
        for request in lengths.requests(known=True)
    ]

    settings = system.plan.settings
    executor, scheduler = build_executor(loaded, settings), Scheduler(settings)
    priced = Priced(TimeLeft(system.plan, cost_model))
    timed = TimedAdmission(system.gathering, system.pack) if system.pack else None
    admission = admission_for(settings.policy) if timed is None else timed
    clock = ProcessorClock()
    waited = WaitingTimes(lambda request: request.arrived_s, lambda: clock.now_s)
    waited.on_first_token = admission.first_token
    source = ArrivingRows(VirtualFeed(rows, arrived_at_s.tolist(), clock), scheduler, admission)
    stats = drain(source, scheduler, executor, CountingSink(), [waited, priced])
    busy_s, ttft = clock.busy_s, Percentiles.of(waited.ttft_s)
    assert ttft is not None
    return Measured(
        ttft,
        float(np.mean(waited.latency_s)),
        busy_s / priced.seconds,
        stats.steps,
        busy_s,
        admission.spent_s if isinstance(admission, TimedAdmission) else 0.0,
    )


def window(data: Path, trace: str, number: int, rows: int, shrink: int) -> Lengths:
    """The first rows of a window, from 0 on."""
    found = reproduce_arrivals.windows(Options(data))[trace][number]
    assert found.arrived_at_s is not None
    prompts, outputs = (np.maximum(1, tokens[:rows] // shrink) for tokens in (found.prompt_tokens, found.output_tokens))
    return Lengths(prompts, outputs, found.arrived_at_s[:rows] - found.arrived_at_s[0], outputs)


def compare(placement: Placement, loaded: LoadedModel, rows: Lengths, shrink: int, where: Figures) -> Iterator[Figures]:
    """Run all systems on the same arrivals, at the load that `where` says."""
    systems = {name: prepared(name, placement, rows, 20_000 // shrink) for name in (*COMPARED, *FIXED_ROWS)}
    plan = systems["continuous"].plan
    cost_model = CostModel(placement.shape, placement.profile, plan.layout)
    assert rows.arrived_at_s is not None
    at_once = at_times(rows, 0 * rows.arrived_at_s)
    for _ in range(2):  # the first is slower
        pace = measured(systems["continuous"], loaded, cost_model, at_once).pace
    lengths = at_times(rows, rows.arrived_at_s * pace * plan.makespan_s / float(where["load"]) / rows.arrived_at_s[-1])
    for name in (*COMPARED, BEST_FIXED):
        chosen = name
        if name == BEST_FIXED:  # as foreseen
            chosen = min(FIXED_ROWS, key=lambda n: simulated(systems[n], cost_model, lengths, pace).mean_s)
        system = systems[chosen]
        foreseen, seen = simulated(system, cost_model, lengths, pace), measured(system, loaded, cost_model, lengths)
        paced = simulated(system, cost_model, lengths, seen.pace)
        yield {
            **where,
            "system": name,
            "chosen": chosen,
            "measured_s": seen.ttft.mean_s,
            "measured_p95_s": seen.ttft.p95_s,
            "answer_s": seen.answer_s,
            "simulated_s": foreseen.mean_s,
            "paced_s": paced.mean_s,
            "over_measured": paced.mean_s / seen.ttft.mean_s,
            "pace": seen.pace,
            "control_us": seen.control_s / seen.steps * 1e6,
            "control_share": seen.control_s / seen.busy_s,
        }


def main() -> None:
    parser = arguments(__doc__, data=True)
    parser.add_argument("model")
    parser.add_argument("--trace", choices=TRACES, action="append", help="repeatable; all if not given")
    parser.add_argument("--load", type=float, action="append", help="repeatable; 0.5, 1 and 1.5 if not given")
    parser.add_argument(
        "--window", type=int, action="append", help="of the windows of `packing-ttft`; repeatable; else 0 to 2"
    )
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--shrink", type=int, default=SHRINK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = job(options.model)
    loaded = load_model(config.model, "cpu")
    for trace, number in itertools.product(options.trace or TRACES, options.window or WINDOWS):
        rows = window(options.data, trace, number, options.rows, options.shrink)
        placement = placed_as_loaded(config, loaded, tokens_of(rows))
        for load in options.load or LOADS:
            where: Figures = {"trace": trace, "load": load, "window": number}
            found = list(compare(placement, loaded, rows, options.shrink, where))
            others = write_page.read()[CLAIM] if options.write else []
            tell({CLAIM: [row for row in others if not where.items() <= row.items()] + found}, options.write)
            print(f"load average of the machine: {os.getloadavg()[0]:.1f}\n", flush=True)


if __name__ == "__main__":
    main()
