"""What an hour of a machine costs, and what a job costs on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vasuki.base.errors import JobFileError


class Spot(BaseModel):
    """The same device on spot: cheaper, and taken away when somebody pays more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_hour: Annotated[float, Field(ge=0)]
    """For one device, in the currency of the price on demand."""
    interruptions_per_hour: Annotated[float, Field(ge=0)]
    """How often a machine is taken away, on average, at moments that nobody foresees."""
    date: str
    """Month that the figures stand for, YYYY-MM; empty where nobody said."""
    source: str
    """Who says so."""


class Price(BaseModel):
    """What renting a device costs, and who says so. `cost.price_per_hour` in the job file takes precedence over a
    profile's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_hour: Annotated[float, Field(ge=0)]
    """For one device."""
    currency: str = "USD"
    """Of `per_hour`."""
    date: str
    """Month that the figure stands for, YYYY-MM; empty where nobody said."""
    source: str
    """Who says so, or what kind of price it is: list, on demand, spot, amortised."""
    boot_s: Annotated[float, Field(ge=0)] = 0
    """From asking for a machine until it computes, which is paid for: boot, image, weights."""
    spot: Spot | None = None
    """Absent where the device cannot be had on spot, or nobody knows at what price."""


def parse_prices(texts: Iterable[str], option: str = "--price", what: str = "PRICE") -> dict[str, float]:
    """`["a10=0.60"]` -> `{"a10": 0.6}`: figures by the hour, by card. Raises JobFileError for anything else."""
    prices: dict[str, float] = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            if not name:
                raise ValueError(text)
            prices[name] = float(price)
        except ValueError:
            message = f"{option} {text!r}: write it as NAME={what}_PER_HOUR, for example a10=0.60"
            raise JobFileError(message) from None
        if not 0 <= prices[name] < float("inf"):
            raise JobFileError(f"the {what.lower()} of '{name}' is {prices[name]}; give an amount per hour")
    return prices


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job costs. Amounts are None where no price is known."""

    gpu_hours: float = 0.0
    amount: float | None = None
    currency: str = "USD"
    per_million_tokens: float | None = None

    @classmethod
    def of(cls, seconds: float, num_gpus: int, price_per_hour: float | None, currency: str, tokens: int) -> Cost:
        """The cost of `seconds` on `num_gpus` GPUs, and for a million of the prompt and output tokens."""
        hours = seconds * num_gpus / 3600
        amount = None if price_per_hour is None else hours * price_per_hour
        per_million = amount / tokens * 1e6 if amount is not None and tokens else None
        return cls(hours, amount, currency, per_million)

    @property
    def price_per_hour(self) -> float | None:
        """Price of one GPU."""
        return self.amount / self.gpu_hours if self.amount is not None and self.gpu_hours else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as in a manifest."""
        return asdict(self)
