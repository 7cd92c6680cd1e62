"""Requests -> Plan: step size, mixing, offload, and what the job will take.

    lengths --> steady state of each candidate --> the best few simulated on a sample --> the best one --> makespan

Arithmetic tells bad candidates from good ones, and the simulator, which is the real scheduler in virtual time, decides
among these. Offload is priced the same way: nothing, streamed layers, parked sequences, and the cheapest is taken.

Jobs beyond a certain size are predicted from a sample: rows evenly spaced in the order of their work, simulated as a
job of their own. The seconds a row takes between the first and the last quarter of the sample hold for all rows that
the sample lacks; start and end are the sample's.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vasuki.config import Column, CostConfig, EngineConfig, KVConfig, PlanConfig
from vasuki.cost_model import CostModel
from vasuki.errors import InputError, ModelError
from vasuki.layout import Layout
from vasuki.lengths import Ints, Lengths
from vasuki.lower_bound import job_lower_bound
from vasuki.memory_budget import memory_budget
from vasuki.model_shape import ModelShape
from vasuki.offload_policy import LayerTraffic, StreamPlan, choose_stream
from vasuki.ordering import MILP_ROWS, Solver, order_requests
from vasuki.plan import CostEstimate, EngineSettings, Offload, OffloadMode, Plan
from vasuki.profile import HardwareProfile
from vasuki.scheduler import Limits, Mixing, Policy, find_policy
from vasuki.sequence import Sequence
from vasuki.simulator import SimulationResult, VirtualClock, simulate
from vasuki.steady_state import SteadyState, Workload, steady_state

OFFLOAD_MODES: tuple[OffloadMode, ...] = ("none", "stream", "park")

CHUNK_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
MOST_CHUNK_TOKENS = 4096
CHUNK_TOKENS = 512  # of the other policies where nothing is said, as in the papers
WHOLE_PROMPT_TOKENS = 2048  # the same for those that never split a prompt
NUM_SEQS = 256
MOST_SEQS = 2048
SHORT_ROW_TOKENS = 512  # rows shorter than that get small blocks
SHORTLIST = 3
WORTHWHILE = 0.99  # a candidate with more moving parts must be this much faster
# A simulation takes about SIMULATED_ROW x (SIMULATED_BASE + sequences) microseconds a row, on one core.
SIMULATED_ROW, SIMULATED_BASE = 6, 50
CANDIDATE_US, PREDICTION_US = 150_000, 700_000
SAMPLE_WAVES = 3  # rows of a sample, at least, in units of what runs side by side


def make_plan(
    lengths: Lengths,
    shape: ModelShape,
    profile: HardwareProfile,
    *,
    plan: PlanConfig | None = None,
    engine: EngineConfig | None = None,
    kv: KVConfig | None = None,
    cost: CostConfig | None = None,
    kv_bytes: int | None = None,
    offload_modes: Collection[OffloadMode] = OFFLOAD_MODES,
    layout: Layout | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a job.

    Args:
        lengths: prompt lengths, and output lengths recorded or expected.
        shape: the model.
        profile: the device.
        plan: how rows are ordered and what is known of their outputs.
        engine: policy and limits; what is `auto` is chosen here for vasuki, and usual values are taken for the others.
        kv: memory and offload.
        cost: price; the profile's where it says nothing.
        kv_bytes: KV memory of the device, where it is known better than the profile tells.
        offload_modes: what the executor can do.
        layout: over several devices.
        seed: of local search.

    Raises:
        ModelError: the model does not fit the device.
        InputError: not one of the requests fits.
    """
    started_s = time.perf_counter()
    planner = _Planner(
        lengths,
        shape,
        profile,
        plan or PlanConfig(),
        engine or EngineConfig(),
        kv or KVConfig(),
        cost or CostConfig(),
        kv_bytes,
        offload_modes,
        layout or Layout(),
        seed,
    )
    made = planner.make()
    return replace(made, plan_s=time.perf_counter() - started_s)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to run the job."""

    settings: EngineSettings
    state: SteadyState
    offload: Offload


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says of a whole job."""

    makespan_s: float
    simulated_requests: int
    result: SimulationResult
    solver: Solver
    optimal: bool


