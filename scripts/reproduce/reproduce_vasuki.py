"""The Vasuki paper's evaluation (6.2): makespan, offloaded memory, batch sizes, cost. Llama-3-8B, contexts up to 4,096.

Workloads are `planner_table`'s: rows of the arXiv summarisation trace, and made-up book chapters in place of the
BWB trace, which is not public. Without --data, jobs/compare/summarise.csv stands in for the former. As in the paper a
step has 512 tokens, and the A10 is also tried with the A40's times and its own memory, which is how the paper
simulates it (6.1.2). Systems:

    Sarathi        chunked prefills, rows as they come, recomputation when memory runs out
    order          vasuki's ordering and admission alone
    stream         in addition, as many layers streamed over the profile's PCIe link as the planner finds hidden
    free copies    the same over a link that takes no time: what offloading could give if it cost nothing
    outputs free   the same where prompts stay on the device, as the paper allocates (5.2), and only what sequences grow
                   by is off it: Sarathi with as much more memory as that is in the mean
    no limit       Sarathi with a terabyte of device memory: what any saving of memory could give
    plan           what vasuki plans if it is free to choose step size, mixing and offload
    plan, no offload; and Sarathi with the step size of the plan
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from planner_table import books, summaries
from reproduce_table import Options, Table

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.machines.cost_model import CostModel, StepWork
from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.memory_budget import MemoryBudget, memory_budget
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.offload.algorithms import LayerTraffic, max_layers_first_last, ring_layers, spread_layers
from vasuki.planner.simulated import Simulated, simulate_plan

SHAPE = named_shape("llama-3-8b")
ROWS = 2000
CHUNK_TOKENS, MAX_NUM_SEQS, BLOCK_TOKENS = 512, 256, 32
HOST_MEMORY = 2**40  # never the limit, as in the paper
NO_LIMIT_MIB = 2**20
TRACE = "arxiv_summarization_lengths.csv"
STAND_IN = Path(__file__).resolve().parents[2] / "jobs" / "compare" / "summarise.csv"
FREE = Link(
    kind="copies take no time",
    source="an assumption to compare with",
    curve=(LinkPoint(bytes=1, h2d=1e9, d2h=1e9, both=1e9),),
)
PAPER_A10 = "A10 memory, A40 times"


@dataclass(frozen=True, slots=True)
class System:
    """A way to run the job."""

    policy: str
    offload: Literal["auto", "none", "stream", "by_batch"] = "none"
    conditions: Literal["corrected", "printed"] = "corrected"
    free_copies: bool = False
    outputs_free: bool = False
    no_limit: bool = False
    planned: bool = False  # the planner chooses the step size; Sarathi's is the one that it chose for vasuki


SYSTEMS = {
    "Sarathi": System("sarathi"),
    "order": System("vasuki"),
    "stream": System("vasuki", "stream"),
    "free copies": System("vasuki", "stream", free_copies=True),
    "outputs free": System("sarathi", outputs_free=True),
    "no limit": System("sarathi", no_limit=True),
    "as printed": System("vasuki-paper", "by_batch", "printed"),
    "as corrected": System("vasuki-paper", "by_batch"),
    "plan": System("vasuki", "auto", planned=True),
    "plan, no offload": System("vasuki", planned=True),
    "Sarathi, the plan's step": System("sarathi", planned=True),
}
COMPARED = ("order", "stream", "free copies", "outputs free", "no limit", "plan")


@dataclass(slots=True)
class Distributions:
    """An engine observer: sequences and context tokens of every step."""

    sequences: list[int]
    context_tokens: list[int]
    steps: list[int]  # how many such steps followed one another
    away: list[float]  # the share of layers that need no place on the device

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.sequences.append(batch.num_seqs)
        self.context_tokens.append(sum(batch.starts) + sum(chunk.end for chunk in batch.prefills))
        self.steps.append(result.num_steps)
        depth = batch.depth and batch.depth.depth
        self.away.append(1 - depth.places / depth.num_layers if depth else 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run."""

    simulated: Simulated
    distributions: Distributions

    @property
    def makespan_s(self) -> float:
        return self.simulated.plan.makespan_s


