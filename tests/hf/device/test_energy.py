from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from vasuki.base.errors import ModelError
from vasuki.hf.device import energy
from vasuki.hf.device.energy import EnergyMeter
from vasuki.hf.loading.load_model import resolve_device
from vasuki.machines.here import gpu
from vasuki.machines.here.gpu import Board


class CounterError(Exception):
    pass


def board(counter_mj: Callable[[], int]) -> Board:
    nvml = SimpleNamespace(NVMLError=CounterError, nvmlDeviceGetTotalEnergyConsumption=lambda handle: counter_mj())
    return Board(nvml, "handle")


def meter(monkeypatch: pytest.MonkeyPatch, counter_mj: Callable[[], int]) -> EnergyMeter:
    monkeypatch.setattr(energy, "board_of", lambda device: board(counter_mj))
    return EnergyMeter(torch.device("cuda"))


def test_it_counts_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5_000_000, 5_250_000, 6_000_000])
    counted = meter(monkeypatch, lambda: next(readings))
    assert counted.energy_j == pytest.approx(250)
    assert counted.energy_j == pytest.approx(1000)


def test_a_board_without_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise CounterError

    assert meter(monkeypatch, refuse).energy_j is None


def test_a_cpu_has_none() -> None:
    assert EnergyMeter(torch.device("cpu")).energy_j is None


def test_what_a_board_does_not_say_is_none() -> None:
    """As a slice of a board (MIG) does not say its memory."""

    def refuse(*_: object) -> NoReturn:
        raise CounterError

    asked = ("nvmlSystemGetDriverVersion", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage")
    silent = Board(SimpleNamespace(NVMLError=CounterError, **dict.fromkeys(asked, refuse)), "handle")
    assert (silent.driver, silent.memory_bytes, silent.power_w) == (None, None, None)


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA A10",
        nvmlSystemGetDriverVersion=lambda: "535.104",
        nvmlSystemGetCudaDriverVersion=lambda: 12020,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, said in (("13.0", "is built for CUDA 13.0 and cannot use it"), (None, "is built for CPUs")):
        monkeypatch.setattr(torch.version, "cuda", version)
        for wanted in ("auto", "cuda"):
            with pytest.raises(ModelError, match=rf"NVIDIA A10, driver 535.104, for CUDA up to 12.2.*{said}"):
                resolve_device(wanted)
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize("is_given", [True, False])
def test_a_gpu_without_the_drivers_libraries_is_said(
    is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver writes is to be read in containers too that were given no GPU, and run on their CPU."""
    files = {
        "nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
        "nvidia/gpus/0000:65:00.0/information": "Model: \t\t NVIDIA A10\nIRQ:   \t\t 183\n",
        "dev/nvidiactl": "",
    }
    for path, text in (files | ({"dev/nvidia0": ""} if is_given else {})).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(gpu, "_DEVICES", tmp_path / "dev")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if is_given:
        with pytest.raises(ModelError, match=r"there is a GPU \(NVIDIA A10, driver 535\.104\.05\), but"):
            resolve_device("auto")
    else:
        assert resolve_device("auto").type == "cpu"
