"""Sarathi (arXiv 2308.16369) on one GPU: decode cost, peak gains, P:D ratio, tiles, Orca, cost of chunking.

Nothing is fitted to the paper: the A6000 profile takes its efficiencies from layer times of other cards. Steps are
priced by the cost model; whole runs are simulated with the project's own scheduler. As in the paper (5.1), all requests
of a run are equal, P prompt and D output tokens with P + D the sequence length; B of them run at a time, and as many
are run that start and end hardly count. The baseline computes the prompts of a whole batch in one step and then its
decodes. A chunk and the decodes in its step share C tokens, so that together they are whole tiles (4.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reproduce_table import Figures, Options

from vasuki.engine.policy import Policy, find_policy
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel, StepWork
from vasuki.machines.cost_model.rooflines import Rooflines
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.simulator import simulate

BLOCK_TOKENS = 16
WAVES = 40  # requests of a run, in units of the batch
P_D_RATIOS = (2, 5, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 50, 64, 80, 100, 200)


def llama_13b() -> CostModel:
    """Model and card: the A6000, in half precision."""
    return CostModel(named_shape("llama-13b").with_dtype("float16"), find_profile("rtx-a6000"))


def llama_33b() -> CostModel:
    """Model and card: the A100, in half precision."""
    return CostModel(named_shape("llama-33b").with_dtype("float16"), find_profile("a100"))


@dataclass(frozen=True, slots=True)
class EqualRequests:
    """A workload of equal requests."""

    sequence_tokens: int
    p_d_ratio: float
    batch: int

    @property
    def output_tokens(self) -> int:
        return max(2, round(self.sequence_tokens / (self.p_d_ratio + 1)))

    @property
    def prompt_tokens(self) -> int:
        return self.sequence_tokens - self.output_tokens


BASELINE = find_policy("static")
SARATHI = find_policy("sarathi")
ORCA = find_policy("orca")  # with a budget below a prompt, it starts one whole prompt a step: the paper's best case


def tokens_per_s(policy: Policy, chunk_tokens: int, work: EqualRequests, cost: CostModel, options: Options) -> float:
    """Throughput, prompts and outputs together."""
    rows = work.batch * options.rows(WAVES, least=2)
    limits = Limits(chunk_tokens, work.batch, lookahead=2 * work.batch)
    blocks = (work.batch + 1) * -(-work.sequence_tokens // BLOCK_TOKENS)
    settings = EngineSettings(policy, limits, blocks, BLOCK_TOKENS)
    requests = (Request(row, row, work.prompt_tokens, work.output_tokens) for row in range(rows))
    result = simulate(requests, [work.output_tokens] * rows, settings, cost)
    return rows * work.sequence_tokens / result.makespan_s


def gain(chunk_tokens: int, work: EqualRequests, cost: CostModel, options: Options) -> float:
    """Sarathi's throughput over the baseline's."""
    baseline = tokens_per_s(BASELINE, chunk_tokens, work, cost, options)
    return tokens_per_s(SARATHI, chunk_tokens, work, cost, options) / baseline


def decode_costs(cost: CostModel, chunk_tokens: int, batch: int, context: int) -> tuple[float, float]:
    """Seconds a decode token: in a step of `batch` decodes, and as what `batch - 1` add to a chunk's step (5.1.1).

    A chunk of the same size alone is subtracted, at the same context.
    """
    decodes = batch - 1
    chunk = chunk_tokens - decodes
    alone_s = cost.step_time_s(StepWork.of([1] * batch, [context] * batch)) / batch
    mixed = StepWork.of([chunk] + [1] * decodes, [context] * batch)
    added_s = cost.step_time_s(mixed) - cost.step_time_s(StepWork.of([chunk], [context]))
    return alone_s, added_s / decodes


def table_2(options: Options) -> Iterator[Figures]:
    """Sarathi, table 2: a decode alone and in a step with a prompt, LLaMA-13B on A6000."""
    cost = llama_13b()
    prefill = cost.step(StepWork.of([1024], [1024]))
    decodes = cost.step(StepWork.of([1] * 4, [1024] * 4))
    mixed = cost.step(StepWork.of([1021, 1, 1, 1], [1024] * 4))
    added_s = (mixed.total_s - prefill.total_s) / 3
    for name, step, linear, attention, decode, decode_s in (
        ("1,024 prompt tokens", prefill, 224.8, 10.0, 0.0, 0.0),
        ("4 decodes", decodes, 44.28, 5.68, 12.49, decodes.total_s / 4),
        ("1,021 prompt tokens and 3 decodes", mixed, 223.2, 15.2, 1.2, added_s),
    ):
        yield {
            "step": name,
            "paper_linear_ms": linear,
            "linear_ms": step.linear_s * 1e3,
            "paper_attention_ms": attention,
            "attention_ms": step.attention_s * 1e3,
            "paper_decode_ms": decode,
            "decode_ms": decode_s * 1e3,
        }


def figure_3(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 3: a decode's cost over a prompt token's, LLaMA-13B on A6000, 1,024 tokens."""
    cost = llama_13b()
    prefill_s = cost.step_time_s(StepWork.of([1024], [1024])) / 1024
    for batch, paper in ((1, 200.0), (2, 100.0), (18, 16.7)):
        ratio = cost.step_time_s(StepWork.of([1] * batch, [1024] * batch)) / batch / prefill_s
        yield {"batch": batch, "paper": paper, "ratio": ratio}


