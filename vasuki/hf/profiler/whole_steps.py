"""Times whole steps of a model, by the executor of a run.

Steps rather than operators: their sum is what a job takes, so nothing between them is left out, and no operator has to
be told from its neighbours.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Sequence as Row
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.device.device import available_bytes
from vasuki.hf.kernels.varlen import preferred_block_tokens
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.profiler.rows import row_at
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.machines.cost_model import CostModel, StepWork

_BLOCK_TOKENS = 16  # where any size is as good
_SHORT = 32  # context of decodes whose attention hardly counts
_FIRST_SHARE = 0.5  # of the budget, for a first look at each size
_NARROW = 16  # tokens up to which steps take about the same: they read the weights
_LONG_SHARE = 0.03  # of the budget: longer steps are believed the first time
_MOST_ROUNDS = 12
_LEAST_SIZES = 2  # one that reads the weights, and one that computes: no budget goes without
_MEMORY_SHARE = 0.25  # of what is free, for the keys and values of these steps


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
# Where there is a minute: more numbers of rows, and longer contexts.
MORE_SIZES = (
    *SIZES,
    StepSize(2, 0, _SHORT),
    StepSize(4, 0, _SHORT),
    StepSize(16, 0, _SHORT),
    StepSize(32, 0, 512),
    StepSize(0, 128, 128),
    StepSize(0, 512, 1024),
    StepSize(0, 1024, 1024),
    StepSize(0, 512, 4096),
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


@torch.inference_mode()
def time_steps(
    loaded: LoadedModel,
    cost_model: CostModel,
    budget_of: Callable[[float], float],
    block_tokens: int | Literal["auto"] = "auto",
    sizes: Sequence[StepSize] = SIZES,
) -> StepTimings:
    """Run steps of each size by turns until the time is over; sizes that a first look leaves no time for are left out.

    Args:
        loaded: the model.
        cost_model: of its shape, by datasheet.
        budget_of, block_tokens: see `measure_first`.
        sizes: of steps, those first that matter most; of rows that are computed one after another, `SIZES_ALONE`.
    """
    started_s, shape = time.perf_counter(), cost_model.shape
    most = min(loaded.max_context, shape.max_context_tokens)
    chosen = list(dict.fromkeys(size.within(most) for size in (sizes if loaded.in_blocks else SIZES_ALONE)))
    room = _MEMORY_SHARE * available_bytes(loaded.device) / loaded.token_bytes
    if block_tokens == "auto":
        layout = loaded.kv_layout
        preferred = preferred_block_tokens(layout.dtype, loaded.device, min(layout.head_dims, default=0))
        block_tokens = preferred or _BLOCK_TOKENS
    chosen = [size for size in chosen if size.num_blocks(block_tokens) * block_tokens <= room] or chosen[:1]
    executor = _executor(loaded, cost_model, chosen, block_tokens)
    timings, batches, slower = StepTimings(), {}, 1.0
    for size in chosen:
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


def _executor(
    loaded: LoadedModel, cost_model: CostModel, sizes: Sequence[StepSize], block_tokens: int
) -> RaggedExecutor:
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

    def sequence(row: int, computed: int) -> Row:
        token_ids = rng.integers(0, vocab_size, size.context)
        return row_at(row, token_ids, computed, list(itertools.islice(blocks, each)))

    if size.chunk:
        start = size.context - size.chunk
        return Batch([], [], [ScheduledChunk(sequence(0, start), start, size.chunk, True)], [])
    last = size.context - 1
    return Batch([sequence(row, last) for row in range(size.decodes)], [last] * size.decodes, [], [])