class _Planner:
    """One call of `make_plan`."""

    def __init__(
        self,
        lengths: Lengths,
        shape: ModelShape,
        profile: HardwareProfile,
        plan: PlanConfig,
        engine: EngineConfig,
        kv: KVConfig,
        cost: CostConfig,
        kv_bytes: int | None,
        offload_modes: Collection[OffloadMode],
        layout: Layout,
        seed: int,
    ) -> None:
        self.lengths, self.shape, self.profile, self.layout, self.seed = lengths, shape, profile, layout, seed
        self.plan_config, self.engine, self.kv, self.cost_config = plan, engine, kv, cost
        self.device_memory: float | int = kv.device_memory if kv_bytes is None else kv_bytes
        self.offload_modes = [mode for mode in offload_modes if kv.offload in ("auto", mode)]
        self.cost = CostModel(shape, profile, layout)
        self.policy = find_policy(engine.policy)
        self.work = Workload.of(lengths)
        self.known = isinstance(plan.output_length, Column)
        mean_tokens = self.work.prompt_tokens + self.work.output_tokens
        self.block_tokens = (
            (16 if mean_tokens < SHORT_ROW_TOKENS else 32) if kv.block_tokens == "auto" else kv.block_tokens
        )

    def make(self) -> Plan:
        candidates = sorted(self._without_offload(), key=lambda candidate: candidate.state.request_s)
        fits, misfit = self._fitting(candidates[0].settings)
        job = self.lengths if fits.all() else self.lengths.take(np.flatnonzero(fits))
        chosen = self._best(candidates, job)
        chosen = self._with_offload(chosen, job)
        prediction = self._solve(chosen.settings, job)
        settings, limits = chosen.settings, chosen.settings.limits
        bound = job_lower_bound(
            self.shape, self.profile, job.prompt_tokens, job.output_tokens, settings.kv_tokens, self.layout
        )
        tokens = int(job.prompt_tokens.sum()), int(job.output_tokens.sum())
        price, currency = self._price()
        return Plan(
            gpu=self.profile.name,
            requests=len(self.lengths),
            prompt_tokens=int(self.lengths.prompt_tokens.sum()),
            output_tokens_estimate=int(self.lengths.output_tokens.sum()),
            makespan_s=prediction.makespan_s,
            lower_bound_s=bound.seconds,
            solver=prediction.solver,
            optimal=prediction.optimal,
            policy=self.policy.name,
            chunk_tokens=limits.chunk_tokens,
            max_num_seqs=limits.max_num_seqs,
            offload=chosen.offload,
            cost=CostEstimate.of(prediction.makespan_s, self.layout.num_gpus, price, currency, sum(tokens)),
            plan_s=0.0,
            settings=settings,
            mixing=self._mixing_reason(chosen, candidates),
            bound_by=bound.binding,
            simulated_requests=prediction.simulated_requests,
            misfits=int((~fits).sum()),
            misfit=misfit,
        )

    # --- candidates --------------------------------------------------------------------------------------------------

    def _without_offload(self) -> Iterator[_Candidate]:
        """Every step size and mixing worth considering that memory allows."""
        problem: ModelError | None = None
        found = False
        for chunk_tokens in self._chunk_sizes():
            try:
                settings = self._settings(chunk_tokens)
            except ModelError as error:
                problem = error
                continue
            found = True
            for policy in self._policies():
                yield self._candidate(replace(settings, policy=policy), Offload("none", 0, "not considered"))
        if problem is not None and not found:
            raise problem

    def _policies(self) -> list[Policy]:
        if self.policy.name != "vasuki":
            return [self.policy]
        return [replace(self.policy, mixing=mixing) for mixing in (Mixing.MIXED, Mixing.EXCLUSIVE)]

    def _chunk_sizes(self) -> list[int]:
        """Whole tiles, so that decodes and the chunk together fill them."""
        if self.engine.chunk_tokens != "auto":
            return [self.engine.chunk_tokens]
        if self.policy.name != "vasuki":
            longest = int(self.lengths.prompt_tokens.max())
            return [CHUNK_TOKENS if self.policy.chunked else max(WHOLE_PROMPT_TOKENS, longest)]
        tile = self.profile.tile_rows
        return [tile * tiles for tiles in CHUNK_TILES if tile * tiles <= MOST_CHUNK_TOKENS]

    def _settings(self, chunk_tokens: int) -> EngineSettings:
        """Limits and blocks for a step size. Raises ModelError if no memory is left."""
        max_num_seqs = NUM_SEQS
        if self.engine.max_num_seqs != "auto":
            max_num_seqs = self.engine.max_num_seqs
        elif self.policy.name == "vasuki":
            roomy = self.work.most_sequences(self._num_blocks(chunk_tokens, 1) * self.block_tokens)
            max_num_seqs = min(MOST_SEQS, 8 * math.ceil((1.5 * roomy + 8) / 8))
        num_blocks = self._num_blocks(chunk_tokens, max_num_seqs)
        limits = Limits(chunk_tokens, max_num_seqs)
        return EngineSettings(self.policy, limits, num_blocks, self.block_tokens)

    def _num_blocks(self, chunk_tokens: int, max_num_seqs: int) -> int:
        return memory_budget(
            self.shape,
            self.profile,
            device_memory=self.device_memory,
            block_tokens=self.block_tokens,
            max_step_tokens=max(chunk_tokens, max_num_seqs),
            max_num_seqs=max_num_seqs,
            layout=self.layout,
        ).num_blocks

    def _candidate(self, settings: EngineSettings, offload: Offload) -> _Candidate:
        limits = settings.limits
        state = steady_state(
            self.cost,
            self.work,
            settings.kv_tokens,
            limits.chunk_tokens,
            limits.max_num_seqs,
            settings.policy.mixing,
            settings.streamed_layers,
        )
        return _Candidate(settings, state, offload)

    def _fitting(self, settings: EngineSettings) -> tuple[np.ndarray, str]:
        """`[rows]` which requests fit alone, and what the first that does not would need.

        Raises InputError if none fits.
        """
        needed = self.lengths.prompt_tokens + self.lengths.limits - 1
        fits: np.ndarray = -(-needed // settings.block_tokens) <= settings.num_blocks
        if fits.all():
            return fits, ""
        row = int(np.argmin(fits))
        misfit = (
            f"row {row} needs KV memory for {int(needed[row]):,} tokens (prompt {self.lengths.prompt_tokens[row]:,}, "
            f"max_tokens {self.lengths.limits[row]:,}), {self.profile.name} has room for {settings.kv_tokens:,}"
        )
        if not fits.any():
            raise InputError(f"no request fits: {misfit}")
        return fits, misfit

    # --- choices -----------------------------------------------------------------------------------------------------

    def _best(self, candidates: list[_Candidate], job: Lengths) -> _Candidate:
        """The fastest on a sample, of the best few by arithmetic; the best of the other mixing is among them."""
        shortlist = candidates[:SHORTLIST]
        mixings = {candidate.settings.policy.mixing for candidate in shortlist}
        shortlist += [c for c in candidates if c.settings.policy.mixing not in mixings][:1]
        if len(shortlist) == 1:
            return shortlist[0]
        return min(shortlist, key=lambda candidate: self._try(candidate, job).makespan_s)

    def _try(self, candidate: _Candidate, job: Lengths) -> Prediction:
        rows = self._affordable_rows(CANDIDATE_US, candidate.state.sequences)
        return self._predict(candidate.settings, job, rows, "greedy")

    def _with_offload(self, candidate: _Candidate, job: Lengths) -> _Candidate:
        """The candidate with what pays best of no offload, parking and streaming, and the reason in words."""
        base = self._try(candidate, job)
        options = [(base.makespan_s, candidate)]
        reasons = []
        for mode, other in (("park", self._parking), ("stream", self._streaming)):
            if mode in self.offload_modes:
                found, reason = other(candidate, base)
                reasons.append(reason)
                if found is not None:
                    options.append((self._try(found, job).makespan_s, found))
        forced = [option for option in options if option[1].offload.mode == self.kv.offload]
        best_s, best = min(forced or options, key=lambda option: option[0])
        if best.offload.mode == "none" or (not forced and best_s > WORTHWHILE * base.makespan_s):
            return replace(candidate, offload=Offload("none", 0, self._why_none(options, reasons)))
        saved = 1 - best_s / base.makespan_s
        gain = f"saves {saved:.1%}" if saved > 0 else f"costs {-saved:.1%}"
        return replace(best, offload=replace(best.offload, reason=f"{best.offload.reason}; {gain} on a sample"))

    def _why_none(self, options: list[tuple[float, _Candidate]], reasons: list[str]) -> str:
        if not self.offload_modes or self.kv.offload == "none":
            return "as the job asks"
        base_s = options[0][0]
        reasons += [f"{c.offload.mode} would take {s / base_s - 1:+.1%} on a sample" for s, c in options[1:]]
        return "; ".join(reason for reason in reasons if reason) or "nothing else is available"

    def _parking(self, candidate: _Candidate, base: Prediction) -> tuple[_Candidate | None, str]:
        """Preempted sequences wait in host memory instead of being computed again."""
        if self.policy.name != "vasuki":
            return None, "only vasuki parks sequences"
        if not base.result.counters.preemptions_recompute and self.kv.offload != "park":
            return None, "no sequence has to make room, so none would be parked"
        settings = candidate.settings
        host_blocks = int(self.kv.host_memory / (self.shape.kv_bytes_per_token * settings.block_tokens))
        threshold = self._swap_min_tokens(settings, candidate.state)
        if host_blocks < 1 or threshold is None:
            return None, "computing again is cheaper than moving KV over the link"
        settings = replace(
            settings,
            host_blocks=host_blocks,
            limits=replace(settings.limits, swap_min_tokens=threshold),
        )
        reason = (
            f"preempted sequences of {threshold:,} tokens or more wait on the host, cheaper than computing them again"
        )
        return self._candidate(settings, Offload("park", 0, reason)), ""

    def _swap_min_tokens(self, settings: EngineSettings, state: SteadyState) -> int | None:
        """The shortest context, in blocks doubled again and again, whose KV moves faster than it is computed again.

        Leaving is exposed, returning hides behind a step; computing again takes tokens away from other prompts.
        """
        block_bytes = self.shape.kv_bytes_per_token_per_layer * settings.block_tokens
        tokens = settings.block_tokens
        while tokens <= settings.kv_tokens:
            num_bytes = float(self.shape.kv_bytes_per_token * tokens)
            moved_s = self.profile.link.transfer_s(0, num_bytes, block_bytes)
            moved_s += max(0.0, self.profile.link.transfer_s(num_bytes, 0, block_bytes) - state.decode_step_s)
            if moved_s < tokens / settings.limits.chunk_tokens * (state.mixed_step_s - state.decode_step_s):
                return tokens
            tokens *= 2
        return None

    def _streaming(self, candidate: _Candidate, base: Prediction) -> tuple[_Candidate | None, str]:
        """Layers whose KV passes through the device, so that more sequences have room."""
        stream, why_not = self._stream_plan(candidate)
        if stream is None:
            return None, why_not
        layers = self.shape.num_layers
        num_blocks = candidate.settings.num_blocks * layers // (layers - stream.offloaded_layers)
        streamed_bytes = self.shape.kv_bytes_per_token_per_layer * stream.streamed_layers * self.block_tokens
        num_blocks = min(num_blocks, max(candidate.settings.num_blocks, int(self.kv.host_memory / streamed_bytes)))
        settings = replace(candidate.settings, num_blocks=num_blocks, streamed_layers=stream.streamed_layers)
        found = self._candidate(settings, Offload("stream", stream.streamed_layers, stream.reason))
        if found.state.request_s >= candidate.state.request_s and self.kv.offload != "stream":
            slower = found.state.request_s / candidate.state.request_s - 1
            return None, f"streaming {stream.streamed_layers} layers would be {slower:.0%} slower: {stream.reason}"
        return found, ""

    def _stream_plan(self, candidate: _Candidate) -> tuple[StreamPlan | None, str]:
        """The layers that a typical step hides, for the context that the larger memory would hold."""
        settings, state = candidate.settings, candidate.state
        layers = self.shape.num_layers
        context, new_tokens = round(0.97 * settings.kv_tokens), settings.limits.chunk_tokens
        per_token = self.shape.kv_bytes_per_token_per_layer
        layer_s = (state.decode_step_s + state.mixed_step_s) / 2 / layers
        stream = choose_stream(
            layers,
            layer_s,
            LayerTraffic(context * per_token, new_tokens * per_token, self.block_tokens * per_token),
            self.profile.link,
        )
        if stream.offloaded_layers < 1:
            return None, stream.reason
        return stream, ""

    def _mixing_reason(self, chosen: _Candidate, candidates: list[_Candidate]) -> str:
        mixing = chosen.settings.policy.mixing
        others = [c.state.request_s for c in candidates if c.settings.policy.mixing is not mixing]
        if not others:
            return f"{mixing.value}, as the policy says"
        ratio = min(others) / chosen.state.request_s
        tokens = chosen.settings.limits.chunk_tokens
        if mixing is Mixing.MIXED:
            why = "decodes read the weights that prompts compute with" if ratio > 1 else "by simulation"
            return (
                f"mixed, {tokens} tokens each: {why}; taking turns would be {abs(ratio - 1):.0%} slower by arithmetic"
            )
        return (
            f"exclusive, prompts in steps of {tokens} tokens, then decodes: mixing them would be {ratio - 1:.0%} slower"
        )

    # --- prediction --------------------------------------------------------------------------------------------------

    def _solve(self, settings: EngineSettings, job: Lengths) -> Prediction:
        """The whole job, in the order that the run will have."""
        rows = self._affordable_rows(PREDICTION_US, self.work.most_sequences(settings.kv_tokens))
        wanted = self.plan_config.solver
        if wanted == "auto":
            wanted = "milp" if self.known and len(job) <= MILP_ROWS else "greedy"
        return self._predict(settings, job, rows, wanted)

    def _affordable_rows(self, budget_us: float, sequences: float) -> int:
        """Rows that a simulation may have, so that planning stays a matter of a second or two."""
        affordable = budget_us / (SIMULATED_ROW * (SIMULATED_BASE + sequences))
        return round(max(affordable, SAMPLE_WAVES * sequences))

    def _predict(self, settings: EngineSettings, job: Lengths, most_rows: int, solver: Solver = "greedy") -> Prediction:
        """Simulate the job, or a sample of it that is scaled up."""
        sample = job if len(job) <= most_rows else job.take(sample_rows(job, most_rows))
        progress = _Progress()
        order = order_requests(
            sample.requests(self.known),
            settings,
            solver=solver,
            output_length=self.plan_config.output_length,
            window_rows=self.plan_config.window_rows,
            seed=self.seed,
        )

        def finished(sequence: Sequence) -> None:
            order.observe(sequence)
            progress.ends_s.append(clock.now_s)

        clock = VirtualClock()
        outputs = np.minimum(sample.output_tokens, sample.limits).tolist()
        result = simulate(order, outputs, settings, self.cost, on_finished=finished, clock=clock)
        makespan_s = result.makespan_s
        if len(sample) < len(job):
            makespan_s += (len(job) - len(sample)) * progress.steady_s()
        solved = order.solved
        proved = self.known and len(sample) == len(job) and solved.optimal and result.stats.steps == solved.steps
        return Prediction(makespan_s, len(sample), result, solved.solver, proved)

    def _price(self) -> tuple[float | None, str]:
        if self.cost_config.price_per_hour is not None:
            return self.cost_config.price_per_hour, self.cost_config.currency
        return self.profile.price.per_hour, self.profile.price.currency


@dataclass(slots=True)
class _Progress:
    """When rows ended."""

    ends_s: list[float] = dataclasses.field(default_factory=list)

    def steady_s(self) -> float:
        """Seconds a row, between the first and the last quarter."""
        first, last = len(self.ends_s) // 4, len(self.ends_s) * 3 // 4
        return (self.ends_s[last] - self.ends_s[first]) / max(1, last - first)


def sample_rows(lengths: Lengths, rows: int) -> Ints:
    """`[rows]` indices, in input order, of rows that are evenly spaced in the order of their work."""
    work = lengths.prompt_tokens / lengths.prompt_tokens.mean() + lengths.output_tokens / lengths.output_tokens.mean()
    by_work = np.argsort(work, kind="stable")
    positions = ((np.arange(rows) + 0.5) * len(lengths) / rows).astype(np.int64)
    return np.sort(by_work[positions])
