"""How a GPU's memory is taken, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vasuki.hf.device.device import take_some

CUDA = torch.device("cuda", 0)


class Driver:
    """Gives memory, and refuses it in segments that grow, or for some other reason."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: Exception | None, always: bool = False) -> None:
        self.taken, self.settings, self._refuses, self._always = 0, "expandable_segments:True", refuses, always
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.set_up)

    def set_up(self, settings: str) -> None:
        self.settings = settings

    def empty(self, size: int, device: Any) -> None:
        if self._refuses and (self._always or self.settings == "expandable_segments:True"):
            raise self._refuses
        self.taken += size


def test_memory_is_taken_in_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, None)
    take_some(CUDA)
    assert (driver.taken, driver.settings) == (1, "expandable_segments:True")
    assert not caplog.messages


def test_a_driver_that_refuses_them_gives_plain_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, RuntimeError("CUDA driver error: operation not supported\nand more"))
    take_some(CUDA)
    assert (driver.taken, driver.settings) == (1, "expandable_segments:False")
    [said] = caplog.messages
    assert said.endswith("CUDA driver error: operation not supported")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: unknown error"), torch.OutOfMemoryError("no memory")])
def test_what_plain_ones_do_not_mend_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, error, always=True)
    with pytest.raises(type(error)):
        take_some(CUDA)
    assert driver.settings == f"expandable_segments:{isinstance(error, torch.OutOfMemoryError)}"
