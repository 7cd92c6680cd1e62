"""Sequences that wait on the host: those that had to make room, and prompts that are computed ahead of their rows."""

from __future__ import annotations

from dataclasses import replace

from vasuki.base.units import bytes_text, longer_text
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import Admission, Mixing
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.offload.options import host_kv_bytes
from vasuki.planner.prediction import Prediction, predict_like

VICTIMS_SHARE = 1 / 8  # of a CPU's blocks, for the KV of rows that make way; what finds no room is computed again


def parked(problem: Problem, base: Prediction, asked: bool = False) -> Prediction | str:
    """Preempted sequences wait on the host instead of being computed again, or why not. What is streamed stays so.

    Where nobody has to make room in `base`, it is tried only if the job asks for it.
    """
    if not base.result.counters.preemptions_recompute and not asked:
        return "no sequence has to make room"
    room = room_for_parked(problem, base.candidate, asked)
    if isinstance(room, str):
        return room
    if room.mode == "stream":
        offload = replace(room, reason=f"{room.reason}, and preempted sequences are parked")
    else:
        least = f"{room.park_min_tokens:,}"
        why = "cheaper than computing them again" if _park_min_tokens(problem, base.candidate) else "as the job asks"
        reason = f"preempted sequences of {least} tokens or more are parked, {why}"
        offload = replace(room, mode="park", reason=reason)
    settings = replace(base.candidate.settings, offload=offload)
    return predict_like(problem, base, Candidate.of(problem, settings, base.candidate.cost))


def prefilled_ahead(problem: Problem, base: Prediction) -> Prediction | str:
    """Prompts are computed in the room that others have yet to grow into, and wait on the host; or why not.

    Rows start only with room for all their growth then. On recorded lengths that gains nothing, so only who asks for it
    gets it.
    """
    candidate, room = base.candidate, room_for_parked(problem, base.candidate, asked=True)
    if isinstance(room, str):
        return room
    policy = replace(candidate.settings.policy, admission=Admission.PEAK, mixing=Mixing.MIXED)
    offload = replace(room, mode="ahead", prefills_ahead=True)
    settings = replace(candidate.settings, policy=policy, offload=offload)
    option = predict_like(problem, base, Candidate.of(problem, settings, candidate.cost))
    change = option.makespan_s / base.makespan_s - 1
    waits = "prompts are computed ahead and wait on the host until their rows have room"
    reason = f"{waits}; makespan {longer_text(change)}"
    settings = replace(option.candidate.settings, offload=replace(offload, reason=reason))
    return replace(option, candidate=replace(option.candidate, settings=settings))


def with_room_for_victims(problem: Problem, base: Prediction) -> Prediction:
    """Rows that make way keep their KV on the host. A CPU's host memory is its own, so there a share of the blocks is
    set aside for them, if the longest row fits the others."""
    settings = base.candidate.settings
    block_bytes = problem.shape.kv_bytes_per_token * settings.block_tokens
    blocks = min(settings.num_blocks, host_kv_bytes(problem, base.candidate) // block_bytes)
    if problem.profile.kind == "cpu":
        longest = -(-int(problem.lengths.peak_tokens.max()) // settings.block_tokens)
        blocks = min(blocks, int(VICTIMS_SHARE * settings.num_blocks), settings.num_blocks - longest)
        settings = replace(settings, num_blocks=settings.num_blocks - max(0, blocks))
    if blocks < 1:
        return base
    for_whom = "" if problem.policy.parks else " for urgent ones"
    offload = OffloadPlan("park", f"rows that make room{for_whom} are parked", 0, blocks, park_min_tokens=1)
    candidate = Candidate.of(problem, replace(settings, offload=offload), base.candidate.cost)
    return predict_like(problem, base, candidate)


def room_for_parked(problem: Problem, candidate: Candidate, asked: bool = False) -> OffloadPlan | str:
    """The candidate's offload with what host memory is left as room for sequences, no more than all of them take; or
    why nobody can use it, or should, which a job that asks for it does all the same."""
    settings, shape = candidate.settings, problem.shape
    block_bytes = shape.kv_bytes_per_token * settings.block_tokens
    homes_bytes = settings.num_blocks * block_bytes * settings.offload.streamed_layers // shape.num_layers
    host_blocks = (host_kv_bytes(problem, candidate) - homes_bytes) // block_bytes
    all_blocks = int((-(-problem.lengths.peak_tokens // settings.block_tokens)).sum())
    host_blocks = min(host_blocks, all_blocks)  # it is pinned as a whole, before the first step
    least = _park_min_tokens(problem, candidate) or (1 if asked else None)
    if host_blocks < 1:
        return f"kv.host_memory has no room for a block of {bytes_text(block_bytes)}"
    if least is None:
        return "computing again is cheaper than moving KV over the link"
    return replace(settings.offload, host_blocks=host_blocks, park_min_tokens=least)


def _park_min_tokens(problem: Problem, candidate: Candidate) -> int | None:
    """The shortest context, a power of two, whose blocks move faster than it is computed again.

    Leaving and returning hide behind a step, but for the first layer's leaving, or all layers' where steps are
    recorded; computing again takes tokens away from other prompts.
    """
    settings, state, shape, link = candidate.settings, candidate.state, problem.shape, problem.profile.link
    block_bytes = shape.kv_bytes_per_token_per_layer * settings.block_tokens
    tokens, is_recorded = 16, candidate.cost.records_decodes
    while tokens <= settings.kv_tokens:
        num_bytes = float(-(-tokens // settings.block_tokens) * settings.block_tokens * shape.kv_bytes_per_token)
        leaving_s = link.transfer_s(0, num_bytes, block_bytes)
        moved_s = leaving_s if is_recorded else max(leaving_s / shape.num_layers, leaving_s - state.decode_step_s)
        moved_s += max(0.0, link.transfer_s(num_bytes, 0, block_bytes) - state.decode_step_s)
        if moved_s < tokens / settings.limits.chunk_tokens * (state.mixed_step_s - state.decode_step_s):
            return tokens
        tokens *= 2
    return None
