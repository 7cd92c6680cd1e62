"""A better way to run a small job, by simulation: propose, simulate, keep.

Arithmetic ranks ways by their steady state, which a small job hardly reaches: it is start and end, and what decides
there (who may start, in which order, with which steps) only a simulation tells.

    the shortest way of which not all was tried --> the nearest that differs by each switch, then the next ones --+
             ^                                                                                                    |
             +---------------------------------------- all of them, simulated ------------------------------------+

Switches are the order (planned, or as rows come), what must be free before a row starts, whether prompts and decodes
share steps, the step's size, how many rows run side by side, and how many layers stream. What other schedulers would do
sets several at once. It ends where nothing is left to try from ways that are nearly as good as the best, where the
bound is near, or where it has taken as long as it may: counted, not timed, so that a job has the same plan however busy
the machine is. Even then the best way is tried in the other order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from vasuki.base.errors import ModelError
from vasuki.engine.policy import POLICIES, Admission, Policy
from vasuki.planner.candidates import Candidate, Problem, settings_of, with_rows
from vasuki.planner.offload.choice import choose_offload, explained, may_stream
from vasuki.planner.offload.streaming import first_streamed, streamed_alike
from vasuki.planner.prediction import (
    PLANNING_SHARE,
    Prediction,
    end_after_a_kill_s,
    loss_s,
    predict,
    preferred,
)

OTHERS = ("sarathi", "vllm", "orca")
ADMISSIONS = (Admission.PROMPT, Admission.CHUNK, Admission.ROOM, Admission.PEAK)
SIZES = (1, -1, 0, 3, -3)  # of steps, away in the row of sizes
ROWS = (0.5, 0.75, 1.5)  # times as many side by side
LAYERS = (1, -1, 4, -4)  # more that stream
DEPTHS = (0.25, 0.5)  # of the layers, where none does yet
FULL = 0.9  # of the memory: where more of it stays free, it decides nothing
NEAR = 0.02  # a makespan that exceeds its bound by less is good enough
WORTH = 0.002  # of the makespan: a way that saves less is no reason to leave the one that is known
LEAST_S, MOST_S = 0.5, 5.0  # that the search may take, though never more than it could save
ALWAYS_S = 0.2  # that it may take even so
IN_VAIN = 0.001  # by what share a way looks longer with each other one that was tried from it and saves nothing
REACH = 0.05  # a way that is longer than the best by more leads to nothing better

Switch = Callable[[Problem, Prediction, list[Candidate]], Iterator[Candidate]]


def searched(
    problem: Problem, base: Prediction, shortlist: list[Prediction], candidates: list[Candidate], least_s: float
) -> Prediction:
    """The best way found from the best of the shortlist on, in planned order and as rows come, with what it moves to
    the host.

    There is nothing to search for in large jobs, of which a sample tells less than arithmetic, where rows may be
    urgent or nobody knows when they arrive, where another policy than vasuki's says what is done, nor where rows are
    computed one by one.

    Args:
        problem: the job.
        base: the best way of the shortlist, in planned order.
        shortlist: the best of the candidates, where nothing moves.
        candidates: all ways to mix and to size steps.
        least_s: seconds that no schedule beats.
    """
    best = choose_offload(problem, base)
    whole = best.simulated_requests == len(problem.lengths)
    if not whole or not problem.policy.ordered or problem.shape.backend not in ("ragged", "padded"):
        return best
    if problem.may_be_urgent or problem.arrivals_are_unknown:
        return best
    search = _BestFirst(problem, candidates, least_s, best)
    starts = [best]
    if problem.order_is_open and search.goes_on():
        ways = (_switched(problem, each.candidate, as_they_come=True) for each in shortlist)
        as_they_come = preferred(problem, [predict(problem, way) for way in ways])
        starts.append(choose_offload(problem, as_they_come))
    usual = best
    search.best_from(starts)
    best = search.turned()
    if best is not usual and best.candidate.settings.offload.mode == "none":
        moved = choose_offload(problem, best)  # which says why nothing moves where nothing does
        saves = moved.makespan_s < (1 - WORTH) * best.makespan_s
        best = search.best_from([moved]) if saves else moved
    if best is usual:
        return usual
    best = replace(best, usual_s=usual.makespan_s)
    return explained(problem, best, base.candidate) if best.candidate.settings.offload.streamed_layers else best


@dataclass(slots=True, eq=False)
class _Way:
    """A way that others are tried from."""

    makespan_s: float
    options: Iterator[tuple[Switch, Prediction]]
    in_vain: int = 0

    def seems_s(self) -> float:
        return self.makespan_s * (1 + IN_VAIN * self.in_vain)


class _BestFirst:
    """The best way so far, what was tried, and how long it may go on.

    A way looks longer with all that was tried from it in vain: so none takes all the time from its neighbours.
    """

    def __init__(self, problem: Problem, candidates: list[Candidate], least_s: float, usual: Prediction) -> None:
        self._problem, self._candidates, self._least_s = problem, candidates, least_s
        allowed_s = min(max(LEAST_S, PLANNING_SHARE * usual.makespan_s), MOST_S)
        allowed_s = min(allowed_s, max(ALWAYS_S, usual.makespan_s - least_s))
        self._until_s = sum(problem.simulated_s) + allowed_s
        self._best = usual
        self._tried: set[tuple[object, ...]] = set()
        self._switches = list(SWITCHES)  # the one first that helped last

    def goes_on(self) -> bool:
        """Whether there may be something better, and time to find it."""
        near = self._best.makespan_s < (1 + NEAR) * self._least_s
        return not near and sum(self._problem.simulated_s) < self._until_s

    def best_from(self, starts: list[Prediction]) -> Prediction:
        """The best way that is found from these, always on from the one that looks shortest."""
        for start in starts:
            self._keep(start)
        ways = [_Way(start.makespan_s, self._from(start)) for start in starts]
        while self.goes_on() and ways:
            way = min(ways, key=_Way.seems_s)
            near = way.makespan_s <= (1 + REACH) * self._best.makespan_s
            found = next(way.options, None) if near else None
            if found is None:
                ways.remove(way)
                continue
            switch, option = found
            if self._keep(option):
                self._switches = [switch, *(each for each in self._switches if each is not switch)]
            else:
                way.in_vain += 1
            if abs(option.makespan_s - way.makespan_s) > WORTH * way.makespan_s:  # else it's much the same way
                ways.append(_Way(option.makespan_s, self._from(option)))
        return self._best

    def turned(self) -> Prediction:
        """The best way, or the same in the other order, if that was not tried and is better: time may have been up."""
        problem, best = self._problem, self._best
        if best.makespan_s >= (1 + NEAR) * self._least_s:
            for other in _order(problem, best, self._candidates):
                if _key(other) not in self._tried and other.holds_all(problem):
                    self._keep(predict(problem, other))
        return self._best

    def _keep(self, option: Prediction) -> bool:
        """Whether it is the best way by now."""
        saves = option.makespan_s < (1 - WORTH) * self._best.makespan_s
        otherwise = end_after_a_kill_s if self._problem.plan.max_loss == "auto" else loss_s
        if saves and preferred(self._problem, [self._best, option], otherwise) is option:
            self._best = option
        return self._best is option

    def _from(self, way: Prediction) -> Iterator[tuple[Switch, Prediction]]:
        """Ways that differ by a switch and were not tried yet, while there is time: the nearest by each switch, then
        the next ones."""
        problem = self._problem
        turns = deque((switch, switch(problem, way, self._candidates)) for switch in self._switches)
        while turns:
            switch, others = turns.popleft()
            for other in others:
                if not self.goes_on():
                    return
                if _key(other) not in self._tried and other.holds_all(problem):
                    self._tried.add(_key(other))
                    turns.append((switch, others))
                    yield switch, predict(problem, other)
                    break


def _key(way: Candidate) -> tuple[object, ...]:
    return replace(way.settings, offload=replace(way.settings.offload, reason="")), way.cost.layout


def _switched(problem: Problem, way: Candidate, **switches: object) -> Candidate:
    """The same with other switches of its policy."""
    policy: Policy = replace(way.settings.policy, **switches)  # type: ignore[arg-type]
    return Candidate.of(problem, replace(way.settings, policy=policy), way.cost)


def _as_others_would(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    """As rows come, with the others' admission, steps and victims, in so far as the job leaves these open."""
    if problem.asks_for_offload:
        return
    way = best.candidate
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
        yield _switched(
            problem,
            usual,
            admission=other.admission,
            chunked=other.chunked,
            as_they_come=problem.order_is_open,
            evicts_least_computed=other.evicts_least_computed,
        )


