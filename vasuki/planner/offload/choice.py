"""What moves to host memory, by price: nothing, streamed layers, parked sequences, or both, and why in a sentence.

Whatever it is, prompts may be computed ahead beside it.

Streaming is found by arithmetic and then simulated; parking saves what preemption costs, which only a simulation knows.
Where prices differ by no more than noise, copies hide behind compute and nothing is computed twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vasuki.base.errors import ModelError
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import Admission, Mixing
from vasuki.engine.settings import EngineSettings
from vasuki.machines.memory_budget import host_weight_bytes
from vasuki.models.layout import spread_buffers
from vasuki.planner.candidates import MOST_SEQS, Candidate, Problem
from vasuki.planner.prediction import Prediction, predict, predict_like

STREAM_BLOCKS = (1, 4, 16)  # sizes of streamed blocks that are compared, in units of usual ones: one copy is a block
SIMULATED_BLOCKS = 2  # of them, the best by arithmetic
LINK_BUSY = 0.9  # share of a step that weights take on the link, from which on no KV is streamed beside them
WORTHWHILE = 0.005  # streaming, which moves KV in every step, must save this share, and so must prefilling ahead
MOST_WAVES = 4  # of rows side by side; in a longer job prefilling ahead is not tried
NOISE = 0.02  # jobs differ by as much where rows only start in another order
# Of plans that differ by less than noise, one that does not hang on a link as fast as its profile, and wastes no work.
HIDDEN = 0.95  # share of the copy time that must pass behind compute
STEADY_HIDDEN = 0.955  # the same of a steady state, whose steps are more even than those of a job
AGAIN = 0.05  # most tokens to be computed again, as a share of those of the prompts
# Decodes that may stall where layers stream and too much is computed again: so many rows run then, in blocks so large,
# that soon enough one ends. The second share computes less again and takes longer.
STALLED_SHARE = 0.25
PATIENT_SHARE = 0.5
_STATES_STAY = "rows carry states through recurrent layers, which stay on the device"


def choose_offload(problem: Problem, base: Prediction) -> Prediction:
    """The candidate of `base`, which moves no KV, with whatever offload makes it fastest."""
    if problem.shape.recurrent:
        chosen = _because(_without_preemption(problem, base), OffloadPlan("none", 0, _STATES_STAY))
    else:
        chosen = _ahead(problem, _cheapest(problem, base))
    weights, offload = _weights_reason(problem, chosen.candidate), chosen.candidate.offload
    if not weights:
        return chosen
    return _because(chosen, replace(offload, reason=f"{weights}; {offload.reason}"))


def _cheapest(problem: Problem, base: Prediction) -> Prediction:
    plain = _without_preemption(problem, base)
    ways = {"park": _parked, "stream": _streamed}
    tried = [way(problem, base) for mode, way in ways.items() if mode in problem.offload_modes]
    options = [option for option in tried if isinstance(option, Prediction)]
    why_not = [reason for reason in tried if isinstance(reason, str)]

    def change(option: Prediction) -> str:
        return f"{option.makespan_s / plain.makespan_s - 1:+.1%}"

    if options:
        best = min(options, key=_makespan_s)
        offload = best.candidate.offload
        most = 1 + NOISE if offload.mode == "park" else 1 - WORTHWHILE
        if offload.mode == problem.kv.offload or best.makespan_s < most * plain.makespan_s:
            return _because(best, replace(offload, reason=f"{offload.reason}; makespan {change(best)}"))
    why_not += [f"{each.candidate.offload.mode} would change the makespan by {change(each)}" for each in options]
    return _because(plain, OffloadPlan("none", 0, "; ".join(why_not) or "as the job asks"))


def _because(prediction: Prediction, offload: OffloadPlan) -> Prediction:
    return replace(prediction, candidate=replace(prediction.candidate, offload=offload))


def _makespan_s(prediction: Prediction) -> float:
    return prediction.makespan_s


def _without_preemption(problem: Problem, base: Prediction) -> Prediction:
    """The same, or with rows that start only when all expected growth has room, if that is faster.

    Rows that start as soon as their prompt fits push others out later. Usually a full memory is worth that.
    """
    if not problem.policy.ordered or not base.result.counters.preemptions_recompute:
        return base
    settings = base.candidate.settings
    settings = replace(settings, policy=replace(settings.policy, admission=Admission.PEAK))
    careful = Candidate.of(problem, settings, base.candidate.cost, base.candidate.offload)
    return min(base, predict_like(problem, base, careful), key=_makespan_s)


# --- parked sequences -------------------------------------------------------------------------------------------------


def _parked(problem: Problem, base: Prediction) -> Prediction | str:
    """Preempted sequences wait on the host instead of being computed again, or why not. What is streamed stays so."""
    if not problem.policy.ordered:
        return "only vasuki parks sequences"
    if not base.result.counters.preemptions_recompute and problem.kv.offload != "park":
        return "no sequence has to make room"
    candidate = base.candidate
    settings, offload = _parking(problem, candidate), candidate.offload
    if isinstance(settings, str):
        return settings
    threshold = settings.limits.swap_min_tokens
    if offload.mode == "stream":
        offload = replace(offload, reason=f"{offload.reason}, and preempted sequences are parked")
    else:
        reason = f"preempted sequences of {threshold:,} tokens or more are parked, cheaper than computing them again"
        offload = OffloadPlan("park", 0, reason)
    return predict_like(problem, base, Candidate.of(problem, settings, candidate.cost, offload))


def _parking(problem: Problem, candidate: Candidate) -> EngineSettings | str:
    """The candidate's settings with what host memory is left as room for sequences, or why not."""
    settings, shape = candidate.settings, problem.shape
    block_bytes = shape.kv_bytes_per_token * settings.block_tokens
    homes_bytes = settings.num_blocks * block_bytes * settings.streamed_layers // shape.num_layers
    host_blocks = (_host_kv_bytes(problem, candidate) - homes_bytes) // block_bytes
    threshold = _swap_min_tokens(problem, candidate)
    if host_blocks < 1 or threshold is None:
        return "computing again is cheaper than moving KV over the link"
    return replace(settings, host_blocks=host_blocks, limits=replace(settings.limits, swap_min_tokens=threshold))


