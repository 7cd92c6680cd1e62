"""Baton (arXiv 2410.18701): batches of transformers that rows join and leave, against batches that run to completion.

    static      a batch is padded to its longest prompt and decodes until its longest output ends ("Benchmark")
    static-pd   the same, with prompts computed apart, in groups of similar lengths ("PD")
    baton       a query takes the slot of one that ended: running rows are padded to its prompt for a step
    with holes  the same with the paper's cache, in which that padding stays
    baton-pd    as baton, but with prompts computed apart ("Baton-PD")
    ragged      the rows of baton end to end, without padding

In all of them a row is answered when it ends. The paper calls `baton` equal to Orca in throughput; Orca batches
selectively and pads nothing, so it never was Orca: that is `ragged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from reproduce_table import Figures, Options

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.policy import POLICIES, Policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.engine.shaping import Shaped, Shaping, shaping_of
from vasuki.machines.cost_model import Copies, CostModel, StepWork
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import Lengths
from vasuki.simulator import simulate

WORD_TOKENS = 1.33
BLOCK_TOKENS = 16
MIXED, SHORT = 120, 30  # queries of the paper's two sets
SHAPE = named_shape("llama-2-7b").with_dtype("float16")
PAPER_1 = {4: (21_901, 21_781, 20_549, 11_771), 8: (6_619, 6_577, 3_424, 2_654)}  # table 1, s
PAPER_2 = {2: 1.94, 4: 1.89, 6: 1.66, 8: 1.61, 10: 1.31}  # table 2, baton over static
GB = 1e9


class Holes:
    """Columns of the paper's cache (section 4.1), as vasuki does not keep them.

    A row that joins with a prompt of n tokens widens the cache by n columns. Rows that decode have a token in the first
    of them, and holes in the others. Before rows join, columns are released that come before the first token of every
    row. That the cache grows beyond the memory of the card is not held against it.

    Attributes:
        most_cells: of the cache, rows times columns.
    """

    def __init__(self) -> None:
        self.most_cells = 0
        self._first: dict[Sequence, int] = {}  # column of each row's first token
        self._ahead: dict[Sequence, int] = {}  # columns by which its next token is ahead of its position

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """A call of all rows, over all columns."""
        decodes = list(zip(batch.decodes, batch.starts, strict=True))
        width = self._ahead[decodes[0][0]] + decodes[0][1] if decodes else 0
        self.most_cells = max(self.most_cells, len(decodes) * width)
        new = 1
        if batch.prefills:
            released = min([self._first[row] for row, _ in decodes], default=0)
            new, width = max(chunk.num_tokens for chunk in batch.prefills), width - released
            for row, start in decodes:
                self._first[row] -= released
                self._ahead[row] = width + new - (start + 1)
            for chunk in batch.prefills:
                self._first[chunk.sequence] = self._ahead[chunk.sequence] = width + new - chunk.end
        self.most_cells = max(self.most_cells, batch.num_seqs * (width + new))
        return [Shaped([[i] for i in range(batch.num_seqs)], width + new)]


class WithHoles(CostModel):
    """Prices calls over the columns of the paper's cache."""

    def __init__(self, shape: ModelShape, card: str) -> None:
        super().__init__(shape, find_profile(card))
        self.holes = Holes()

    def batch_work(
        self, batch: Batch, copies: tuple[Copies, ...] = (), shaped: Iterable[Shaped] | None = None
    ) -> StepWork:
        """See `CostModel`."""
        return super().batch_work(batch, copies, self.holes(batch))


