"""The ways to run a job that memory allows, each with the steady state that arithmetic expects of it.

A candidate is a step size, a mixing and a place for the weights. Of a model larger than the device, some layers'
weights stay on the host: the more of them, the longer a step, and the more room for the sequences that share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.engine.policy import Mixing, Policy, find_policy
from vasuki.engine.settings import MOST_SEQS, EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import host_weight_bytes, memory_budget, rectangle_bytes
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering.planned_order import MOST_ROWS
from vasuki.planner.steady_state import MeanRow, SteadyState, steady_state

CHUNK_TILES = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 32, 4096
NUM_SEQS = 256
SHORT_ROW_TOKENS = 512  # rows shorter than that get small blocks
SPARE_ROWS = 1.1  # times the rows that run while the longest does: rows start at different times
LAYOUTS = 12  # numbers of layers on the host that are compared, where the weights do not fit
USUAL_ROW = 1.5  # times what rows hold on average is the room from which on steps are full ones
PREFILL_THRESHOLD = 0.1  # share of memory that starts a prefill phase: small ones keep the batch large
FULL_SPEED = 0.95  # of the prompt tokens a second that the best step size computes


@dataclass(frozen=True, eq=False)
class Problem:
    """What a plan is made from. Fields as the arguments of `planner.make_plan`."""

    lengths: Lengths
    shape: ModelShape
    profile: HardwareProfile
    plan: PlanConfig
    engine: EngineConfig
    kv: KVConfig
    beside_weights_bytes: int | None
    layout: Layout
    rows_arrive: bool = False  # rather than being there from the start
    may_be_urgent: bool = False  # rows that others make room for, whether or not the first ones are
    simulated_s: list[float] = field(default_factory=list)  # what simulations of it took so far, counted by `predict`

    @cached_property
    def work(self) -> MeanRow:
        return MeanRow.of(self.lengths)

    @property
    def arrivals_are_unknown(self) -> bool:
        """Whether rows that are yet to come stand for a stream: all of them at once, which nobody expects."""
        arrived_at_s = self.lengths.arrived_at_s
        return arrived_at_s is not None and not arrived_at_s.any()

    @cached_property
    def policy(self) -> Policy:
        """The job's policy, but that rows with a state of their own share nothing."""
        policy = find_policy(self.engine.policy)
        return policy if self.shape.in_blocks else replace(policy, shares_prefixes=False)

    @property
    def searching_solver(self) -> Literal["milp", "local_search"] | None:
        """Which solver looks for a better order once a candidate is chosen (`few_rows`); greedy's order serves until
        then.

        Where the job leaves it open, a few rows of known lengths are worth it."""
        if self.plan.solver == "milp" or self.plan.solver == "local_search":
            return self.plan.solver
        few = self.lengths.known and len(self.lengths) <= MOST_ROWS["milp"] and not self.rows_arrive
        return "local_search" if few and self.policy.ordered and self.plan.solver == "auto" else None

    @cached_property
    def order_is_open(self) -> bool:
        """Whether the input's order may be taken instead of the planned one, and may differ from it."""
        lengths = self.lengths
        if self.plan.solver != "auto" and not (self.searching_solver and lengths.known):
            return False
        return any(each.min() < each.max() for each in (lengths.prompt_tokens, lengths.output_tokens, lengths.limits))

    @property
    def asks_for_offload(self) -> bool:
        """Whether the job says that KV is to move, by itself or by its policy."""
        return self.kv.asks_for_offload or (self.kv.offload == "auto" and self.policy.goes_deep)

    @property
    def block_tokens(self) -> int:
        if self.kv.block_tokens != "auto":
            return self.kv.block_tokens
        return 16 if self.work.prompt_tokens + self.work.output_tokens < SHORT_ROW_TOKENS else 32

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of the longest row, in the end."""
        return min(self.shape.max_context_tokens, int(self.lengths.peak_tokens.max()))

    def num_blocks(self, chunk_tokens: int, max_num_seqs: int, layout: Layout) -> int:
        """KV blocks that fit on each device with weights and the activations of such steps. Raises ModelError if none
        fits."""
        return memory_budget(
            self.shape,
            self.profile,
            device_memory=self.kv.device_memory,
            block_tokens=self.block_tokens,
            max_step_tokens=max(chunk_tokens, max_num_seqs),
            max_num_seqs=max_num_seqs,
            row_tokens=self.row_tokens,
            layout=layout,
            beside_weights_bytes=self.beside_weights_bytes,
            host_kv_bytes=self.kv.host_memory if self.profile.kind == "cpu" and self.asks_for_offload else 0,
        ).num_blocks

    @cached_property
    def costs(self) -> list[CostModel]:
        """Step times with as many layers' weights on the host as the job says, or as the device has no room for.

        What fits stays: a layer on the host costs its copy in every step. What does not is tried in several depths.
        Raises JobFileError if what the job says needs more host memory than it allows.
        """
        return [CostModel(self.shape, self.profile, layout) for layout in _layouts(self)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the job."""

    settings: EngineSettings
    cost: CostModel
    state: SteadyState

    @classmethod
    def of(cls, problem: Problem, settings: EngineSettings, cost: CostModel) -> Candidate:
        """Make a candidate with its steady state.

        The last block of a sequence is half empty on average. The arithmetic is fitted to the usual blocks; what
        larger ones waste beyond that is no room for anybody.
        """
        held, wasted = problem.work.held_tokens, (settings.block_tokens - problem.block_tokens) / 2
        state = steady_state(
            cost,
            problem.work,
            int(settings.kv_tokens * held / (held + wasted)),
            settings.limits.chunk_tokens,
            settings.limits.max_num_seqs,
            settings.policy.mixing,
            settings.offload.streamed_layers,
            settings.block_tokens * problem.shape.kv_bytes_per_token_per_layer,
            settings.limits.short_step_tokens,
        )
        return cls(settings, cost, state)

    def holds_all(self, problem: Problem) -> bool:
        """Whether there is room for the longest row."""
        return self.settings.kv_tokens >= int(problem.lengths.peak_tokens.max())

    @property
    def mixing(self) -> Mixing:
        return self.settings.policy.mixing