@cache
def workloads(options: Options) -> dict[str, Lengths]:
    """Summarisation and translation, by name."""
    rows = options.rows(ROWS, least=16)
    trace = options.data / TRACE if options.data else STAND_IN
    return {
        "summarisation" if options.data else "summarisation (stand-in)": summaries(trace, rows),
        "translation": books(rows),
    }


def card(name: str) -> HardwareProfile:
    """A profile by name, or the A10 as the paper simulates it."""
    if name != PAPER_A10:
        return find_profile(name)
    return find_profile("a40").model_copy(update={"memory_mib": find_profile("a10").memory_mib})


@cache
def run(options: Options, workload: str, card_name: str, system_name: str) -> Outcome:
    """Plan and simulate all rows of a workload."""
    lengths, system, profile = workloads(options)[workload], SYSTEMS[system_name], card(card_name)
    memory = {"device_memory": kv_bytes_with_outputs_free(lengths, profile)} if system.outputs_free else {}
    if system.no_limit or system.outputs_free:
        profile = profile.model_copy(update={"memory_mib": NO_LIMIT_MIB})
    if system.free_copies:
        profile = profile.model_copy(update={"link": FREE})
    engine = EngineConfig(policy=system.policy, chunk_tokens=CHUNK_TOKENS, max_num_seqs=MAX_NUM_SEQS)
    kv = KVConfig(
        block_tokens="auto" if system.offload == "by_batch" else BLOCK_TOKENS,  # whose copies are blocks
        offload=system.offload,
        conditions=system.conditions,
        host_memory=HOST_MEMORY,
        **memory,
    )
    if system.planned:
        kv = KVConfig(offload=system.offload, **memory)
        engine = EngineConfig(policy=system.policy)
        if system.policy != "vasuki":
            chosen = run(options, workload, card_name, "plan").simulated.plan.chunk_tokens
            engine = EngineConfig(policy=system.policy, chunk_tokens=chosen)
    plan = make_plan(lengths, SHAPE, profile, engine=engine, kv=kv)
    seen = Distributions([], [], [], [])
    return Outcome(simulate_plan(plan, lengths, SHAPE, profile, observers=[seen]), seen)


def kv_budget(profile: HardwareProfile) -> MemoryBudget:
    """KV memory of a card with 512-token steps."""
    return memory_budget(
        SHAPE, profile, block_tokens=BLOCK_TOKENS, max_step_tokens=CHUNK_TOKENS, max_num_seqs=MAX_NUM_SEQS
    )


def kv_bytes_with_outputs_free(lengths: Lengths, profile: HardwareProfile) -> int:
    """The card's KV memory, larger by what outputs add to prompts, summed over all decode steps of all rows."""
    prompts, outputs = lengths.prompt_tokens, lengths.output_tokens
    prompt_steps = float((outputs * prompts).sum())
    growth = 1 + float((outputs * (outputs - 1) / 2).sum()) / prompt_steps
    return round(kv_budget(profile).kv_bytes * growth)


