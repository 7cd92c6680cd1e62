"""What is known of a processor without measuring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vasuki.machines.here import cpu
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


def test_cached_files_do_not_fill_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": 8 * 2**30, "memory.current": 7 * 2**30}
    monkeypatch.setattr(cpu, "_control_group", files.get)
    monkeypatch.setattr(cpu, "_mem_available", lambda: 64 * 2**30)
    monkeypatch.setattr(Path, "read_text", lambda path: "anon 5\ninactive_file 5368709120\nactive_file 7\n")
    assert cpu.available_bytes() == 6 * 2**30
