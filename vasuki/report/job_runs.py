"""Runs of one job side by side: what each took and cost, which card was first, which cheaper, and what would change it.

Two cards are compared on what a unit of work costs on them, so that runs of unequal size can still be compared:

    cost per token      = price per hour x GPU hours per token
    break-even price    of B against A = price of A x (GPU hours per token on A) / (GPU hours per token on B)

Below its break-even price B is the cheaper one, above it A.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vasuki.machines.price import Price
from vasuki.report.runs import Run
from vasuki.report.savings import could_save, knowing_saves

SAME_WORK = 0.02  # tokens of two runs may differ by this share and count as the same work
J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A run in figures. None stands for what is not known."""

    run: Run
    label: str  # unique within the comparison
    price: Price | None

    @property
    def simulated(self) -> bool:
        return self.run.manifest.simulated

    @property
    def full_label(self) -> str:
        """The label, and that the run is a simulation."""
        return f"{self.label} (simulated)" if self.simulated and "simulated" not in self.label else self.label

    @property
    def makespan_s(self) -> float:
        return self.run.makespan_s

    @property
    def load_s(self) -> float:
        """The part of the makespan that loaded the model; no simulated run has one."""
        return self.run.manifest.timings.load_s

    @property
    def foreseen_s(self) -> float:
        """The part of the makespan that prediction and lower bound speak of: without loading and planning."""
        return self.run.manifest.timings.foreseen_s

    @property
    def predicted_s(self) -> float | None:
        return self.run.manifest.predicted.makespan_s

    @property
    def lower_bound_s(self) -> float | None:
        """The lower bound at datasheet rates. None, as the next, for a job in several runs: bounds are of the last
        one."""
        return None if self.run.earlier_s else self.run.manifest.bounds.datasheet_s

    @property
    def schedule_bound_s(self) -> float | None:
        return None if self.run.earlier_s else self.run.manifest.bounds.schedule_s

    @property
    def could_save(self) -> float | None:
        """See `savings`."""
        return None if self.run.earlier_s else could_save(self.run.manifest)

    @property
    def knowing_saves(self) -> float | None:
        """See `savings`."""
        return None if self.run.earlier_s else knowing_saves(self.run.manifest)

    @property
    def prediction_error(self) -> float | None:
        """How much longer than predicted the run took once the model was loaded, as a share of the prediction.

        None without a prediction, and for a job in several runs: the prediction was of the last one.
        """
        if not self.predicted_s or self.run.earlier_s:
            return None
        return self.foreseen_s / self.predicted_s - 1

    @property
    def times_lower_bound(self) -> float | None:
        return self.foreseen_s / self.lower_bound_s if self.lower_bound_s else None

    def in_all_s(self, seconds: float | None) -> float | None:
        """What was predicted, or a bound, and what else the run took; to be compared with the makespan."""
        return None if seconds is None else self.run.manifest.timings.makespan_s - self.foreseen_s + seconds

    @property
    def rows_per_s(self) -> float:
        return self.run.rows_done / self.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return self.run.tokens / self.makespan_s

    @property
    def gpu_hours_per_million_tokens(self) -> float | None:
        return self.run.gpu_hours / self.run.tokens * 1e6 if self.run.tokens else None

    @property
    def amount(self) -> float | None:
        """Money for the whole job."""
        return None if self.price is None else self.price.per_hour * self.run.gpu_hours

    @property
    def per_million_tokens(self) -> float | None:
        """Money for a million tokens, prompt and output."""
        hours = self.gpu_hours_per_million_tokens
        return None if self.price is None or hours is None else self.price.per_hour * hours

    @property
    def per_thousand_rows(self) -> float | None:
        return None if self.amount is None else self.amount / self.run.rows_done * 1e3

    @property
    def energy_kwh(self) -> float | None:
        """Energy that the run recorded (`device.energy_j`). None for a job in several runs: it is that of the last."""
        energy_j = self.run.manifest.device.get("energy_j")
        return float(energy_j) / J_PER_KWH if isinstance(energy_j, (int, float)) and not self.run.earlier_s else None

    @property
    def energy_limit_kwh(self) -> float | None:
        """Energy at the board's power limit all the time: it was no more than that."""
        profile = self.run.profile
        return None if profile is None else profile.power.peak_w * self.run.gpu_hours / 1e3

    @property
    def paper_metric(self) -> float | None:
        """QPS / ($ per FP32 GFLOP per watt), Vasuki, section 3.2; higher is better."""
        profile = self.run.profile
        if profile is None or profile.dollars_per_fp32_gflop_per_watt is None:
            return None
        return self.rows_per_s / profile.dollars_per_fp32_gflop_per_watt

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        run, manifest = self.run, self.run.manifest
        return {
            "label": self.label,
            "path": str(run.place),
            "finished_at": run.finished_at.isoformat(timespec="seconds"),
            "simulated": self.simulated,
            "gpu": run.gpu,
            "device": manifest.device,
            "job": run.job,
            "model": run.model,
            "policy": run.policy,
            "rows": {"done": run.rows_done, "failed": manifest.rows.failed, "total": manifest.rows.total},
            "tokens": {
                "prompt": manifest.tokens.prompt,
                "output": manifest.tokens.output,
                "recomputed": manifest.tokens.recomputed,
            },
            "makespan_s": self.makespan_s,
            "predicted_makespan_s": self.predicted_s,
            "prediction_error": self.prediction_error,
            "load_s": self.load_s,
            "lower_bound_s": self.lower_bound_s,
            "times_lower_bound": self.times_lower_bound,
            "schedule_bound_s": self.schedule_bound_s,
            "could_save": self.could_save,
            "knowing_saves": self.knowing_saves,
            "rows_per_s": self.rows_per_s,
            "tokens_per_s": self.tokens_per_s,
            "tail_s": run.timeline.tail_s if run.timeline is not None else None,
            "median_step_error": run.timeline.median_step_error if run.timeline is not None else None,
            "steps": manifest.steps,
            "batch": {"mean_seqs": manifest.batch.mean_seqs, "max_seqs": manifest.batch.max_seqs},
            "kv": manifest.to_dict()["kv"],
            "preemptions": manifest.to_dict()["preemptions"],
            "gpu_hours": run.gpu_hours,
            "price": None if self.price is None else self.price.model_dump(),
            "cost": {
                "amount": self.amount,
                "per_million_tokens": self.per_million_tokens,
                "per_thousand_rows": self.per_thousand_rows,
            },
            "energy_kwh": self.energy_kwh,
            "energy_limit_kwh": self.energy_limit_kwh,
            "qps_per_dollar_per_fp32_gflop_per_watt": self.paper_metric,
        }


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The price at which one card costs as much for the same work as another, at the other's price now."""

    label: str
    against: str
    is_cheapest_now: bool  # loses above the price; the others win below theirs
    price_now: float
    price: float
    currency: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "against": self.against,
            "is_cheapest_now": self.is_cheapest_now,
            "price_now": self.price_now,
            "break_even_price": self.price,
            "currency": self.currency,
        }


