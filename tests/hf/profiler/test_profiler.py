"""What is measured is plausible and complete, and a profile survives its file. No test depends on how fast it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from plain_varlen import paged_varlen, plain_varlen
from tiny_models import RECURRENT, random_config

from vasuki.base.errors import ModelError, ProfileError
from vasuki.commands.cli import main
from vasuki.hf import ragged_executor
from vasuki.hf.attention import chunks
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.packed_linear import PackedLinear
from vasuki.hf.device.device import Machine, describe, device_name
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.paged_attention import PagedKernel, load_kernel
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.profiler import build_profile, operator_times, profile_machine, step_overheads
from vasuki.hf.profiler.build_profile import _Rates
from vasuki.hf.profiler.in_step import WholeSteps
from vasuki.hf.profiler.links import link_of, saturation_bytes
from vasuki.hf.profiler.operator_times import Bench, Product, mlp_width, products, tile_of
from vasuki.hf.profiler.recurrent_times import measure_recurrent
from vasuki.hf.profiler.step_overheads import fit_overheads, measure_overheads, narrow, stand_in
from vasuki.hf.profiler.timing import QUICK, HostClock, affordable, low_quantile, measure
from vasuki.machines.cost_model import CostModel, launches_of
from vasuki.machines.cost_model.stages import Part
from vasuki.machines.gpus import profile_of_gpu
from vasuki.machines.here.cpu import without_noise
from vasuki.machines.here.stolen_time import StolenTime
from vasuki.machines.measured_points import MatmulPoints
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile, load_profile, profile_for_device, user_profile_path
from vasuki.machines.profile_writing import write_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.report.profile_table import profile_table

TINY = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_context_tokens=1024,
)
CPU = torch.device("cpu")
# As little as can be measured: these tests are about what happens, not about how long it takes.
HASTY = replace(QUICK, group_s=0.02, max_call_s=0.02)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))  # none of the user's own profiles
        patch.setattr(StolenTime, "share", 0.236)
        return profile_machine("cpu", TINY, quick=True)


# --- the whole profile -----------------------------------------------------------------------------------------------


def test_a_profile_survives_its_file(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "sub" / f"{profile.name}.yaml"
    write_profile(profile, path)
    assert load_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing else is left in the folder"


def test_a_profile_is_found_where_it_is_written(
    profile: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_profile(profile, user_profile_path(profile.name))
    assert find_profile(profile.name) == profile
    assert profile_for_device(device_name(CPU)) == profile


@pytest.mark.parametrize(
    ("name", "title", "listed"),
    [
        ("NVIDIA A10", "NVIDIA A10 24GB PCIe", True),
        ("NVIDIA A10G", "NVIDIA A10G 24GB", False),
        ("NVIDIA A10 MIG 2g.10gb", "NVIDIA A10 MIG 2g.10gb", False),
    ],
)
def test_a_card_is_known_to_the_profiler_as_to_a_plan(
    name: str, title: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of a similar card serve a variant, which keeps its own name."""
    machine = Machine(name, (), "driver 1", 24 * 2**30, 72, (8, 6))
    monkeypatch.setattr(build_profile, "describe", lambda device: machine)
    stages, bench = build_profile._Stages(shown=False), Bench.on(CPU, torch.float32, TINY, QUICK)
    profiler = build_profile._Profiler(torch.device("cuda"), TINY, bench, stages, None)
    assert profiler.known == profile_of_gpu(name)
    assert profiler.known.title == title
    assert bool(profiler.listed) == listed


def test_a_profile_names_its_machine(profile: HardwareProfile) -> None:
    machine = describe(CPU)
    assert profile.kind == "cpu"
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+-cores?", profile.name)
    assert profile.device_names[0] == machine.name == device_name(CPU)
    assert profile.processors == torch.get_num_threads()
    assert profile.memory_mib == machine.memory_bytes // 2**20
    assert set(profile.peak_tflops) == {"float32", "bfloat16", "float16"}
    assert "measured" in profile.link.source
    assert "measured" in profile.overheads.source
    assert profile.sources["disturbance"] == "the host gave 24 % of the processors to others while this was measured"


def test_every_operator_is_measured(profile: HardwareProfile) -> None:
    measured = profile.measured
    assert measured is not None
    assert {(series.k, series.n) for series in measured.matmul} == set(products(TINY))
    assert {series.operator for series in measured.elementwise} == {
        "norm", "rope", "activation", "residual", "embedding"
    }  # fmt: skip
    attention, *narrower = measured.attention
    assert [each.kv_dtype for each in narrower] == ([] if attention.dtype == "bfloat16" else ["bfloat16"])
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, 2, 16)
    assert {point.tokens == 1 for point in attention.points} == {True, False}
    for series in measured.matmul:
        assert series.us[-1] > series.us[0], "a thousand rows take longer than one"