def _order(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    if problem.order_is_open:
        comes = best.candidate.settings.policy.as_they_come
        yield _switched(problem, best.candidate, as_they_come=not comes)


def _admission(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    """What must be free before a row starts, where memory is full."""
    if _is_full(best) and best.candidate.settings.offload.mode != "ahead":
        yield from (_switched(problem, best.candidate, admission=admission) for admission in ADMISSIONS)


def _steps(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    """The other way to mix, and other sizes of steps."""
    chunk_tokens, mixing = best.candidate.settings.limits.chunk_tokens, best.candidate.mixing
    sizes = sorted({each.settings.limits.chunk_tokens for each in candidates if each.mixing is mixing} | {chunk_tokens})
    at = sizes.index(chunk_tokens)
    for size in [sizes[at + away] for away in SIZES if 0 <= at + away < len(sizes)]:
        for other in candidates:
            if other.settings.limits.chunk_tokens == size and (size == chunk_tokens or other.mixing is mixing):
                yield from _resized(problem, best, other)


def _layers(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    """More layers that stream, or fewer; the first ones where memory is full."""
    settings = best.candidate.settings
    if settings.offload.streamed_layers:
        chunk_tokens = settings.limits.chunk_tokens
        same = [
            each
            for each in candidates
            if each.settings.limits.chunk_tokens == chunk_tokens and each.mixing is best.candidate.mixing
        ]
        for more, other in product(LAYERS, same):
            yield from _resized(problem, best, other, more)
    elif _is_full(best) and may_stream(problem):
        for share in DEPTHS:
            yield from first_streamed(problem, best.candidate, round(share * problem.shape.num_layers))


def _rows(problem: Problem, best: Prediction, candidates: list[Candidate]) -> Iterator[Candidate]:
    """Other numbers of rows side by side."""
    way = best.candidate
    if problem.engine.max_num_seqs == "auto":
        rows = min(way.settings.limits.max_num_seqs, way.state.sequences, len(problem.lengths))
        for share in ROWS:
            yield from with_rows(problem, way, max(1, round(share * rows)))


def _is_full(way: Prediction) -> bool:
    return way.result.stats.peak_device_blocks > FULL * way.candidate.settings.num_blocks


def _resized(problem: Problem, best: Prediction, other: Candidate, more_layers: int = 0) -> Iterator[Candidate]:
    """The best way with the other's steps, and with more layers that stream where some do."""
    way = best.candidate
    if other.cost.layout != way.cost.layout:
        return
    offload, policy = way.settings.offload, replace(way.settings.policy, mixing=other.mixing, chunked=True)
    resident = replace(other.settings, policy=policy)
    if offload.streamed_layers:
        alike = Candidate.of(problem, resident, way.cost)
        yield from streamed_alike(problem, alike, way.settings, more_layers)
    else:
        yield Candidate.of(problem, replace(resident, offload=offload), way.cost)


SWITCHES: tuple[Switch, ...] = (_as_others_would, _order, _admission, _steps, _layers, _rows)
