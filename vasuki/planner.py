"""Requests -> Plan: step size, mixing, offload, and what the job will take.

    lengths --> steady state of each candidate --> (a small job: the best few simulated) --> simulation --> makespan

Step size and mixing are chosen by arithmetic (`steady_state`), where start and end of the job hardly matter, and by
simulation, which is the real scheduler in virtual time, where they do: in jobs so small that all of it can be simulated
several times in a second. Offload is priced too: nothing, streamed layers, parked sequences, and the cheapest is taken.
Of a model larger than the device, some layers' weights stay on the host: the more of them, the longer a step, and the
more room for the sequences that share it.

Larger jobs are predicted from a sample: rows evenly spaced in the order of their work, simulated as a job of their own,
which gives start and end. For every row that the sample lacks, the steady state's time is added.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vasuki.batch import Batch, StepResult
from vasuki.config import Column, CostConfig, EngineConfig, KVConfig, PlanConfig
from vasuki.cost_model import CostModel
from vasuki.errors import InputError, JobFileError, ModelError
from vasuki.layout import Layout, spread_buffers
from vasuki.lengths import Ints, Lengths
from vasuki.lower_bound import job_lower_bound
from vasuki.memory_budget import host_weight_bytes, memory_budget
from vasuki.model_shape import ModelShape
from vasuki.offload_policy import LayerTraffic, StreamPlan, choose_stream
from vasuki.ordering import MILP_ROWS, order_requests
from vasuki.plan import CostEstimate, EngineSettings, Offload, OffloadMode, Plan, Solver
from vasuki.profile import HardwareProfile
from vasuki.scheduler import Admission, Limits, Mixing, Policy, Scheduler, find_policy
from vasuki.sequence import Sequence
from vasuki.simulation import SimulationResult, simulate
from vasuki.simulator import VirtualClock
from vasuki.steady_state import PACKED, SteadyState, Workload, steady_state

OFFLOAD_MODES: tuple[OffloadMode, ...] = ("none", "stream", "park")

CHUNK_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
MOST_CHUNK_TOKENS = 4096
CHUNK_TOKENS = 512  # of the other policies where nothing is said, as in the papers
WHOLE_PROMPT_TOKENS = 2048  # the same for those that never split a prompt
NUM_SEQS = 256
MOST_SEQS = 2048
SHORT_ROW_TOKENS = 512  # rows shorter than that get small blocks
SHORTLIST = 3
LAYOUTS = 12  # numbers of layers on the host that are compared, where the weights do not fit
STREAM_DEPTHS = 4  # numbers of streamed layers that are compared
LINK_BUSY = 0.9  # share of a step that weights take on the link, from which on no KV is streamed beside them
WORTHWHILE = 0.005  # streaming, which moves KV in every step, must save this share
UNEVEN = 1.03  # what rows of different lengths take beyond the steady state of equal ones; fitted to whole simulations
PREFILL_THRESHOLD = 0.1  # share of memory that starts a prefill phase: small ones keep the batch large
# About what a simulation takes on one core: for each run of steps, and in it for each sequence; and for each step.
RUN_US, SEQUENCE_US, STEP_US = 40.0, 1.2, 1.5
SIMULATION_US = 400_000
SAMPLE_WAVES = 2.5  # rows of a sample, at least, in units of what runs side by side


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
        layout: over several devices; how many layers live on the host is decided here.
        seed: of local search.

    Raises:
        ModelError: the model does not fit the device, nor device and host together.
        JobFileError: the job keeps more weights on the host than it allows memory for.
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
    layout: Layout


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says of a whole job."""

    makespan_s: float
    simulated_requests: int
    prompt_steps_share: float
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
        self.lengths, self.shape, self.profile, self.seed = lengths, shape, profile, seed
        self.plan_config, self.engine, self.kv, self.cost_config = plan, engine, kv, cost
        self.device_memory: float | int = kv.device_memory if kv_bytes is None else kv_bytes
        self.offload_modes = [mode for mode in offload_modes if kv.offload in ("auto", mode)]
        self.policy = find_policy(engine.policy)
        self.work = Workload.of(lengths)
        self.known = isinstance(plan.output_length, Column)
        mean_tokens = self.work.prompt_tokens + self.work.output_tokens
        self.block_tokens = (
            (16 if mean_tokens < SHORT_ROW_TOKENS else 32) if kv.block_tokens == "auto" else kv.block_tokens
        )
        self.layouts = self._layouts(layout)
        self.costs = {each: CostModel(shape, profile, each) for each in self.layouts}

    def make(self) -> Plan:
        candidates = self._ranked()
        fits, misfit = self._fitting(max((candidate.settings for candidate in candidates), key=lambda s: s.num_blocks))
        job = self.lengths
        if misfit:
            job = job.take(np.flatnonzero(fits))
            self.work = Workload.of(job)
            candidates = self._ranked()
        largest = int((job.prompt_tokens + job.limits).max()) - 1
        candidates = [candidate for candidate in candidates if candidate.settings.kv_tokens >= largest]
        chosen, prediction = self._with_offload(*self._best(candidates, job), job)
        settings, limits, layout = chosen.settings, chosen.settings.limits, chosen.layout
        bound = job_lower_bound(
            self.shape, self.profile, job.prompt_tokens, job.output_tokens, settings.kv_tokens, layout
        )
        weights = self._weights_reason(chosen)
        offload = replace(chosen.offload, reason=f"{weights}; {chosen.offload.reason}") if weights else chosen.offload
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
            offload=offload,
            cost=CostEstimate.of(prediction.makespan_s, layout.num_gpus, price, currency, sum(tokens)),
            plan_s=0.0,
            settings=settings,
            layout=layout,
            mixing=self._mixing_reason(chosen, candidates),
            bound_by=bound.binding,
            prompt_steps_share=prediction.prompt_steps_share,
            simulated_requests=prediction.simulated_requests,
            uncertainty=self._uncertainty(chosen, prediction, job),
            misfits=int((~fits).sum()),
            misfit=misfit,
        )

    # --- candidates --------------------------------------------------------------------------------------------------

    def _layouts(self, layout: Layout) -> list[Layout]:
        """With as many layers' weights on the host as the job says, or as there is no room for on the device.

        What fits stays: a layer on the host costs its copy in every step. What does not is tried in several depths.
        Raises JobFileError if what the job says needs more host memory than it allows.
        """
        asked, layers, allowed = self.engine.weights_on_host, self.shape.num_layers, self.kv.host_memory
        if asked != "auto":
            layout = replace(layout, host_layers=asked)
            layout.check(self.shape)
            if (needed := host_weight_bytes(self.shape, layout)) > allowed:
                raise JobFileError(
                    f"engine.weights_on_host: {asked} layers need {needed / 2**30:.1f} GiB of host memory, "
                    f"kv.host_memory allows {allowed / 2**30:.1f} GiB"
                )
            return [layout]
        if self.profile.kind == "cpu" or self._has_room(layout):
            return [layout]
        deepest = min(layers - 1, allowed // self.shape.layer_weight_bytes)
        options = [replace(layout, host_layers=host) for host in range(1, deepest + 1)]
        options = [option for option in options if self._has_room(option)]
        return options[:: max(1, len(options) // LAYOUTS)] or [layout]

    def _has_room(self, layout: Layout) -> bool:
        """Whether the shortest request fits beside the weights."""
        chunk_tokens = self._chunk_sizes()[0]
        shortest = int((self.lengths.prompt_tokens + self.lengths.limits).min()) - 1
        try:
            return self._num_blocks(chunk_tokens, 1, layout) * self.block_tokens >= shortest
        except ModelError:
            return False

    def _ranked(self) -> list[_Candidate]:
        """The fastest steady state first."""
        return sorted(self._without_offload(), key=lambda candidate: candidate.state.request_s)

    def _without_offload(self) -> Iterator[_Candidate]:
        """Every step size and mixing worth considering that memory allows."""
        problem: ModelError | None = None
        found = False
        for layout, chunk_tokens in itertools.product(self.layouts, self._chunk_sizes()):
            try:
                settings = self._settings(chunk_tokens, layout)
            except ModelError as error:
                problem = error
                continue
            found = True
            for policy in self._policies():
                yield self._candidate(replace(settings, policy=policy), Offload("none", 0, "not considered"), layout)
        if problem is not None and not found:
            raise problem

    def _policies(self) -> list[Policy]:
        if not self.policy.ordered:
            return [self.policy]
        return [replace(self.policy, mixing=mixing) for mixing in (Mixing.MIXED, Mixing.EXCLUSIVE)]

    def _chunk_sizes(self) -> list[int]:
        """Whole tiles, so that decodes and the chunk together fill them."""
        if self.engine.chunk_tokens != "auto":
            return [self.engine.chunk_tokens]
        if not self.policy.ordered:
            longest = int(self.lengths.prompt_tokens.max())
            return [CHUNK_TOKENS if self.policy.chunked else max(WHOLE_PROMPT_TOKENS, longest)]
        tile = self.profile.tile_rows
        return [tile * tiles for tiles in CHUNK_TILES if tile * tiles <= MOST_CHUNK_TOKENS]

    def _settings(self, chunk_tokens: int, layout: Layout) -> EngineSettings:
        """Limits and blocks for a step size. Raises ModelError if no memory is left."""
        max_num_seqs = NUM_SEQS
        if self.engine.max_num_seqs != "auto":
            max_num_seqs = self.engine.max_num_seqs
        elif self.policy.ordered:
            roomy = self.work.most_sequences(self._num_blocks(chunk_tokens, 1, layout) * self.block_tokens)
            max_num_seqs = min(MOST_SEQS, 8 * math.ceil((1.5 * roomy + 8) / 8))
        num_blocks = self._num_blocks(chunk_tokens, max_num_seqs, layout)
        limits = Limits(chunk_tokens, max_num_seqs, prefill_threshold=PREFILL_THRESHOLD)
        return EngineSettings(self.policy, limits, num_blocks, self.block_tokens)

    def _num_blocks(self, chunk_tokens: int, max_num_seqs: int, layout: Layout) -> int:
        return memory_budget(
            self.shape,
            self.profile,
            device_memory=self.device_memory,
            block_tokens=self.block_tokens,
            max_step_tokens=max(chunk_tokens, max_num_seqs),
            max_num_seqs=max_num_seqs,
            layout=layout,
        ).num_blocks

    def _candidate(self, settings: EngineSettings, offload: Offload, layout: Layout) -> _Candidate:
        limits = settings.limits
        state = steady_state(
            self.costs[layout],
            self.work,
            settings.kv_tokens,
            limits.chunk_tokens,
            limits.max_num_seqs,
            settings.policy.mixing,
            settings.streamed_layers,
            settings.block_tokens * self.shape.kv_bytes_per_token_per_layer,
        )
        return _Candidate(settings, state, offload, layout)

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

    def _best(self, candidates: list[_Candidate], job: Lengths) -> tuple[_Candidate, Prediction]:
        """The fastest, and what it will take. `candidates` come in the order of their steady states."""
        best = candidates[0]
        if len(job) > self._affordable_rows(best.state.sequences):
            return best, self._predict(best, job)
        shortlist = candidates[:SHORTLIST]
        mixings = {candidate.settings.policy.mixing for candidate in shortlist}
        shortlist += [c for c in candidates if c.settings.policy.mixing not in mixings][:1]
        tried = [(candidate, self._predict(candidate, job)) for candidate in shortlist]
        return min(tried, key=lambda pair: pair[1].makespan_s)

    def _with_offload(self, candidate: _Candidate, base: Prediction, job: Lengths) -> tuple[_Candidate, Prediction]:
        """The candidate with what pays best of no offload, parking and streaming, and the reason in words."""
        plain, plain_prediction = self._without_preemption(candidate, base, job)
        options: list[tuple[_Candidate, Prediction]] = []
        reasons = []
        if "park" in self.offload_modes:
            parking, reason = self._parking(candidate, base)
            if parking is not None:
                options.append((parking, self._like(base, parking, job)))
            reasons.append(reason)
        if "stream" in self.offload_modes:
            streaming, reason = self._streaming(candidate)
            if streaming is not None:
                streamed = streaming, self._predict(streaming, job)
                options.append(self._with_parking(*streamed, job) if "park" in self.offload_modes else streamed)
            reasons.append(reason)
        best, prediction = min(options, key=_makespan, default=(plain, plain_prediction))
        change = prediction.makespan_s / plain_prediction.makespan_s - 1
        worthwhile = 0.0 if best.offload.mode == "park" else -WORTHWHILE
        if options and (change < worthwhile or best.offload.mode == self.kv.offload):
            reason = f"{best.offload.reason}; the makespan changes by {change:+.1%}"
            return replace(best, offload=replace(best.offload, reason=reason)), prediction
        for option, other in options:
            change = other.makespan_s / plain_prediction.makespan_s - 1
            reasons.append(f"{option.offload.mode} would change the makespan by {change:+.1%}")
        why = "; ".join(filter(None, reasons)) or "as the job asks"
        return replace(plain, offload=Offload("none", 0, why)), plain_prediction

    def _with_parking(
        self, streaming: _Candidate, prediction: Prediction, job: Lengths
    ) -> tuple[_Candidate, Prediction]:
        """The same, or with parked sequences beside streamed layers, if that is faster."""
        parking, _ = self._parking(streaming, prediction)
        if parking is None:
            return streaming, prediction
        return min((streaming, prediction), (parking, self._like(prediction, parking, job)), key=_makespan)

    def _without_preemption(
        self, candidate: _Candidate, base: Prediction, job: Lengths
    ) -> tuple[_Candidate, Prediction]:
        """The same, or with rows that start only when all expected growth has room, if that is faster.

        Rows that start as soon as their prompt fits push others out later. Usually a full memory is worth that.
        """
        if not self.policy.ordered or not base.result.counters.preemptions_recompute:
            return candidate, base
        settings = candidate.settings
        settings = replace(settings, policy=replace(settings.policy, admission=Admission.PEAK))
        careful = self._candidate(settings, candidate.offload, candidate.layout)
        return min((candidate, base), (careful, self._like(base, careful, job)), key=_makespan)

    def _like(self, base: Prediction, candidate: _Candidate, job: Lengths) -> Prediction:
        """Predict a candidate that arithmetic, which knows no preemption, cannot tell from that of `base`: the ratio of
        the two samples holds for the whole job."""
        prediction = self._predict(candidate, job)
        ratio = prediction.result.makespan_s / base.result.makespan_s
        return replace(prediction, makespan_s=ratio * base.makespan_s)

    def _parking(self, candidate: _Candidate, base: Prediction) -> tuple[_Candidate | None, str]:
        """Preempted sequences wait in host memory instead of being computed again. What is streamed stays so."""
        if not self.policy.ordered:
            return None, "only vasuki parks sequences"
        if not base.result.counters.preemptions_recompute and self.kv.offload != "park":
            return None, "no sequence has to make room, so that there is none to park"
        settings, offload = candidate.settings, candidate.offload
        block_bytes = self.shape.kv_bytes_per_token * settings.block_tokens
        homes_bytes = settings.num_blocks * block_bytes * settings.streamed_layers // self.shape.num_layers
        host_blocks = (self._host_kv_bytes(candidate.layout) - homes_bytes) // block_bytes
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
        if offload.mode == "stream":
            offload = replace(offload, reason=f"{offload.reason}; {reason}")
        else:
            offload = Offload("park", 0, reason)
        return self._candidate(settings, offload, candidate.layout), ""

    def _swap_min_tokens(self, settings: EngineSettings, state: SteadyState) -> int | None:
        """The shortest context, in blocks doubled again and again, whose KV moves faster than it is computed again.

        Leaving and returning hide behind a step, but for the first layer's leaving; computing again takes tokens away
        from other prompts.
        """
        block_bytes = self.shape.kv_bytes_per_token_per_layer * settings.block_tokens
        tokens = settings.block_tokens
        while tokens <= settings.kv_tokens:
            num_bytes = float(self.shape.kv_bytes_per_token * tokens)
            leaving_s = self.profile.link.transfer_s(0, num_bytes, block_bytes)
            moved_s = max(leaving_s / self.shape.num_layers, leaving_s - state.decode_step_s)
            moved_s += max(0.0, self.profile.link.transfer_s(num_bytes, 0, block_bytes) - state.decode_step_s)
            if moved_s < tokens / settings.limits.chunk_tokens * (state.mixed_step_s - state.decode_step_s):
                return tokens
            tokens *= 2
        return None

    def _streaming(self, candidate: _Candidate) -> tuple[_Candidate | None, str]:
        """Layers whose KV passes through the device, so that more sequences have room."""
        if not self.policy.ordered:
            return None, "only vasuki streams layers"
        if self._weights_s(candidate.layout) >= LINK_BUSY * candidate.state.mixed_step_s:
            return None, "weights keep the link busy, so that no KV can be streamed"
        options: list[_Candidate] = []
        filled, reason = candidate, ""
        for _ in range(STREAM_DEPTHS):
            # What one depth makes room for has to be fetched too, so the next is chosen for the memory filled by it.
            stream = self._stream_plan(filled)
            reason = reason or stream.reason
            depth = min(stream.streamed_layers, self.shape.num_layers - 1)  # the first layer's copies hide behind none
            if depth in [option.offload.layers for option in options]:
                break
            deeper = self._with_streamed(candidate, depth, stream.reason)
            if deeper is None:
                break
            options.append(deeper)
            filled = deeper
        if not options:
            return None, reason
        best = min(options, key=lambda option: option.state.request_s)
        change = best.state.request_s / candidate.state.request_s - 1
        if change > -WORTHWHILE and self.kv.offload != "stream":
            return None, f"streaming {best.offload.layers} layers would change it by {change:+.1%} ({reason})"
        return best, ""

    def _with_streamed(self, candidate: _Candidate, streamed: int, reason: str) -> _Candidate | None:
        """The candidate with so many streamed layers, and blocks and sequences in the room that they leave."""
        layers, settings, limits = self.shape.num_layers, candidate.settings, candidate.settings.limits
        device_layers = layers - streamed + spread_buffers(layers, streamed)
        if device_layers >= layers:
            return None
        if self.engine.max_num_seqs == "auto":
            grown = math.ceil(limits.max_num_seqs * layers / device_layers)
            limits = replace(limits, max_num_seqs=min(MOST_SEQS, max(grown, limits.max_num_seqs)))
        try:
            num_blocks = self._num_blocks(limits.chunk_tokens, limits.max_num_seqs, candidate.layout)
        except ModelError:  # activations of so many sequences leave no room
            return None
        homes_bytes = self.shape.kv_bytes_per_token_per_layer * streamed * self.block_tokens  # of one block
        most_homes = self._host_kv_bytes(candidate.layout) // homes_bytes
        num_blocks = min(num_blocks * layers // device_layers, max(settings.num_blocks, most_homes))
        settings = replace(settings, num_blocks=num_blocks, streamed_layers=streamed, limits=limits)
        return self._candidate(settings, Offload("stream", streamed, reason), candidate.layout)

    def _stream_plan(self, candidate: _Candidate) -> StreamPlan:
        """The layers whose copies a typical step hides, in what time weights leave on the link."""
        settings, state = candidate.settings, candidate.state
        per_token = self.shape.kv_bytes_per_token_per_layer
        context, new_tokens = round(PACKED * settings.kv_tokens), settings.limits.chunk_tokens
        step_s = (state.decode_step_s + state.mixed_step_s) / 2
        return choose_stream(
            self.shape.num_layers,
            max(0.0, step_s - self._weights_s(candidate.layout)) / self.shape.num_layers,
            LayerTraffic(context * per_token, new_tokens * per_token, self.block_tokens * per_token),
            self.profile.link,
        )

    def _host_kv_bytes(self, layout: Layout) -> int:
        """Host memory that weights leave to KV."""
        return max(0, self.kv.host_memory - host_weight_bytes(self.shape, layout))

    def _weights_s(self, layout: Layout) -> float:
        """Seconds that a step's weights need on the link."""
        return sum(
            self.profile.link.transfer_s(copies.to_device_bytes, 0, copies.copy_bytes)
            for copies in self.costs[layout].weight_copies
        )

    def _weights_reason(self, chosen: _Candidate) -> str:
        """What is said of weights on the host."""
        host, layers = chosen.layout.host_layers, self.shape.num_layers
        if not host:
            return ""
        why = "as the job asks"
        if self.engine.weights_on_host == "auto":
            weights_gib = self.shape.weight_bytes / chosen.layout.gpus_per_replica / 2**30
            memory_gib = self.profile.memory_mib / 2**10
            why = f"since {weights_gib:.1f} GiB of weights and KV beside them do not fit into {memory_gib:.1f} GiB"
            if host == self.kv.host_memory // self.shape.layer_weight_bytes:
                why += ", and as many as kv.host_memory allows"
        return (
            f"the weights of {host} of {layers} layers stay on the host, {why}; they take "
            f"{self._weights_s(chosen.layout) * 1e3:,.0f} ms to come in every step, which lasts "
            f"{chosen.state.decode_step_s * 1e3:,.0f} ms without prompts and {chosen.state.mixed_step_s * 1e3:,.0f} ms "
            "with them"
        )

    def _mixing_reason(self, chosen: _Candidate, candidates: list[_Candidate]) -> str:
        mixing = chosen.settings.policy.mixing
        others = [c.state.request_s for c in candidates if c.settings.policy.mixing is not mixing]
        if not others:
            return f"{mixing.value}, as the policy says"
        ratio = min(others) / chosen.state.request_s
        tokens = chosen.settings.limits.chunk_tokens
        by_arithmetic = f"{abs(ratio - 1):.0%} {'slower' if ratio >= 1 else 'faster'} by arithmetic"
        if ratio < 1:
            by_arithmetic += ", but not in the simulation"
        if mixing is Mixing.MIXED:
            why = "decodes read the weights that prompts compute with"
            return f"mixed, {tokens} tokens each: {why}; taking turns would be {by_arithmetic}"
        return f"exclusive, prompts in steps of {tokens} tokens, then decodes: mixing them would be {by_arithmetic}"

    # --- prediction --------------------------------------------------------------------------------------------------

    def _affordable_rows(self, sequences: float) -> int:
        """Rows that a simulation may have, so that planning stays a matter of a second or two."""
        runs = 4 + self.work.output_tokens / 200  # a row
        row_us = runs * (RUN_US + SEQUENCE_US * sequences) + STEP_US * self.work.output_tokens / sequences
        return round(max(SIMULATION_US / row_us, SAMPLE_WAVES * sequences))

    def _uncertainty(self, chosen: _Candidate, prediction: Prediction, job: Lengths) -> float | None:
        """What rows of recorded outputs lose by being run as if these were not known."""
        if self.known or not self.policy.ordered or (job.output_tokens >= job.limits).all():
            return None
        told = self._predict(chosen, job, known=True)
        return prediction.result.makespan_s / told.result.makespan_s - 1

    def _predict(self, candidate: _Candidate, job: Lengths, known: bool | None = None) -> Prediction:
        """Simulate the job, or a sample of it to which the missing rows are added; `known`: as if outputs were."""
        known = self.known if known is None else known
        settings = candidate.settings
        most_rows = self._affordable_rows(candidate.state.sequences)
        sample = job if len(job) <= most_rows else job.take(sample_rows(job, most_rows))
        solver = self.plan_config.solver
        if solver == "auto":
            solver = "milp" if self.known and len(job) <= MILP_ROWS else "greedy"
        order = order_requests(
            sample.requests(known),
            settings,
            solver=solver,
            output_length=Column(column="recorded") if known and not self.known else self.plan_config.output_length,
            window_rows=self.plan_config.window_rows,
            seed=self.seed,
        )
        clock = VirtualClock()
        ends_s: list[float] = []

        def finished(sequence: Sequence) -> None:
            order.observe(sequence)
            ends_s.append(clock.now_s)

        outputs = np.minimum(sample.output_tokens, sample.limits).tolist()
        shares = _Shares()
        result = simulate(
            order,
            outputs,
            settings,
            self.costs[candidate.layout],
            observers=[shares, order],
            on_finished=finished,
            clock=clock,
        )
        missing = len(job) - len(sample)
        # The arithmetic knows how vasuki fills memory; of the other policies it takes what the sample shows.
        row_s = UNEVEN * candidate.state.request_s if self.policy.ordered else _steady_s(ends_s)
        solved = order.solved
        proved = self.known and not missing and solved.optimal and result.stats.steps == solved.steps
        makespan_s = result.makespan_s + missing * row_s
        return Prediction(makespan_s, len(sample), shares.prompts_s / shares.all_s, result, solved.solver, proved)

    def _price(self) -> tuple[float | None, str]:
        if self.cost_config.price_per_hour is not None:
            return self.cost_config.price_per_hour, self.cost_config.currency
        return self.profile.price.per_hour, self.profile.price.currency


@dataclass(slots=True)
class _Shares:
    """An engine observer that tells steps with prompts from steps without."""

    all_s: float = 0.0
    prompts_s: float = 0.0

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler) -> None:
        self.all_s += result.elapsed_s
        self.prompts_s += result.elapsed_s if batch.prefills else 0.0


def _makespan(option: tuple[_Candidate, Prediction]) -> float:
    return option[1].makespan_s


def _steady_s(ends_s: list[float]) -> float:
    """Seconds a row, between the first and the last quarter of those that ended."""
    first, last = len(ends_s) // 4, len(ends_s) * 3 // 4
    return (ends_s[last] - ends_s[first]) / max(1, last - first)


def sample_rows(lengths: Lengths, rows: int) -> Ints:
    """`[rows]` indices, in input order, of rows that are evenly spaced in the order of their work."""
    work = lengths.prompt_tokens / lengths.prompt_tokens.mean() + lengths.output_tokens / lengths.output_tokens.mean()
    by_work = np.argsort(work, kind="stable")
    positions = ((np.arange(rows) + 0.5) * len(lengths) / rows).astype(np.int64)
    return np.sort(by_work[positions])
