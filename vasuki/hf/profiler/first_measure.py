"""A machine measured in seconds, by real steps of the model that a job is about to run.

    decodes of 1, 8, 32, 96 rows, chunks of 64 to 512 tokens    ->  measured.in_step, by tokens of a step
    the same with long contexts                                 ->  measured.attention, of decodes and of chunks

Steps rather than operators: their sum is what a job takes, so nothing between them is left out, and no operator has to
be told from its neighbours. A profile of this kind holds for the model that it was measured with; `vasuki profile`
measures operators one by one, and what it finds holds for others too.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from vasuki.base.errors import one_line
from vasuki.base.units import duration, percent_text
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.device.device import available_bytes, describe
from vasuki.hf.kernels.varlen import preferred_block_tokens
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.profiler import links
from vasuki.hf.profiler.rows import row_at
from vasuki.hf.profiler.timing import QUICK
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.machines.cost_model import CostModel, OperatorModel, StepWork
from vasuki.machines.here import control_group
from vasuki.machines.here.measured import DATASHEET, MachineProfile, budget_s, keep
from vasuki.machines.here.pressure import BUSY, cpu_pressure
from vasuki.machines.here.stolen_time import NOISE, StolenTime
from vasuki.machines.measured_points import AttentionPoint, AttentionPoints, InStep, Measured
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape

log = logging.getLogger(__name__)

_BLOCK_TOKENS = 16  # where any size is as good
_SHORT = 32  # context of decodes whose attention hardly counts
_FIRST_SHARE = 0.5  # of the budget, for a first look at each size
_NARROW = 16  # tokens up to which steps take about the same: they read the weights
_LONG_SHARE = 0.03  # of the budget: longer steps are believed the first time
_MOST_ROUNDS = 12
_LEAST_SIZES = 2  # one that reads the weights, and one that computes: no budget goes without
_MOST_SPREAD = 0.25  # of the middle half of equal steps, on a machine that can be measured
_MEMORY_SHARE = 0.25  # of what is free, for the keys and values of these steps
_STEP_US = 300.0  # of scheduler, observers and output, which run between the steps measured here
_ATTENTION = (0.05, 4.0)  # times what rooflines say of it: beyond, it is noise of two steps that hardly differ


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step of some decodes of one context, or of one chunk of a prompt that ends at it."""

    decodes: int
    chunk: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decodes + self.chunk

    @property
    def kv_tokens(self) -> int:
        """Tokens that it attends to."""
        return max(1, self.decodes) * self.context

    def num_blocks(self, block_tokens: int) -> int:
        """Return the blocks that it attends to."""
        return max(1, self.decodes) * -(-self.context // block_tokens)

    def work(self, cost_model: CostModel) -> StepWork:
        """The step as the cost model sees it."""
        if self.chunk:
            return cost_model.work([self.chunk], [self.context])
        return cost_model.work([1] * self.decodes, [self.context] * self.decodes)

    def within(self, max_context: int) -> StepSize:
        """Return the size that fits a model with no more context than that."""
        return StepSize(self.decodes, min(self.chunk, max_context), min(self.context, max_context))


# Those that tell most come first, so that a budget ends with those that matter least: (decodes, chunk, context).
SIZES = (
    StepSize(1, 0, _SHORT),
    StepSize(0, 64, 64),
    StepSize(8, 0, _SHORT),
    StepSize(8, 0, 512),
    StepSize(0, 256, 256),
    StepSize(32, 0, _SHORT),
    StepSize(0, 64, 1024),
    StepSize(96, 0, _SHORT),
    StepSize(0, 512, 512),
)
# Of rows that are computed one after another: a call has one, and starts at its first token.
SIZES_ALONE = (StepSize(0, 1, 1), StepSize(0, 64, 64), StepSize(0, 256, 256), StepSize(0, 512, 512))


@dataclass(slots=True)
class StepTimings:
    """Seconds of each size's steps."""

    seconds: dict[StepSize, list[float]] = field(default_factory=dict)
    busy_s: dict[StepSize, list[float]] = field(default_factory=dict)  # of all processors, in this process
    disturbed: bool = False  # by other programs
    stretch: float = 1.0  # what work takes in the long run over what it takes in a moment, under a quota

    def add(self, size: StepSize, seconds: float, busy_s: float) -> None:
        """Note a step."""
        self.seconds.setdefault(size, []).append(seconds)
        self.busy_s.setdefault(size, []).append(busy_s)

    def typical_s(self, size: StepSize) -> float:
        """Seconds of a step of that size.

        Its median, on a machine of one's own. On a shared one a few steps tell more of the others than of themselves:
        there it is what the step kept processors busy for, times what all steps together waited beyond that. Under a
        quota, which short steps do not use up, it is what the quota allows for in the long run.
        """
        if self.busy_s and self.stretch > 1:
            return max(statistics.median(self.seconds[size]), statistics.median(self.busy_s[size]) * self.stretch)
        if not (self.disturbed and self.busy_s):
            return statistics.median(self.seconds[size])
        waited, busy = (sum(map(sum, each.values())) for each in (self.seconds, self.busy_s))
        return statistics.median(self.busy_s[size]) * waited / busy

    def expected_s(self, size: StepSize) -> float:
        """Seconds that a step takes at least, about, by the largest measured step that is smaller."""
        smaller = max((each for each in self.seconds if each.tokens <= size.tokens), key=lambda each: each.tokens)
        return self.seconds[smaller][0] * size.tokens / max(smaller.tokens, _NARROW)

    @property
    def spread(self) -> float:
        """The share by which the middle half of a size's steps lies apart; the median of the sizes."""
        apart = []
        for seconds in self.seconds.values():
            if len(seconds) > 2:
                low, high = np.quantile(seconds, (0.25, 0.75))
                apart.append(float(high - low) / statistics.median(seconds))
        return statistics.median(apart) if apart else 0.0


def measured_now(
    loaded: LoadedModel,
    shape: ModelShape,
    base: HardwareProfile,
    rough_s: float,
    key: Mapping[str, str],
    block_tokens: int | Literal["auto"],
) -> MachineProfile:
    """`measure_first` for a job that takes about `rough_s`, kept under a key; the base profile if nothing runs."""
    started_s, stolen, pressure = time.perf_counter(), StolenTime(), cpu_pressure()
    try:
        profile = measure_first(loaded, shape, base, lambda slower: budget_s(slower * rough_s), block_tokens)
    except (RuntimeError, MemoryError) as error:  # what torch raises, also for memory that ran out
        log.warning("this machine could not be measured: %s", one_line(error))
        return MachineProfile(base, DATASHEET)
    seconds = time.perf_counter() - started_s
    keep(key, profile, seconds, pressure)
    machine = MachineProfile(profile, f"measured just now in {duration(seconds)}", key)
    if machine.spread:
        why = "its host gave processors to others" if stolen.share > NOISE else "other programs use its processors"
        off = percent_text(machine.spread)
        log.warning("this machine is too busy to be measured well (%s): times may be %s off", why, off)
    return machine


def measure_first(
    loaded: LoadedModel,
    shape: ModelShape,
    base: HardwareProfile,
    budget_of: Callable[[float], float],
    block_tokens: int | Literal["auto"] = "auto",
) -> HardwareProfile:
    """What the base profile says of this machine, corrected by steps of the model at hand.

    Args:
        loaded: the model, on its device.
        shape: its own, in the type that it runs in.
        base: datasheet figures of the device.
        budget_of: seconds to spend, by the ratio of measured steps to the base profile's prediction. A step that is
            under way is ended.
        block_tokens: as the job has it; `auto` is what the attention of the model prefers, as in a run.

    Raises:
        RuntimeError, MemoryError: as torch does where a step does not run.
    """
    waited = cpu_pressure() if loaded.device.type == "cpu" else 0.0
    timings = time_steps(loaded, CostModel(shape, base), budget_of, block_tokens)
    timings.stretch = max(1.0, 1 / (control_group.processor_quota() or 1.0))
    is_noisy = (waited > BUSY or timings.spread > _MOST_SPREAD) and timings.stretch == 1  # pauses of a quota are none
    timings.disturbed = loaded.device.type == "cpu" and is_noisy
    profile = fitted(timings, shape, base, max(_MOST_SPREAD, timings.spread) if timings.disturbed else 0.0)
    if loaded.device.type == "cuda":
        link = links.measure_link(loaded.device, replace(QUICK, group_s=0.05), base.link.kind, "measured before a run")
        profile = profile.model_copy(update={"link": link})
    return profile.model_copy(update={"processors": describe(loaded.device).processors})


# --- steps -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def time_steps(
    loaded: LoadedModel,
    cost_model: CostModel,
    budget_of: Callable[[float], float],
    block_tokens: int | Literal["auto"] = "auto",
) -> StepTimings:
    """Run steps of each size by turns until the time is over; sizes that a first look leaves no time for are left out.

    Args:
        loaded: the model.
        cost_model: of its shape, by datasheet.
        budget_of, block_tokens: see `measure_first`.
    """
    started_s, shape = time.perf_counter(), cost_model.shape
    most = min(loaded.max_context, shape.max_context_tokens)
    sizes = list(dict.fromkeys(size.within(most) for size in (SIZES if loaded.in_blocks else SIZES_ALONE)))
    room = _MEMORY_SHARE * available_bytes(loaded.device) / loaded.token_bytes
    if block_tokens == "auto":
        layout = loaded.kv_layout
        preferred = preferred_block_tokens(layout.dtype, loaded.device, min(layout.head_dims, default=0))
        block_tokens = preferred or _BLOCK_TOKENS
    sizes = [size for size in sizes if size.num_blocks(block_tokens) * block_tokens <= room] or sizes[:1]
    executor = _executor(loaded, cost_model, sizes, block_tokens)
    timings, batches, slower = StepTimings(), {}, 1.0
    for size in sizes:
        budget_s = budget_of(slower)
        first_look_ends_s = started_s + _FIRST_SHARE * budget_s
        if len(timings.seconds) >= _LEAST_SIZES and time.perf_counter() + timings.expected_s(size) > first_look_ends_s:
            continue
        batches[size] = _batch(size, shape.vocab_size, block_tokens)
        timed = _timed(executor, batches[size])
        if timed[0] < _LONG_SHARE * budget_s:  # taking memory and loading kernels counts in short steps
            timed = _timed(executor, batches[size])
        timings.add(size, *timed)
        slower = max(slower, timed[0] / cost_model.step_time_s(size.work(cost_model)))
    ends_s = started_s + budget_of(slower)
    for _ in range(_MOST_ROUNDS):
        for size, batch in batches.items():
            if time.perf_counter() + timings.seconds[size][0] > ends_s:
                return timings
            timings.add(size, *_timed(executor, batch))
    return timings