def figure_7(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 7: tile quantisation, LLaMA-13B on A6000."""
    cost = llama_13b()
    for tokens, paper_ms in ((128, 55.0), (256, 69.8), (257, 92.33)):
        yield {
            "tokens": tokens,
            "paper_ms": paper_ms,
            "ms": cost.step_time_s(StepWork.of([tokens], [tokens])) * 1e3,
        }


def figure_8(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 8: decode speed-up, LLaMA-13B on A6000, chunk 256 (paper: 2.8 to 10 over all)."""
    cost = llama_13b()
    for tokens, batches in ((1024, (2, 4, 6, 10, 18)), (2048, (2, 4, 6, 10)), (3072, (2, 4, 6))):
        for batch in batches:
            alone_s, added_s = decode_costs(cost, 256, batch, tokens)
            yield {"tokens": tokens, "batch": batch, "speedup": alone_s / added_s}


def table_4(options: Options) -> Iterator[Figures]:
    """Sarathi, table 4: peak gains, chunk 256."""
    small, large = llama_13b(), llama_33b()
    for name, cost, tokens, batch, ratio, paper_decode, paper_gain in (
        ("LLaMA-13B, A6000", small, 1024, 6, 50, 5.45, 1.33),
        ("LLaMA-13B, A6000", small, 2048, 6, 50, 3.26, 1.26),
        ("LLaMA-13B, A6000", small, 3072, 6, 50, 2.51, 1.22),
        ("LLaMA-33B, A100", large, 1024, 10, 28, 3.83, 1.25),
        ("LLaMA-33B, A100", large, 2048, 5, 63, 4.25, 1.22),
        ("LLaMA-33B, A100", large, 3072, 3, 127, 3.51, 1.14),
    ):
        alone_s, added_s = decode_costs(cost, 256, batch, tokens)
        yield {
            "model": name,
            "tokens": tokens,
            "batch": batch,
            "p_d_ratio": ratio,
            "paper_decode_speedup": paper_decode,
            "decode_speedup": alone_s / added_s,
            "paper_gain": paper_gain,
            "gain": gain(256, EqualRequests(tokens, ratio, batch), cost, options),
        }


def figure_9(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 9: the P:D ratio of the largest gain, which 5.1.3 says is C / (B - 1), LLaMA-13B on A6000."""
    cost = llama_13b()
    for tokens, batch, chunk, paper in (
        (1024, 18, 128, ""),
        (1024, 18, 256, 1.27),
        (1024, 18, 512, 1.23),
        (2048, 10, 256, 1.25),
        (3072, 6, 256, 1.23),
    ):
        gains = {ratio: gain(chunk, EqualRequests(tokens, ratio, batch), cost, options) for ratio in P_D_RATIOS}
        peak = max(gains, key=lambda ratio: gains[ratio])
        large = [ratio for ratio, found in gains.items() if found >= 1.1] or [0]  # 0: nowhere
        yield {
            "tokens": tokens,
            "batch": batch,
            "chunk": chunk,
            "formula": chunk / (batch - 1),
            "peak": peak,
            "paper_gain": paper,
            "gain": gains[peak],
            "gain_200": gains[200],
            "large_from": large[0],
            "large_to": large[-1],
            "loses_from": next((ratio for ratio, found in gains.items() if ratio > peak and found < 1), 0),
        }


def figure_4(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 4: tokens a millisecond of a layer, LLaMA-13B on A6000.

    Paper: prompts about 180 from 512 tokens on, 12.5 % fewer at 256; decodes saturate at a batch of 256.
    """
    cost = llama_13b()
    for phase, sizes in (("prefill", (128, 256, 512, 1024, 2048)), ("decode", (1, 18, 64, 128, 256, 512))):
        for size in sizes:
            work = StepWork.of([size], [size]) if phase == "prefill" else StepWork.of([1] * size, [1024] * size)
            yield {"phase": phase, "tokens": size, "tokens_per_ms": size / cost.layer_time_s(work) / 1e3}


def figure_10(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 10: matmuls of a balanced run, baseline over Sarathi (paper: MLP 1.3 to 1.6, rest 1.05 to 1.38).

    LLaMA-13B on A6000, P:D = C / (B - 1).
    """
    cost = llama_13b()
    rooflines = Rooflines(cost.profile, cost.shape.dtype)
    for chunk in (256, 512):
        for tokens, batch in ((1024, 6), (1024, 12), (1024, 18), (2048, 10), (3072, 6)):
            work = EqualRequests(tokens, chunk / (batch - 1), batch)
            steps = batch * work.prompt_tokens / (chunk - batch + 1)
            ratios: Figures = {}
            for name, matrices in (("mlp", cost.shape.dense_matrices), ("projections", cost.shape.attention_matrices)):
                prompts_s, decode_s, mixed_s = (
                    sum(rooflines.matmul(rows, each.k, each.n).total_s for each in matrices)
                    for rows in (batch * work.prompt_tokens, batch, chunk)
                )
                ratios[name] = (prompts_s + work.output_tokens * decode_s) / (steps * mixed_s)
            yield {"tokens": tokens, "chunk": chunk, "batch": batch, **ratios}


def batch_sizes(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 11 and table 4: sequences that fit in 90 % of the card's memory."""
    for name, cost, papers in (
        ("LLaMA-13B, A6000", llama_13b(), (18, 10, 6)),
        ("LLaMA-33B, A100", llama_33b(), (10, 5, 3)),
    ):
        for tokens, paper in zip((1024, 2048, 3072), papers, strict=True):
            budget = memory_budget(cost.shape, cost.profile, max_step_tokens=tokens, max_num_seqs=paper)
            yield {"model": name, "tokens": tokens, "paper": paper, "ours": budget.kv_tokens // tokens}


def figure_11b(options: Options) -> Iterator[Figures]:
    """Sarathi, figures 11b and 13c: the largest gain over all P:D by chunk, 1,024 tokens, batch 18, LLaMA-13B on A6000.

    Orca's chunk is a whole prompt.
    """
    cost = llama_13b()
    works = [EqualRequests(1024, ratio, 18) for ratio in P_D_RATIOS]
    baselines = [tokens_per_s(BASELINE, 256, work, cost, options) for work in works]
    for name, chunk, paper in (
        ("64", 64, "almost 1"),
        ("128", 128, "1.16"),
        ("256", 256, "1.27"),
        ("320", 320, "less than 256"),
        ("512", 512, "1.23"),
        ("whole prompts, Orca", 18, "1.11"),
    ):
        policy = ORCA if chunk == works[0].batch else SARATHI
        gains = [
            tokens_per_s(policy, chunk, work, cost, options) / baseline
            for work, baseline in zip(works, baselines, strict=True)
        ]
        best = max(gains)
        yield {"chunk": name, "paper": paper, "gain": best, "peak": P_D_RATIOS[gains.index(best)]}


def figure_11(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 11: gains over the baseline at P:D = C / (B - 1), C = 256, Orca at best, LLaMA-13B on A6000."""
    cost = llama_13b()
    for tokens, batch, paper_orca, paper_sarathi in (
        (1024, 18, "1.11", 1.27),
        (2048, 10, "near 1", 1.25),
        (3072, 6, "near 1", 1.23),
    ):
        work = EqualRequests(tokens, 256 / (batch - 1), batch)
        baseline = tokens_per_s(BASELINE, 256, work, cost, options)
        yield {
            "tokens": tokens,
            "batch": batch,
            "paper_orca": paper_orca,
            "orca": tokens_per_s(ORCA, batch, work, cost, options) / baseline,
            "paper_sarathi": paper_sarathi,
            "sarathi": tokens_per_s(SARATHI, 256, work, cost, options) / baseline,
        }


def figure_13(options: Options) -> Iterator[Figures]:
    """Sarathi, figure 13: time of a 1,024-token prompt in chunks over whole, LLaMA-13B on A6000."""
    cost, prompt = llama_13b(), 1024
    whole = cost.step(StepWork.of([prompt], [prompt]))
    for chunk, paper_attention, paper in (
        (64, "3", "about 5"),
        (128, "", "more than 2"),
        (256, "", "at most 1.2"),
        (512, "", "at most 1.1"),
    ):
        steps = [cost.step(StepWork.of([chunk], [end])) for end in range(chunk, prompt + 1, chunk)]
        yield {
            "chunk": chunk,
            "paper_attention": paper_attention,
            "attention": sum(step.attention_s for step in steps) / whole.attention_s,
            "paper_total": paper,
            "total": sum(step.total_s for step in steps) / whole.total_s,
        }
