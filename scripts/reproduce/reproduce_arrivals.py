"""Dynamic Prefill Packing: time to first token of rows that arrive over time. Sheared-LLaMA 1.3B on an A40.

As in the paper, windows of two traces are replayed, sped up or slowed down: here until they offer 0.5, 1 or 1.5 of the
load that the card can take, the rate at which it finishes rows when all of a window are there at once. Every system has
the same engine, in which decodes go on in every step:

    padding              what arrived in a window of time, in batches whose prompts are as long as the longest
    Prepacking           the same, packed by first-fit decreasing (the paper names no window; here it is the timeout)
    greedy, exact        the paper's controller, with either packer
    mended               the controller `load`, greedy
    best fixed N         the controller switched off, at the N that is best for this trace and load
    ... at once          either of the first two, with the rows that are there when the engine can take a batch
    continuous           nothing held back, first come, first served: prompts in chunks, as many tokens a step as above
    rounds               the same, but rows that wait start in rounds, the short prompts first
    watch                rounds, in the smaller steps that `vasuki watch` plans
    vLLM                 vLLM's present scheduler, with 8,192 tokens a step: what the card can take is measured with it

Prompts are computed without padding in all but the first, also Prepacking's, whose rows of equal length cost more where
attention works under a mask. Without --data, made-up rows stand in for the traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from reproduce_prepacking import SHEARED_LLAMA
from reproduce_table import Figures, Options

from vasuki.arrivals import ArrivalAdmission, Percentiles, WaitingTimes, pack_requests
from vasuki.arrivals.admission import Pack
from vasuki.arrivals.gathering import Gathering
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import Observer
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.engine.sequence import Sequence as Row
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, read_lengths
from vasuki.simulator import SimulationResult, simulate
from vasuki_solvers import first_fit_decreasing

Times = npt.NDArray[np.float64]

WINDOWS, ROWS = 5, 600
LOADS = (0.5, 1.0, 1.5)
QUIET = 0.1
DRAW = 0.01
FIXED = (1, 2, 4, 8, 16)
TRACES = {"coding": "azure_code_arrivals.csv", "conversation": "azure_conv_arrivals.csv"}
PAPER = {
    "coding": {"padding": 33.07, "Prepacking": 17.66, "greedy": 16.25, "exact": 16.63},
    "conversation": {"padding": 49.68, "Prepacking": 30.26, "greedy": 25.70, "exact": 26.95},
}
COST = CostModel(
    shape_from_config(SHEARED_LLAMA, "sheared-llama-1.3b").with_dtype("float16", "auto"), find_profile("a40")
)
USUAL = Gathering(controller="aimd")
NEVER = 10**9
BY_THE_CLOCK = replace(USUAL, min_rows=NEVER, max_rows=NEVER, burst_rows=NEVER, burst_rows_per_s=NEVER)
AT_ONCE = Gathering(max_rows=1)
MOST_RUNNING = 256
STEP_TOKENS = USUAL.batch_tokens + MOST_RUNNING  # a batch of prompts in addition to all decodes


@dataclass(frozen=True, slots=True)
class System:
    """How rows that arrive are started."""

    policy: str = "prefill-packing"
    gathering: Gathering = USUAL  # of that policy, like the packer
    pack: Pack = pack_requests
    step_tokens: int | None = STEP_TOKENS  # None: as `watch` plans

    @property
    def gathers(self) -> bool:
        """Whether rows are held back to be packed."""
        return find_policy(self.policy).gathers


def padded(requests: Sequence[Request], config: Gathering) -> list[list[Request]]:
    """Batches in order of arrival, every prompt as long as the longest of its batch."""
    batches: list[list[Request]] = [[]]
    for request in requests:
        longest = max(each.num_prompt_tokens for each in [*batches[-1], request])
        rows = len(batches[-1]) + 1
        if rows > 1 and (rows > config.batch_rows or rows * longest > config.batch_tokens):
            batches.append([])
        batches[-1].append(request)
    longest_of = [max(request.num_prompt_tokens for request in batch) for batch in batches]
    return [
        [replace(request, num_prompt_tokens=longest) for request in batch]
        for batch, longest in zip(batches, longest_of, strict=True)
    ]


def prepacked(requests: Sequence[Request], config: Gathering) -> list[list[Request]]:
    """Batches by first-fit decreasing, as Prepacking forms its rows."""
    lengths = [min(request.num_prompt_tokens, config.batch_tokens) for request in requests]
    packing = first_fit_decreasing(lengths, config.batch_tokens, max_items=config.batch_rows)
    return [[requests[i] for i in content] for content in packing.bins]


SYSTEMS = {
    "padding": System(gathering=BY_THE_CLOCK, pack=padded),
    "Prepacking": System(gathering=BY_THE_CLOCK, pack=prepacked),
    "greedy": System(),
    "exact": System(gathering=replace(USUAL, packing="exact")),
    "mended": System(gathering=Gathering()),
    **{f"N = {n}": System(gathering=replace(USUAL, min_rows=n, max_rows=n)) for n in FIXED},
    "continuous": System("sarathi"),
    "rounds": System("vasuki"),
    "watch": System("vasuki", step_tokens=None),
    "vLLM": System("vllm", step_tokens=8192),
    "padding at once": System(gathering=AT_ONCE, pack=padded),
    "Prepacking at once": System(gathering=AT_ONCE, pack=prepacked),
}
BEST_FIXED = "best fixed N"
COMPARED = (
    "padding", "Prepacking", "greedy", "exact", "mended", BEST_FIXED, "continuous", "rounds", "watch"
)  # fmt: skip


@cache
def step_tokens(name: str) -> int:
    """Tokens of a step; those that `watch` plans don't depend on the rows."""
    some = Lengths(np.array([1000]), np.array([100]), np.zeros(1))
    return SYSTEMS[name].step_tokens or make_plan(some, COST.shape, COST.profile).chunk_tokens


