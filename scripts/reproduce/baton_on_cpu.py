"""Baton's systems and the ragged backend for real, on this machine, with a Llama of random weights.

    python scripts/reproduce/baton_on_cpu.py [--rounds 3] [--write]

The paper's two sets of queries, with lengths divided so that a CPU takes minutes. The systems take turns, and each
figure is the median over the rounds. Seconds are processor time, which other programs hardly change. Greedy
tokens of all systems are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from on_cpu import arguments, small_llama, tell
from reproduce_baton import BATON, HOLES, METHODS, PAPER_1, PAPER_2, STATIC, Method, OverTime, mixed, requests_of, short
from reproduce_table import Figures

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.padded.forward import Padded
from vasuki.hf.ragged_executor import build_executor
from vasuki.models.shape import Backend
from vasuki.planner.lengths import Lengths

QUERIES, SHRUNK_MIX, SHRUNK_SHORT = 16, 52, 8


@dataclass(slots=True)
class Seen(OverTime):
    """A sink as well, that keeps the tokens of each row."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    processor_s: float = field(default_factory=time.process_time)

    def write(self, sequence: Sequence) -> None:
        """Keep its tokens."""
        self.outputs[sequence.request.row] = sequence.output_token_ids

    def commit_if_due(self, now_s: float) -> None:
        """Nothing is kept on disk."""

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note a step, by the processor's time since the last one."""
        elapsed_s = time.process_time() - self.processor_s
        self.processor_s += elapsed_s
        OverTime.record(self, now_s, batch, result._replace(elapsed_s=elapsed_s), scheduler, finished)


def run(method: Method, loaded: LoadedModel, lengths: Lengths, batch: int) -> Seen:
    """Run the rows once."""
    settings = method.settings(lengths, batch)
    executor = build_executor(loaded, settings)
    if method.holes:
        executor.unpacked = Padded(loaded.model, executor.cache, shaping=method.shaping())
    seen = Seen(method.shaping())
    drain(requests_of(lengths), Scheduler(settings), executor, seen, [seen])
    return seen


def measured(
    methods: Iterable[Method], models: dict[Backend, LoadedModel], lengths: Lengths, batch: int, rounds: int
) -> dict[str, list[Seen]]:
    """Run each method so often, by turns. Raises AssertionError if their tokens differ."""
    found: dict[str, list[Seen]] = {}
    for _ in range(rounds):
        for method in methods:
            seen = run(method, models["padded" if method.is_padded else "ragged"], lengths, batch)
            found.setdefault(method.name, []).append(seen)
            assert seen.outputs == found["static"][0].outputs, f"{method.name} gives other tokens"
    return found


def ratio(found: dict[str, list[Seen]], name: str, other: str) -> float:
    """How much longer `other` takes: the median over the rounds."""
    return statistics.median(b.seconds[-1] / a.seconds[-1] for a, b in zip(found[name], found[other], strict=True))


def compared(models: dict[Backend, LoadedModel], rounds: int) -> dict[str, list[Figures]]:
    """Both of the paper's tables, static over each, and what its figures 5 to 7 show.

    Of the mix in batches of 8: when half of the rows are answered, over static's makespan; cells of the cache over the
    most of static's, mean and most.
    """
    names = [method.name for method in METHODS]
    times: list[Figures] = []
    for batch in PAPER_1:
        found = measured(METHODS, models, mixed(QUERIES, SHRUNK_MIX, doubled=batch == 4), batch, rounds)
        times.append({"batch": batch, **{name: ratio(found, name, "static") for name in names[1:]}})
    columns = [found[name][0] for name in names]
    all_s, most = columns[0].seconds[-1], max(columns[0].cells)
    over_time: list[Figures] = [
        {"what": what, **dict(zip(names, shares, strict=True))}
        for what, shares in (
            ("half answered", [seen.half_s / all_s for seen in columns]),
            ("mean cells", [seen.mean_cells / most for seen in columns]),
            ("most cells", [max(seen.cells) / most for seen in columns]),
        )
    ]
    lengths = short(30, SHRUNK_SHORT)
    by_batch = {batch: measured((STATIC, BATON, HOLES), models, lengths, batch, rounds) for batch in PAPER_2}
    slots: list[Figures] = [
        {
            "system": method.name,
            **{f"batch_{batch}": ratio(found, method.name, "static") for batch, found in by_batch.items()},
        }
        for method in (BATON, HOLES)
    ]
    return {"baton-on-cpu": times, "baton-on-cpu-time": over_time, "baton-on-cpu-short": slots}


def main() -> None:
    options = arguments(__doc__, rounds=True).parse_args()
    tell(compared(small_llama(), options.rounds), options.write)


if __name__ == "__main__":
    main()
