"""Any runs, grouped by workload: those that did the same job, or read the same input, are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vasuki.report.job_runs import JobRuns, Result, run_labels
from vasuki.report.prices import check_prices, price_of
from vasuki.report.runs import Run
from vasuki.report.words import answer, caveats


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Runs by workload, in the order in which they were given."""

    workloads: tuple[JobRuns, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the answer in words."""
        return {
            "workloads": [
                {"name": each.name, "answer": answer(each), "caveats": caveats(each), **each.to_dict()}
                for each in self.workloads
            ]
        }


def compare(runs: Sequence[Run], prices: Mapping[str, float] | None = None) -> Comparison:
    """Put runs side by side.

    Args:
        runs: at least one, as `load_runs` gives them.
        prices: price per hour by card, profile or folder name, in place of those that runs and profiles know.

    Raises:
        JobFileError: a price is given for a name that no run goes by.
    """
    prices = prices or {}
    check_prices(list(runs), prices)
    results = [Result(run, label, price_of(run, prices)) for run, label in zip(runs, run_labels(runs), strict=True)]
    groups: list[list[Result]] = []
    for result in results:
        group = next((group for group in groups if any(_is_same_job(result.run, other.run) for other in group)), None)
        if group is None:
            groups.append([result])
        else:
            group.append(result)
    return Comparison(tuple(JobRuns(group[0].run.job, tuple(group)) for group in groups))


def _is_same_job(a: Run, b: Run) -> bool:
    """Runs belong together if their jobs have one name or one input."""
    same_input = a.manifest.input_fingerprint == b.manifest.input_fingerprint != ""
    return a.job == b.job or same_input
