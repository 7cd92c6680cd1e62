"""Requests -> Plan: step size, mixing, offload, and what the job will take.

    lengths --> candidates --> priced --> chosen, with the offload that pays --> searched
                (steady        (simulated, a large                               (of a small job,
                 states)        job by a sample)                                  other ways too)

Step size and mixing are chosen by arithmetic (`candidates`), where start and end of the job hardly matter, and by
simulation (`prediction`, `search`), which is the real scheduler in virtual time, where they do: in jobs so small that
all of it can be simulated many times in a second or two. What may move to the host is priced with them (`offload`), and
a few rows of known lengths may get a better order (`few_rows`).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from vasuki.base.config import CostConfig, EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import InputError
from vasuki.base.units import percent_text, time_text
from vasuki.engine.policy import Admission, Mixing
from vasuki.machines.cost_model import CostModel
from vasuki.machines.known_error import known_error
from vasuki.machines.memory_budget import footprint, host_weight_bytes
from vasuki.machines.price import Cost
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.any_schedule import AnySchedule
from vasuki.planner.candidates import Candidate, Problem, ranked_candidates, with_fewer_rows
from vasuki.planner.few_rows import refuse_solver, with_best_order
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.loss import max_loss_s
from vasuki.planner.offload.choice import may_offload, most_kv_tokens
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import (
    NOISE,
    Prediction,
    affordable_predictions,
    predict,
    preferred,
    simulated_row_s,
)
from vasuki.planner.search import searched
from vasuki.planner.steady_state import price_split
from vasuki.planner.whole_job import with_all_rows

SHORTLIST = 3
_ROOM = {  # what must have it before a row starts
    Admission.CHUNK: "a chunk of their prompt",
    Admission.ROOM: "a chunk of their prompt beside the decodes",
    Admission.PROMPT: "their prompt",
    Admission.PEAK: "all their growth",
    Admission.MAXIMUM: "all that they may write",
}


def make_plan(
    lengths: Lengths,
    shape: ModelShape,
    profile: HardwareProfile,
    *,
    plan: PlanConfig | None = None,
    engine: EngineConfig | None = None,
    kv: KVConfig | None = None,
    cost: CostConfig | None = None,
    beside_weights_bytes: int | None = None,
    layout: Layout | None = None,
    may_be_urgent: bool = False,
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
        beside_weights_bytes: see `memory_budget`.
        layout: over several devices; how many layers live on the host is decided here.
        may_be_urgent: some rows may have a priority or a deadline, see `input.priority`.

    Raises:
        ModelError: the model does not fit the device, nor device and host together.
        JobFileError: the job keeps more weights on the host than it allows memory for.
        InputError: not one of the requests fits.
    """
    started_s = time.perf_counter()
    plan, engine, kv, cost = plan or PlanConfig(), engine or EngineConfig(), kv or KVConfig(), cost or CostConfig()
    if not shape.in_blocks:
        lengths = replace(lengths, prefixes=None)
    rows_arrive = lengths.arrived_at_s is not None
    layout = layout or Layout()
    problem = Problem(
        lengths, shape, profile, plan, engine, kv, beside_weights_bytes, layout, rows_arrive, may_be_urgent
    )

    refuse_solver(problem)
    problem, candidates, misfit = _that_fit(problem)
    predictions = _predictions(problem, candidates)
    base = preferred(problem, predictions)
    any_schedule = AnySchedule(
        shape,
        profile,
        tuple(each.layout for each in problem.costs),
        kv.device_memory,
        may_offload(problem),
        beside_weights_bytes,
    )
    schedule_bound_s = any_schedule.least_of_lengths_s(problem.lengths)
    chosen = searched(problem, base, predictions, candidates, schedule_bound_s)
    others = [each.candidate for each in predictions if each is not base and not problem.asks_for_offload]
    chosen = with_best_order(problem, chosen, others)
    candidate, job = chosen.candidate, problem.lengths
    settings, layout, offload = candidate.settings, candidate.cost.layout, candidate.settings.offload

    bound = any_schedule.at_datasheet_rates(JobSums.of_lengths(shape, job))
    chosen = with_all_rows(problem, chosen, any_schedule.least_of_lengths_s)
    price, currency, price_date = profile.price.per_hour, profile.price.currency, profile.price.date
    if cost.price_per_hour is not None:
        price, currency, price_date = cost.price_per_hour, cost.currency, ""
    block_bytes, pools = settings.block_tokens * shape.kv_bytes_per_token, (settings.num_blocks, offload.host_blocks)
    kv_on_host = footprint(settings, block_bytes, shape.num_layers, *pools)[1]  # which is taken as a whole
    limits = settings.limits
    job_tokens = int(job.prompt_tokens.sum() + job.output_tokens.sum())
    return Plan(
        gpu=profile.name,
        requests=len(lengths),
        prompt_tokens=int(lengths.prompt_tokens.sum()),
        output_tokens_estimate=int(lengths.output_tokens.sum()),
        makespan_s=chosen.makespan_s,
        lower_bound_s=bound.seconds,
        schedule_bound_s=schedule_bound_s,
        any_schedule=any_schedule,
        at_risk_s=chosen.loss.mean_s,
        at_risk_most_s=chosen.loss.most_s,
        risks_too_much=_risk_reason(problem, chosen, predictions),
        solver=chosen.solved.solver,
        order=chosen.order,
        optimal=problem.lengths.known and chosen.order_gap == 0,
        order_gap=chosen.order_gap,
        policy=problem.policy.name,
        chunk_tokens=limits.chunk_tokens,
        max_num_seqs=limits.max_num_seqs,
        cost=Cost.of(chosen.makespan_s, layout.num_gpus, price, currency, job_tokens),
        settings=settings,
        layout=layout,
        state_bytes=shape.state_bytes,
        mixing=_mixing_reason(candidate, candidates, rows_arrive, chosen.usual_s > 0) + _search_reason(problem, chosen),
        prompt_steps_share=chosen.prompt_steps_share,
        simulated_requests=chosen.simulated_requests,
        simulated_row_s=simulated_row_s(chosen.result),
        sample_spread=chosen.spread,
        shared_tokens=chosen.shared_tokens,
        source=profile.basis,
        host_step_us=profile.overheads.step_us,
        host_is_measured=bool(profile.rates_measured_on),
        outputs_at_most=not job.known and bool((job.output_tokens >= job.limits).all()),
        misfits=len(lengths) - len(job),
        misfit=misfit,
        error=known_error(profile, bool(shape.in_8_bits)),
        price_date=price_date,
        prompt_share=price_split(
            candidate.cost, problem.work, settings.kv_tokens, limits.chunk_tokens, limits.max_num_seqs
        ),
        backend=shape.backend,
        in_8_bits=shape.in_8_bits,
        padding=_padding(problem, chosen),
        host_bytes=kv_on_host + host_weight_bytes(shape, layout),
        plan_s=time.perf_counter() - started_s,
    )


