"""What is measured is plausible and complete, and a profile survives its file. No test depends on how fast it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.errors import ModelError, ProfileError
from vasuki.commands.cli import main
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.cpu.packed_linear import Format, PackedLinear
from vasuki.hf.device.device import Machine, describe, device_name
from vasuki.hf.profiler import build_profile, profile_machine
from vasuki.hf.profiler import stand_in as stand_ins
from vasuki.hf.profiler.links import link_of, saturation_bytes
from vasuki.hf.profiler.stand_in import stand_in
from vasuki.hf.profiler.timing import QUICK, Effort, HostClock, low_quantile, measure
from vasuki.hf.profiler.whole_steps import SIZES as STEP_SIZES
from vasuki.machines.cost_model import CostModel
from vasuki.machines.gpus import profile_of_gpu
from vasuki.machines.here.cpu import without_noise
from vasuki.machines.here.device import local_device
from vasuki.machines.here.measured import cache_key, measured_before
from vasuki.machines.here.stolen_time import StolenTime
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile, load_profile, profile_for_device, user_profile_path
from vasuki.machines.profile_writing import write_profile
from vasuki.models.config_json import shape_from_config
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
HASTY: Effort = replace(QUICK, group_s=0.02, steps_s=0.5)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))  # none of the user's own profiles
        patch.setattr(build_profile, "QUICK", HASTY)
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
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    known = build_profile._known(Machine(name, (), "driver 1", 24 * 2**30, 72, (8, 6)), torch.device("cuda"))
    card = profile_of_gpu(name)
    assert known.title == title == card.title
    assert (known.peak_tflops, known.price) == (card.peak_tflops, card.price)
    assert known.device_names == (card.device_names if listed else (name,))
    assert known.name == (card.name if listed else re.sub("[^a-z0-9]+", "-", name.lower()))


def test_a_card_that_nobody_knows_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    known = build_profile._known(Machine("NVIDIA B40", (), "driver 1", 24 * 2**30, 72, (12, 0)), torch.device("cuda"))
    assert (known.name, known.title, known.device_names) == ("nvidia-b40", "NVIDIA B40", ("NVIDIA B40",))


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


def test_the_cost_model_meets_what_was_measured(profile: HardwareProfile) -> None:
    """No step is free, and many rows take longer than a few."""
    measured = profile.measured
    assert measured is not None
    assert measured.in_step is not None
    assert set(measured.in_step.tokens) <= {size.tokens for size in STEP_SIZES}
    assert "measured by `vasuki profile`, steps of tiny" in measured.source
    (attention,) = measured.attention
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, 2, 16)
    model = CostModel(TINY.with_dtype(attention.dtype), profile)
    few, many = (model.step_time_s(model.work([1] * rows, [100] * rows)) for rows in (1, 4096))
    assert 0 < few < many


def test_a_folder_s_own_model_is_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(build_profile, "QUICK", HASTY)
    profile = profile_machine("cpu", quick=True, folder=tiny_model)
    shape = shape_from_config(tiny_model)
    assert profile.measured is not None
    assert f"steps of {tiny_model.name}" in profile.measured.source
    assert profile.measured.attention[0].heads == shape.num_heads


def test_a_run_goes_by_the_profile_of_its_own_model(
    profile: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps of a small model reach tells little of a large one's; operators are any model's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_profile(profile, user_profile_path(profile.name))
    other = replace(TINY, hidden_size=128)

    def found(shape: ModelShape) -> HardwareProfile | None:
        machine = measured_before(local_device("cpu").names, cache_key(shape))
        return machine.profile if machine else None

    assert found(TINY) == profile
    assert found(other) is None
    assert profile.measured is not None
    of_any = profile.model_copy(update={"measured": profile.measured.model_copy(update={"model": ""})})
    write_profile(of_any, user_profile_path(profile.name))
    assert found(other) == of_any


def test_the_table_is_narrow_and_complete(profile: HardwareProfile) -> None:
    lines = profile_table(profile).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert profile.measured is not None
    for word in ("float32", "overheads", "decodes", "chunks", "steps over", "copies"):
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


def test_steps_that_find_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(build_profile, "measure_first", fails)
    with pytest.raises(ModelError, match=r"^tiny: its steps could not be measured: CUDA out of memory"):
        profile_machine("cpu", TINY, quick=True)


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


# --- models that stand in ---------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SHAPES)
def test_stand_ins_have_the_shape(family: str, dtype: torch.dtype) -> None:
    shape = SHAPES[family].with_dtype(str(dtype).removeprefix("torch."))
    loaded = stand_in(shape, dtype, CPU)
    assert loaded.dtype is loaded.kv_layout.dtype is dtype
    assert loaded.kv_layout.heads == ((2, 16), (2, 16))
    served = loaded.shape_in_use(shape.name, "auto")
    assert served.layer_parameters == shape.layer_parameters
    assert served.embedding_parameters == shape.embedding_parameters
    assert served.max_context_tokens == shape.max_context_tokens
    if family != "experts":
        assert any(isinstance(module, PackedLinear) for module in loaded.model.modules()) == bool(load_cpu_kernels())


def test_weights_of_a_stand_in_are_packed_as_narrow_as_the_shape_was_saved() -> None:
    """As those of a bfloat16 model are where a processor computes it in float32."""
    for saved, width in (("bfloat16", Format.NARROW), ("float32", Format.WIDE)):
        loaded = stand_in(TINY.with_dtype(saved), torch.float32, CPU)
        assert loaded.dtype is torch.float32
        assert {each.format for each in loaded.model.modules() if isinstance(each, PackedLinear)} <= {width}


def test_a_model_that_does_not_fit_is_measured_with_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TINY, num_layers=10).with_dtype("float32")
    of_layer = shape.layer_parameters // 10 * 4
    monkeypatch.setattr(
        stand_ins, "available_bytes", lambda device: (shape.embedding_parameters * 4 + 3.5 * of_layer) / 0.6
    )
    assert stand_in(shape, torch.float32, CPU).kv_layout.num_layers == 3
    monkeypatch.setattr(stand_ins, "available_bytes", lambda device: shape.embedding_parameters * 4)
    with pytest.raises(ModelError, match="tiny: there is no memory for one of its layers"):
        stand_in(shape, torch.float32, CPU)
