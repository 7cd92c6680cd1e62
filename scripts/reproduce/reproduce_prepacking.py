"""Prepacking (ICML submission): prefill time against batch size, and what predicts the speed-up. RTX A6000.

A batch of k prompts, the longest of m tokens, is computed in four ways:

    full batching     k rows of m tokens
    prepacking        r rows of m tokens, prompts packed by first-fit decreasing
    length-ordered    full batching of batches cut from all prompts in order of length, an oracle (appendix E)
    ragged            the prompts end to end, without rows: what this project does

Attention under a mask is computed for all m x m pairs of a row, as kernels that take a mask do; ragged attention only
for causal pairs. Weights are float16; the paper's are quantised to 4 or 8 bits, which the cost model does not price.

The paper's datasets come without their lengths here. Uniform lengths from 1 to 512 are its appendix K's; the
log-normal ones (median 64, at most 2,048 tokens) show what longer tails do; `arxiv` are the prompts of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from reproduce_table import Figures, Options

from vasuki.machines.cost_model import CostModel, StepWork
from vasuki.machines.memory_budget import activation_bytes, rectangle_bytes
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import read_lengths
from vasuki_solvers import first_fit_decreasing

Ints = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Ints]

PROMPTS = 5000
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TRACE = "arxiv_summarization_lengths.csv"
# Sheared-LLaMA 1.3B: table 2 of the paper; sizes of MLP and vocabulary from its config.json.
SHEARED_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


def models() -> dict[str, CostModel]:
    """The paper's smallest model and the one of figure 3's other line, on its card."""
    shapes = {
        "1.3B": shape_from_config(SHEARED_LLAMA, "sheared-llama-1.3b"),
        "Llama-2-7B": named_shape("llama-2-7b"),
    }
    return {name: CostModel(shape.with_dtype("float16"), find_profile("rtx-a6000")) for name, shape in shapes.items()}


def lognormal(sigma: float) -> Draw:
    """Lengths with median 64."""
    return lambda random, rows: np.clip(random.lognormal(np.log(64), sigma, rows), 1, 2048).astype(np.int64)


def uniform(random: np.random.Generator, rows: int) -> Ints:
    """Lengths from 1 to 512."""
    return random.integers(1, 513, rows)


def workloads(options: Options) -> dict[str, Ints]:
    """Prompt lengths by name."""
    rows = options.rows(PROMPTS, least=256)
    draws: dict[str, Draw] = {"uniform": uniform, "log-normal 0.5": lognormal(0.5), "log-normal 1": lognormal(1.0)}
    found = {name: draw(np.random.default_rng(0), rows) for name, draw in draws.items()}
    if options.data:
        found["arxiv"] = np.random.default_rng(0).permutation(read_lengths(options.data / TRACE).prompt_tokens)[:rows]
    return found


def masked(rows: int, tokens: int, prompts: int) -> StepWork:
    """The work of `[rows, tokens]`, each row under a mask, from which `prompts` tokens are sampled."""
    return StepWork(
        num_tokens=rows * tokens,
        num_samples=prompts,
        num_chunks=rows,
        chunk_context_tokens=rows * tokens,
        chunk_pairs=float(rows * tokens * tokens),
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one batch."""

    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def packed_rows(self) -> int:
        return len(first_fit_decreasing(self.lengths, self.longest).bins)

    def cells(self, way: str) -> tuple[int, int]:
        """Rows and columns of its rectangle; end to end there is one row."""
        if way == "ragged":
            return 1, sum(self.lengths)
        return self.packed_rows if way == "prepacking" else len(self.lengths), self.longest

    def peak_bytes(self, way: str, shape: ModelShape) -> int:
        """Weights, keys and values of the rectangle, and the larger of what its attention and the rest of a layer hold
        in addition."""
        rows, columns = self.cells(way)
        tokens = rows * columns
        activations = activation_bytes(shape, tokens, len(self.lengths))
        if way != "ragged":
            activations = max(activations, rectangle_bytes(shape, rows, columns, columns))
        return shape.weight_bytes + tokens * shape.kv_bytes_per_token + activations

    def full_s(self, cost: CostModel) -> float:
        return cost.step_time_s(masked(len(self.lengths), self.longest, len(self.lengths)))

    def packed_s(self, cost: CostModel) -> float:
        return cost.step_time_s(masked(self.packed_rows, self.longest, len(self.lengths)))

    def ragged_s(self, cost: CostModel) -> float:
        return cost.step_time_s(StepWork.of(self.lengths, self.lengths))


