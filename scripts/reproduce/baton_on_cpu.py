"""Baton's four systems and the ragged backend for real, on this machine, with a Llama of random weights.

    python scripts/reproduce/baton_on_cpu.py [--rounds 3] [--write]

The paper's two sets of queries, with lengths divided so that a CPU takes minutes. The systems take turns, and each
figure is the median over the rounds. Greedy tokens of all systems are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import write_page
from reproduce_baton import METHODS, PAPER_1, PAPER_2, Method, mixed, short
from reproduce_table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vasuki.base.config import ModelConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import drain
from vasuki.engine.rectangles import Rows
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.hf.loading.load_model import LoadedModel, load_model
from vasuki.hf.padded.forward import Padded
from vasuki.hf.ragged_executor import build_executor
from vasuki.planner.lengths import Lengths

QUERIES, SHRUNK_MIX, SHRUNK_SHORT = 16, 52, 8
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "dates"
SIZES = dict(
    vocab_size=768,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=1024,
)


class OneRectangle(Padded):
    """Prompts and running rows in one rectangle."""

    def groups(self, batch: Batch) -> Iterable[Rows]:
        """All chunks together."""
        return [[[i] for i in range(len(batch.chunks))]]


@dataclass(slots=True)
class Seen:
    """A sink and an observer: what a user has at which time, and what the KV of running rows takes."""

    outputs: list[int]  # tokens that are asked for, by row
    waves: bool
    seconds: float = 0.0
    answered_s: dict[int, float] = field(default_factory=dict)  # by row
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by row
    held: list[tuple[float, int]] = field(default_factory=list)  # seconds of each step, and tokens of KV held in it

    def write(self, sequence: Sequence) -> None:
        """Keep the tokens that were asked for."""
        row = sequence.request.row
        self.tokens[row] = sequence.output_token_ids[: self.outputs[row]]

    def commit_if_due(self, now_s: float) -> None:
        """Nothing is kept on disk."""

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Rows count as answered when they have their tokens, and static batches hold the widest row's columns."""
        self.seconds += result.elapsed_s
        for chunk in batch.chunks:
            row = chunk.sequence.request.row
            if chunk.sequence.num_output_tokens >= self.outputs[row]:
                self.answered_s.setdefault(row, self.seconds)
        widest = len(batch.chunks) * max(chunk.end for chunk in batch.chunks)
        pool = scheduler.queues.pool
        self.held.append((result.elapsed_s, widest if self.waves else pool.num_held * pool.block_tokens))

    @property
    def half_s(self) -> float:
        """When half of the rows were answered."""
        return statistics.median(self.answered_s.values())

    @property
    def mean_held(self) -> float:
        """Tokens of KV over time, on average."""
        return sum(seconds * tokens for seconds, tokens in self.held) / self.seconds

    @property
    def peak_held(self) -> int:
        """The most tokens of KV."""
        return max(tokens for _, tokens in self.held)


def run(method: Method, loaded: LoadedModel, lengths: Lengths, batch: int) -> Seen:
    """Run the rows once."""
    settings = method.settings(lengths, batch)
    executor = build_executor(loaded, settings)
    if not method.apart:
        executor.unpacked = OneRectangle(loaded.model, executor.cache)
    seen = Seen(lengths.output_tokens.tolist(), method.waves)
    drain(method.requests(lengths, batch), Scheduler(settings), executor, seen, [seen])
    return seen


def measured(
    methods: Iterable[Method], models: dict[str, LoadedModel], lengths: Lengths, batch: int, rounds: int
) -> dict[str, list[Seen]]:
    """Run each method so often, by turns. Raises AssertionError if their tokens differ."""
    found: dict[str, list[Seen]] = {}
    for _ in range(rounds):
        for method in methods:
            seen = run(method, models[method.way], lengths, batch)
            found.setdefault(method.name, []).append(seen)
            assert seen.tokens == found["static"][0].tokens, f"{method.name} gives other tokens"
    return found


def ratio(found: dict[str, list[Seen]], name: str, other: str) -> float:
    """How much longer `other` takes: the median over the rounds."""
    return statistics.median(b.seconds / a.seconds for a, b in zip(found[name], found[other], strict=True))


def tables(models: dict[str, LoadedModel], rounds: int) -> list[Table]:
    """Both of the paper's tables, and what its figures 5 to 7 show."""
    names = [method.name for method in METHODS]
    times = Table("static over each, the mix (paper; here)", ("batch", *names[1:]))
    over_time = Table(
        "The mix in batches of 8: half of the rows answered after so much of the static makespan; KV over the peak "
        "of static, mean and most",
        ("", *names),
    )
    for batch, paper in PAPER_1.items():
        lengths = mixed(QUERIES, SHRUNK_MIX, doubled=batch == 4)
        found = measured(METHODS, models, lengths, batch, rounds)
        known = [*(f"{paper[0] / seconds:.2f}; " for seconds in paper[1:]), ""]
        cells = [f"{text}{ratio(found, name, 'static'):.2f}" for text, name in zip(known, names[1:], strict=True)]
        times.add(str(batch), *cells)
    (static, *_), columns = found["static"], [found[name][0] for name in names]
    over_time.add("half answered", *(f"{seen.half_s / static.seconds:.2f}" for seen in columns))
    for name, each in (("mean KV", "mean_held"), ("most KV", "peak_held")):
        over_time.add(name, *(f"{getattr(seen, each) / static.peak_held:.2f}" for seen in columns))
    slots = Table("baton over static, short queries (paper; here)", ("batch", *map(str, PAPER_2)))
    static_and_baton = (METHODS[0], METHODS[2])
    lengths = short(30, SHRUNK_SHORT)
    gains = {
        batch: ratio(measured(static_and_baton, models, lengths, batch, rounds), "baton", "static") for batch in PAPER_2
    }
    slots.add("baton", *(f"{PAPER_2[batch]}; {gain:.2f}" for batch, gain in gains.items()))
    return [times, over_time, slots]


def load() -> dict[str, LoadedModel]:
    """The model for both backends."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # other programs disturb one thread less than several that wait for each other
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
        model = ModelConfig(path=folder)
        return {"ragged": load_model(model, "cpu"), "padded": load_model(model, "cpu", attention="padded")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system, by turns")
    parser.add_argument("--write", action="store_true", help="write the figures to docs/, and its page anew")
    options = parser.parse_args()
    found = tables(load(), options.rounds)
    print("\n\n".join(table.markdown() for table in found))
    if options.write:
        stored = [{"title": table.title, "header": table.header, "rows": table.rows} for table in found]
        write_page.update({"baton-on-cpu": stored})


if __name__ == "__main__":
    main()