def test_whole_steps_are_measured(profile: HardwareProfile) -> None:
    """Overheads and ratios together explain a step's time, if it is plausible."""
    assert profile.measured is not None
    in_step = profile.measured.in_step
    assert in_step is not None
    assert set(in_step.tokens) <= {decodes + chunk for decodes, chunk in QUICK.steps}
    assert all(0.5 <= ratio <= 3.0 for ratio in in_step.ratio)


def test_the_cost_model_meets_what_was_measured(profile: HardwareProfile) -> None:
    assert profile.measured is not None
    dtype = profile.measured.matmul[0].dtype
    model = CostModel(TINY.with_dtype(dtype), profile)
    for series in profile.measured.matmul:
        for tokens, us in zip(series.tokens, series.us, strict=True):
            assert model.operators.matmul(tokens, series.k, series.n).total_s == pytest.approx(us * 1e-6)
    # 64 rows of this model take hardly longer than one, so that noise could decide; 1,024 take five times as long.
    few, many = (model.step_time_s(model.work([1] * rows, [100] * rows)) for rows in (1, 1024))
    assert 0 < few < many


def test_no_measured_product_is_faster_than_the_peak() -> None:
    rates = _Rates({"float32": 0.2, "bfloat16": 0.39}, 30.0)
    series = [  # 0.1 and 0.5 TFLOP/s
        MatmulPoints(tokens=(1, 100), us=(200.0, us), k=1000, n=1000, dtype=dtype)
        for us, dtype in ((2000.0, "float32"), (400.0, "bfloat16"))
    ]
    assert rates.raised(series) == _Rates({"float32": 0.2, "bfloat16": 0.5}, 30.0)


def test_the_table_is_narrow_and_complete(profile: HardwareProfile) -> None:
    lines = profile_table(profile).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert profile.measured is not None
    for word in ("float32", "overheads", "decodes", "chunks", "norm", "rope", "copies"):
        assert word in text
    for point in profile.link.curve:
        assert f"{point.bytes:,}" in text


def test_tables_of_big_models_are_narrow_too() -> None:
    assert max(map(len, profile_table(find_profile("h100")).splitlines())) <= 100


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "Intel Xeon Platinum 8375C"),
        ("AMD EPYC 7B13 64-Core Processor", "AMD EPYC 7B13"),
        ("AMD EPYC", "AMD EPYC"),
    ],
)
def test_processors_go_by_short_names(model: str, short: str) -> None:
    assert without_noise(model) == short


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["My GPU", "a/b", "", "under_score"])
def test_names_that_could_not_be_found_are_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="cannot name a profile"):
        profile_machine("cpu", TINY, name=name, quick=True)


def test_the_file_is_called_like_the_profile(profile: HardwareProfile, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="must be written to a file called"):
        write_profile(profile, tmp_path / "other.yaml")