def _that_fit(problem: Problem) -> tuple[Problem, list[Candidate], str]:
    """The problem without the rows that never fit, the candidates in which all the others do, if need be with layers
    streamed, and what the first of the rows left out would need.

    Raises InputError if none fits.
    """
    misfit = ""
    while True:
        candidates, needed = ranked_candidates(problem), problem.lengths.peak_tokens
        rooms = [candidate.settings.kv_tokens for candidate in candidates]
        if max(rooms) < needed.max():
            rooms = [most_kv_tokens(problem, candidate) for candidate in candidates]
        roomiest = max(rooms)
        fits = needed <= roomiest
        if fits.all():
            roomy = (each for each, room in zip(candidates, rooms, strict=True) if room >= needed.max())
            return problem, list(roomy), misfit
        misfit = misfit or _misfit(problem, int(np.argmin(fits)), roomiest)
        if not fits.any():
            raise InputError(f"no request fits: {misfit}")
        problem = replace(problem, lengths=problem.lengths.take(np.flatnonzero(fits), arriving=True))


def _misfit(problem: Problem, row: int, kv_tokens: int) -> str:
    lengths = problem.lengths
    return (
        f"row {row} needs KV memory for {lengths.peak_tokens[row]:,} tokens (prompt {lengths.prompt_tokens[row]:,}, "
        f"max_tokens {lengths.limits[row]:,}), {problem.profile.name} has room for {kv_tokens:,}"
    )