def _swap_min_tokens(problem: Problem, candidate: Candidate) -> int | None:
    """The shortest context, a power of two, whose blocks move faster than it is computed again.

    Leaving and returning hide behind a step, but for the first layer's leaving; computing again takes tokens away
    from other prompts.
    """
    settings, state, shape, link = candidate.settings, candidate.state, problem.shape, problem.profile.link
    block_bytes = shape.kv_bytes_per_token_per_layer * settings.block_tokens
    tokens = 16
    while tokens <= settings.kv_tokens:
        num_bytes = float(-(-tokens // settings.block_tokens) * settings.block_tokens * shape.kv_bytes_per_token)
        leaving_s = link.transfer_s(0, num_bytes, block_bytes)
        moved_s = max(leaving_s / shape.num_layers, leaving_s - state.decode_step_s)
        moved_s += max(0.0, link.transfer_s(num_bytes, 0, block_bytes) - state.decode_step_s)
        if moved_s < tokens / settings.limits.chunk_tokens * (state.mixed_step_s - state.decode_step_s):
            return tokens
        tokens *= 2
    return None


# --- prefilling ahead -------------------------------------------------------------------------------------------------


def _ahead(problem: Problem, chosen: Prediction) -> Prediction:
    """What was chosen, with prompts computed ahead beside it if that is faster.

    Rows start only with room for all their growth then: where that is not known, too late. After the first few waves
    prompts and decodes share steps evenly anyway.
    """
    candidate, asked = chosen.candidate, problem.kv.offload == "ahead"
    waves = len(problem.lengths) / candidate.state.sequences
    may_pay = problem.known and 1 < waves <= MOST_WAVES and chosen.simulated_requests == len(problem.lengths)
    if "ahead" not in problem.offload_modes or not problem.policy.ordered or not (asked or may_pay):
        return chosen
    settings, offload = _parking(problem, candidate), candidate.offload
    if isinstance(settings, str):
        return _because(chosen, replace(offload, reason=settings)) if asked else chosen
    policy = replace(settings.policy, admission=Admission.AHEAD, mixing=Mixing.MIXED)
    changed = Candidate.of(problem, replace(settings, policy=policy), candidate.cost, offload)
    option = predict_like(problem, chosen, changed)
    change = option.makespan_s / chosen.makespan_s - 1
    if not asked and change > -WORTHWHILE:
        return chosen
    if offload.mode == "stream":
        reason = f"{offload.reason}, and {change:+.1%} more with prompts that are computed ahead"
        return _because(option, replace(offload, reason=reason))
    reason = f"prompts are computed ahead and wait on the host until their rows have room; makespan {change:+.1%}"
    return _because(option, OffloadPlan("ahead", 0, reason))


# --- streamed layers --------------------------------------------------------------------------------------------------


def _streamed(problem: Problem, base: Prediction) -> Prediction | str:
    """Layers whose KV passes through the device, so that more sequences have room, or why not.

    With parked sequences beside them or without, whichever is better. What would compute too much again lets decodes
    stall for a block instead.
    """
    candidates = _streaming(problem, base.candidate)
    if isinstance(candidates, str):
        return candidates
    plain = [predict(problem, candidate) for candidate in candidates]
    options = [each if _again(problem, each) <= AGAIN else _stalling(problem, each, STALLED_SHARE) for each in plain]
    if "park" in problem.offload_modes:
        parked = [_parked(problem, option) for option in plain]
        options += [option for option in parked if isinstance(option, Prediction)]
    if _again(problem, _best(problem, options)) > AGAIN:
        options += [_stalling(problem, option, PATIENT_SHARE) for option in plain]
    return _best(problem, options)


def _stalling(problem: Problem, option: Prediction, share: float) -> Prediction:
    """The same, where so many of the decodes may wait for a block before a sequence has to make room."""
    candidate = option.candidate
    settings = replace(candidate.settings, limits=replace(candidate.settings.limits, stalled_share=share))
    offload = replace(candidate.offload, reason=f"{candidate.offload.reason}, and decodes stall where memory runs out")
    return predict_like(problem, option, replace(candidate, settings=settings, offload=offload))


def _best(problem: Problem, options: list[Prediction]) -> Prediction:
    """Of those about as fast as the fastest, one that hides its copies and computes little again, if there is one."""
    near = (1 + NOISE) * min(map(_makespan_s, options))

    def merit(option: Prediction) -> tuple[bool, bool, float]:
        stats = option.result.stats
        hides = stats.hidden_copy_s >= HIDDEN * (stats.hidden_copy_s + stats.exposed_copy_s)
        return hides, _again(problem, option) <= AGAIN, -option.makespan_s

    return max((option for option in options if option.makespan_s <= near), key=merit)


def _again(problem: Problem, option: Prediction) -> float:
    """Tokens computed again, as a share of those of the prompts."""
    return option.result.counters.recomputed_tokens / (option.simulated_requests * problem.work.prompt_tokens)


def _streaming(problem: Problem, candidate: Candidate) -> list[Candidate] | str:
    """For each block size the best depth, or why not.

    Arithmetic is not aware that a small job hardly settles, so sizes are left to the simulation.
    """
    if not problem.policy.ordered:
        return "only vasuki streams layers"
    if not problem.shape.stores_evenly:
        return "layers keep more of a token than others do, and are not streamed"
    if _weights_s(candidate) >= LINK_BUSY * candidate.state.mixed_step_s:
        return "weights keep the link busy"
    sizes = STREAM_BLOCKS if problem.kv.block_tokens == "auto" else (1,)
    depths = [_best_depth(problem, _with_blocks(problem, candidate, size)) for size in sizes]
    options = sorted((option for option in depths if option), key=_request_s)
    if not options:
        return "streamed layers would make no room"
    change = _request_s(options[0]) / _request_s(candidate) - 1
    if change > -WORTHWHILE and problem.kv.offload != "stream":
        return f"streaming {options[0].offload.layers} layers would change the makespan by {change:+.1%}"
    return options[:SIMULATED_BLOCKS]


def _request_s(candidate: Candidate) -> float:
    return candidate.state.request_s


def _with_blocks(problem: Problem, candidate: Candidate, size: int) -> Candidate:
    """The same memory in blocks so many times as large."""
    settings = candidate.settings
    num_blocks, block_tokens = settings.num_blocks // size, settings.block_tokens * size
    settings = replace(settings, num_blocks=max(1, num_blocks), block_tokens=block_tokens)
    return Candidate.of(problem, settings, candidate.cost, candidate.offload)


def _best_depth(problem: Problem, resident: Candidate) -> Candidate | None:
    """The depth with the fastest steady state, or with the fastest that hides its copies if that is nearly as fast.

    What a depth makes room for has to be fetched too, so each is priced with the memory filled by it; and if that is
    more than a step hides, also with so much less as hides. Arithmetic is smooth where simulations differ by noise.
    """
    options: list[Candidate] = []
    for depth in range(1, problem.shape.num_layers):  # the first layer's copies hide behind none
        if full := _with_streamed(problem, resident, depth):
            options.append(full)
            if full.state.hidden < STEADY_HIDDEN:
                options.append(_with_kv(problem, full, full.state.hidden))
    longest = problem.lengths.peak_tokens.max()
    options = [option for option in options if option.settings.kv_tokens >= longest]
    near = (1 + NOISE) * min(map(_request_s, options), default=0.0)
    options = sorted((option for option in options if _request_s(option) <= near), key=_request_s)
    hiding = [option for option in options if option.state.hidden >= STEADY_HIDDEN]
    return next(iter(hiding + options), None)


def _with_kv(problem: Problem, candidate: Candidate, share: float) -> Candidate:
    """The candidate with this share of its KV blocks."""
    settings = replace(candidate.settings, num_blocks=int(share * candidate.settings.num_blocks))
    return Candidate.of(problem, settings, candidate.cost, candidate.offload)


def _with_streamed(problem: Problem, candidate: Candidate, streamed: int) -> Candidate | None:
    """The candidate with so many streamed layers, and blocks and sequences in the room that they leave."""
    shape, settings, limits = problem.shape, candidate.settings, candidate.settings.limits
    layers, layout = shape.num_layers, candidate.cost.layout
    device_layers = layers - streamed + spread_buffers(layers, streamed)
    if device_layers >= layers:
        return None
    if problem.engine.max_num_seqs == "auto":
        grown = math.ceil(limits.max_num_seqs * layers / device_layers)
        limits = replace(limits, max_num_seqs=min(MOST_SEQS, max(grown, limits.max_num_seqs)))
    try:
        num_blocks = problem.num_blocks(limits.chunk_tokens, limits.max_num_seqs, layout)
    except ModelError:  # activations of so many sequences leave no room
        return None
    num_blocks = num_blocks * problem.block_tokens // settings.block_tokens
    homes_bytes = shape.kv_bytes_per_token_per_layer * streamed * settings.block_tokens  # of one block
    most_homes = _host_kv_bytes(problem, candidate) // homes_bytes
    num_blocks = min(num_blocks * layers // device_layers, max(settings.num_blocks, most_homes))
    settings = replace(settings, num_blocks=num_blocks, streamed_layers=streamed, limits=limits)
    reason = f"{streamed} of {layers} layers stream in blocks of {settings.block_tokens} tokens"
    return Candidate.of(problem, settings, candidate.cost, OffloadPlan("stream", streamed, reason))


# --- weights ----------------------------------------------------------------------------------------------------------


def _host_kv_bytes(problem: Problem, candidate: Candidate) -> int:
    """Host memory that weights leave to KV."""
    return max(0, problem.kv.host_memory - host_weight_bytes(problem.shape, candidate.cost.layout))


def _weights_s(candidate: Candidate) -> float:
    """Seconds that a step's weights need on the link."""
    link = candidate.cost.profile.link
    return sum(link.transfer_s(copies.to_device_bytes, 0, copies.copy_bytes) for copies in candidate.cost.weight_copies)


def _weights_reason(problem: Problem, chosen: Candidate) -> str:
    """What is said of weights on the host."""
    shape, layout = problem.shape, chosen.cost.layout
    if not layout.host_layers:
        return ""
    why = "as the job asks"
    if problem.engine.weights_on_host == "auto":
        weights_gib = shape.weight_bytes / layout.gpus_per_replica / 2**30
        why = f"since {weights_gib:.1f} GiB and KV do not fit into {problem.profile.memory_mib / 2**10:.1f} GiB"
        if layout.host_layers == problem.kv.host_memory // shape.layer_weight_bytes:
            why += ", and as many as kv.host_memory allows"
    return f"the weights of {layout.host_layers} of {shape.num_layers} layers stay on the host, {why}"
