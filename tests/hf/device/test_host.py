"""Threads and memory of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vasuki.hf.device import host


@pytest.mark.parametrize(("percent", "spins"), [(0.0, str(host.SPINS)), (60.0, "0")])
def test_threads_spin_only_where_nobody_waits(monkeypatch: pytest.MonkeyPatch, percent: float, spins: str) -> None:
    monkeypatch.setattr(host, "cpu_pressure", lambda: percent)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    host.prepare()
    assert os.environ["GOMP_SPINCOUNT"] == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    host.prepare()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}),  # would not count next to the other
    ],
)
def test_the_allocator_is_set_up_unless_somebody_has(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], added: dict[str, str]
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    host.set_up_allocator()
    assert {name: os.environ[name] for name in names if name in os.environ} == said | added


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of glibc")
def test_freed_blocks_are_reused_without_page_faults() -> None:
    code = """
import resource, sys
from vasuki.hf import host
import torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate(count):
    before = faults()
    for _ in range(count):
        blocks = [torch.ones(5_000_000) for _ in range(3)]
    return faults() - before
allocate(2)
assert allocate(10) < 10 * 3 * 4000, "pages are taken again"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_turns_are_short_only_while_steps_are_launched() -> None:
    before_s = sys.getswitchinterval()
    with host.quick_turns():
        assert sys.getswitchinterval() == pytest.approx(host.TURN_S)
    assert sys.getswitchinterval() == before_s