def run(lengths: Lengths, name: str, observers: Sequence[Observer] = ()) -> SimulationResult:
    """Replay the arrivals of some rows."""
    system = SYSTEMS[name]
    budget = memory_budget(COST.shape, COST.profile, block_tokens=32, max_step_tokens=20_000, max_num_seqs=MOST_RUNNING)
    limits = Limits(step_tokens(name), MOST_RUNNING)
    if system.gathers:
        limits = replace(limits, lookahead=USUAL.batch_rows + 1)
    assert lengths.arrived_at_s is not None
    return simulate(
        lengths.requests(),
        lengths.output_tokens.tolist(),
        EngineSettings(find_policy(system.policy), limits, budget.num_blocks, 32),
        COST,
        arrived_at_s=lengths.arrived_at_s.tolist(),
        admission=ArrivalAdmission(system.gathering, system.pack) if system.gathers else None,
        observers=observers,
        one_by_one=bool(observers),
    )


def waited(result: SimulationResult) -> WaitingTimes:
    """How long rows waited."""
    assert result.waited is not None
    return result.waited


def at_times(lengths: Lengths, arrived_at_s: Times) -> Lengths:
    """The same rows, at other times."""
    return replace(lengths, arrived_at_s=arrived_at_s)


@cache
def windows(options: Options) -> dict[str, list[Lengths]]:
    """Stretches of each trace, from 0 on, with the arrivals of load 1."""
    rows, random = options.rows(ROWS, least=24), np.random.default_rng(0)
    found = {}
    for name, file in TRACES.items():
        trace = read_lengths(options.data / file) if options.data else _made_up(random, 10 * rows)
        starts = random.integers(0, len(trace) - rows, max(1, min(WINDOWS, rows // 20)))
        found[name] = [_at_load_1(trace, slice(start, start + rows)) for start in starts.tolist()]
    return found


def _made_up(random: np.random.Generator, rows: int) -> Lengths:
    prompts = np.clip(random.lognormal(np.log(900), 1.0, rows), 8, 7000).astype(np.int64)
    outputs = np.clip(random.lognormal(np.log(90), 1.0, rows), 1, 1000).astype(np.int64)
    return Lengths(prompts, outputs, np.cumsum(random.exponential(0.2, rows)))


def _at_load_1(trace: Lengths, part: slice) -> Lengths:
    """Rows that arrive as fast as the card finishes them, in the middle of a run in which all are there at once."""
    assert trace.arrived_at_s is not None
    prompts, outputs, times = trace.prompt_tokens[part], trace.output_tokens[part], trace.arrived_at_s[part]
    rows = Lengths(prompts, outputs, np.zeros(len(prompts)))
    return at_times(rows, (times - times[0]) * len(times) / (rows_per_s(rows) * (times[-1] - times[0])))


def rows_per_s(rows: Lengths) -> float:
    """What the card can take of such rows, without start and end."""
    latency_s = waited(run(rows, "vLLM")).latency_s
    first, last = len(rows) // 4, 3 * len(rows) // 4
    return (last - first) / (latency_s[last] - latency_s[first])


class Waits(NamedTuple):
    """Means over the windows."""

    ttft_s: float  # time to first token, its mean
    ttft_p95_s: float
    answer_s: float  # from arrival to the last token, its mean


@cache
def waits(options: Options, trace: str, load: float, system: str) -> Waits:
    """What a system makes of a trace."""
    if system == BEST_FIXED:
        return min(waits(options, trace, load, f"N = {n}") for n in FIXED)
    each = []
    for rows in windows(options)[trace]:
        assert rows.arrived_at_s is not None
        times = waited(run(at_times(rows, rows.arrived_at_s / load), system))
        each.append((np.mean(times.ttft_s), np.percentile(times.ttft_s, 95), np.mean(times.latency_s)))
    return Waits(*np.mean(each, axis=0).tolist())


def table_1(options: Options) -> Iterator[Figures]:
    """Dynamic Prefill Packing, table 1: time to first token by system and load, and to the whole answer, s."""
    for trace, paper in PAPER.items():
        for system in COMPARED:
            found = {f"{load:g}": waits(options, trace, load, system) for load in LOADS}
            yield {
                "trace": trace,
                "system": system,
                "step_tokens": STEP_TOKENS if system == BEST_FIXED else step_tokens(system),
                "paper_mean_s": paper.get(system, ""),
                **{f"mean_s_{load}": each.ttft_s for load, each in found.items()},
                **{f"p95_s_{load}": each.ttft_p95_s for load, each in found.items()},
                **{f"answer_s_{load}": each.answer_s for load, each in found.items()},
            }


def each_window(options: Options) -> Iterator[Figures]:
    """Dynamic Prefill Packing, table 1: time to first token by window, mean, s, load 1.

    Where windows are in order, greedy is faster than Prepacking, and that than padding.
    """
    for trace in PAPER:
        for number, rows in enumerate(windows(options)[trace]):
            found = {
                system: float(np.mean(waited(run(rows, system)).ttft_s))
                for system in ("padding", "Prepacking", "greedy", "exact", "continuous", "rounds")
            }
            yield {
                "trace": trace,
                "window": number + 1,
                "in_order": int(found["greedy"] < found["Prepacking"] < found["padding"]),
                "exact_saves": 1 - found["exact"] / found["greedy"],
                **found,
            }


def quiet(options: Options) -> Iterator[Figures]:
    """Time to first token, mean, s, where there is next to nothing to pack."""
    for trace in PAPER:
        systems = (*COMPARED, "padding at once")
        yield {"trace": trace, **{system: waits(options, trace, QUIET, system).ttft_s for system in systems}}


def verdicts(options: Options) -> Iterator[Figures]:
    """Dynamic Prefill Packing: shares of the mean time to first token that are saved, and of that to the answer."""
    for trace, paper in PAPER.items():
        for better, worse in (
            ("Prepacking", "padding"),
            ("greedy", "padding"),
            ("greedy", "Prepacking"),
            ("Prepacking at once", "Prepacking"),
            ("exact", "greedy"),
            ("mended", "greedy"),
            (BEST_FIXED, "greedy"),
            ("continuous", "greedy"),
            ("continuous", "mended"),
            ("rounds", "mended"),
            ("watch", "mended"),
        ):
            pairs = [(waits(options, trace, load, better), waits(options, trace, load, worse)) for load in LOADS]
            saved = [1 - one.ttft_s / other.ttft_s for one, other in pairs]
            answers = [1 - one.answer_s / other.answer_s for one, other in pairs]
            theirs = 1 - paper[better] / paper[worse] if better in paper else None
            yield {
                "trace": trace,
                "better": better,
                "worse": worse,
                "paper_saved": "" if theirs is None else theirs,
                "verdict": verdict(theirs, saved),
                **{f"saved_{load:g}": share for load, share in zip(LOADS, saved, strict=True)},
                **{f"answer_saved_{load:g}": share for load, share in zip(LOADS, answers, strict=True)},
            }


def verdict(theirs: float | None, ours: Sequence[float]) -> str:
    """Whether the paper's saving is there, or what is saved, over all loads. Within 1 % is a draw."""
    signs = [int(share > DRAW) - int(share < -DRAW) for share in ours]
    if theirs is None:
        return "draw" if not any(signs) else " and ".join(w for n, w in ((1, "saves"), (-1, "costs")) if n in signs)
    agree = sum(sign == (1 if theirs > 0 else -1) for sign in signs)
    return "yes" if agree == len(signs) else "in part" if agree else "no"


@dataclass(slots=True)
class Queue:
    """An engine observer: when each step ended, the rows that waited then, and N."""

    at_s: list[float]
    waiting: list[int]
    gathers: list[int]

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Row]) -> None:
        self.at_s.append(now_s)
        self.waiting.append(scheduler.queues.num_waiting)
        self.gathers.append(scheduler.queues.gathers)


def shaped(shape: str, rows: int, rows_per_s: float) -> Times:
    """Arrivals of `rows` rows at a mean rate. By quarters of the rows:

    step 0.5, 0.5, 1.5, 1.5 of the mean rate; ramp from 0.2 to 1.8; burst an eighth of the rows at once, in half of the
    rate; diurnal two waves between 0.2 and 1.8.
    """
    share = (np.arange(rows) + 0.5) / rows
    if shape == "burst":
        times = np.arange(rows) / (0.5 * rows_per_s)
        first, last = rows // 4, rows // 4 + rows // 8
        times[first:last] = times[first]
        times[last:] -= times[last] - times[first]
        return times
    rates = {
        "steady": np.full(rows, 1.0),
        "step": np.where(share < 0.5, 0.5, 1.5),
        "ramp": 0.2 + 1.6 * share,
        "diurnal": 1 + 0.8 * np.sin(4 * np.pi * share),
    }[shape]
    return np.cumsum(1 / (rows_per_s * rates))


def control(options: Options) -> Iterator[Figures]:
    """Controllers and made-up arrivals, at 0.8 of what the card can take: time to first token, N, and the queue after.

    Prompts have 1,500 tokens in the middle.
    """
    rows = options.rows(2 * ROWS, least=48)
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(1500), 0.7, rows), 8, 8000).astype(np.int64)
    lengths = Lengths(prompts, random.integers(10, 60, rows), np.zeros(rows))
    most_rows_per_s = rows_per_s(lengths)
    for shape, system in itertools.product(
        ("steady", "step", "ramp", "burst", "diurnal"), ("greedy", "mended", "continuous", "rounds")
    ):
        queue, arrived_at_s = Queue([], [], []), shaped(shape, rows, 0.8 * most_rows_per_s)
        ttft = Percentiles.of(waited(run(at_times(lengths, arrived_at_s), system, [queue])).ttft_s)
        assert ttft is not None
        figures: Figures = {"arrivals": shape, "system": system, "mean_s": ttft.mean_s, "p95_s": ttft.p95_s}
        if SYSTEMS[system].gathers:
            falls = sum(after < before for before, after in itertools.pairwise(queue.gathers))
            figures |= {"mean_n": float(np.mean(queue.gathers)), "falls": falls}
        if shape == "burst":  # until the queue is as short again as without it
            start_s, queued = arrived_at_s[rows // 4], np.array(queue.waiting) > max(4, rows // 40)
            figures["after_s"] = float(np.array(queue.at_s)[queued].max(initial=start_s) - start_s)
        yield figures
