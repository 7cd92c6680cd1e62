"""What moves to host memory, by price: nothing, streamed layers, parked sequences, or both, and why in a sentence.

This is the one place where `kv.offload` is decided: what the job asks for, or `auto`. Streaming is found by arithmetic
and then simulated; parking saves what preemption costs, which only a simulation knows. Where prices differ by no more
than noise, nothing moves.
"""

from __future__ import annotations

from dataclasses import replace

from vasuki.base.errors import JobFileError
from vasuki.base.units import longer_text, only_longer_text, percent_text
from vasuki.engine.offload import OffloadMode, OffloadPlan
from vasuki.engine.policy import Admission
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.offload.by_batch import by_batch, why_not_by_batch
from vasuki.planner.offload.options import because
from vasuki.planner.offload.parking import parked, prefilled_ahead, with_room_for_victims
from vasuki.planner.offload.streaming import most_streamed_tokens, streamed
from vasuki.planner.prediction import NOISE, Prediction, end_after_a_kill_s, loss_s, makespan_s, predict_like, preferred

_NEEDED = ", which the longest row needs"
_STATES_STAY = "rows keep states or caches of their own, which stay on the device"


def choose_offload(problem: Problem, base: Prediction) -> Prediction:
    """The candidate of `base`, which moves no KV, with whatever offload makes it fastest.

    Raises JobFileError if the job asks for what this model, policy, layout or memory does not allow.
    """
    modes = _modes(problem)
    plain = _without_preemption(problem, base)
    if not (problem.shape.in_blocks or "by_batch" in modes):
        chosen = because(plain, OffloadPlan("none", _STATES_STAY))
    elif "by_batch" in modes:
        chosen = by_batch(problem, base)
    elif "ahead" in modes:
        ahead = prefilled_ahead(problem, plain)
        if isinstance(ahead, str):
            raise refusal("ahead", ahead)
        chosen = ahead
    else:
        chosen = _cheapest(problem, base, plain, modes)
    if chosen.candidate.settings.offload.mode == "none" and _keeps_victims(problem):
        chosen = with_room_for_victims(problem, chosen)
    return _with_weights(problem, chosen)


def explained(problem: Problem, chosen: Prediction, plain: Candidate) -> Prediction:
    """A prediction with streamed layers that was not made here, with all that is said of what moves.

    plain: the same job where nothing moves.
    """
    offload = chosen.candidate.settings.offload
    if not plain.holds_all(problem):
        chosen = because(chosen, replace(offload, reason=f"{offload.reason}{_NEEDED}"))
    return _with_weights(problem, chosen)


def _with_weights(problem: Problem, chosen: Prediction) -> Prediction:
    """The prediction with the reason why weights stay on the host, where some do."""
    offload = chosen.candidate.settings.offload
    weights = _weights_reason(problem, chosen.candidate)
    return because(chosen, replace(offload, reason=f"{weights}; {offload.reason}")) if weights else chosen


def may_offload(problem: Problem) -> bool:
    """Whether KV may pass over the link, by any policy. States stay on the device, and KV of models with states."""
    on_its_own = problem.kv.offload == "auto" and problem.profile.kind != "cpu"
    moves = problem.asks_for_offload or on_its_own
    return moves and problem.shape.in_blocks


def _keeps_victims(problem: Problem) -> bool:
    """Whether rows that make way keep their KV: by the policy, or since some are urgent and the job lets them."""
    may_move = problem.shape.in_blocks and problem.kv.offload != "none" and problem.layout.pipeline_parallel == 1
    policy = problem.policy
    return may_move and (policy.parks or (problem.may_be_urgent and policy.urgent_first))


def may_stream(problem: Problem) -> bool:
    """Whether the job lets layers be streamed."""
    return "stream" in _modes(problem) and problem.shape.in_blocks


def most_kv_tokens(problem: Problem, candidate: Candidate) -> int:
    """Tokens that a row of this candidate may have, with layers streamed where the job lets them be."""
    return most_streamed_tokens(problem, candidate) if may_stream(problem) else candidate.settings.kv_tokens


def _modes(problem: Problem) -> tuple[OffloadMode, ...]:
    """What is to be tried. On a CPU both tiers are the same memory: moving gains nothing, unless the job asks for it.
    Nor is prefilling ahead tried by itself: on recorded lengths it gains nothing."""
    asked, policy, staged = problem.kv.offload, problem.policy, problem.layout.pipeline_parallel > 1
    if policy.goes_deep and asked in ("auto", "by_batch"):
        if why_not := why_not_by_batch(problem):
            raise JobFileError(
                f"engine.policy: {policy.name} cannot be done: {why_not}; take another, or set kv.offload to none"
            )
        return ("by_batch",)
    if asked != "auto":
        if why_not := _why_never(problem, asked):
            raise refusal(asked, why_not)
        return (asked,)
    if not policy.ordered or problem.profile.kind == "cpu":
        return ()
    return ("park",) if staged else ("park", "stream")


