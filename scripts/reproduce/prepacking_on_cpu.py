"""Prepacking for real, on this machine, with a Llama of random weights: what prompts that share rows save.

    python scripts/reproduce/prepacking_on_cpu.py --data DIR [--rounds 3] [--write]

Prompts are as long as in three public traces, divided so that a CPU takes minutes, and are computed up to their
first token in five ways, by turns:

    full          batches of 16 in order of arrival, each row as long as its longest
    prepacking    the same batches, first-fit decreasing
    ordered       batches of 16 in order of length
    set packed    all prompts packed at once, as many rows a call as prepacking has
    ragged        the batches of arrival end to end, without rows, by this project's own attention

All ways have to give the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from on_cpu import arguments, small_llama, tell
from reproduce_prepacking import TRACE
from reproduce_table import Figures

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.blocks import BlockTable
from vasuki.engine.policy import find_policy
from vasuki.engine.rectangles import Rows
from vasuki.engine.sequence import Request, Sequence, Status
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.engine.shaping import Shaped
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.padded.forward import Padded
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.models.shape import Backend
from vasuki.planner.lengths import read_lengths
from vasuki_solvers import first_fit_decreasing

BATCH, BATCHES, SHRUNK = 16, 8, 48
TRACES = {"arXiv": TRACE, "conversation": "azure_conv_arrivals.csv", "coding": "azure_code_arrivals.csv"}
BLOCK_TOKENS = 16
Pack = Callable[[list[int]], Rows]


def full(lengths: list[int]) -> Rows:
    """A row for each."""
    return [[i] for i in range(len(lengths))]


def packed(lengths: list[int]) -> Rows:
    """Rows as long as the longest."""
    return [list(row) for row in first_fit_decreasing(lengths, max(lengths)).bins]


class OneRectangle:
    """A shaping with all prompts of a step in one rectangle.

    Attributes:
        pack: shapes it.
    """

    pack: Pack

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """See `pack`."""
        return [Shaped(self.pack([chunk.num_tokens for chunk in batch.chunks]))]


@dataclass(frozen=True, slots=True)
class Call:
    """Prompts that are computed together, by their place among all."""

    prompts: list[int]
    way: str
    pack: Pack | None = None  # None: ragged

    def tokens(self, lengths: Ints) -> tuple[int, int]:
        """Tokens of prompts, and tokens that are computed."""
        wanted = int(lengths[self.prompts].sum())
        if self.pack is None:
            return wanted, wanted
        return wanted, self.num_rows(lengths) * self.longest_row(lengths)

    def num_rows(self, lengths: Ints) -> int:
        return len(self.rows(lengths))

    def longest_row(self, lengths: Ints) -> int:
        return max(int(lengths[np.array(self.prompts)[row]].sum()) for row in self.rows(lengths))

    def rows(self, lengths: Ints) -> Rows:
        assert self.pack is not None
        return self.pack(lengths[self.prompts].tolist())


def calls(lengths: Ints) -> list[Call]:
    """All prompts in each of the ways."""
    arrived = np.arange(len(lengths)).reshape(-1, BATCH).tolist()
    ordered = np.argsort(lengths, kind="stable").reshape(-1, BATCH).tolist()
    found = [Call(prompts, way, pack) for prompts in arrived for way, pack in (("full", full), ("prepacking", packed))]
    rows = statistics.mean(call.num_rows(lengths) for call in found if call.way == "prepacking")
    found += [Call(prompts, "ordered", full) for prompts in ordered]
    found += [Call(prompts, "ragged") for prompts in arrived]
    return found + list(set_packed(lengths, round(rows)))


def set_packed(lengths: Ints, rows: int) -> Iterable[Call]:
    """All prompts packed at once, a number of rows a call."""
    bins = packed(lengths.tolist())
    for first in range(0, len(bins), rows):
        chosen = bins[first : first + rows]
        prompts = [i for row in chosen for i in row]
        place = {i: k for k, i in enumerate(prompts)}
        shape = [[place[i] for i in row] for row in chosen]
        yield Call(prompts, "set packed", lambda _, shape=shape: shape)  # type: ignore[misc]


class Machine:
    """Computes calls on both backends, over blocks that are there already."""

    def __init__(self, models: dict[Backend, LoadedModel], lengths: Ints) -> None:
        random = np.random.default_rng(0)
        self.prompts = [random.integers(3, 700, length).astype(np.int32) for length in lengths]
        blocks = int((lengths // BLOCK_TOKENS + 1).sum())
        limits = Limits(int(lengths.sum()), len(lengths))
        settings = EngineSettings(find_policy("vasuki"), limits, blocks, BLOCK_TOKENS)
        self.ragged, self.padded = (build_executor(models[way], settings) for way in ("ragged", "padded"))
        self.shaping = OneRectangle()
        self.padded.unpacked = Padded(models["padded"].model, self.padded.cache, shaping=self.shaping)

    def seconds(self, call: Call) -> tuple[float, list[int]]:
        """Seconds of the processor up to the first tokens of a call, and these tokens."""
        batch = self.batch(call.prompts)
        started_s = time.process_time()  # what other programs take from the machine hardly counts
        tokens = self.executor(call).launch(batch).wait().token_ids
        return time.process_time() - started_s, tokens

    def executor(self, call: Call) -> RaggedExecutor:
        """The backend, shaped as the call says."""
        if call.pack is None:
            return self.ragged
        self.shaping.pack = call.pack
        return self.padded

    def batch(self, prompts: list[int]) -> Batch:
        """Whole prompts."""
        chunks, block = [], 0
        for i in prompts:
            ids = self.prompts[i]
            count = len(ids) // BLOCK_TOKENS + 1
            table = BlockTable(device=list(range(block, block + count)))
            row = Sequence(Request(i, i, len(ids), 1, ids), block_table=table, status=Status.RUNNING)
            chunks.append(ScheduledChunk(row, 0, len(ids), True))
            block += count
        return Batch([], [], chunks, [])


def timed(machine: Machine, found: list[Call], rounds: int) -> list[float]:
    """Seconds of each call, the median of its rounds. Raises AssertionError if ways give different tokens."""
    first: dict[int, int] = {}
    seconds: list[list[float]] = [[] for _ in found]
    for _ in range(rounds + 1):
        for each, call in zip(seconds, found, strict=True):
            took_s, tokens = machine.seconds(call)
            each.append(took_s)
            for prompt, token in zip(call.prompts, tokens, strict=True):
                assert first.setdefault(prompt, token) == token, f"{call.way} gives another token"
    return [statistics.median(each[1:]) for each in seconds]


def drawn(data: Path, rows: int) -> dict[str, Ints]:
    """Prompts of the traces, shrunk."""
    random = np.random.default_rng(0)
    traces = {name: read_lengths(data / file).prompt_tokens for name, file in TRACES.items()}
    return {name: np.maximum(1, random.permutation(each)[:rows] // SHRUNK) for name, each in traces.items()}


def compared(models: dict[Backend, LoadedModel], data: Path, rounds: int) -> Iterable[Figures]:
    """What the paper's figures show of each trace.

    Time to first token of a batch of 16, mean and deviation (figure 2); prefill over that of full batches, for each
    prompt (8); the share of computed tokens that are no padding; what predicts a batch's speed-up (9 to 12).
    """
    for name, lengths in drawn(data, BATCH * BATCHES).items():
        found = calls(lengths)
        seconds = np.array(timed(Machine(models, lengths), found, rounds))
        figures: Figures = {"prompts": name}
        ways = dict.fromkeys(call.way for call in found)
        of = {way: np.array([call.way == way for call in found]) for way in ways}
        for way in ways:
            chosen = seconds[of[way]]
            some, computed = np.array([call.tokens(lengths) for call in found if call.way == way]).sum(0)
            figures |= {
                f"{way}_ms": 1e3 * float(chosen.mean()),
                f"{way}_deviation_ms": 1e3 * float(chosen.std()),
                way: float(chosen.sum() / seconds[of["full"]].sum()),
                f"{way}_wanted": float(some / computed),
            }
        yield figures | _causes(lengths, found, seconds)


def _causes(lengths: Ints, found: list[Call], seconds: Ints) -> Figures:
    by_way = {way: [i for i, call in enumerate(found) if call.way == way] for way in ("full", "prepacking")}
    speedups = seconds[by_way["full"]] / seconds[by_way["prepacking"]]
    batches = [found[i] for i in by_way["prepacking"]]
    reductions = np.array([call.num_rows(lengths) / BATCH for call in batches])
    deviations = [lengths[call.prompts].max() - lengths[call.prompts].mean() for call in batches]
    return {
        "mean": float(speedups.mean()),
        "least": float(speedups.min()),
        "most": float(speedups.max()),
        "k_over_r": float((1 / reductions).mean()),
        "correlation_reduction": float(np.corrcoef(speedups, reductions)[0, 1]),
        "correlation_deviation": float(np.corrcoef(speedups, deviations)[0, 1]),
    }


def main() -> None:
    options = arguments(__doc__, data=True, rounds=True).parse_args()
    tell({"prepacking-on-cpu": list(compared(small_llama(), options.data, options.rounds))}, options.write)


if __name__ == "__main__":
    main()