def figure_1(options: Options) -> Table:
    """Makespan over chunk sizes: vLLM, which computes whole prompts first, and Sarathi with 24 GB and 1 TB."""
    table = Table(
        f"Vasuki, figure 1: makespan, A10 with A40 times, summarisation, {options.rows(ROWS, least=16):,} requests",
        ("tokens a step", "vLLM, s", "Sarathi, s", "Sarathi, 1 TB, s", "sequences in a step of Sarathi"),
    )
    lengths, shape = next(iter(workloads(options).values())), SHAPE
    small = card(PAPER_A10)
    large = small.model_copy(update={"memory_mib": NO_LIMIT_MIB})
    for chunk in (256, 512, 1024, 2048, 4096):
        found = {}
        for name, policy, profile in (
            ("vllm", "vllm-v0", small),
            ("sarathi", "sarathi", small),
            ("no_limit", "sarathi", large),
        ):
            tokens = max(chunk, 4096) if name == "vllm" else chunk  # a whole prompt has to fit
            engine = EngineConfig(policy=policy, chunk_tokens=tokens, max_num_seqs=MAX_NUM_SEQS)
            plan = make_plan(
                lengths, shape, profile, engine=engine, kv=KVConfig(block_tokens=BLOCK_TOKENS, offload="none")
            )
            found[name] = simulate_plan(plan, lengths, shape, profile)
        seconds = {name: simulated.plan.makespan_s for name, simulated in found.items()}
        mean_seqs = found["sarathi"].result.stats.mean_seqs
        table.add(
            f"{chunk:,}",
            *(f"{value:,.0f}" for value in seconds.values()),
            f"{mean_seqs:.1f}",
            chunk=chunk,
            mean_seqs=mean_seqs,
            **{f"{name}_s": value for name, value in seconds.items()},
        )
    return table


def makespan(options: Options) -> Table:
    """Figures 4 and 5."""
    table = Table(
        f"Vasuki, figures 4 and 5: speed-up over Sarathi on the same card, {options.rows(ROWS, least=16):,} requests",
        ("workload", "card", "Sarathi, s", "paper", *COMPARED),
    )
    for workload in workloads(options):
        paper = "36 %" if workload == "translation" else "9 %"
        for card_name in ("rtx4090", PAPER_A10, "a10"):
            sarathi_s = run(options, workload, card_name, "Sarathi").makespan_s
            gains = {name: sarathi_s / run(options, workload, card_name, name).makespan_s - 1 for name in COMPARED}
            table.add(
                workload,
                card_name,
                f"{sarathi_s:,.0f}",
                paper,
                *[f"{gain:+.0%}" for gain in gains.values()],
                workload=workload,
                card=card_name,
                sarathi_s=sarathi_s,
                **gains,
            )
    return table


def planned(options: Options) -> Table:
    """Where the plan's gain comes from: its step size, its offload, or the rest."""
    table = Table(
        f"What vasuki plans: speed-up over Sarathi with {CHUNK_TOKENS} tokens a step",
        ("workload", "card", "tokens a step", "offload", "plan", "plan, no offload", "Sarathi, the plan's step"),
    )
    for workload in workloads(options):
        for card_name in ("rtx4090", PAPER_A10, "a10"):
            sarathi_s = run(options, workload, card_name, "Sarathi").makespan_s
            plan = run(options, workload, card_name, "plan").simulated.plan
            names = ("plan", "plan, no offload", "Sarathi, the plan's step")
            gains = {name: sarathi_s / run(options, workload, card_name, name).makespan_s - 1 for name in names}
            offload = (
                f"{plan.offload.streamed_layers} layers streamed"
                if plan.offload.mode == "stream"
                else plan.offload.mode
            )
            table.add(
                workload,
                card_name,
                str(plan.chunk_tokens),
                offload,
                *[f"{gain:+.1%}" for gain in gains.values()],
                workload=workload,
                card=card_name,
                chunk_tokens=plan.chunk_tokens,
                offload=offload,
                by_offload=gains["plan"] - gains["plan, no offload"],
                **gains,
            )
    return table


