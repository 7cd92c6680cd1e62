"""How long a candidate takes: the real scheduler and loop in virtual time.

Jobs larger than a second's simulation are predicted from a sample: rows evenly spaced in the order of their work,
simulated as a job of their own, which gives start and end. For every row that the sample lacks, the time that a row
takes in the steady state is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.lengths import Lengths
from vasuki.planner.loss import Loss, RowWork, max_loss_s
from vasuki.planner.ordering.planned_order import PORTFOLIO_ROWS, Ordered, order_requests
from vasuki.planner.plan import Solver
from vasuki.simulator import SimulationResult, simulate

UNEVEN = 1.03  # what rows of different lengths take beyond the steady state of equal ones; fitted to whole simulations
# About what a simulation takes on one core. Told before it: for each run of steps, in it for each sequence, and for
# each step. Told after it: for each row, each batch, in it for each sequence, and for each step.
RUN_US, SEQUENCE_US, STEP_US = 40.0, 1.2, 1.5
ROW_US, BATCH_US, BATCH_SEQUENCE_US = 40.0, 40.0, 0.6
SIMULATION_US = 400_000
ROW_S = 0.001  # what ordering and simulating a row takes, about, on one core, of up to `PORTFOLIO_ROWS`
PLANNING_SHARE = 1 / 20  # of the makespan
NOISE = 0.02  # jobs differ by as much where rows only start in another order: nothing else is done to save less
SAMPLE_WAVES = 2.5  # rows of a sample, at least, in units of what runs side by side


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says of a candidate for the whole job."""

    candidate: Candidate
    makespan_s: float
    simulated_requests: int
    prompt_steps_share: float  # of the time, in steps that carry prompts
    shared_tokens: int  # of prompts, found in memory
    loss: Loss  # of a kill
    result: SimulationResult  # of the rows simulated
    solved: Ordered  # the order of the rows simulated
    order: tuple[int, ...] = ()  # of all rows, where it was found beforehand
    order_gap: float | None = None  # by what share its steps exceed those that no order undercuts, where one was sought
    usual_s: float = 0.0  # what the way takes that arithmetic found, where a search has left it for this one
    spread: float = 0.0  # by what share the makespan may be off, since other rows might have been simulated

    def loses_too_much(self, problem: Problem) -> bool:
        """Whether a kill costs more than the job allows."""
        return self.loss.mean_s > max_loss_s(problem.plan, self.makespan_s)


def predict(
    problem: Problem,
    candidate: Candidate,
    found: Ordered | None = None,
    rows: int | None = None,
) -> Prediction:
    """Simulate the job, or a sample of it, whose rows are there from the start.

    Args:
        problem: the job.
        candidate: how it is run.
        found: an order of the whole job.
        rows: to simulate; if not given, as many as are affordable for each of several candidates.
    """
    job, settings, config = problem.lengths, candidate.settings, problem.plan
    most_rows = affordable_rows(problem, candidate) if rows is None else rows
    sample = job if found or len(job) <= most_rows else job.take(sample_rows(job, most_rows))
    solver: Solver = "greedy" if config.solver == "auto" or problem.searching_solver else config.solver
    found_order = tuple(found.order) if found else ()
    arrivals = job.arrived_at_s if sample is job and not problem.policy.gathers else None
    requests = sample.requests(problem.policy.waves)  # whose batches are as large as memory was seen to hold
    order = order_requests(
        requests,
        settings,
        solver=found.solver if found else solver,
        known=job.known,
        output_length=config.output_length,
        window_rows=config.window_rows,
        order=found_order,
    )
    outputs = np.minimum(sample.output_tokens, sample.limits).tolist()
    seen = RowWork()
    result = simulate(
        order if arrivals is None else requests,  # what has not arrived cannot be ordered
        outputs,
        settings,
        candidate.cost,
        arrived_at_s=None if arrivals is None else np.ascontiguousarray(arrivals).data,
        observers=[seen, order] if arrivals is None else [seen],
    )
    problem.simulated_s.append(len(sample) * simulated_row_s(result))
    missing = len(job) - len(sample)
    # The arithmetic knows how vasuki fills memory; of the other policies it takes what the sample shows.
    row_s = UNEVEN * candidate.state.request_s if problem.policy.ordered else _steady_s(seen.ends_s)
    return Prediction(
        candidate,
        makespan_s=result.makespan_s + missing * row_s,
        simulated_requests=len(sample),
        prompt_steps_share=seen.prompts_s / seen.all_s,
        shared_tokens=_scaled_up(result.counters.shared_tokens, sample, job, settings.block_tokens),
        loss=seen.loss(config, missing * row_s, missing),
        result=result,
        solved=order.solved,
        order=found_order,
    )


