from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vasuki.hf.device import energy
from vasuki.hf.device.energy import EnergyMeter


class CounterError(Exception):
    pass


def board(counter_mj):
    nvml = SimpleNamespace(NVMLError=CounterError, nvmlDeviceGetTotalEnergyConsumption=lambda handle: counter_mj())
    return energy.Board(nvml, "handle")


def meter(monkeypatch: pytest.MonkeyPatch, counter_mj) -> EnergyMeter:
    monkeypatch.setattr(energy.Board, "of", lambda device: board(counter_mj))
    return EnergyMeter(torch.device("cuda"))


def test_it_counts_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5_000_000, 5_250_000, 6_000_000])
    counted = meter(monkeypatch, lambda: next(readings))
    assert counted.energy_j == pytest.approx(250)
    assert counted.energy_j == pytest.approx(1000)


def test_a_board_without_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse():
        raise CounterError

    assert meter(monkeypatch, refuse).energy_j is None


def test_a_cpu_has_none() -> None:
    assert EnergyMeter(torch.device("cpu")).energy_j is None
