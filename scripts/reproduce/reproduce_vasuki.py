"""The Vasuki paper's evaluation (6.2): makespan, offloaded memory, batch sizes, cost. Llama-3-8B, contexts up to 4,096.

Workloads are `job_lengths`': rows of the arXiv summarisation trace, and made-up book chapters in place of the
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

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from job_lengths import books, summaries
from reproduce_table import Figures, Options

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


def figure_1(options: Options) -> Iterator[Figures]:
    """Vasuki, figure 1: makespan over chunk sizes, A10 with A40 times, summarisation.

    vLLM, which computes whole prompts first, and Sarathi with 24 GB and 1 TB.
    """
    lengths, small = next(iter(workloads(options).values())), card(PAPER_A10)
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
            kv = KVConfig(block_tokens=BLOCK_TOKENS, offload="none")
            found[name] = simulate_plan(
                make_plan(lengths, SHAPE, profile, engine=engine, kv=kv), lengths, SHAPE, profile
            )
        yield {
            "chunk": chunk,
            **{f"{name}_s": simulated.plan.makespan_s for name, simulated in found.items()},
            "mean_seqs": found["sarathi"].result.stats.mean_seqs,
        }


def cases(options: Options) -> Iterator[tuple[str, str]]:
    """Workloads and cards that most figures are about."""
    return itertools.product(workloads(options), ("rtx4090", PAPER_A10, "a10"))


def gains(options: Options, workload: str, card_name: str, names: Iterable[str]) -> dict[str, float]:
    """Speed-ups over Sarathi on the same card: 0.1 is a tenth more rows a second."""
    sarathi_s = run(options, workload, card_name, "Sarathi").makespan_s
    return {name: sarathi_s / run(options, workload, card_name, name).makespan_s - 1 for name in names}


def makespan(options: Options) -> Iterator[Figures]:
    """Vasuki, figures 4 and 5: speed-up over Sarathi on the same card (paper: translation 36 %, summarisation 9 %)."""
    for workload, card_name in cases(options):
        yield {
            "workload": workload,
            "card": card_name,
            "sarathi_s": run(options, workload, card_name, "Sarathi").makespan_s,
            **gains(options, workload, card_name, COMPARED),
        }


def planned(options: Options) -> Iterator[Figures]:
    """What vasuki plans, over Sarathi with 512 tokens a step: by its step size, its offload, or the rest."""
    for workload, card_name in cases(options):
        plan = run(options, workload, card_name, "plan").simulated.plan
        gained = gains(options, workload, card_name, ("plan", "plan, no offload", "Sarathi, the plan's step"))
        streams = plan.offload.mode == "stream"
        yield {
            "workload": workload,
            "card": card_name,
            "chunk_tokens": plan.chunk_tokens,
            "offload": f"{plan.offload.streamed_layers} layers streamed" if streams else plan.offload.mode,
            **gained,
            "by_offload": gained["plan"] - gained["plan, no offload"],
        }


def offloaded(options: Options) -> Iterator[Figures]:
    """Vasuki, figure 2: KV off the device in a step, translation on the A10 (paper: 99 % of steps at least 14 GB).

    KV bytes that need no place on the device, by step (the paper's equation 1).
    """
    for card_name, name in itertools.product((PAPER_A10, "a10"), ("stream", "free copies")):
        outcome = run(options, "translation", card_name, name)
        resident = run(options, "translation", card_name, "order").simulated.plan.settings.num_blocks
        share = 1 - resident / outcome.simulated.plan.settings.num_blocks
        seen = outcome.distributions
        low, middle = (
            share * SHAPE.kv_bytes_per_token * value / 1e9
            for value in percentiles(seen.context_tokens, seen.steps, (1, 50))
        )
        yield {
            "card": card_name,
            "system": name,
            "layers": round(share * SHAPE.num_layers),
            "percentile_1_gb": low,
            "median_gb": middle,
        }


def batch_sizes(options: Options) -> Iterator[Figures]:
    """Vasuki, figure 3: sequences in a step on the A10 (paper, translation: twice as many as Sarathi)."""
    for workload in workloads(options):
        sarathi = run(options, workload, PAPER_A10, "Sarathi").simulated.result.stats.mean_seqs
        for name in ("Sarathi", *COMPARED):
            outcome = run(options, workload, PAPER_A10, name)
            [middle] = percentiles(outcome.distributions.sequences, outcome.distributions.steps, (50,))
            ratio = outcome.simulated.result.stats.mean_seqs / sarathi
            yield {"workload": workload, "system": name, "median": middle, "ratio": ratio}


def by_batch(options: Options) -> Iterator[Figures]:
    """Vasuki, figures 2 to 5 by the paper's own mechanism, each batch's depth by Algorithms 1 and 2: over Sarathi."""
    few = Options(options.data, options.scale / 4)  # every batch is decided and simulated by itself
    for workload, card_name in cases(few):
        sarathi = run(few, workload, card_name, "Sarathi")
        for name in ("as printed", "as corrected"):
            outcome = run(few, workload, card_name, name)
            seen = outcome.distributions
            away = [round(share * tokens) for share, tokens in zip(seen.away, seen.context_tokens, strict=True)]
            [tokens] = percentiles(away, seen.steps, (1,))
            yield {
                "workload": workload,
                "card": card_name,
                "conditions": name,
                "gain": sarathi.makespan_s / outcome.makespan_s - 1,
                "percentile_1_gb": tokens * SHAPE.kv_bytes_per_token / 1e9,
                "ratio": outcome.simulated.result.stats.mean_seqs / sarathi.simulated.result.stats.mean_seqs,
            }


def percentiles(values: list[int], weights: list[int], ranks: Iterable[float]) -> list[float]:
    """The smallest values that at least these percentages of the weight do not exceed."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(np.asarray(weights)[order])
    positions = [int(np.searchsorted(total, rank / 100 * total[-1])) for rank in ranks]
    return [float(values[order[min(position, len(values) - 1)]]) for position in positions]


def layers(options: Options) -> Iterator[Figures]:
    """Vasuki, figure 7: layers of 32 that need no place on the device, by what hides their copies (paper: 30).

    The batch fills the KV memory that the card has without offload, and its step computes 512 tokens.
    """
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
        spread, buffers = spread_layers(SHAPE.num_layers, layer_s, traffic, profile.link)
        yield {
            "card": card_name,
            "copies_ms": traffic.transfer_s(profile.link, 1) * 1e3,
            "layer_ms": layer_s * 1e3,
            "step_ms": step_s * 1e3,
            "first_last": max_layers_first_last(SHAPE.num_layers, layer_s, traffic, profile.link),
            "ring": ring_layers(SHAPE.num_layers, layer_s, traffic, profile.link),
            "spread": max(0, spread - buffers),
            "ring_against_step": ring_layers(SHAPE.num_layers, step_s, traffic, profile.link),
        }


def cost(options: Options) -> Iterator[Figures]:
    """Vasuki, figure 6: requests for the same cost, on the A10 over Sarathi on the A40 (paper: 3.4 and about 10).

    By QPS / ($ per FP32 gigaflop per watt), and by price.
    """
    a10, a40 = find_profile("a10"), find_profile("a40")
    metric, price = _ratio(a40, a10, "dollars_per_fp32_gflop_per_watt"), _price(a40) / _price(a10)
    paper_a10 = ("Sarathi", "stream", "outputs free", "free copies", "plan")
    for workload in workloads(options):
        sarathi_s = run(options, workload, "a40", "Sarathi").makespan_s
        for card_name, names in ((PAPER_A10, paper_a10), ("a10", ("Sarathi", "plan"))):
            for name in names:
                slower = run(options, workload, card_name, name).makespan_s / sarathi_s
                yield {
                    "workload": workload,
                    "card": card_name,
                    "system": name,
                    "makespan_ratio": slower,
                    "qps_per_cost": metric / slower,
                    "by_price": price / slower,
                }


def _ratio(first: HardwareProfile, second: HardwareProfile, name: str) -> float:
    return float(getattr(first, name)) / float(getattr(second, name))


def _price(profile: HardwareProfile) -> float:
    """Dollars per hour; the profiles of both cards have one."""
    assert profile.price.per_hour is not None
    return profile.price.per_hour
