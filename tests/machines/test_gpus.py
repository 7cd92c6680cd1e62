"""Datasheet figures of GPUs by the names that drivers report."""

from __future__ import annotations

import pytest

from vasuki.machines.gpus import Reported, profile_of_gpu, scaled


@pytest.mark.parametrize(
    ("name", "gb_per_s", "bfloat16", "memory_gib"),
    [
        ("NVIDIA A10", 600, 125, 22.5),
        ("NVIDIA A10G", 600, 70, 22.5),
        ("NVIDIA A100-SXM4-80GB", 2039, 312, 80),
        ("NVIDIA A100-SXM4-40GB", 1555, 312, 40),
        ("NVIDIA A100-PCIE-40GB", 1555, 312, 40),
        ("NVIDIA H100 NVL", 3938, 835.5, 93.6),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 2039 / 2, 312 * 3 / 7, 40),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1555 / 8, 312 / 7, 5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 3350 / 8, 989 / 7, 10),
    ],
)
def test_names_of_drivers_are_known(name: str, gb_per_s: float, bfloat16: float, memory_gib: float) -> None:
    profile = profile_of_gpu(name)
    assert profile.memory_gb_per_s == pytest.approx(gb_per_s, rel=0.01)
    assert profile.peak_tflops["bfloat16"] == pytest.approx(bfloat16, rel=0.01)
    assert profile.memory_mib / 1024 == pytest.approx(memory_gib, rel=0.01)


@pytest.mark.parametrize(
    ("reported", "gb_per_s", "bfloat16"),
    [  # cards whose datasheets are known, by what their drivers report
        (Reported("A100", 80 * 2**30, 108, 1.41e9, 1.593e9, 5120, (8, 0)), 2039, 312),
        (Reported("A10", 23 * 2**30, 72, 1.695e9, 6.251e9, 384, (8, 6)), 600, 125),
        (Reported("H100", 80 * 2**30, 132, 1.83e9, 2.619e9, 5120, (9, 0)), 3350, 989),
        (Reported("L40S", 48 * 2**30, 142, 2.52e9, 9.001e9, 384, (8, 9)), 864, 362),
        (Reported("T4", 16 * 2**30, 40, 1.59e9, 5.001e9, 256, (7, 5)), 320, 65),
    ],
)
def test_an_unknown_card_is_what_its_driver_says(reported: Reported, gb_per_s: float, bfloat16: float) -> None:
    profile = scaled(reported)
    assert profile.memory_gb_per_s == pytest.approx(gb_per_s, rel=0.03)
    assert profile.peak_tflops["bfloat16"] == pytest.approx(bfloat16, rel=0.03)
    assert profile.processors == reported.multiprocessors


def test_cards_that_multiply_8_bits_do_so_at_twice_the_rate() -> None:
    nvl, unknown, older = (
        profile_of_gpu("NVIDIA H100 NVL"),
        scaled(Reported("RTX 5090", 2**35, 170, 2.4e9, 14e9, 512, (12, 0))),
        scaled(Reported("RTX 3090", 2**34, 82, 1.7e9, 9.75e9, 384, (8, 6))),
    )
    for profile in (nvl, unknown):
        assert profile.peak_tflops["float8"] == pytest.approx(2 * profile.peak_tflops["bfloat16"], rel=0.01)
    assert "float8" not in older.peak_tflops


def test_a_card_of_tomorrow_is_as_the_newest_known() -> None:
    assert scaled(Reported("R100", 2**38, 200, 2e9, 4e9, 8192, (13, 0))).peak_tflops["bfloat16"] > 0
    assert scaled(Reported("P100", 2**34, 56, 1.3e9, 0.7e9, 4096, (6, 0))).peak_tflops["float32"] > 0
