"""A better way to run a small job, by simulation: propose, simulate, keep.

Arithmetic ranks ways by their steady state, which a small job hardly reaches: it is start and end, and what decides
there (who may start, in which order, with which steps) only a simulation tells.

    the best way so far --> what other schedulers would do --> ways that differ by one switch --+
             ^                                                                                  |
             +-------------------------- whatever is better, simulated -------------------------+

Switches are the order (planned, or as rows come), what must be free before a row starts, whether prompts and decodes
share steps, the step's size, how many rows run side by side, and how many layers stream. What other schedulers would do
sets several at once. It ends where no switch helps, where the bound is near, or where it has taken as long as it may:
counted, not timed, so that a job has the same plan however busy the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from vasuki.base.errors import ModelError
from vasuki.engine.policy import POLICIES, Admission, Policy
from vasuki.planner.candidates import Candidate, Problem, settings_of, with_rows
from vasuki.planner.offload.choice import choose_offload, explained
from vasuki.planner.offload.streaming import streamed_alike
from vasuki.planner.prediction import PLANNING_SHARE, Prediction, makespan_s, predict, preferred

OTHERS = ("sarathi", "vllm", "orca")
ADMISSIONS = (Admission.PROMPT, Admission.CHUNK, Admission.ROOM, Admission.PEAK)
ROWS = (0.5, 0.75, 1.5)  # times as many side by side
LAYERS = (1, -1, 3, -3)  # more that stream
NEAR = 0.02  # a makespan that exceeds its bound by less is good enough
WORTH = 0.002  # of the makespan: a way that saves less is no reason to leave the one that is known
LEAST_S, MOST_S = 0.5, 5.0  # that the search may take, though never more than half of what it could save
ALWAYS_S = 0.02  # that it takes even so


def searched(problem: Problem, base: Prediction, candidates: list[Candidate], least_s: float) -> Prediction:
    """The best way found from `base` on, and from the same with rows as they come, with what it moves to the host.

    There is nothing to search for in large jobs, of which a sample tells less than arithmetic, where rows arrive or may
    be urgent, nor where they are not packed.

    Args:
        problem: the job.
        base: the best of the candidates, where nothing moves.
        candidates: all ways to mix and to size steps.
        least_s: seconds that no schedule beats.
    """
    best = choose_offload(problem, base)
    whole = best.simulated_requests == len(problem.lengths)
    if not whole or not problem.policy.ordered or problem.shape.backend != "ragged":
        return best
    if problem.rows_arrive or problem.may_be_urgent:
        return best
    search = _Steps(problem, candidates, least_s, best)
    starts = [best]
    if problem.order_is_open and search.goes_on(best):
        as_they_come = predict(problem, _switched(problem, base.candidate, as_they_come=True))
        starts.append(choose_offload(problem, as_they_come))
    usual = best
    for start in sorted(starts, key=makespan_s):
        best = search.better_of(best, search.from_here(start))
    if best is usual:
        return usual
    best = replace(best, usual_s=usual.makespan_s)
    return explained(problem, best, base.candidate) if best.candidate.settings.offload.streamed_layers else best


class _Steps:
    """What was tried, and how long it may go on."""

    def __init__(self, problem: Problem, candidates: list[Candidate], least_s: float, usual: Prediction) -> None:
        self._problem, self._candidates, self._least_s = problem, candidates, least_s
        may_save_s = (usual.makespan_s - least_s) / 2
        allowed_s = max(ALWAYS_S, min(max(LEAST_S, PLANNING_SHARE * usual.makespan_s), MOST_S, may_save_s))
        self._until_s = sum(problem.simulated_s) + allowed_s
        self._tried: set[tuple[object, ...]] = set()

    def goes_on(self, best: Prediction) -> bool:
        """Whether there may be something better, and time to find it."""
        return best.makespan_s >= (1 + NEAR) * self._least_s and sum(self._problem.simulated_s) < self._until_s

    def better_of(self, best: Prediction, option: Prediction) -> Prediction:
        """The option, if that is worth it."""
        saves = option.makespan_s < (1 - WORTH) * best.makespan_s
        return option if saves and preferred(self._problem, [best, option]) is option else best

    def from_here(self, start: Prediction) -> Prediction:
        """The best way that steps from one to a better one lead to."""
        problem, best = self._problem, start
        while (found := self._step(best)) is not best:
            best = found
        if best is start or best.candidate.settings.offload.mode != "none":
            return best
        moved = choose_offload(problem, best)  # which says why nothing moves where nothing does
        return self.from_here(moved) if moved.makespan_s < (1 - WORTH) * best.makespan_s else moved

    def _step(self, best: Prediction) -> Prediction:
        """The first that is better than the best so far; that itself if there is none."""
        problem, way = self._problem, best.candidate
        for other in chain(_as_others_would(problem, way), _neighbours(problem, way, self._candidates)):
            if not self.goes_on(best):
                return best
            if _key(other) in self._tried or not other.holds_all(problem):
                continue
            self._tried.add(_key(other))
            option = predict(problem, other)
            if self.better_of(best, option) is option:
                return option
        return best


def _key(way: Candidate) -> tuple[object, ...]:
    return replace(way.settings, offload=replace(way.settings.offload, reason="")), way.cost.layout


def _switched(problem: Problem, way: Candidate, **switches: object) -> Candidate:
    """The same with other switches of its policy."""
    policy: Policy = replace(way.settings.policy, **switches)  # type: ignore[arg-type]
    return Candidate.of(problem, replace(way.settings, policy=policy), way.cost)


def _as_others_would(problem: Problem, way: Candidate) -> Iterator[Candidate]:
    """As rows come, with the others' admission and steps, in so far as the job leaves these open."""
    if problem.asks_for_offload:
        return
    for other in (POLICIES[name] for name in OTHERS):
        chunk_tokens = other.chunk_tokens
        if problem.engine.chunk_tokens != "auto":
            chunk_tokens = problem.engine.chunk_tokens
            if not other.chunked:
                continue
        elif not other.chunked:
            chunk_tokens = max(chunk_tokens, int(problem.lengths.prompt_tokens.max()))
        try:
            settings = settings_of(problem, chunk_tokens, way.cost.layout)
        except ModelError:
            continue
        usual = Candidate.of(problem, settings, way.cost)
        comes = problem.order_is_open
        yield _switched(problem, usual, admission=other.admission, chunked=other.chunked, as_they_come=comes)