def simulated_row_s(result: SimulationResult) -> float:
    """What simulating a row took on one core, about. It is counted and not timed: so a job has the same plan however
    busy the machine is."""
    stats = result.stats
    batches_us = stats.batches * (BATCH_US + BATCH_SEQUENCE_US * stats.mean_seqs) + stats.steps * STEP_US
    return 1e-6 * (ROW_US + batches_us / result.written.rows)


def predict_like(problem: Problem, base: Prediction, candidate: Candidate) -> Prediction:
    """Predict a candidate that arithmetic, which knows no preemption, cannot tell from that of `base`: the ratio of
    the two samples holds for the whole job, but for what memory takes that is pinned once."""
    prediction = predict(problem, candidate)
    pinned_s, base_pinned_s = (each.cost.pinning_s(each.settings) for each in (candidate, base.candidate))
    ratio = (prediction.result.makespan_s - pinned_s) / (base.result.makespan_s - base_pinned_s)
    return replace(prediction, makespan_s=pinned_s + ratio * (base.makespan_s - base_pinned_s))


def makespan_s(prediction: Prediction) -> float:
    """The makespan, by which options are compared."""
    return prediction.makespan_s


def loss_s(prediction: Prediction) -> float:
    """Work that a kill loses on average."""
    return prediction.loss.mean_s


def end_after_a_kill_s(prediction: Prediction) -> float:
    """When the job ends if it is killed once."""
    return prediction.makespan_s + prediction.loss.mean_s


def preferred(
    problem: Problem,
    predictions: Iterable[Prediction],
    otherwise: Callable[[Prediction], float] = end_after_a_kill_s,
) -> Prediction:
    """The fastest prediction within `plan.max_loss`; if there is none, the least by `otherwise`. Choosing by the loss
    alone may follow the sample's noise, and cost much time.

    With `plan.max_loss: auto`, no prediction is taken that ends later than another one both without a kill and with
    one."""
    predictions = list(predictions)
    allowed = [each for each in predictions if not each.loses_too_much(problem)]
    if not allowed:
        return min(predictions, key=otherwise)
    best = min(allowed, key=makespan_s)
    if problem.plan.max_loss == "auto":
        after_s = end_after_a_kill_s(best)
        better = [
            each for each in predictions if end_after_a_kill_s(each) < after_s and each.makespan_s < best.makespan_s
        ]
        best = min([best, *better], key=makespan_s)
    return best


def affordable_rows(problem: Problem, candidate: Candidate) -> int:
    """Rows that a simulation may have, so that planning stays a matter of a second or two."""
    sequences, output_tokens = candidate.state.sequences, problem.work.output_tokens
    runs = 4 + output_tokens / 200  # a row
    row_us = runs * (RUN_US + SEQUENCE_US * sequences) + STEP_US * output_tokens / sequences
    return round(max(SIMULATION_US / row_us, SAMPLE_WAVES * sequences))


def affordable_predictions(problem: Problem, candidate: Candidate) -> int:
    """How many candidates may be simulated in `PLANNING_SHARE` of what the job takes; one at least."""
    rows = len(problem.lengths)
    prediction_s = ROW_S * min(rows, PORTFOLIO_ROWS)
    return max(1, int(PLANNING_SHARE * rows * candidate.state.request_s / prediction_s))


def sample_rows(lengths: Lengths, rows: int) -> Ints:
    """`[rows]` indices, in input order, of rows that are evenly spaced in the order of their work."""
    positions = ((np.arange(rows) + 0.5) * len(lengths) / rows).astype(np.int64)
    return np.sort(by_work(lengths)[positions])


def by_work(lengths: Lengths) -> Ints:
    """`[rows]` indices in the order of their work."""
    work = lengths.prompt_tokens / lengths.prompt_tokens.mean() + lengths.output_tokens / lengths.output_tokens.mean()
    return np.argsort(work, kind="stable")


def _scaled_up(shared_tokens: int, sample: Lengths, job: Lengths, block_tokens: int) -> int:
    """Prompt tokens that the job shares, if it shares as much of its prefixes as the sample does."""
    if len(sample) == len(job) or job.prefixes is None or sample.prefixes is None:
        return shared_tokens
    of_sample, of_job = (int(each.found(block_tokens).sum()) for each in (sample.prefixes, job.prefixes))
    return shared_tokens * of_job // of_sample if of_sample else of_job


def _steady_s(ends_s: list[float]) -> float:
    """Seconds a row takes, between the first and the last quarter of the rows that ended."""
    first, last = len(ends_s) // 4, len(ends_s) * 3 // 4
    return (ends_s[last] - ends_s[first]) / max(1, last - first)