def batches(lengths: Ints, size: int) -> list[Batch]:
    """Cut into full batches."""
    whole = len(lengths) // size * size
    return [Batch(rows) for rows in lengths[:whole].reshape(-1, size).tolist()]


def figure_3(options: Options) -> Iterator[Figures]:
    """Prepacking, figure 3: prefill speed-up over full batching, by batch size (paper: 7B up to 4.5, 1.3B up to 6)."""
    for model, cost in models().items():
        for name, lengths in workloads(options).items():
            speedups: dict[str, dict[str, float]] = {"prepacking": {}, "length-ordered": {}, "ragged": {}}
            for size in BATCHES:
                drawn, ordered = batches(lengths, size), batches(np.sort(lengths), size)
                full_s = sum(batch.full_s(cost) for batch in drawn)
                for way, seconds in (
                    ("prepacking", sum(batch.packed_s(cost) for batch in drawn)),
                    ("length-ordered", sum(batch.full_s(cost) for batch in ordered)),
                    ("ragged", sum(batch.ragged_s(cost) for batch in drawn)),
                ):
                    speedups[way][f"batch_{size}"] = full_s / seconds
            for way, found in speedups.items():
                yield {"model": model, "lengths": name, "way": way, **found}


def figure_6(options: Options) -> Iterator[Figures]:
    """Prepacking, figure 6: largest batch whose prompts fit, 1.3B, A6000 (paper: up to 16 times full batching's)."""
    shape, memory_bytes = models()["1.3B"].shape, find_profile("rtx-a6000").memory_bytes
    for name, lengths in workloads(options).items():
        largest: dict[str, int] = {}
        for way in ("full batching", "length-ordered", "prepacking", "ragged"):
            size = 1
            ordered = np.sort(lengths)[::-1] if way == "length-ordered" else lengths  # the longest are in a batch, too
            while 2 * size <= len(lengths) and all(
                batch.peak_bytes(way, shape) <= memory_bytes for batch in batches(ordered, 2 * size)
            ):
                size *= 2
            largest[way.replace(" ", "_").replace("-", "_")] = size
        yield {"lengths": name, **largest, "more": largest["prepacking"] / largest["full_batching"]}


def figure_9(options: Options) -> Iterator[Figures]:
    """Prepacking, figures 9 to 11: speed-up by batch, and what predicts it; uniform lengths from 1 to 512.

    By rows saved, r / k, and by how far the longest prompt is from the mean, m - L / k.
    """
    lengths = workloads(options)["uniform"]
    for model, size in (("1.3B", 16), ("1.3B", 32), ("Llama-2-7B", 16), ("Llama-2-7B", 32)):
        cost = models()[model]
        drawn = batches(lengths, size)
        speedups = np.array([batch.full_s(cost) / batch.packed_s(cost) for batch in drawn])
        reductions = np.array([batch.packed_rows / size for batch in drawn])
        deviations = np.array([batch.longest - np.mean(batch.lengths) for batch in drawn])
        yield {
            "model": model,
            "batch": size,
            "mean": float(speedups.mean()),
            "correlation_reduction": float(np.corrcoef(speedups, reductions)[0, 1]),
            "correlation_deviation": float(np.corrcoef(speedups, deviations)[0, 1]),
            "times_reduction": float((speedups * reductions).mean()),
        }
