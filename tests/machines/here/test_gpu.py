"""What NVML says of the GPUs of this machine, and where it says nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vasuki.machines.here.gpu import Board, Card, gpu, visible_gpus

GIB = 2**30


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Three A10s, of which a board is known by its index or its identity."""
    memory = SimpleNamespace(total=24 * GIB, reserved=GIB, free=20 * GIB)
    library = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle, version=None: memory,
        nvmlDeviceGetName=lambda handle: f"NVIDIA A10 {handle}".encode(),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 6),
        nvmlDeviceGetNumGpuCores=lambda handle: 9216,
        nvmlDeviceGetMaxClockInfo=lambda handle, clock: 1695 * clock,
        nvmlDeviceGetMemoryBusWidth=lambda handle: 384,
        nvmlDeviceGetPowerUsage=lambda handle: 150_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("visible", "first", "seen"),
    [
        (None, "0", ["0", "1", "2"]),
        ("2,1", "2", ["2", "1"]),
        ("GPU-ab", "GPU-ab", ["GPU-ab"]),
        ("", "", []),
        ("-1", "", []),
    ],
)
def test_the_gpus_are_those_that_torch_would_see(
    visible: str | None, first: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = Card(f"NVIDIA A10 {first}", 23 * GIB, 20 * GIB - 2**29, (8, 6)) if first else None
    assert gpu() == expected
    assert visible_gpus() == seen


@pytest.mark.usefixtures("nvml")
def test_a_board_is_known_by_its_identity() -> None:
    board = Board.of("cd")
    assert board is not None
    assert board.reported is not None
    assert (board.reported.name, board.reported.multiprocessors) == ("NVIDIA A10 GPU-cd", 72)
    assert board.power_w == 150


def test_what_an_older_library_does_not_know_is_not_known(nvml: SimpleNamespace) -> None:
    del nvml.nvmlMemory_v2, nvml.nvmlDeviceGetNumGpuCores
    board = Board.of()
    assert board is not None
    assert (board.card, board.reported) == (None, None)
    assert board.memory_bytes == 24 * GIB


def test_without_the_library_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (gpu(), Board.of(), visible_gpus()) == (None, None, [])