def ranked_candidates(problem: Problem) -> list[Candidate]:
    """Every candidate worth considering, without offload, the fastest steady state first.

    Raises:
        ModelError: none fits into memory.
        JobFileError: the job keeps more weights on the host than it allows memory for.
    """
    return sorted(_candidates(problem), key=lambda candidate: candidate.state.request_s)


def _candidates(problem: Problem) -> Iterator[Candidate]:
    misfit: ModelError | None = None
    found = False
    for cost, short, chunk_tokens in _steps(problem):
        try:
            settings = settings_of(problem, chunk_tokens, cost.layout)
        except ModelError as error:
            misfit = error
            continue
        found = True
        for mixing in _mixings(problem):
            mixed = replace(settings, policy=replace(problem.policy, mixing=mixing))
            if mixing is Mixing.MIXED and short:
                usual = int(USUAL_ROW * problem.work.held_tokens)
                mixed = replace(mixed, limits=replace(mixed.limits, short_step_tokens=short, usual_row_tokens=usual))
            yield Candidate.of(problem, mixed, cost)
    if misfit is not None and not found:
        raise misfit


def _steps(problem: Problem) -> Iterator[tuple[CostModel, int, int]]:
    """Places for the weights, and tokens of a step: when memory is tight, and usually."""
    for cost in problem.costs:
        sizes = chunk_sizes(problem)
        if problem.rows_arrive:
            sizes = [_at_full_speed(cost, sizes)]
        for short, chunk_tokens in zip([0, *sizes], sizes, strict=False):
            yield cost, short, chunk_tokens


def with_fewer_rows(problem: Problem, candidates: list[Candidate]) -> list[Candidate]:
    """The same with only as many rows side by side as it takes for all of them to end with the longest, the fastest
    steady state first. Without candidates whose memory holds no more rows anyway; none where rows
    arrive.

    More would end sooner, and leave the longest rows to small steps. With fewer, smaller steps may be better, too.
    """
    outputs = problem.lengths.output_tokens
    enough = 8 * math.ceil(SPARE_ROWS * float(outputs.sum()) / float(outputs.max()) / 8)
    if problem.rows_arrive or problem.engine.max_num_seqs != "auto":
        return []
    fewer = [
        Candidate.of(
            problem,
            replace(each.settings, limits=replace(each.settings.limits, max_num_seqs=enough)),
            each.cost,
        )
        for each in candidates
        if enough < min(each.settings.limits.max_num_seqs, each.state.sequences)
    ]
    return sorted(fewer, key=lambda candidate: candidate.state.request_s)


def with_rows(problem: Problem, candidate: Candidate, rows: int) -> Iterator[Candidate]:
    """The candidate with so many rows side by side, if memory allows it."""
    settings = candidate.settings
    limits, size = replace(settings.limits, max_num_seqs=rows), settings.block_tokens // problem.block_tokens
    if rows > settings.limits.max_num_seqs:
        if settings.offload.streamed_layers:  # whose room is another question
            return
        try:
            num_blocks = problem.num_blocks(limits.chunk_tokens, rows, candidate.cost.layout) // size
        except ModelError:
            return
        settings = replace(settings, num_blocks=min(settings.num_blocks, num_blocks))
    yield Candidate.of(problem, replace(settings, limits=limits), candidate.cost)


def _mixings(problem: Problem) -> tuple[Mixing, ...]:
    """Rows that arrive should not stand still while the prompts of others are computed."""
    if problem.policy.ordered and not problem.rows_arrive:
        return (Mixing.MIXED, Mixing.EXCLUSIVE)
    return (problem.policy.mixing,)


def chunk_sizes(problem: Problem) -> list[int]:
    """Whole tiles, or parts, so that decodes and the chunk together fill them."""
    if problem.engine.chunk_tokens != "auto":
        return [problem.engine.chunk_tokens]
    if not problem.policy.ordered:
        whole = 0 if problem.policy.chunked else int(problem.lengths.prompt_tokens.max())
        return [max(problem.policy.chunk_tokens, whole)]
    tile = problem.profile.tile_rows
    tile *= math.ceil(LEAST_CHUNK_TOKENS / tile)  # a CPU's tiles are single rows
    sizes = [int(tile * tiles) for tiles in CHUNK_TILES]
    return [size for size in sizes if LEAST_CHUNK_TOKENS <= size <= MOST_CHUNK_TOKENS]