@dataclass(frozen=True, slots=True, eq=False)
class JobRuns:
    """Runs of one job, or over one input."""

    name: str
    results: tuple[Result, ...]

    @property
    def contenders(self) -> tuple[Result, ...]:
        """The runs that the answer is about: of a card's runs under one policy the measured ones, if there are any."""
        measured = {_setup(result) for result in self.results if not result.simulated}
        return tuple(result for result in self.results if not result.simulated or _setup(result) not in measured)

    @property
    def finalists(self) -> tuple[Result, ...]:
        """The contenders that the answer names: the fastest of each card, or all where there is one card alone."""
        best: dict[tuple[str, float | None], Result] = {}
        for result in self.contenders:
            card = (result.run.gpu, None if result.price is None else result.price.per_hour)
            if card not in best or result.tokens_per_s > best[card].tokens_per_s:
                best[card] = result
        return tuple(best.values()) if len(best) > 1 else self.contenders

    @property
    def names(self) -> dict[Result, str]:
        """The name of each run in the answer: for a finalist no more than tells it apart from the others."""
        finalists = self.finalists
        short = dict(zip(finalists, run_labels([result.run for result in finalists]), strict=True))
        return {result: short.get(result, result.label) for result in self.results}

    @property
    def is_same_work(self) -> bool:
        """Return whether all finalists did as many rows and, within 2 %, as many prompt and output tokens."""
        return _is_same_work(self.finalists)

    @property
    def by_time(self) -> tuple[Result, ...]:
        """Finalists, the fastest first: by makespan, or by tokens per second where the work was not the same."""
        key: Callable[[Result], float]
        key = (lambda result: result.makespan_s) if self.is_same_work else (lambda result: -result.tokens_per_s)
        return tuple(sorted(self.finalists, key=key))

    @property
    def by_cost(self) -> tuple[Result, ...]:
        """Finalists, the cheapest per token first. Empty if a price is unknown, or the currencies differ."""
        prices = [result.price for result in self.finalists]
        if any(result.per_million_tokens is None for result in self.finalists):
            return ()
        if len({price.currency for price in prices if price is not None}) > 1:
            return ()
        return tuple(sorted(self.finalists, key=lambda result: result.per_million_tokens or 0.0))

    @property
    def break_evens(self) -> tuple[BreakEven, ...]:
        """Return, for each card that is not the cheapest, the price at which it would be; then the price at which
        the cheapest would lose to the next."""
        if len(self.by_cost) < 2:
            return ()
        cheapest, *others = self.by_cost
        found = [found for other in others if (found := _break_even(other, cheapest))]
        return (*found, *filter(None, [_break_even(cheapest, others[0])]))

    @property
    def simulation_errors(self) -> tuple[tuple[Result, Result, float], ...]:
        """(measured, simulated, measured over simulated makespan - 1) of setups that did the same work both ways.

        Loading is left out: a simulated run has none.
        """
        return tuple(
            (measured, simulated, measured.foreseen_s / simulated.makespan_s - 1)
            for measured in self.results
            for simulated in self.results
            if not measured.simulated
            and simulated.simulated
            and _setup(measured) == _setup(simulated)
            and _is_same_work([measured, simulated])
        )

    @property
    def known_errors(self) -> tuple[float, ...]:
        """Every error of a prediction or a simulation that a measured run in this workload reveals."""
        predictions = [r.prediction_error for r in self.results if not r.simulated and r.prediction_error is not None]
        return (*predictions, *(error for _, _, error in self.simulation_errors))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "same_work": self.is_same_work,
            "fastest": self.by_time[0].label,
            "cheapest": self.by_cost[0].label if self.by_cost else None,
            "break_even": [each.to_dict() for each in self.break_evens],
            "known_prediction_errors": list(self.known_errors),
            "runs": [result.to_dict() for result in self.results],
        }


