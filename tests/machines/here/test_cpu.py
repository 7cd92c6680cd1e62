"""What is known of a processor without measuring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vasuki.machines.here import control_group, cpu
from vasuki.machines.here.cpu import Processor, level_of, limits_of, typical_of

AVX2 = "fpu sse2 fma avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level", "float32", "bfloat16"),
    [
        ("fpu sse2", "generic", 16, 16),
        (AVX2, "avx2", 32, 32),
        (AVX512, "avx512", 64, 64),
        (f"{AVX512} avx512_bf16", "avx512_bf16", 64, 128),
        (f"{AVX512} avx512_bf16 amx_tile amx_bf16", "amx", 64, 2048),
    ],
)
@pytest.mark.parametrize("hypervisor", [False, True])
def test_limits_follow_the_instructions(
    flags: str,
    level: str,
    float32: int,
    bfloat16: int,
    hypervisor: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "_MAX_CLOCK", tmp_path / "absent")
    processor = Processor("One", 4, frozenset(flags.split()) | ({"hypervisor"} if hypervisor else set()))
    clock_hz = 5e9 if hypervisor else 6.2e9
    assert level_of(processor) == level
    peaks = limits_of(processor).peak_tflops
    assert peaks["float32"] == pytest.approx(4 * clock_hz * float32 / 1e12)
    assert peaks["bfloat16"] == pytest.approx(4 * clock_hz * bfloat16 / 1e12)


def test_a_clock_that_the_system_tells_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = cpu.processor()
    before = limits_of(processor)
    (tmp_path / "clock").write_text("2000000\n")
    monkeypatch.setattr(cpu, "_MAX_CLOCK", tmp_path / "clock")
    assert limits_of(processor).peak_tflops["float32"] < before.peak_tflops["float32"]


def test_what_is_typical_grows_with_cores_and_stays_below_the_limits() -> None:
    one = Processor("One", 1, frozenset(AVX2.split()))
    two = replace(one, cores=2)
    typical, limits = typical_of(two), limits_of(two)
    assert typical.peak_tflops["float32"] == pytest.approx(2 * typical_of(one).peak_tflops["float32"])
    for dtype, peak in typical.peak_tflops.items():
        assert peak < limits.peak_tflops[dtype]
        assert typical.most_flops(dtype) == limits.peak_tflops[dtype] * 1e12


def test_what_a_container_may_take_is_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "memory_room", lambda: 6 * 2**30)
    monkeypatch.setattr(cpu, "_mem_available", lambda: 64 * 2**30)
    assert cpu.available_bytes() == 6 * 2**30
    monkeypatch.setattr(control_group, "memory_room", lambda: -5)  # a limit that was lowered
    assert cpu.available_bytes() == 0


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu, "_usable_cores", lambda fields: 8)
    for quota, cores in [(None, 8), (16.0, 8), (4.0, 4), (3.9, 3), (0.6, 1)]:
        monkeypatch.setattr(control_group, "processor_quota", lambda quota=quota: quota)
        assert cpu._cores([]) == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # somebody knows better
    assert cpu._cores([]) == 6