def _at_full_speed(cost: CostModel, sizes: list[int]) -> int:
    """The smallest step that computes prompts at nearly full speed: larger ones delay the tokens of decoding rows,
    smaller ones all rows that have not started."""
    speeds = [size / cost.step_time_s(cost.work([size], [size])) for size in sizes]
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= FULL_SPEED * max(speeds))


def settings_of(problem: Problem, chunk_tokens: int, layout: Layout) -> EngineSettings:
    """Limits and blocks for a step size. Raises ModelError if no memory is left."""
    shape, max_num_seqs = problem.shape, NUM_SEQS
    if problem.engine.max_num_seqs != "auto":
        max_num_seqs = problem.engine.max_num_seqs
    elif problem.policy.ordered or shape.state_bytes or shape.backend == "padded":
        kv_tokens = problem.num_blocks(chunk_tokens, 1, layout) * problem.block_tokens
        max_num_seqs = min(MOST_SEQS if problem.policy.ordered else NUM_SEQS, _rows_side_by_side(problem, kv_tokens))
    num_blocks, max_num_seqs = _blocks_beside(problem, chunk_tokens, max_num_seqs, layout)
    longest = problem.row_tokens
    limits = Limits(chunk_tokens, max_num_seqs, prefill_threshold=PREFILL_THRESHOLD, longest_row_tokens=longest)
    if not problem.policy.refill:  # a batch that starts as a whole is chosen from as many rows
        limits = replace(limits, lookahead=max(limits.lookahead, max_num_seqs))
    return EngineSettings(problem.policy, limits, num_blocks, problem.block_tokens)


def _blocks_beside(problem: Problem, chunk_tokens: int, max_num_seqs: int, layout: Layout) -> tuple[int, int]:
    """Blocks beside the activations of so many rows, and the rows; fewer where these are rectangles, for which the
    device has no room. Raises ModelError if no memory is left."""
    try:
        return problem.num_blocks(chunk_tokens, max_num_seqs, layout), max_num_seqs
    except ModelError:
        if max_num_seqs == 1 or problem.shape.backend != "padded" or problem.engine.max_num_seqs != "auto":
            raise
        return _blocks_beside(problem, chunk_tokens, max_num_seqs * 3 // 4, layout)


def _rows_side_by_side(problem: Problem, kv_tokens: int) -> int:
    """Rows at a time: more than usually fit, since rows may turn out short. But memory for a state or a row of a
    rectangle is set aside for each of them, and the longest row that fits by itself must still fit with them."""
    work, shape = problem.work, problem.shape
    shares = shape.backend == "padded" and problem.kv.device_memory <= 1  # rectangles have their memory of KV's
    rectangle = rectangle_bytes(shape, 1, 1, problem.row_tokens) if shares else 0
    state_tokens = (shape.state_bytes + rectangle) / shape.kv_bytes_per_token
    roomy = work.most_sequences(kv_tokens, state_tokens)
    if not state_tokens:
        return 8 * math.ceil((1.5 * roomy + 8) / 8)
    peaks = problem.lengths.peak_tokens
    spare_tokens = kv_tokens - int(peaks[peaks <= kv_tokens].max(initial=0))
    usual = roomy * (1 + 0.5 * work.held_tokens / (work.held_tokens + state_tokens))
    return max(1, min(int(usual), 1 + int(spare_tokens / state_tokens)))


def _layouts(problem: Problem) -> list[Layout]:
    """See `Problem.costs`."""
    layout, shape, allowed = problem.layout, problem.shape, problem.kv.host_memory
    asked = problem.engine.weights_on_host
    if asked != "auto":
        layout = replace(layout, host_layers=asked)
        layout.check(shape)
        if (needed := host_weight_bytes(shape, layout)) > allowed:
            raise JobFileError(
                f"engine.weights_on_host: {asked} layers need {needed / 2**30:.1f} GiB of host memory, "
                f"kv.host_memory allows {allowed / 2**30:.1f} GiB"
            )
        return [layout]
    if problem.profile.kind == "cpu" or _has_room(problem, layout):
        return [layout]
    deepest = min(shape.num_layers - 1, allowed // shape.layer_weight_bytes)
    options = [replace(layout, host_layers=host) for host in range(1, deepest + 1)]
    options = [option for option in options if _has_room(problem, option)]
    return options[:: max(1, len(options) // LAYOUTS)] or [layout]


def _has_room(problem: Problem, layout: Layout) -> bool:
    """Whether the shortest request fits together with the weights."""
    try:
        num_blocks = problem.num_blocks(chunk_sizes(problem)[0], 1, layout)
    except ModelError:
        return False
    return num_blocks * problem.block_tokens >= int(problem.lengths.peak_tokens.min())
