"""What is known of a processor without measuring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vasuki.machines import this_cpu
from vasuki.machines.this_cpu import Processor

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
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nmodel name : One\nflags : {flags}{' hypervisor' * hypervisor}\n\nprocessor: 1\n")
    monkeypatch.setattr(this_cpu, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(this_cpu, "_MAX_CLOCK", tmp_path / "absent")
    monkeypatch.setattr(this_cpu, "usable_cores", lambda: 4)
    processor = Processor.of_this_machine()
    clock_hz = 5e9 if hypervisor else 6.2e9
    assert (processor.model, processor.level) == ("One", level)
    assert processor.float32_flops == pytest.approx(4 * clock_hz * float32)
    assert processor.limits.peak_tflops["bfloat16"] == pytest.approx(4 * clock_hz * bfloat16 / 1e12)


def test_a_clock_that_the_system_tells_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Processor.of_this_machine()
    (tmp_path / "clock").write_text("2000000\n")
    monkeypatch.setattr(this_cpu, "_MAX_CLOCK", tmp_path / "clock")
    assert Processor.of_this_machine().float32_flops < before.float32_flops


def test_what_is_typical_grows_with_cores_and_stays_below_the_limits() -> None:
    one = replace(Processor.of_this_machine(), cores=1, float32_flops=1.6e11, bfloat16_flops=1.6e11, level="avx2")
    two = replace(one, cores=2, float32_flops=3.2e11, bfloat16_flops=3.2e11, bytes_per_s=2 * one.bytes_per_s)
    assert two.typical.peak_tflops["float32"] == pytest.approx(2 * one.typical.peak_tflops["float32"])
    for dtype, peak in two.typical.peak_tflops.items():
        assert peak < two.limits.peak_tflops[dtype]
        assert two.typical.most_flops(dtype) == two.limits.peak_tflops[dtype] * 1e12
