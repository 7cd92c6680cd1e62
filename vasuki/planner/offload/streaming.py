"""Layers whose KV passes through the device in every step, so that more sequences have room.

How many layers, and in which blocks, is found by arithmetic (`steady_state`) and then simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from vasuki.base.errors import ModelError
from vasuki.base.units import only_longer_text
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.settings import MOST_SEQS, EngineSettings
from vasuki.models.layout import spread_buffers
from vasuki.planner.candidates import Candidate, Problem, chunk_sizes, settings_of
from vasuki.planner.loss import max_loss_s
from vasuki.planner.offload.options import best, host_kv_bytes
from vasuki.planner.offload.parking import parked, room_for_parked
from vasuki.planner.prediction import NOISE, Prediction, predict

STREAM_BLOCKS = (1, 4, 16)  # sizes of streamed blocks that are compared, in units of usual ones: one copy is a block
SIMULATED_BLOCKS = 2  # of them, and of step sizes, the best by arithmetic
MOST_SIMULATED = 5  # with less and less KV, where a kill loses too much
STEADY_HIDDEN = 0.955  # share of copies to hide in a steady state, whose steps are more even than a job's


def streamed(problem: Problem, base: Prediction, asked: bool, may_park: bool) -> Prediction | str:
    """The best depth and blocks, or why there is none. With parked sequences as well where that is better."""
    candidates = _options(problem, base.candidate, asked or not base.candidate.holds_all(problem))
    if isinstance(candidates, str):
        return candidates
    options = [predict(problem, candidate) for candidate in candidates]
    while options[-1].loses_too_much(problem) and len(options) < MOST_SIMULATED:
        smaller = _losing_less(problem, options[-1])
        if smaller is None or (smaller.settings.kv_tokens <= base.candidate.settings.kv_tokens and not asked):
            break  # nothing would be gained by moving any
        options.append(predict(problem, smaller))
    if may_park:
        also_parked = [parked(problem, option) for option in options]
        options += [option for option in also_parked if isinstance(option, Prediction)]
    return best(problem, options)


def most_streamed_tokens(problem: Problem, candidate: Candidate) -> int:
    """The most tokens that the device may have room for with streamed layers, or without where none can be."""
    most = candidate.settings.kv_tokens
    if _why_not(problem):
        return most
    depths = (_settings_with_depth(problem, candidate, depth) for depth in range(1, problem.shape.num_layers))
    return max([most, *(settings.kv_tokens for settings in depths if settings)])


def streamed_alike(
    problem: Problem, resident: Candidate, like: EngineSettings, more_layers: int = 0
) -> Iterator[Candidate]:
    """The candidate with as many layers streamed as `like` streams, or some more, in blocks of the same size, if these
    leave room."""
    streamed_layers = like.offload.streamed_layers + more_layers
    if not 0 < streamed_layers < problem.shape.num_layers:
        return
    in_blocks = with_blocks(problem, resident, like.block_tokens // resident.settings.block_tokens)
    settings = _settings_with_depth(problem, in_blocks, streamed_layers, saving=False)
    if settings is None:
        return
    if not more_layers:
        settings = replace(settings, num_blocks=min(settings.num_blocks, like.num_blocks))
    option = Candidate.of(problem, settings, resident.cost)
    room = room_for_parked(problem, option) if like.offload.host_blocks else settings.offload
    yield option if isinstance(room, str) else replace(option, settings=replace(settings, offload=room))


def first_streamed(problem: Problem, resident: Candidate, layers: int) -> Iterator[Candidate]:
    """The candidate with this many layers streamed, in the blocks that arithmetic finds best."""
    if _why_not(problem):
        return
    sizes = STREAM_BLOCKS if problem.kv.block_tokens == "auto" else (1,)
    options = [_with_depth(problem, with_blocks(problem, resident, size), layers, saving=True) for size in sizes]
    yield from sorted((option for option in options if option), key=_request_s)[:1]


def _why_not(problem: Problem) -> str:
    """Why no layer can be streamed; empty if some can."""
    if problem.shape.num_layers < 2:
        return "the model has one layer, and the first stays on the device"
    if not problem.shape.stores_evenly:
        return "layers keep more of a token than others do, and are not streamed"
    return ""


def _options(problem: Problem, candidate: Candidate, asked: bool) -> list[Candidate] | str:
    """Find the best depth for each block size, or say why there is none.

    Arithmetic is not aware that a small job hardly settles, so sizes are left to the simulation.
    """
    if why_not := _why_not(problem):
        return why_not
    sizes = STREAM_BLOCKS if problem.kv.block_tokens == "auto" else (1,)
    resident = [with_blocks(problem, each, size) for each in _with_steps(problem, candidate) for size in sizes]
    depths = [_best_depth(problem, each) for each in resident]
    if problem.kv.offload == "stream" and not any(depths):  # nor does it save any of the device's memory
        depths = [_best_depth(problem, each, saving=False) for each in resident]
    options = sorted((option for option in depths if option), key=_request_s)
    if not options:
        return "streamed layers would make no room that kv.host_memory holds as well"
    change = _request_s(options[0]) / _request_s(candidate) - 1
    if change > -NOISE and not asked:
        layers = options[0].settings.offload.streamed_layers
        return f"with {layers} layers streamed the makespan would be {only_longer_text(change)}"
    return options[:SIMULATED_BLOCKS]


def _with_steps(problem: Problem, candidate: Candidate) -> list[Candidate]:
    """The candidate, and where weights wait on the host the same with larger steps: the more rows share a fetch of the
    weights, the more prompts they want in a step."""
    options, settings, cost = [candidate], candidate.settings, candidate.cost
    larger = [size for size in chunk_sizes(problem) if size > settings.limits.chunk_tokens]
    for chunk_tokens in larger if cost.layout.host_layers else []:
        with suppress(ModelError):  # its activations leave no room
            other = replace(settings_of(problem, chunk_tokens, cost.layout), policy=settings.policy)
            options.append(Candidate.of(problem, other, cost))
    return options


def _losing_less(problem: Problem, option: Prediction) -> Candidate | None:
    """The same with less KV, by as much as its loss by a kill is too large: what runs side by side is lost together."""
    share = 0.9 * max_loss_s(problem.plan, option.makespan_s) / option.loss.mean_s
    smaller = _with_kv(problem, option.candidate, share)
    return smaller if smaller.settings.kv_tokens >= problem.lengths.peak_tokens.max() else None


def _request_s(candidate: Candidate) -> float:
    return candidate.state.request_s


def with_blocks(problem: Problem, candidate: Candidate, size: int) -> Candidate:
    """Cut the same memory into blocks `size` times as large."""
    settings = candidate.settings
    num_blocks, block_tokens = settings.num_blocks // size, settings.block_tokens * size
    settings = replace(settings, num_blocks=max(1, num_blocks), block_tokens=block_tokens)
    return Candidate.of(problem, settings, candidate.cost)


def _best_depth(problem: Problem, resident: Candidate, saving: bool = True) -> Candidate | None:
    """The depth with the fastest steady state, or with the fastest that hides its copies if that is nearly as fast.

    What a depth makes room for has to be fetched too, so each is priced with the memory filled by it; and if that is
    more than a step hides, also with so much less as hides. Arithmetic is smooth where simulations differ by noise.
    Models of four layers or fewer need as many buffers as they stream layers, so that no depth of theirs is `saving`.
    """
    options: list[Candidate] = []
    for depth in range(1, problem.shape.num_layers):  # the first layer's copies hide behind none
        if full := _with_depth(problem, resident, depth, saving):
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
    return Candidate.of(problem, settings, candidate.cost)


def _with_depth(problem: Problem, candidate: Candidate, streamed: int, saving: bool) -> Candidate | None:
    """The candidate with `streamed` streamed layers."""
    settings = _settings_with_depth(problem, candidate, streamed, saving)
    return Candidate.of(problem, settings, candidate.cost) if settings else None


def _settings_with_depth(
    problem: Problem, candidate: Candidate, streamed: int, saving: bool = True
) -> EngineSettings | None:
    """Its settings with `streamed` streamed layers, and blocks and sequences in the room that they leave; None where
    they leave none and should be `saving` some."""
    shape, settings, limits = problem.shape, candidate.settings, candidate.settings.limits
    layers, layout = shape.num_layers, candidate.cost.layout
    device_layers = layers - streamed + spread_buffers(layers, streamed)
    if device_layers >= layers and saving:
        return None
    if problem.engine.max_num_seqs == "auto":
        grown = math.ceil(limits.max_num_seqs * layers / device_layers)
        limits = replace(limits, max_num_seqs=min(MOST_SEQS, max(grown, limits.max_num_seqs)))
    try:
        num_blocks = problem.num_blocks(limits.chunk_tokens, limits.max_num_seqs, layout)
    except ModelError:  # activations of that many sequences leave no room
        return None
    num_blocks = num_blocks * problem.block_tokens // settings.block_tokens
    homes_bytes = shape.kv_bytes_per_token_per_layer * streamed * settings.block_tokens  # of one block
    most_homes = host_kv_bytes(problem, candidate) // homes_bytes
    num_blocks = min(num_blocks * layers // device_layers, most_homes)
    reason = f"{streamed} of {layers} layers stream in blocks of {settings.block_tokens} tokens"
    offload = OffloadPlan("stream", reason, streamed_layers=streamed)
    return replace(settings, num_blocks=num_blocks, limits=limits, offload=offload)