def _why_never(problem: Problem, asked: OffloadMode) -> str:
    """Why a job of this kind cannot have what it asks for, whatever its rows and its memory; empty if it may."""
    policy = problem.policy
    if asked == "none":
        return ""
    if asked == "by_batch":
        return why_not_by_batch(problem)
    if not problem.shape.in_blocks:
        return _STATES_STAY
    if policy.goes_deep:
        return f"policy {policy.name} decides batch by batch which layers move"
    if asked in ("stream", "ahead") and problem.layout.pipeline_parallel > 1:
        return "it is not simulated with stages"
    if asked == "ahead" and not policy.ordered:
        return f"rows start ahead with policy vasuki alone, not with {policy.name}"
    if asked == "park" and not policy.makes_room:
        return f"with policy {policy.name} rows start with room for all their growth, so that none ever makes room"
    return ""


def refusal(asked: str, why: str) -> JobFileError:
    """What a job is told that asks for what cannot be done."""
    return JobFileError(f"kv.offload: {asked} cannot be done: {why}; leave it out, or say none")


def _cheapest(problem: Problem, base: Prediction, plain: Prediction, modes: tuple[OffloadMode, ...]) -> Prediction:
    asked = problem.kv.offload
    tried: list[Prediction | str] = []
    if "park" in modes:
        tried.append(parked(problem, base, asked == "park"))
    if "stream" in modes:
        tried.append(streamed(problem, base, asked == "stream", may_park="park" in modes))
    options = [option for option in tried if isinstance(option, Prediction)]
    why_not = [reason for reason in tried if isinstance(reason, str)]
    if problem.kv.asks_for_offload and not options:
        raise refusal(asked, "; ".join(why_not))

    roomy = [option for option in options if option.candidate.holds_all(problem)]
    if roomy and not plain.candidate.holds_all(problem):
        fastest = min(roomy, key=makespan_s)
        offload = fastest.candidate.settings.offload
        return because(fastest, replace(offload, reason=f"{offload.reason}{_NEEDED}"))

    def change(option: Prediction) -> str:
        return longer_text(option.makespan_s / plain.makespan_s - 1)

    if asked == "auto":
        otherwise = end_after_a_kill_s if problem.plan.max_loss == "auto" else loss_s
        best = preferred(problem, [plain, *options], otherwise)
        keeps = best.loss.mean_s < (1 - NOISE) * plain.loss.mean_s and not best.loses_too_much(problem)
        if plain.loses_too_much(problem) and keeps:
            offload = best.candidate.settings.offload
            why = f"a kill loses {percent_text(1 - best.loss.mean_s / plain.loss.mean_s)} less"
            return because(best, replace(offload, reason=f"{offload.reason}; {why}, makespan {change(best)}"))
        risky = [each for each in options if each is not best and _risks_more(problem, each, plain)]
        why_not += [f"with {each.candidate.settings.offload.mode} a kill loses more" for each in risky]
        options = [each for each in options if not any(each is one for one in risky)]
    if options:
        fastest = min(options, key=makespan_s)
        offload = fastest.candidate.settings.offload
        if offload.mode == asked or fastest.makespan_s < (1 - NOISE) * plain.makespan_s:
            return because(fastest, replace(offload, reason=f"{offload.reason}; makespan {change(fastest)}"))
    why = "as the job asks" if asked != "auto" else "host and device are one memory"
    if asked == "auto" and not problem.policy.ordered:
        why = f"policy {problem.policy.name} moves nothing unless the job asks for it"
    for option in options:
        would = only_longer_text(option.makespan_s / plain.makespan_s - 1)
        why_not.append(f"with {option.candidate.settings.offload.mode} the makespan would be {would}")
    return because(plain, OffloadPlan("none", "; ".join(why_not) or why))


def _risks_more(problem: Problem, option: Prediction, plain: Prediction) -> bool:
    """Whether a kill loses more than the job allows, and more than where nothing moves."""
    return option.loses_too_much(problem) and option.loss.mean_s > plain.loss.mean_s


def _without_preemption(problem: Problem, base: Prediction) -> Prediction:
    """Return the prediction, or one in which rows start only when all expected growth has room, if that is faster.

    Rows that start as soon as their prompt fits push others out later. Usually a full memory is worth that.
    """
    if not problem.policy.ordered or not base.result.counters.preemptions_recompute:
        return base
    settings = base.candidate.settings
    settings = replace(settings, policy=replace(settings.policy, admission=Admission.PEAK))
    careful = Candidate.of(problem, settings, base.candidate.cost)
    return preferred(problem, [base, predict_like(problem, base, careful)])


def _weights_reason(problem: Problem, chosen: Candidate) -> str:
    """What the plan says of weights on the host."""
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