def run_labels(runs: Sequence[Run]) -> list[str]:
    """`[runs]` the card, and as much else as tells the runs of one job apart."""
    parts: list[Callable[[Run], str]] = [
        lambda run: run.gpu,
        lambda run: run.policy,
        lambda run: run.model,
        lambda run: "simulated" if run.manifest.simulated else "measured",
        lambda run: run.name,
        lambda run: str(run.place),
    ]
    labels = [parts[0](run) for run in runs]
    for part in parts[1:]:
        common = Counter((run.job, label) for run, label in zip(runs, labels, strict=True))
        if max(common.values(), default=0) <= 1:
            break
        tells_apart = {
            key
            for key in common
            if len({part(run) for run, label in zip(runs, labels, strict=True) if (run.job, label) == key}) > 1
        }
        labels = [
            f"{label} {part(run)}" if (run.job, label) in tells_apart else label
            for run, label in zip(runs, labels, strict=True)
        ]
    return labels


def _setup(result: Result) -> tuple[str, str, str]:
    return (result.run.gpu, result.run.policy, result.run.model)


def _is_same_work(results: Sequence[Result]) -> bool:
    runs = [result.run for result in results]
    return (
        len({run.rows_done for run in runs}) == 1
        and _spread([run.manifest.tokens.prompt for run in runs]) <= SAME_WORK
        and _spread([run.manifest.tokens.output for run in runs]) <= SAME_WORK
    )


def _spread(values: Sequence[int]) -> float:
    return (max(values) - min(values)) / max(values) if max(values) else 0.0


def _break_even(result: Result, against: Result) -> BreakEven | None:
    hours, other_hours = result.gpu_hours_per_million_tokens, against.gpu_hours_per_million_tokens
    if result.price is None or against.price is None or not hours or not other_hours:
        return None
    if (result.run.gpu, result.price.per_hour) == (against.run.gpu, against.price.per_hour):
        return None  # one card under two policies: its price is the same for both
    several_cards = result.run.gpu != against.run.gpu
    name, other_name = (each.run.gpu if several_cards else each.label for each in (result, against))
    is_cheapest_now = (result.per_million_tokens or 0.0) <= (against.per_million_tokens or 0.0)
    price = against.price.per_hour * other_hours / hours
    return BreakEven(name, other_name, is_cheapest_now, result.price.per_hour, price, result.price.currency)
