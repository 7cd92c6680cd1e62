"""Baton (arXiv 2410.18701): batches of transformers that rows join and leave, against batches that run to completion.

    static      a batch is padded to its longest prompt and decodes until its longest output ends ("Benchmark")
    static-pd   the same, with prompts computed apart, in groups of similar lengths ("PD")
    baton       a query takes the slot of one that ended: running rows are padded to its prompt for a step
    baton-pd    the same, with its prompt computed apart ("Baton-PD")
    ragged      the rows of baton end to end, without padding

In all of them a row is answered when it ends. The paper calls `baton` equal to Orca in throughput; Orca batches
selectively and pads nothing, so it never was Orca: that is `ragged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from reproduce_table import Options, Table

from vasuki.base.arrays import Ints
from vasuki.engine.policy import POLICIES, Policy
from vasuki.engine.rectangles import Rows
from vasuki.engine.sequence import Request, SamplingParams
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.cost_model.unpacked import Piece
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import Way
from vasuki.planner.lengths import Lengths
from vasuki.simulator import simulate

WORD_TOKENS = 1.33
BLOCK_TOKENS = 16
MIXED, SHORT = 120, 30  # queries of the paper's two sets
PAPER_1 = {4: (21_901, 21_781, 20_549, 11_771), 8: (6_619, 6_577, 3_424, 2_654)}  # table 1, s
PAPER_2 = {2: 1.94, 4: 1.89, 6: 1.66, 8: 1.61, 10: 1.31}  # table 2, baton over static


@dataclass(frozen=True, slots=True)
class Method:
    """One of the systems compared."""

    name: str
    policy: Policy
    way: Way = "padded"
    apart: bool = True  # prompts are computed in rectangles of their own
    waves: bool = False  # rows stay until the last of their batch ends

    def requests(self, lengths: Lengths, batch: int) -> list[Request]:
        """The rows, each as long as it is computed. Prompts are made up."""
        random = np.random.default_rng(0)
        outputs = self.computed(lengths, batch)
        prompts = [random.integers(3, 700, count).astype(np.int32) for count in lengths.prompt_tokens]
        return [
            Request(row, row, len(prompt), output, prompt, SamplingParams(max_tokens=output, ignore_eos=True), output)
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def computed(self, lengths: Lengths, batch: int) -> list[int]:
        """Output tokens that are computed of each row."""
        outputs: list[int] = lengths.output_tokens.tolist()
        if not self.waves:
            return outputs
        starts = range(0, len(outputs), batch)
        return [max(outputs[start : start + batch]) for start in starts for _ in outputs[start : start + batch]]

    def settings(self, lengths: Lengths, batch: int) -> EngineSettings:
        """So many rows at a time, with memory for all of them: the paper's batches are no larger."""
        longest = int(lengths.prompt_tokens.max() + lengths.output_tokens.max()) + 1
        blocks = (batch + 1) * (-(-longest // BLOCK_TOKENS))
        return EngineSettings(self.policy, Limits(batch * longest, batch), blocks, BLOCK_TOKENS)


_WAVES = replace(POLICIES["static"], padded=False)  # the backend pads
METHODS = (
    Method("static", _WAVES, apart=False, waves=True),
    Method("static-pd", _WAVES, waves=True),
    Method("baton", POLICIES["orca"], apart=False),
    Method("baton-pd", POLICIES["orca"]),
    Method("ragged", POLICIES["orca"], way="ragged"),
)


class OneRectangle(CostModel):
    """Prices steps in which prompts and running rows are one rectangle."""

    def groups(self, pieces: Sequence[Piece], num_decodes: int) -> Iterable[Rows]:
        """All of them together."""
        return [[[i] for i in range(len(pieces))]]


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


def simulated_s(method: Method, lengths: Lengths, batch: int, card: str) -> float:
    """Makespan of Llama-2-7B in float16."""
    shape = replace(named_shape("llama-2-7b").with_dtype("float16"), way=method.way)
    cost = (CostModel if method.apart else OneRectangle)(shape, find_profile(card))
    requests = method.requests(lengths, batch)
    return simulate(requests, method.computed(lengths, batch), method.settings(lengths, batch), cost).makespan_s


def table_1(options: Options) -> Table:
    """Completion times of the mix."""
    table = Table(
        "Baton, table 1: queries completion time, Llama-2-7B, A6000, s (paper; ours simulated)",
        ("batch", *(method.name for method in METHODS)),
    )
    queries = options.rows(MIXED, least=16)
    for batch, paper in PAPER_1.items():
        lengths = mixed(queries, doubled=batch == 4)
        found = {method.name: simulated_s(method, lengths, batch, "rtx-a6000") for method in METHODS}
        known = [f"{seconds:,}; " for seconds in paper] + [""]
        cells = [f"{text}{seconds:,.0f}" for text, seconds in zip(known, found.values(), strict=True)]
        table.add(str(batch), *cells, batch=batch, **found)
    return table


def table_2(options: Options) -> Table:
    """What slots that are filled again gain on short queries."""
    table = Table(
        "Baton, table 2: baton over static, short queries, Llama-2-7B, RTX 4090 (paper; ours simulated)",
        ("batch", *map(str, PAPER_2)),
    )
    static, _, baton, *_ = METHODS
    lengths = short(SHORT)  # too few to be fewer
    ratios = {
        batch: simulated_s(static, lengths, batch, "rtx4090") / simulated_s(baton, lengths, batch, "rtx4090")
        for batch in PAPER_2
    }
    cells = [f"{PAPER_2[batch]}; {ratio:.2f}" for batch, ratio in ratios.items()]
    table.add("baton", *cells, **{f"batch_{batch}": ratio for batch, ratio in ratios.items()})
    return table
