"""Levels of instructions, and what becomes of them in a compiler's hands."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from vasuki.base.errors import JobFileError
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.kernels import levels, native
from vasuki.hf.kernels.levels import ARM, NONE, VARIABLE, X86
from vasuki.hf.kernels.paged_attention import load_kernel

NO_OPENMP = """#!/bin/sh
for flag in "$@"; do
  case $flag in -fopenmp|-mtune=native) echo "error: unknown argument $flag" >&2; exit 1 ;; esac
done
exec {compiler} "$@"
"""


@pytest.mark.parametrize("ladder", [X86, ARM])
def test_every_level_has_all_of_those_below(ladder: tuple[levels.Level, ...]) -> None:
    for below, level in itertools.pairwise(ladder):
        assert level.flags[: len(below.flags)] == below.flags


@pytest.mark.parametrize(
    ("has", "best"),
    [
        ("", "generic"),
        ("avx2", "generic"),
        ("avx2 fma3", "avx2"),
        ("avx512_f avx512_bw avx512_dq avx512_vl", "generic"),
        ("avx2 fma3 avx512_f", "avx2"),
        ("avx2 fma3 avx512_f avx512_bw avx512_dq avx512_vl", "avx512"),
        ("avx2 fma3 avx512_f avx512_bw avx512_dq avx512_vl amx_tile amx_bf16", "avx512"),
        ("avx2 fma3 avx512_f avx512_bw avx512_dq avx512_vl avx512_bf16 amx_tile", "avx512_bf16"),
        ("avx2 fma3 avx512_f avx512_bw avx512_dq avx512_vl avx512_bf16 amx_tile amx_bf16", "amx"),
    ],
)
def test_the_best_level_is_the_last_that_the_processor_has_all_of(
    has: str, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
    assert levels.chosen().name == best


@pytest.mark.parametrize(
    ("machine", "names"),
    [("aarch64", ["none", "neon"]), ("arm64", ["none", "neon"]), ("riscv64", ["none", "generic"])],
)
def test_other_processors(machine: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert [level.name for level in levels.executable()] == names


def test_the_environment_may_ask_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in levels.executable():
        monkeypatch.setenv(VARIABLE, level.name)
        assert levels.chosen() is level
    monkeypatch.setenv(VARIABLE, "")
    assert levels.chosen() is levels.executable()[-1]


@pytest.mark.parametrize("wanted", ["amx", "fast", "AVX2"])
def test_more_than_there_is_and_what_nobody_knows_is_a_line(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True})
    monkeypatch.setenv(VARIABLE, wanted)
    with pytest.raises(JobFileError) as caught:
        levels.chosen()
    assert str(caught.value) == (
        f"VASUKI_CPU_LEVEL is {wanted!r}, but this processor has none, generic, avx2 "
        "(of the levels none, generic, avx2, avx512, avx512_bf16, amx)"
    )


def test_at_none_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    assert load_cpu_kernels() is None
    assert load_kernel((8,), torch.float32) is None
    assert load_cpu_kernels(NONE) is None


def test_libraries_of_two_levels_lie_side_by_side(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    has = levels.executable()[1:]
    types = ("-O0", "-DHEAD_DIM=8", "-DELEMENT=float", "-DCACHED=float", "-DROUNDS=0")
    files = [native.build("paged_attention.cpp", level, types, compiler) for level in (*has, *has)]
    assert sorted({*files}) == sorted(tmp_path.rglob("*.so"))
    assert [file.name.split("-")[1] for file in files] == [level.name for level in (*has, *has)]


def test_a_compiler_without_openmp_makes_kernels_of_one_thread(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "c++"
    own.write_text(NO_OPENMP.format(compiler=compiler))
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = load_kernel((8,), torch.float32, level=levels.executable()[1])
    assert kernel is not None
    cache, keys, values = torch.zeros(2, 2, 4, 1, 8), *torch.randn(2, 3, 1, 8)
    kernel.write(keys, values, torch.tensor([1, 2, 9]), cache)
    assert torch.equal(cache.flatten(0, 2)[[1, 2, 9, 5, 6, 13], 0], torch.cat([keys, values])[:, 0])
