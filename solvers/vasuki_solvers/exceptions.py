"""What this library raises.

SolverError
├── InvalidItem(ValueError)          a length or a limit that makes no sense
├── InfeasibleItem(ValueError)       an item that does not fit even when it runs alone
├── InvalidSchedule(ValueError)      a schedule that breaks a rule of its instance
├── HorizonTooLong(ValueError)       more steps than a step-by-step computation will hold
└── UnsupportedLimit(ValueError)     a limit that this algorithm does not model
"""

from __future__ import annotations


class SolverError(Exception):
    """The base of every exception that the library raises on purpose."""


class InvalidItem(SolverError, ValueError):
    """A prompt, a duration, a capacity or a limit is not a positive whole number."""


class InfeasibleItem(SolverError, ValueError):
    """Item `index` needs `needed` tokens of capacity when it runs alone, and there are only `capacity`."""

    def __init__(self, index: int, needed: int, capacity: int) -> None:
        super().__init__(f"item {index} needs a capacity of {needed} tokens even alone, and the capacity is {capacity}")
        self.index = index
        self.needed = needed
        self.capacity = capacity


class InvalidSchedule(SolverError, ValueError):
    """A schedule leaves an item out, over-commits a step, or exceeds a limit of its instance."""


class HorizonTooLong(SolverError, ValueError):
    """The schedule lasts longer than a step-by-step array may be."""


class UnsupportedLimit(SolverError, ValueError):
    """The instance has a limit that the chosen algorithm can't express."""