def _predictions(problem: Problem, candidates: list[Candidate]) -> list[Prediction]:
    """Simulations of the best candidates, which come in the order of their steady states, and of those with fewer rows
    side by side that save more than noise."""
    best = candidates[0]
    shortlist = candidates[:SHORTLIST]
    mixings = {candidate.mixing for candidate in shortlist}
    shortlist += [candidate for candidate in candidates if candidate.mixing not in mixings][:1]
    affordable = affordable_predictions(problem, best)
    usual = [predict(problem, candidate) for candidate in shortlist[:affordable]]
    most = min(SHORTLIST, affordable - len(usual))
    fewer = [predict(problem, candidate) for candidate in with_fewer_rows(problem, candidates)[:most]]
    worth_s = (1 - NOISE) * min(each.makespan_s for each in usual)
    return usual + [each for each in fewer if each.makespan_s < worth_s]


def _padding(problem: Problem, chosen: Prediction) -> float:
    """The share of the time that packed steps would save, of a model that knows none."""
    if problem.shape.backend == "ragged":
        return 0.0
    cost = chosen.candidate.cost
    packed = CostModel(replace(problem.shape, backend="ragged"), problem.profile, cost.layout)
    packed_s = predict(problem, replace(chosen.candidate, cost=packed)).result.makespan_s
    return max(0.0, 1 - packed_s / chosen.result.makespan_s)


def _risk_reason(problem: Problem, chosen: Prediction, predictions: list[Prediction]) -> str:
    """Why a kill loses more than the job allows. Empty if it does not, and where that is a limit that nobody asked for
    and nothing that was tried loses less."""
    if not chosen.loses_too_much(problem):
        return ""
    max_loss = problem.plan.max_loss
    allowed = f"a kill loses more than plan.max_loss, {time_text(max_loss_s(problem.plan, chosen.makespan_s))}"
    if min(each.loss.mean_s for each in predictions) < chosen.loss.mean_s:
        return f"{allowed}: what loses less takes longer"
    if max_loss == "auto":
        return ""
    return allowed + ", and nothing that was tried loses less" * (len(predictions) > 1)


def _search_reason(problem: Problem, chosen: Prediction) -> str:
    """What a search by simulation has changed, and what that saves."""
    if not chosen.usual_s:
        return ""
    policy = chosen.candidate.settings.policy
    starts = "" if policy.admission is problem.policy.admission else f" once {_ROOM[policy.admission]} has room"
    order = " as they come" if policy.as_they_come and not chosen.order else ""
    how = f"rows start{order}{starts}, " if order or starts else ""
    whole = "" if policy.chunked else "prompts stay whole, "
    leaves = "" if policy.evicts_least_computed else "the last to come makes room, "
    saved = percent_text(1 - chosen.makespan_s / chosen.usual_s)
    return f"; {how}{whole}{leaves}found by simulation and {saved} shorter than the usual way"


def _mixing_reason(chosen: Candidate, candidates: list[Candidate], rows_arrive: bool, searched_for: bool) -> str:
    tokens = chosen.settings.limits.chunk_tokens
    if rows_arrive and chosen.settings.policy.ordered:
        why = "" if searched_for else ": prompts need as many, and larger ones delay decodes"
        return f"mixed, {tokens} tokens each{why}"
    others = [each.state.request_s for each in candidates if each.mixing is not chosen.mixing]
    if not others:
        return f"{chosen.mixing.value}, as the policy says"
    ratio = min(others) / chosen.state.request_s
    would_be = "slower when simulated, or lose more by a kill"
    if ratio >= 1:
        would_be = "about as fast" if ratio < 1.0005 else f"about {percent_text(ratio - 1)} slower"
    if chosen.mixing is Mixing.MIXED:
        packed = chosen.cost.shape.backend == "ragged"
        why = "decodes read the weights that prompts compute with" if packed else "rows start when others end"
        return f"mixed, {tokens} tokens each: {why}; taking turns would be {would_be}"
    return f"exclusive, prompts in steps of {tokens} tokens, then decodes: mixing them would be {would_be}"