def _neighbours(problem: Problem, way: Candidate, candidates: list[Candidate]) -> Iterator[Candidate]:
    """Ways that differ from this one by a switch, those first that are better most often."""
    settings, policy, offload = way.settings, way.settings.policy, way.settings.offload
    if problem.order_is_open:
        yield _switched(problem, way, as_they_come=not policy.as_they_come)
    if offload.mode != "ahead":
        yield from (_switched(problem, way, admission=admission) for admission in ADMISSIONS)
    chunk_tokens = settings.limits.chunk_tokens
    same = [each for each in candidates if each.cost.layout == way.cost.layout]
    for other in sorted(same, key=lambda each: abs(each.settings.limits.chunk_tokens - chunk_tokens)):
        resized = other.settings.limits.chunk_tokens != chunk_tokens
        if resized and other.mixing is not way.mixing:
            continue
        resident = replace(other.settings, policy=replace(policy, mixing=other.mixing, chunked=True))
        if not offload.streamed_layers:
            yield Candidate.of(problem, replace(resident, offload=offload), way.cost)
            continue
        for more_layers in (0,) if resized else (0, *LAYERS):
            yield from streamed_alike(problem, Candidate.of(problem, resident, way.cost), settings, more_layers)
    if problem.engine.max_num_seqs == "auto":
        rows = min(settings.limits.max_num_seqs, way.state.sequences, len(problem.lengths))
        for share in ROWS:
            yield from with_rows(problem, way, max(1, round(share * rows)))
