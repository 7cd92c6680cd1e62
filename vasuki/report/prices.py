"""Which price of a card's hour a report uses."""

from __future__ import annotations

from collections.abc import Mapping

from vasuki.base.errors import JobFileError, did_you_mean
from vasuki.machines.price import Price
from vasuki.report.runs import Run


def price_of(run: Run, given: Mapping[str, float]) -> Price | None:
    """The price to use: the one given now, the job file's, the one the run recorded, or the profile's.

    Args:
        given: price per hour by card, profile or folder name; case does not matter.
    """
    cost = run.manifest.cost
    known = run.profile.price if run.profile is not None else None
    of_job = run.setting("cost", "price_per_hour")
    job_currency = str(run.setting("cost", "currency") or cost.currency)
    wanted = {name.casefold(): price for name, price in given.items()}
    for name in _names(run):
        if name in wanted:
            currency = known.currency if known is not None and of_job is None else job_currency
            return _price(wanted[name], currency, "given for this report")
    if isinstance(of_job, (int, float)):
        return _price(float(of_job), job_currency, "set in the job")
    recorded = cost.price_per_hour
    if recorded is not None and (known is None or abs(recorded - known.per_hour) > 0.005 * known.per_hour):
        return _price(recorded, cost.currency, "recorded by the run")
    if known is None:
        return None
    return known.model_copy(update={"source": f"hardware profile: {known.source}"})


def check_prices(runs: list[Run], given: Mapping[str, float]) -> None:
    """Raises JobFileError for a name that no run goes by, and for a price that cannot be one."""
    known = {name for run in runs for name in _names(run)}
    for name, price in given.items():
        if name.casefold() not in known:
            raise JobFileError(
                f"a price is given for '{name}', but no run goes by that name{did_you_mean(name.casefold(), known)}; "
                f"there are {', '.join(sorted(known))}"
            )
        if not 0 <= price < float("inf"):
            raise JobFileError(f"the price of '{name}' is {price}; give an amount per hour")


def _price(per_hour: float, currency: str, source: str) -> Price:
    return Price(per_hour=per_hour, currency=currency, date="", source=source)


def _names(run: Run) -> list[str]:
    """Return the names that a price may be given for: the run's folder, or its card."""
    names = [run.name, run.gpu, run.profile.title if run.profile is not None else ""]
    return [name.casefold() for name in names if name]