@dataclass(frozen=True, slots=True)
class Method:
    """One of the systems compared."""

    name: str
    policy: Policy
    holes: bool = False

    @property
    def is_padded(self) -> bool:
        return bool(self.policy.pads)

    def shaping(self) -> Shaping | None:
        """Of its calls."""
        return Holes() if self.holes else shaping_of(self.policy)

    def cost(self, card: str) -> CostModel:
        """Of Llama-2-7B in float16."""
        shape = replace(SHAPE, backend="padded" if self.is_padded else "ragged")
        return WithHoles(shape, card) if self.holes else CostModel(shape, find_profile(card))

    def settings(self, lengths: Lengths, batch: int) -> EngineSettings:
        """Settings for a number of rows at a time, with memory for all of them: the paper's batches are no larger."""
        longest = int(lengths.prompt_tokens.max() + lengths.output_tokens.max()) + 1
        blocks = (batch + 1) * (-(-longest // BLOCK_TOKENS))
        return EngineSettings(self.policy, Limits(batch * longest, batch), blocks, BLOCK_TOKENS)


STATIC, STATIC_PD, BATON, HOLES, BATON_PD, RAGGED = METHODS = (
    Method("static", POLICIES["static"]),
    Method("static-pd", POLICIES["static-pd"]),
    Method("baton", POLICIES["baton"]),
    Method("with holes", POLICIES["baton"], holes=True),
    Method("baton-pd", POLICIES["baton-pd"]),
    Method("ragged", POLICIES["orca"]),
)


def requests_of(lengths: Lengths) -> list[Request]:
    """The rows. Prompts are made up."""
    random = np.random.default_rng(0)
    rows = enumerate(zip(lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), strict=True))
    return [
        Request(
            row,
            row,
            prompt,
            output,
            random.integers(3, 700, prompt).astype(np.int32),
            SamplingParams(max_tokens=output, ignore_eos=True),
            output,
        )
        for row, (prompt, output) in rows
    ]


def mixed(queries: int, shrunk: float = 1.0, doubled: bool = False) -> Lengths:
    """Table 1's mix: long prompts, long outputs, and neither, 1 to 1 to 2. Lengths are divided by `shrunk`."""
    random = np.random.default_rng(0)
    tokens = WORD_TOKENS * (2 if doubled else 1) / shrunk

    def draw(least: int, most: int) -> Ints:
        drawn: Ints = np.maximum(2, tokens * random.integers(least, most, queries)).astype(np.int64)
        return drawn

    kind = random.permutation(np.resize([0, 1, 2, 2], queries))
    prompts, outputs = (np.where(kind == long, draw(3600, 4400), draw(30, 400)) for long in (0, 1))
    return Lengths(prompts, outputs)


def short(queries: int, shrunk: float = 1.0) -> Lengths:
    """Table 2's queries, prompts and outputs of a few dozen to 200 words."""
    random = np.random.default_rng(0)
    drawn = random.integers(30, 200, (2, queries)) * WORD_TOKENS / shrunk
    prompts, outputs = np.maximum(2, drawn).astype(np.int64)
    return Lengths(prompts, outputs)


@dataclass(slots=True)
class OverTime:
    """An observer of single steps: what a user has, and what the cache takes. Cells are rows times columns, of those
    whose prompts are computed apart as well; without columns, tokens."""

    shaping: Shaping | None
    seconds: list[float] = field(default_factory=list)  # at the end of each step
    answered: list[int] = field(default_factory=list)  # rows that have ended
    tokens: list[int] = field(default_factory=list)  # that they and the others have
    cells: list[int] = field(default_factory=list)

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note a step."""
        last = [each[-1] if each else 0 for each in (self.seconds, self.answered, self.tokens)]
        self.seconds.append(last[0] + result.elapsed_s)
        self.answered.append(int(last[1]) + len(finished))
        self.tokens.append(int(last[2]) + batch.num_samples)
        ends = [chunk.end for chunk in batch.chunks]
        calls = self.shaping(batch) if self.shaping else [Shaped([[i]]) for i in range(len(ends))]
        self.cells.append(sum(len(rows) * max(columns, *(ends[row[0]] for row in rows)) for rows, columns in calls))

    @property
    def half_s(self) -> float:
        """When half of the rows were answered."""
        half = self.answered[-1] / 2
        return next(second for second, rows in zip(self.seconds, self.answered, strict=True) if rows >= half)

    @property
    def mean_cells(self) -> float:
        """Over time."""
        steps = np.diff(self.seconds, prepend=0.0)
        return float((steps * np.array(self.cells)).sum() / self.seconds[-1])


def over_time(method: Method, lengths: Lengths, batch: int, card: str) -> OverTime:
    """A simulation, step by step."""
    seen = OverTime(method.shaping())
    settings, outputs = method.settings(lengths, batch), lengths.output_tokens.tolist()
    simulate(requests_of(lengths), outputs, settings, method.cost(card), observers=[seen], one_by_one=True)
    return seen


def simulated_s(method: Method, lengths: Lengths, batch: int, cost: CostModel) -> float:
    """Makespan."""
    settings, outputs = method.settings(lengths, batch), lengths.output_tokens.tolist()
    return simulate(requests_of(lengths), outputs, settings, cost).makespan_s


def table_1(options: Options) -> Iterator[Figures]:
    """Baton, table 1: completion time of the mix, Llama-2-7B, A6000, s; cache with holes, GB."""
    queries = options.rows(MIXED, least=16)
    for batch, (static, static_pd, baton, baton_pd) in PAPER_1.items():
        lengths = mixed(queries, doubled=batch == 4)
        costs = {method.name: method.cost("rtx-a6000") for method in METHODS}
        found = {method.name: simulated_s(method, lengths, batch, costs[method.name]) for method in METHODS}
        holes = costs[HOLES.name]
        assert isinstance(holes, WithHoles)
        yield {
            "batch": batch,
            **found,
            "holes_gb": holes.holes.most_cells * SHAPE.kv_bytes_per_token / GB,
            "paper_static": static,
            "paper_static_pd": static_pd,
            "paper_baton": baton,
            "paper_baton_pd": baton_pd,
        }


def table_2(options: Options) -> Iterator[Figures]:
    """Baton, table 2: what slots filled again gain over static, short queries, by batch, Llama-2-7B, RTX 4090."""
    lengths = short(SHORT)  # too few to be fewer
    yield {"system": "paper's baton", **{f"batch_{batch}": gain for batch, gain in PAPER_2.items()}}
    for method in (BATON, HOLES):
        static, other = (
            [simulated_s(each, lengths, batch, each.cost("rtx4090")) for batch in PAPER_2] for each in (STATIC, method)
        )
        ratios = {f"batch_{batch}": a / b for batch, a, b in zip(PAPER_2, static, other, strict=True)}
        yield {"system": method.name, **ratios}


def figures_5_to_7(options: Options) -> Iterator[Figures]:
    """Baton, figures 5 to 7: what a user has of the short queries, and what the cache takes, over time."""
    lengths = short(SHORT)  # too few to be fewer
    for batch in PAPER_2:
        for method in (STATIC, BATON, HOLES):
            seen = over_time(method, lengths, batch, "rtx4090")
            mean_gb, most_gb = (cells * SHAPE.kv_bytes_per_token / GB for cells in (seen.mean_cells, max(seen.cells)))
            yield {
                "batch": batch,
                "system": method.name,
                "half_s": seen.half_s,
                "all_s": seen.seconds[-1],
                "mean_gb": mean_gb,
                "most_gb": most_gb,
            }
