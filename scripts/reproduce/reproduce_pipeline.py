"""Sarathi, section 5.3: GPT-3 on 64 A100s, 8-way tensor parallel, with and without an 8-stage pipeline.

10,000 requests with the lengths of `zipf_lengths`. As in the paper a micro-batch holds at most 27 sequences in the
pipeline and 11 on a replica without one; memory for that many of the longest requests is set aside.

    Orca          a step holds the decodes and one whole prompt: the paper's best case
    Sarathi       decodes and prompt chunks share 256 tokens; the next prompt fills up what the last chunk of one leaves
    one chunk     the same, but a step has a chunk of one prompt only, as the paper forms batches (4.3)
    256 extra     one chunk, of up to 256 tokens besides the decodes, so that steps reach into a third tile

The paper does not say how the replicas without a pipeline schedule; both ways are run. Sends between stages are priced
at the profile's NVLink rate although servers are joined by InfiniBand: at 25 GB/s a GPU the 0.8 MB of 256 tokens would
take 0.03 ms of a stage's 13 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from reproduce_table import Figures, Options
from zipf_lengths import LONGEST, REQUESTS, zipf_lengths

from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.simulator import PipelineResult, simulate_pipelines

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
PIPELINE, REPLICAS = Layout(tensor_parallel=8, pipeline_parallel=8), Layout(tensor_parallel=8, data_parallel=8)
SEQUENCES = {PIPELINE: 27, REPLICAS: 11}


@dataclass(frozen=True, slots=True)
class System:
    """A line of the table."""

    name: str
    policy: str
    layout: Layout
    step_tokens: int

    def settings(self) -> EngineSettings:
        sequences = SEQUENCES[self.layout]
        limits = Limits(self.step_tokens, sequences)
        return EngineSettings(find_policy(self.policy), limits, sequences * LONGEST // BLOCK_TOKENS, BLOCK_TOKENS)


SYSTEMS = (
    System("Orca, pipeline", "orca", PIPELINE, SEQUENCES[PIPELINE]),  # a budget that is spent by the first prompt
    System("Sarathi, pipeline", "sarathi", PIPELINE, CHUNK_TOKENS),
    System("Sarathi, pipeline, one chunk", "sarathi-paper", PIPELINE, CHUNK_TOKENS),
    System("Sarathi, pipeline, 256 extra", "sarathi-paper", PIPELINE, CHUNK_TOKENS + SEQUENCES[PIPELINE] - 1),
    System("Orca, 8 replicas", "orca", REPLICAS, SEQUENCES[REPLICAS]),
    System("Sarathi, 8 replicas", "sarathi", REPLICAS, CHUNK_TOKENS),
)


def requests(lengths: Lengths) -> Iterator[Request]:
    """Requests whose memory is set aside by their own lengths."""
    for row, (prompt, output) in enumerate(zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)):
        yield Request(row, row, int(prompt), int(output))


def run(system: System, lengths: Lengths) -> PipelineResult:
    """Simulate one line."""
    cost = CostModel(named_shape("gpt-3").with_dtype("float16"), find_profile("a100"), system.layout)
    outputs = lengths.output_tokens.tolist()
    return simulate_pipelines(requests(lengths), outputs, system.settings(), cost)


def section_5_3(options: Options) -> Iterator[Figures]:
    """Sarathi, section 5.3: GPT-3 on 64 A100s; over Orca (paper: 1.91, 6.29 times fewer bubbles; 8 replicas 1.28)."""
    lengths = zipf_lengths(options.rows(REQUESTS, least=40))
    orca_s = orca_bubble_s = 0.0
    for system in SYSTEMS:
        result = run(system, lengths)
        bubble_s = median(result.bubble_s)
        orca_s, orca_bubble_s = orca_s or result.makespan_s, orca_bubble_s or bubble_s
        yield {
            "system": system.name,
            "speedup": orca_s / result.makespan_s,
            "fewer_bubbles": orca_bubble_s / bubble_s if bubble_s else 0.0,
            "makespan_s": result.makespan_s,
            "median_bubble_s": bubble_s,
            "bubble_share": result.bubble_share,
            "mean_seqs": result.stats.mean_seqs,
            "steps": result.stats.steps,
        }


def batch_sizes(options: Options) -> Iterator[Figures]:
    """Sarathi, section 5.3: sequences of 4,096 tokens that fit in 90 % of memory, for each micro-batch."""
    shape, profile = named_shape("gpt-3").with_dtype("float16"), find_profile("a100")
    for name, layout in (("8 tensor x 8 pipeline", PIPELINE), ("8 tensor, 8 replicas", REPLICAS)):
        budget = memory_budget(shape, profile, layout=layout, max_step_tokens=LONGEST, max_num_seqs=SEQUENCES[layout])
        ours = budget.kv_tokens // LONGEST // layout.pipeline_parallel
        yield {"layout": name, "paper": SEQUENCES[layout], "ours": ours}