def offloaded(options: Options) -> Table:
    """Figure 2: KV bytes that need no place on the device, by step (the paper's equation 1)."""
    table = Table(
        "Vasuki, figure 2: KV off the device in a step, GB, translation on the A10 (paper: 99 % of steps at least 14)",
        ("times of", "system", "layers off the device", "1st percentile", "median", "99th percentile"),
    )
    for card_name in (PAPER_A10, "a10"):
        for name in ("stream", "free copies"):
            outcome = run(options, "translation", card_name, name)
            resident = run(options, "translation", card_name, "order").simulated.plan.settings.num_blocks
            share = 1 - resident / outcome.simulated.plan.settings.num_blocks
            seen = outcome.distributions
            low, middle, high = (
                share * SHAPE.kv_bytes_per_token * value / 1e9
                for value in percentiles(seen.context_tokens, seen.steps, (1, 50, 99))
            )
            layers = round(share * SHAPE.num_layers)
            table.add(
                "A40" if card_name == PAPER_A10 else "A10",
                name,
                f"{layers} of {SHAPE.num_layers}",
                f"{low:.2f}",
                f"{middle:.2f}",
                f"{high:.2f}",
                card=card_name,
                system=name,
                layers=layers,
                percentile_1_gb=low,
                median_gb=middle,
            )
    return table


def batch_sizes(options: Options) -> Table:
    """Figure 3."""
    table = Table(
        "Vasuki, figure 3: sequences in a step on the A10 (paper, translation: twice as many as Sarathi)",
        ("workload", "system", "10th percentile", "median", "90th percentile", "mean against Sarathi"),
    )
    for workload in workloads(options):
        sarathi = run(options, workload, PAPER_A10, "Sarathi").simulated.result.stats.mean_seqs
        for name in ("Sarathi", *COMPARED):
            outcome = run(options, workload, PAPER_A10, name)
            low, middle, high = percentiles(outcome.distributions.sequences, outcome.distributions.steps, (10, 50, 90))
            ratio = outcome.simulated.result.stats.mean_seqs / sarathi
            table.add(
                workload,
                name,
                f"{low:.0f}",
                f"{middle:.0f}",
                f"{high:.0f}",
                f"{ratio:.2f}",
                workload=workload,
                system=name,
                median=middle,
                ratio=ratio,
            )
    return table


def by_batch(options: Options) -> Table:
    """Figures 2 to 5 once more by the paper's own mechanism: each batch's depth by Algorithms 1 and 2, over Sarathi."""
    few = Options(options.data, options.scale / 4)  # every batch is decided and simulated by itself
    table = Table(
        f"Vasuki, a depth for each batch: over Sarathi on the same card, {few.rows(ROWS, least=16):,} requests",
        ("workload", "card", "conditions", "speed-up", "KV off the device in 99 % of steps, GB", "sequences in a step"),
    )
    for workload in workloads(few):
        for card_name in ("rtx4090", PAPER_A10, "a10"):
            sarathi = run(few, workload, card_name, "Sarathi")
            for name in ("as printed", "as corrected"):
                outcome = run(few, workload, card_name, name)
                seen = outcome.distributions
                away = [round(share * tokens) for share, tokens in zip(seen.away, seen.context_tokens, strict=True)]
                [tokens] = percentiles(away, seen.steps, (1,))
                gain = sarathi.makespan_s / outcome.makespan_s - 1
                gb = tokens * SHAPE.kv_bytes_per_token / 1e9
                ratio = outcome.simulated.result.stats.mean_seqs / sarathi.simulated.result.stats.mean_seqs
                table.add(
                    workload,
                    card_name,
                    name,
                    f"{gain:+.0%}",
                    f"{gb:.2f}",
                    f"{ratio:.2f}",
                    workload=workload,
                    card=card_name,
                    conditions=name,
                    gain=gain,
                    percentile_1_gb=gb,
                    ratio=ratio,
                )
    return table