def _timed(executor: RaggedExecutor, batch: Batch) -> tuple[float, float]:
    """Wall seconds of a step, and processor seconds of this process meanwhile."""
    started_s, busy_s = time.perf_counter(), time.process_time()
    executor.execute(batch)
    return time.perf_counter() - started_s, time.process_time() - busy_s


def _executor(loaded: LoadedModel, cost_model: CostModel, sizes: list[StepSize], block_tokens: int) -> RaggedExecutor:
    """An executor as in a run, which records a step of decodes as soon as it has been timed once."""
    limits = Limits(max(size.tokens for size in sizes), max(1, *(size.decodes for size in sizes)))
    num_blocks = max(size.num_blocks(block_tokens) for size in sizes)
    settings = EngineSettings(find_policy("sarathi"), limits, num_blocks, block_tokens)
    executor = build_executor(loaded, settings, record_after=1, cost_model=cost_model)
    for layer in executor.cache.layers:
        layer.fill_(0.01)  # pages that nobody wrote to are all the same one, and lie in the nearest cache
    return executor


def _batch(size: StepSize, vocab_size: int, block_tokens: int) -> Batch:
    rng = np.random.default_rng(0)
    blocks, each = itertools.count(), -(-size.context // block_tokens)

    def sequence(row: int, computed: int) -> Sequence:
        token_ids = rng.integers(0, vocab_size, size.context)
        return row_at(row, token_ids, computed, list(itertools.islice(blocks, each)))

    if size.chunk:
        start = size.context - size.chunk
        return Batch([], [], [ScheduledChunk(sequence(0, start), start, size.chunk, True)], [])
    last = size.context - 1
    return Batch([sequence(row, last) for row in range(size.decodes)], [last] * size.decodes, [], [])


# --- fit -------------------------------------------------------------------------------------------------------------


def fitted(timings: StepTimings, shape: ModelShape, base: HardwareProfile, spread: float = 0.0) -> HardwareProfile:
    """The base profile with rates, attention and ratios by which it meets these steps."""
    base = _paced(timings, shape, base)
    points = tuple(_attention_points(timings, shape, base))
    source = f"steps of {shape.name}, {datetime.date.today().isoformat()}, torch {torch.__version__.partition('+')[0]}"
    before = base.measured or Measured(source=source)
    attention = before.attention
    if points:
        kv_heads, head_dim = shape.full_heads
        heads = {"heads": shape.num_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attention = (AttentionPoints(**heads, dtype=shape.dtype, kv_dtype=shape.kv_dtype, points=points),)
    measured = before.model_copy(
        update={
            "source": source,
            "rates": base.rates,
            "attention": attention,
            "in_step": None,
            "spread": float(f"{spread:.3g}"),
        }
    )
    profile = base.model_copy(update={"measured": measured})
    return profile.model_copy(
        update={"measured": measured.model_copy(update={"in_step": _ratios(timings, shape, profile)})}
    )


def _paced(timings: StepTimings, shape: ModelShape, base: HardwareProfile) -> HardwareProfile:
    """Give a CPU the rates that the longest chunk and the shortest step show, so that ratios are near 1 everywhere and
    hold beyond the sizes measured."""
    overheads = base.overheads.model_copy(
        update={
            "step_us": _STEP_US * timings.stretch,
            "launch_us": 0,
            "kernel_us": 0.1,
            "source": "steps were measured as a whole",
        }
    )
    base = base.model_copy(update={"overheads": overheads, "rates_measured_on": datetime.date.today().isoformat()})
    if base.kind == "gpu":
        return base
    by_tokens = sorted(timings.seconds, key=lambda size: size.tokens)
    longest, shortest = by_tokens[-1], by_tokens[0]
    cost_model = CostModel(shape, base)
    flops_per_s = cost_model.step(longest.work(cost_model)).flops / timings.typical_s(longest)
    bytes_per_s = cost_model.step(shortest.work(cost_model)).memory_bytes / timings.typical_s(shortest)
    efficiency = base.efficiency.model_copy(
        update={"matmul": 1.0, "bandwidth": 1.0, "source": "of rates that steps of the model reached"}
    )
    return base.model_copy(
        update={
            "peak_tflops": {**base.peak_tflops, shape.dtype: flops_per_s / 1e12},
            "memory_gb_per_s": bytes_per_s / 1e9,
            "efficiency": efficiency,
            "tile_rows": 1,
        }
    )


def _attention_points(timings: StepTimings, shape: ModelShape, base: HardwareProfile) -> Iterator[AttentionPoint]:
    """Points of decodes and of chunks, where there were steps of both a short and a long context."""
    operators = OperatorModel(base.datasheet_only(), shape.dtype, shape.kv_dtype)
    heads = (shape.num_heads, *shape.full_heads)
    for short, long in itertools.permutations(timings.seconds, 2):
        if (short.decodes, short.chunk) == (long.decodes, long.chunk) and short.context < long.context:
            rows, tokens = max(1, long.decodes), max(1, long.chunk)
            work = StepWork.of([tokens] * rows, [long.context] * rows)
            if long.chunk:
                alone = operators.chunk_attention(work.chunk_pairs, work.chunk_context_tokens, *heads)
            else:
                alone = operators.decode_attention(work.decode_context_tokens, *heads)
            us = alone.total_s * _attention_ratio(timings, shape, base, short, long) * 1e6
            yield AttentionPoint(sequences=rows, tokens=tokens, context=long.context, us=us)


def _attention_ratio(
    timings: StepTimings, shape: ModelShape, base: HardwareProfile, short: StepSize, long: StepSize
) -> float:
    """Ratio of attention's time to its rooflines, from two steps that differ only in context.

    With d seconds of everything but attention, and a and b of attention by the rooflines, the steps take r (d + x a)
    and r (d + x b): the ratio of the two leaves x.
    """
    cost_model = CostModel(shape, base.datasheet_only())
    costs = [cost_model.step(size.work(cost_model)) for size in (short, long)]
    rest_s = statistics.mean(cost.device_s - cost.attention_s for cost in costs)
    short_s, long_s = timings.typical_s(short), timings.typical_s(long)
    below = costs[1].attention_s * short_s - costs[0].attention_s * long_s
    least, most = _ATTENTION
    found = rest_s * (long_s - short_s) / below if below > 0 else most
    return min(most, max(least, found))


def _ratios(timings: StepTimings, shape: ModelShape, profile: HardwareProfile) -> InStep:
    """Steps over what the cost model says of them, by tokens. Of sizes with as many tokens, the shortest context."""
    cost_model, ratios = CostModel(shape, profile), {}
    for size in sorted(timings.seconds, key=lambda size: (size.tokens, -size.kv_tokens)):
        cost = cost_model.step(size.work(cost_model))
        others_s = cost.total_s - cost.device_s - profile.overheads.step_us * 1e-6  # between the steps
        ratios[size.tokens] = float(f"{max(1e-3, (timings.typical_s(size) - others_s) / cost.device_s):.4g}")
    return InStep(tokens=tuple(ratios), ratio=tuple(ratios.values()))
