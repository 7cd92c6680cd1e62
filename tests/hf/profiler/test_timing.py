"""The clock of operators on a GPU, with a host and a device that only count."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from vasuki.hf.profiler import timing
from vasuki.hf.profiler.timing import CudaClock


class Machine:
    """A device that sleeps, then runs calls that the host has queued meanwhile."""

    QUEUE_S, KERNEL_S = 250e-6, 10e-6  # of a call

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0

    def sleep(self, cycles: int) -> None:
        self.device_s = self.host_s + cycles / CudaClock._CYCLES_PER_S

    def call(self) -> None:
        self.host_s += self.QUEUE_S
        self.device_s = max(self.device_s, self.host_s) + self.KERNEL_S

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at_s=0.0, synchronize=lambda: None)
        event.record = lambda: vars(event).update(at_s=max(self.device_s, self.host_s))
        event.elapsed_time = lambda end: 1e3 * (end.at_s - event.at_s)
        return event


def test_a_call_is_timed_without_its_launch_whatever_was_timed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(timing, "cuda_event", machine.event)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.host_s)
    monkeypatch.setattr(torch.cuda, "_sleep", machine.sleep)
    assert CudaClock().seconds(machine.call, 100) == pytest.approx(machine.KERNEL_S)
