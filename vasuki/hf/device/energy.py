"""Energy of a run, by the counter on the GPU's board."""

from __future__ import annotations

import torch

from vasuki.hf.device.device import board_of


class EnergyMeter:
    """Counts from when it is made.

    Everything that the board draws counts, idle power and other programs on it included. Nothing is known on a CPU,
    where NVML cannot be reached, and of boards before Volta, which have no counter.
    """

    def __init__(self, device: torch.device) -> None:
        self._board = board_of(device)
        self._start_j = self._counter_j()

    @property
    def energy_j(self) -> float | None:
        """Energy so far; None where it is not known."""
        now_j = self._counter_j()
        return None if now_j is None or self._start_j is None else now_j - self._start_j

    def _counter_j(self) -> float | None:
        return None if self._board is None else self._board.counter_j
