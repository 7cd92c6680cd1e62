"""Layers that each batch leaves on the host, by the paper's Algorithms 1 and 2 (Vasuki, section 5), see `engine.depth`.

With the corrected conditions, layers change place only where memory is wanted or copies stop hiding; as printed, with
every batch that allows another depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vasuki.base.errors import JobFileError
from vasuki.base.units import bytes_text
from vasuki.engine.batch import Batch
from vasuki.engine.depth import Depth, depths
from vasuki.engine.offload import OffloadPlan
from vasuki.machines.cost_model import CostModel, StepWork
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.offload.algorithms import (
    LayerTraffic,
    max_layers_first_last,
    printed_first_last,
    printed_ring,
    ring_layers,
)
from vasuki.planner.offload.options import host_kv_bytes
from vasuki.planner.offload.streaming import STREAM_BLOCKS, with_blocks
from vasuki.planner.prediction import Prediction, predict

FULL_COPY_BYTES = 2**28
NEAR = 0.8  # of the bandwidth of such a copy is enough
FEWEST_PLACES = 2  # that a block of a streamed layer needs: one is read while the other fills


@dataclass(frozen=True, eq=False)
class HiddenDepth:
    """The deepest depth whose copies a batch hides; a `DepthRule`.

    Args:
        cost: the model on the device.
        block_tokens: of a block.
        deepest: that the host has room for.
        host_blocks: whose layers it holds then.
        is_lazy: whether the conditions are the corrected ones.
    """

    cost: CostModel
    block_tokens: int
    deepest: Depth
    host_blocks: int
    is_lazy: bool

    @property
    def num_layers(self) -> int:
        return self.cost.shape.num_layers

    def most_blocks(self, num_blocks: int) -> int:
        return min(num_blocks * self.num_layers // self.deepest.places, self.host_blocks)

    def __call__(self, batch: Batch) -> Depth:
        work, of_decodes = self.cost.batch_work(batch), sum(batch.starts)
        context = of_decodes + sum([start for _, start, _, _ in batch.prefills])
        first_last, ring = self.hidden(work, context, of_decodes + len(batch.starts))
        if self.deepest.way == "ring":
            if ring > first_last:
                return Depth(self.num_layers, "ring", max(self.num_layers - ring, self.deepest.buffers))
        else:
            first_last = min(first_last, self.deepest.buffers)
        return Depth(self.num_layers, "first-last", first_last) if first_last else Depth(self.num_layers)

    def hidden(self, work: StepWork, context: int, of_decodes: int) -> tuple[int, int]:
        """Layers that need no place on the device, by Algorithms 1 and 2.

        Args:
            work: of a step.
            context: tokens that its rows have in the cache.
            of_decodes: the same of "decode requests" alone, with the token that each computes.
        """
        layers, link = self.num_layers, self.cost.profile.link
        token_bytes, layer_s = self.cost.shape.kv_bytes_per_token_per_layer, self.cost.layer_time_s(work)
        if not self.is_lazy:
            layer_bytes = of_decodes * token_bytes
            return printed_first_last(layers, layer_s, layer_bytes, link), printed_ring(
                layers, layer_s, layer_bytes, link
            )
        traffic = LayerTraffic(context * token_bytes, work.num_tokens * token_bytes, self.block_tokens * token_bytes)
        return max_layers_first_last(layers, layer_s, traffic, link), ring_layers(layers, layer_s, traffic, link)


def why_not_by_batch(problem: Problem) -> str:
    """Why a job of this kind cannot have it, whatever its rows and its memory; empty if it can."""
    policy, shape = problem.policy, problem.shape
    if not (policy.goes_deep or policy.ordered):
        return f"it goes with policies vasuki and vasuki-paper, not with {policy.name}"
    if shape.backend != "ragged":
        return "rows are not packed (engine.attention), and their layers cannot pass one by one"
    if not shape.stores_evenly:
        return "layers keep more of a token than others do, and cannot take each other's place"
    if shape.num_layers < FEWEST_PLACES + 1:
        return f"of {shape.num_layers} layers none can leave: two are on the device at any time"
    if problem.layout.pipeline_parallel > 1:
        return "it is not simulated with stages"
    if any(cost.layout.host_layers for cost in problem.costs):
        return "weights that live on the host keep the link busy"
    return ""


def by_batch(problem: Problem, base: Prediction) -> Prediction:
    """The candidate of `base` with a depth for each batch. Raises JobFileError where the host has no room for it."""
    candidate = with_blocks(problem, base.candidate, _block_size(problem, base.candidate))
    settings = candidate.settings
    layer_bytes = settings.block_tokens * problem.shape.kv_bytes_per_token_per_layer
    homes = int(host_kv_bytes(problem, candidate) // layer_bytes)  # of one layer's part of a block
    layers, is_lazy = problem.shape.num_layers, problem.kv.conditions == "corrected"
    useful = _useful_depths(candidate) if is_lazy else [each for each in depths(layers) if each.streamed][::-1]
    if not useful:
        reason = "no step hides a layer's copies when the device is full"
        return predict(problem, _with(problem, candidate, OffloadPlan("by_batch", reason)))
    deepest = next((each for each in useful if _has_homes(each, settings.num_blocks, homes)), None)
    if deepest is None:
        least = 2 * (settings.num_blocks * layers // (layers - 1) + 1) * layer_bytes
        raise JobFileError(
            f"kv.host_memory: two layers of the device's blocks, which kv.offload: by_batch moves at least, take "
            f"{bytes_text(least)}; raise it, or set kv.offload to none"
        )
    rule = HiddenDepth(candidate.cost, settings.block_tokens, deepest, homes // len(deepest.streamed), is_lazy)
    reason = f"as many layers as each batch hides, by the paper's conditions as {_AS[rule.is_lazy]}"
    return predict(problem, _with(problem, candidate, OffloadPlan("by_batch", reason, depth=rule)))


def _with(problem: Problem, candidate: Candidate, offload: OffloadPlan) -> Candidate:
    """The candidate with that. Nothing is shared: what nobody holds keeps no place when layers move."""
    policy = replace(candidate.settings.policy, shares_prefixes=False)
    return Candidate.of(problem, replace(candidate.settings, offload=offload, policy=policy), candidate.cost)


def _useful_depths(candidate: Candidate) -> list[Depth]:
    """Depths that a step hides in which rows fill the device, the deepest first: those deeper are hidden by batches
    that need no more room."""
    settings, cost = candidate.settings, candidate.cost
    rows = max(1, min(int(candidate.state.sequences), settings.limits.max_num_seqs))
    each = max(1, settings.kv_tokens // rows)
    chunk = max(1, settings.limits.chunk_tokens - rows)
    work = cost.work([1] * rows + [chunk], [each] * rows + [chunk])
    layers = cost.shape.num_layers
    rule = HiddenDepth(cost, settings.block_tokens, Depth(layers, "ring", FEWEST_PLACES), 0, True)
    first_last, ring = rule.hidden(work, settings.kv_tokens, settings.kv_tokens)
    rings = [Depth(layers, "ring", layers - ring)] if ring > first_last else []
    return [*rings, *(Depth(layers, "first-last", buffers) for buffers in range(first_last, 0, -1))]


def _block_size(problem: Problem, candidate: Candidate) -> int:
    """How many times as large as usual blocks are that the link moves at nearly full speed."""
    link, shape = problem.profile.link, problem.shape
    block_bytes = candidate.settings.block_tokens * shape.kv_bytes_per_token_per_layer
    if problem.kv.block_tokens != "auto":
        return 1
    full = link.bandwidth_bytes_per_s(FULL_COPY_BYTES, "both")
    sizes = (size for size in STREAM_BLOCKS if link.bandwidth_bytes_per_s(size * block_bytes, "both") >= NEAR * full)
    return next(sizes, STREAM_BLOCKS[-1])


def _has_homes(depth: Depth, num_blocks: int, homes: int) -> bool:
    """Whether the host holds the layers that leave: at the ends, of as many blocks as the device has room for then; in
    a ring, where it may hold fewer, of more than without."""
    most = num_blocks * depth.num_layers // depth.places
    return homes > len(depth.streamed) * (num_blocks if depth.way == "ring" else most)


_AS = {True: "corrected", False: "printed"}