@pytest.mark.parametrize("arguments", [["--name", "this", "--output", "that.yaml"], ["--output", "taken/this.yaml"]])
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vasuki.hf.profiler.profile_machine", lambda *_, **__: pytest.fail("it measures"))
    (tmp_path / "taken").write_text("")
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exit_code == 4
    assert result.stderr.startswith("vasuki: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_that_is_a_file(profile: HardwareProfile, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ProfileError, match="cannot write hardware profile"):
        write_profile(profile, tmp_path / "taken" / f"{profile.name}.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_absent() -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        profile_machine("cuda", TINY, quick=True)


# --- timing ----------------------------------------------------------------------------------------------------------


class Scripted:
    """A clock that reads times from a script, one list for each call."""

    most_repeats = 1

    def __init__(self, script: dict[object, Iterator[float]]) -> None:
        self.script = script
        self.order: list[object] = []

    def seconds(self, call: object, repeats: int) -> float:
        self.order.append(call)
        return next(self.script[call])


def test_disturbances_do_not_count() -> None:
    def calm() -> None: ...

    def busy() -> None: ...

    clock = Scripted({calm: itertools.repeat(1.0), busy: itertools.cycle([2.0, 2.1, 50.0, 90.0])})
    effort = replace(QUICK, group_s=0.0, min_rounds=40)
    first, second = measure([calm, busy], clock, effort)
    assert first == 1.0
    assert second <= 2.1
    assert clock.order[2:] == [calm, busy] * 40, "calls take turns"


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.floats(1.0, 100.0))
def test_the_low_quantile_is_among_the_faster_half(timings: list[float], factor: float) -> None:
    assert min(timings) <= low_quantile(timings) <= sorted(timings)[len(timings) // 2]
    slower = sorted(timings)
    slower[-1] *= factor
    assert len(timings) < 2 or low_quantile(slower) == low_quantile(timings)


def test_calls_that_take_too_long_are_left_out() -> None:
    calls = [lambda size=size: size for size in range(4)]
    clock = Scripted(dict(zip(calls, map(itertools.repeat, [0.1, 0.2, 5.0, 9.0]), strict=True)))
    assert affordable(calls, clock, replace(QUICK, max_call_s=1.0)) == calls[:2]
    assert affordable(calls[2:], clock, replace(QUICK, max_call_s=1.0)) == calls[2:3], "one is always left"


def test_the_clock_of_the_host_counts_calls() -> None:
    called = []
    assert HostClock().seconds(lambda: called.append(1), 7) > 0
    assert len(called) == 7


# --- the host link ---------------------------------------------------------------------------------------------------

SIZES = tuple(4096 * 4**i for i in range(9))


@given(st.tuples(*[st.lists(st.floats(1e-7, 1.0), min_size=9, max_size=9)] * 3))
def test_any_noise_becomes_a_valid_link(times: tuple[list[float], list[float], list[float]]) -> None:
    link = link_of(SIZES, *times, kind="PCIe", source="measured")
    for size, point, h2d_s in zip(SIZES, link.curve, times[0], strict=True):
        assert point.bytes == size
        assert point.both <= min(point.h2d, point.d2h)
        assert point.copy_s("h2d") >= h2d_s * 0.999, "noise never makes a link faster than it was measured"


def test_a_link_with_a_fixed_time_for_each_copy() -> None:
    fixed_s, rate = 5e-6, 25e9
    alone = [fixed_s + size / rate for size in SIZES]
    link = link_of(SIZES, alone, alone, [1.1 * s for s in alone], kind="PCIe", source="measured")
    assert link.copy_engines == 2
    assert link.copy_s(3e6, "h2d") == pytest.approx(fixed_s + 3e6 / rate, rel=1e-3)
    assert "saturated from copies of 4194304 bytes" in link.source
    assert link_of(SIZES, alone, alone, [2 * s for s in alone], kind="PCIe", source="measured").copy_engines == 1


def test_saturation_is_where_the_rate_stops_to_change() -> None:
    assert saturation_bytes([1, 2, 4, 8, 16], [1.0, 2.0, 3.9, 4.0, 4.1]) == 4
    assert saturation_bytes([1, 2, 4], [5.0, 5.1, 5.0]) == 1
    assert saturation_bytes([1, 2, 4], [1.0, 2.0, 4.0]) == 4


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-3", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_products_are_those_of_the_shape(name: str) -> None:
    shape = named_shape(name)
    matrices = {(m.k, m.n) for m in (*shape.attention_matrices, *shape.dense_matrices, *shape.expert_matrices)}
    found = products(shape)
    assert set(found) == matrices | {(shape.hidden_size, shape.vocab_size)}
    assert all(sum(widths) == n for (_, n), widths in found.items())


def test_gate_and_up_are_two_products_and_so_are_q_k_and_v() -> None:
    assert products(TINY)[64, 128] == (64, 32, 32)
    assert products(TINY, is_fused=True)[64, 128] == (128,)
    assert products(TINY)[64, 320] == (160, 160)
    assert products(replace(TINY, gated_mlp=False))[64, 160] == (160,)


def test_the_mlp_of_a_mixture_is_as_wide_as_what_a_token_meets() -> None:
    shape = named_shape("qwen3-30b-a3b")
    assert mlp_width(shape) == 8 * 768
    assert mlp_width(TINY) == 160


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_tiles_are_read_off_the_steps(tile: int) -> None:
    tokens = list(range(544, 1025, 32))
    noise = itertools.cycle([0.0, 1e-6, -1e-6])
    assert tile_of(tokens, [1e-4 + 2e-5 * -(-count // tile) + next(noise) for count in tokens], default=96) == tile


def test_without_steps_the_tile_stays_as_it_was() -> None:
    tokens = list(range(544, 1025, 32))
    assert tile_of(tokens, [1e-4 + 3e-7 * count for count in tokens], default=96) == 96


# --- whole steps -----------------------------------------------------------------------------------------------------


@given(st.sampled_from(["cpu", "h100"]), st.floats(3e-6, 6e-5), st.floats(2e-4, 5e-3))
def test_overheads_are_read_off_two_depths(name: str, launch_s: float, step_s: float) -> None:
    """As the cost model puts them together, which counts the same launches."""
    profile = find_profile(name)
    overheads = profile.overheads.model_copy(update={"launch_us": launch_s * 1e6})
    profile = profile.model_copy(update={"overheads": overheads})
    rests = [step_s + Part.whole(layers, 1).launches_s(TINY, profile) for layers in (2, 6)]
    found = fit_overheads((2, 6), rests, 3e-6, launches_of(TINY, profile.kind))
    assert found.launch_s == pytest.approx(launch_s, abs=1e-9)
    assert found.step_s == pytest.approx(step_s, abs=1e-7)


@given(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2))
def test_noise_never_makes_overheads_absurd(rests: list[float]) -> None:
    launches = launches_of(TINY, "cpu")
    found = fit_overheads((2, 6), rests, 3e-6, launches)
    assert 3e-6 <= found.launch_s <= 60e-6
    assert 150e-6 <= found.step_s <= 6e-3
    assert 0 <= fit_overheads((2, 6), rests, 3e-6, launches, in_one_call=True).launch_s <= 60e-6


SHAPES = {
    "gated": TINY,
    "plain": replace(TINY, gated_mlp=False),
    "experts": replace(
        TINY,
        intermediate_size=0,
        num_experts=4,
        experts_per_token=2,
        expert_intermediate_size=32,
        num_expert_layers=2,
    ),
}


@pytest.mark.parametrize("family", SHAPES)
def test_stand_ins_have_the_shape(family: str) -> None:
    shape = SHAPES[family].with_dtype("float32")
    loaded = stand_in(shape, 2, torch.float32, CPU)
    layout = loaded.kv_layout
    assert layout.heads == ((2, 16), (2, 16))
    matrices = sum(p.numel() for p in loaded.model.parameters() if p.dim() > 1)
    packed = [module for module in loaded.model.modules() if isinstance(module, PackedLinear)]
    matrices += sum(module.in_features * module.out_features for module in packed)
    if packed and shape.tied_embeddings:
        matrices -= shape.hidden_size * shape.vocab_size  # the head's, packed in addition to the embedding
    assert matrices == shape.layer_parameters + shape.embedding_parameters


def test_products_are_those_of_a_loaded_model() -> None:
    """Packed where there is a kernel, and as narrow as the weights were saved."""
    bench = Bench.on(CPU, torch.float32, TINY.with_dtype("float32"), HASTY, saved=torch.bfloat16)
    kernel = bench.kernels and bench.kernels.linear
    (part,) = next(Product(bench, 64, (64,))._turns)
    assert part.num_bytes == (64 * 64 * 2 if kernel else 64 * 64 * 4)
    rows = torch.randn(1, 5, 64)
    weight = kernel.unpack(part._weight, part._format, 64) if kernel else part._weight
    torch.testing.assert_close(part(rows), torch.nn.functional.linear(rows, weight), rtol=1e-4, atol=1e-4)
    assert part.copy()._weight.data_ptr() != part._weight.data_ptr()
    wide = replace(bench, saved=torch.float32)
    (part,) = next(Product(wide, 64, (64,))._turns)
    assert part.num_bytes == 64 * 64 * 4


@pytest.mark.parametrize("family", SHAPES)
def test_operators_are_those_of_a_model_in_bfloat16(family: str) -> None:
    """Kernels are measured if a model of that family would be given them."""
    shape = SHAPES[family].with_dtype("bfloat16")
    bench = Bench.on(CPU, torch.bfloat16, shape, HASTY)
    loaded = stand_in(shape, 2, torch.bfloat16, CPU)
    assert loaded.dtype is loaded.kv_layout.dtype is torch.bfloat16
    assert loaded.model.dtype is bench.between
    assert any(isinstance(module, PackedLinear) for module in loaded.model.modules()) == bool(bench.kernels)


def test_what_a_gpu_runs_is_measured(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that its attention walks itself, and steps that are replayed or not."""
    sizes: list[int] = []
    decodings: list[step_overheads._Decoding] = []

    class Watched(KVCache):
        def __init__(self, layout: KVLayout, num_blocks: int, block_tokens: int, *others: Any, **more: Any) -> None:
            sizes.append(block_tokens)
            super().__init__(layout, num_blocks, block_tokens, *others, **more)

    class Kept(step_overheads._Decoding):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            decodings.append(self)

    for module in (operator_times, ragged_executor):
        monkeypatch.setattr(module, "KVCache", Watched)
    monkeypatch.setattr(operator_times, "preferred_block_tokens", lambda *asked: 256)
    monkeypatch.setattr(step_overheads, "load_cpu_kernels", lambda: None)  # whose layers in one call are not recorded
    monkeypatch.setattr(step_overheads, "can_record", lambda *model: True)
    monkeypatch.setattr(ragged_executor, "can_record", lambda loaded, block_tokens: loaded.compiles)
    monkeypatch.setattr(ragged_executor, "record_on_device", lambda: lambda compute: compute)
    monkeypatch.setattr(step_overheads, "_Decoding", Kept)
    monkeypatch.setattr(chunks, "_varlen", paged_varlen)
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: plain_varlen)
    monkeypatch.setattr(varlen, "can_page", lambda block_tokens: True)
    bench = Bench.on(CPU, torch.float32, TINY.with_dtype("float32"), HASTY)
    operator_times.measure_attention(bench, AttentionKernels(), torch.float32)
    measure_overheads(bench, lambda each: CostModel(each, profile), dispatch_s=3e-6)
    assert set(sizes) == {256}
    replayed = [bool(each._executor.replayed_steps) for each in decodings]
    assert replayed == sorted(replayed)
    assert replayed.count(True) == replayed.count(False) > 0


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_gpu_is_measured_by_the_kernel_of_a_run(
    kv_dtype: torch.dtype, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 that is ours: torch's packed one does not take it."""
    called: list[torch.dtype] = []
    ours = load_kernel((TINY.head_dim,), torch.float32, kv_dtype)
    own = PagedKernel.__call__

    def watched(self: PagedKernel, query: torch.Tensor, cache: torch.Tensor, *others: Any) -> None:
        called.append(cache.dtype)
        own(self, query, cache, *others)

    monkeypatch.setattr(PagedKernel, "__call__", watched)
    monkeypatch.setattr(build_profile, "tile_attention", lambda *asked: ours)
    bench = Bench.on(CPU, torch.float32, TINY.with_dtype("float32"), HASTY)
    profiler = object.__new__(build_profile._Profiler)
    profiler.__dict__ |= dict(bench=bench, shape=bench.shape, kind="gpu", device=CPU, attention="auto")
    profiler.machine = describe(CPU)
    operator_times.measure_attention(bench, profiler._attention_kernels(kv_dtype), kv_dtype)
    assert set(called) == {kv_dtype}


@pytest.mark.parametrize("family", SHAPES)
def test_steps_of_every_family_run(family: str, profile: HardwareProfile) -> None:
    shape = SHAPES[family].with_dtype("float32")
    bench = Bench.on(CPU, torch.float32, shape, HASTY)
    found = measure_overheads(bench, lambda each: CostModel(each, profile), dispatch_s=3e-6)
    assert found.step_s > 0
    assert found.launch_s >= 0  # nothing where all layers are one call
    whole = WholeSteps(bench)
    whole.sample()
    in_step = whole.in_step(CostModel(whole.shape, profile))
    assert in_step is not None
    assert in_step.tokens[0] == 2


@pytest.mark.parametrize("uses_kernels", [True, False])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_every_family_are_measured(name: str, uses_kernels: bool) -> None:
    config = random_config(name)
    shape = shape_from_config(config.to_dict(), name).with_dtype("float32")
    effort = replace(HASTY, max_call_s=60.0)
    bench = Bench.on(CPU, torch.float32, shape, effort, saved=torch.bfloat16)
    measured = measure_recurrent(bench if uses_kernels else replace(bench, kernels=None), config)
    assert measured is not None
    assert shape.recurrent is not None
    assert measured.state_size == shape.recurrent.state_size
    assert measured.row_bytes == shape.state_bytes // shape.recurrent.layers
    assert {(point.sequences, point.tokens) for point in measured.points} == set(effort.recurrent)


def test_models_that_only_attend_have_no_recurrent_layer_to_measure() -> None:
    assert measure_recurrent(Bench.on(CPU, torch.float32, TINY.with_dtype("float32"), HASTY), None) is None


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-3", "qwen3-30b-a3b", "mistral-7b"])
def test_narrow_models_keep_the_kind_of_their_layers(name: str) -> None:
    shape = named_shape(name)
    small = narrow(shape)
    assert (small.gated_mlp, small.num_experts) == (shape.gated_mlp, shape.num_experts)
    assert small.hidden_size <= 64 < shape.hidden_size
    assert small.sliding_window == 0