def percentiles(values: list[int], weights: list[int], ranks: Iterable[float]) -> list[float]:
    """The smallest values that at least these percentages of the weight do not exceed."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(np.asarray(weights)[order])
    positions = [int(np.searchsorted(total, rank / 100 * total[-1])) for rank in ranks]
    return [float(values[order[min(position, len(values) - 1)]]) for position in positions]


def layers(options: Options) -> Table:
    """Figure 7: layers that can be streamed, by what their copies are hidden behind.

    The batch fills the KV memory that the card has without offload, and its step computes 512 tokens.
    """
    table = Table(
        "Vasuki, figure 7: layers of 32 that need no place on the device (paper: 30)",
        (
            "card",
            "context tokens",
            "a layer's copies, ms",
            "a layer, ms",
            "a step, ms",
            "algorithm 1",
            "algorithm 2",
            "evenly spaced",
            "algorithm 2 against the step's time",
        ),
    )
    for card_name in ("rtx4090", PAPER_A10, "a10"):
        profile = card(card_name)
        cost = CostModel(SHAPE, profile)
        budget = kv_budget(profile)
        decodes = 16
        chunk, context = CHUNK_TOKENS - decodes, budget.kv_tokens // (decodes + 1)
        work = StepWork.of([chunk] + [1] * decodes, [context] * (decodes + 1))
        layer_s, step_s = cost.layer_time_s(work), cost.step_time_s(work)
        per_token = SHAPE.kv_bytes_per_token_per_layer
        traffic = LayerTraffic(budget.kv_tokens * per_token, CHUNK_TOKENS * per_token, BLOCK_TOKENS * per_token)
        copies_s = traffic.transfer_s(profile.link, 1)
        first_last = max_layers_first_last(SHAPE.num_layers, layer_s, traffic, profile.link)
        ring = ring_layers(SHAPE.num_layers, layer_s, traffic, profile.link)
        spread, buffers = spread_layers(SHAPE.num_layers, layer_s, traffic, profile.link)
        against_step = ring_layers(SHAPE.num_layers, step_s, traffic, profile.link)
        table.add(
            card_name,
            f"{budget.kv_tokens:,}",
            f"{copies_s * 1e3:.1f}",
            f"{layer_s * 1e3:.2f}",
            f"{step_s * 1e3:.0f}",
            str(first_last),
            str(ring),
            str(max(0, spread - buffers)),
            str(against_step),
            card=card_name,
            copies_ms=copies_s * 1e3,
            layer_ms=layer_s * 1e3,
            step_ms=step_s * 1e3,
            first_last=first_last,
            ring=ring,
            spread=max(0, spread - buffers),
            ring_against_step=against_step,
        )
    return table


def cost(options: Options) -> Table:
    """Figure 6: QPS / ($ per FP32 gigaflop per watt), on the A10 over Sarathi on the A40; and in money."""
    table = Table(
        "Vasuki, figure 6: requests for the same cost, on the A10 over Sarathi on the A40",
        ("workload", "A10 times", "system", "makespan over A40's", "QPS / cost, paper", "ours", "by price per hour"),
    )
    a10, a40 = find_profile("a10"), find_profile("a40")
    metric, price = _ratio(a40, a10, "dollars_per_fp32_gflop_per_watt"), _price(a40) / _price(a10)
    for workload in workloads(options):
        sarathi_s = run(options, workload, "a40", "Sarathi").makespan_s
        paper = "3.4" if workload == "translation" else "about 10"
        for card_name, names in (
            (PAPER_A10, ("Sarathi", "stream", "outputs free", "free copies", "plan")),
            ("a10", ("Sarathi", "plan")),
        ):
            for name in names:
                slower = run(options, workload, card_name, name).makespan_s / sarathi_s
                table.add(
                    workload,
                    "A40's" if card_name == PAPER_A10 else "its own",
                    name,
                    f"{slower:.2f}",
                    paper,
                    f"{metric / slower:.2f}",
                    f"{price / slower:.2f}",
                    workload=workload,
                    card=card_name,
                    system=name,
                    makespan_ratio=slower,
                    qps_per_cost=metric / slower,
                    by_price=price / slower,
                )
    return table


def _ratio(first: HardwareProfile, second: HardwareProfile, name: str) -> float:
    return float(getattr(first, name)) / float(getattr(second, name))


def _price(profile: HardwareProfile) -> float:
    """Dollars per hour; the profiles of both cards have one."""
    assert profile.price.per_hour is not None
    return profile.price.per_hour
