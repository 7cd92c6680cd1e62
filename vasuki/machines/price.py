"""What the time of a machine costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Money. Amounts are None where no price is known."""

    gpu_hours: float
    amount: float | None
    currency: str
    per_million_tokens: float | None
    price_per_hour: float | None = None  # of one GPU
    num_gpus: int = 1

    @classmethod
    def of(
        cls, seconds: float, num_gpus: int, price_per_hour: float | None, currency: str, tokens: int
    ) -> CostEstimate:
        """What so many seconds on so many GPUs cost, also for a million of the prompt and output tokens."""
        hours = seconds * num_gpus / 3600
        amount = None if price_per_hour is None else hours * price_per_hour
        per_million = amount / tokens * 1e6 if amount is not None and tokens else None
        return cls(hours, amount, currency, per_million, price_per_hour, num_gpus)

    def scaled(self, seconds: float, tokens: int) -> CostEstimate:
        """The same machine for another time."""
        return CostEstimate.of(seconds, self.num_gpus, self.price_per_hour, self.currency, tokens)

    def to_dict(self) -> dict[str, Any]:
        """As in a manifest."""
        return {
            "gpu_hours": self.gpu_hours,
            "amount": self.amount,
            "currency": self.currency,
            "per_million_tokens": self.per_million_tokens,
        }
