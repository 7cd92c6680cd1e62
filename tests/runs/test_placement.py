"""What is known of the machine without torch is what torch finds, and plans by the one are plans by the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from tiny_job import WORDS, job_tree

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.base.job_file import parse_job
from vasuki.commands.cli import main
from vasuki.hf.device.device import device_name, total_bytes
from vasuki.hf.kernels import levels, varlen
from vasuki.machines.attention import page_tokens
from vasuki.machines.cost_model import CostModel
from vasuki.machines.here import cpu, device
from vasuki.machines.here.cpu import Processor
from vasuki.machines.here.gpu import Card
from vasuki.machines.here.split import Share
from vasuki.machines.profile_files import find_profile
from vasuki.machines.profile_writing import write_profile
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.report.plan_table import plan_table
from vasuki.runs.placement import job_of_replica, placed_here, placed_on

CPU = torch.device("cpu")
GIB = 2**30
AVX512 = "avx2 fma avx512f avx512vl avx512bw avx512dq"


def written_job(folder: Path, model_folder: Path, **changes: dict[str, object]) -> Path:
    rows = [{"id": f"r{i}", "text": " ".join(WORDS[: 1 + i * 7 % 17])} for i in range(40)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = job_tree(model_folder, folder / "in.jsonl", folder / "out")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree | {name: tree.get(name, {}) | values for name, values in changes.items()}))
    return path


def printed(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv": {"device_memory": 0.5}, "engine": {"max_num_seqs": "auto", "chunk_tokens": "auto"}},
        {"model": {"dtype": "bfloat16"}, "engine": {"compile": "off"}},
        {"kv": {"offload": "park", "block_tokens": 4, "device_memory": "24KiB"}},
        {"plan": {"gpu": "cpu", "output_length": "max"}},
        {"engine": {"replicas": 2}},
    ],
    ids=["as it is", "all memory", "bfloat16", "parked", "by a profile", "on two replicas"],
)
def test_plan_and_run_predict_the_same(tmp_path: Path, tiny_model: Path, changes: dict[str, dict[str, object]]) -> None:
    job = written_job(tmp_path, tiny_model, **changes)
    (plan,) = printed("plan", job, "--json")
    manifest = printed("run", job, "--json", "--quiet")
    assert manifest["predicted"] == {name: plan[name] for name in manifest["predicted"]}
    assert manifest["device"]["profile"] == plan["gpu"]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which a run takes two cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cpu.processor.cache_clear()
    yield
    cpu.processor.cache_clear()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("price", [{}, {"price_per_hour": 0.6}], ids=["of the profile", "of the job"])
def test_replicas_on_a_cpu_cost_what_the_machine_does(
    tmp_path: Path, tiny_model: Path, price: dict[str, object]
) -> None:
    job = written_job(tmp_path, tiny_model, cost=price)

    def per_hour(found: Any, seconds: float) -> float:
        return float(found["cost"]["amount"]) / seconds * 3600

    (one,) = printed("plan", job, "--json")
    (two,) = printed("plan", job, "--json", "--set", "engine.replicas=2")
    (given,) = printed("plan", job, "--json", "--set", "engine.replicas=2", "--price", f"{two['gpu']}=0.6")
    ran = printed("run", job, "--json", "--quiet", "--replicas", 2)
    expected = per_hour(one, one["makespan_s"])
    assert expected == pytest.approx(price.get("price_per_hour", find_profile("cpu").price.per_hour))
    assert per_hour(two, two["makespan_s"]) == pytest.approx(expected)
    assert per_hour(given, given["makespan_s"]) == pytest.approx(0.6)
    assert per_hour(ran, ran["timings"]["makespan_s"]) == pytest.approx(expected)


def test_replicas_of_a_card_are_as_many_as_the_job_says_unless_the_command_line_does(
    tmp_path: Path, tiny_model: Path
) -> None:
    job = written_job(tmp_path, tiny_model, engine={"replicas": 3})
    for command in ("plan", "simulate"):
        found = printed(command, job, "--gpu", "a10", "--gpu", "a40:2", "--json")
        assert [round(each["cost"]["gpu_hours"] * 3600 / each["makespan_s"]) for each in found] == [3, 2]


def test_a_model_is_planned_in_the_type_that_it_runs_in(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tiny_model).half().save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "half")
    config = tmp_path / "half" / "config.json"
    for dtype in ("float16", "bfloat16", None):  # None: as older models say nothing of it
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}))
        job = written_job(tmp_path, tmp_path / "half")
        (plan,) = printed("plan", job, "--json")
        assert printed("run", job, "--json", "--quiet", "--fresh")["predicted"]["makespan_s"] == plan["makespan_s"]


def test_what_is_known_without_torch_is_what_torch_finds() -> None:
    processor = cpu.processor()
    assert processor.name == device_name(CPU)
    assert processor.torch_multiplies_bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert levels.executable(processor.capabilities) == levels.executable()
    assert levels.chosen(processor.capabilities) == levels.chosen()
    assert cpu.total_bytes() == total_bytes(CPU)
    assert 0 < cpu.available_bytes() <= cpu.total_bytes()


def test_as_many_cores_as_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    show = "print(cpu.processor().cores, torch.get_num_threads())"
    code = f"import torch; from vasuki.machines.here import cpu, gpu; {show}"
    ours, theirs = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.split()
    assert ours == theirs


def test_cores_share_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    fields = [{"processor": str(i), "physical id": "0", "core id": str(i // 2)} for i in range(8)]
    assert cpu._cores(fields) == 2
    assert cpu._cores([]) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert cpu._cores(fields) == 5


@pytest.mark.parametrize(
    ("flags", "compile", "dtype"),
    [
        (f"{AVX512} avx512_bf16", "auto", "bfloat16"),
        (AVX512, "auto", "float32"),  # kernels would multiply it no faster
        (AVX512, "off", "bfloat16"),  # torch's operators do
        ("avx2", "off", "float32"),
    ],
)
def test_the_type_depends_on_the_processor_and_on_kernels(
    monkeypatch: pytest.MonkeyPatch, flags: str, compile: str, dtype: str
) -> None:
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "processor", lambda: Processor("a processor", 2, frozenset(flags.split())))
    job = job_of(engine={"compile": compile}, kv={"device_memory": "1GiB"})
    placement = placed_here(job, named_shape("mistral-7b"))
    assert placement.shape.dtype == dtype
    assert placement.profile.name == "cpu"


def job_of(**sections: Any) -> JobConfig:
    tree = {
        "model": {"shape": "mistral-7b"},
        "input": {"path": "in.csv", "prompt": "{text}"},
        "output": {"path": "out"},
    }
    return parse_job(tree | sections)


def test_a_gpu_at_hand_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = named_shape("mistral-7b")
    monkeypatch.setattr(device, "gpu", lambda: Card("NVIDIA A10", 22 * GIB, 21 * GIB, (8, 6)))
    monkeypatch.setattr(cpu, "available_bytes", lambda: 32 * GIB)
    placement = placed_here(job_of(), shape)
    assert (placement.profile.name, placement.shape.dtype) == ("a10", "bfloat16")
    assert placement.profile.memory_bytes == 22 * GIB
    assert placement.kv.block_tokens == 256
    assert placement.beside_weights_bytes == int(21 * GIB - shape.weight_bytes - 0.1 * 22 * GIB)
    assert placed_here(job_of(engine={"device": "cpu"}), shape).profile.kind == "cpu"
    monkeypatch.setattr(device, "gpu", lambda: Card("NVIDIA A10", 22 * GIB, 12 * GIB, (8, 6)))
    waiting = placed_here(job_of(), shape)  # for a plan that keeps some of them on the host
    assert (waiting.beside_weights_bytes, waiting.profile.memory_bytes) == (None, 12 * GIB)
    monkeypatch.setattr(device, "gpu", lambda: None)
    with pytest.raises(ModelError, match="no CUDA device here; name a card with --gpu"):
        placed_here(job_of(engine={"device": "cuda"}), shape)


def test_keys_and_values_of_8_bits_are_for_packed_attention_on_a_gpu(tmp_path: Path, tiny_model: Path) -> None:
    shape, a10 = named_shape("mistral-7b"), find_profile("a10")
    wide, narrow = (placed_on(job_of(kv={"dtype": kind}), shape, a10).shape for kind in ("auto", "float8"))
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    with pytest.raises(JobFileError, match=r"^kv.dtype: float8 is for packed attention, and that of .* is padded"):
        placed_on(job_of(kv={"dtype": "float8"}, engine={"attention": "padded"}), shape, a10)
    with pytest.raises(JobFileError, match=r"^kv.dtype: float8 is for GPUs"):
        placed_on(job_of(kv={"dtype": "float8"}), shape, find_profile("cpu"))
    job = written_job(tmp_path, tiny_model, kv={"dtype": "float8"})
    for command in ("check", "plan", "run"):
        done = CliRunner().invoke(main, [command, str(job)])
        assert done.exit_code == 2, command
        assert "kv.dtype: float8 is for GPUs; on a CPU bfloat16 is the least" in done.output


@pytest.mark.parametrize(
    ("card", "shape", "changed", "reason"),
    [
        ("cpu", "mistral-7b", {}, "is for GPUs; on a CPU bfloat16 is the least"),
        ("a10", "mistral-7b", {}, "needs a GPU from Ada on, of compute capability 8.9; this one has 8.6"),
        ("h100", "mixtral-8x7b", {}, "is for layers of plain attention and dense MLPs, and mixtral-8x7b has experts"),
        ("h100", "mistral-7b", {"engine": {"attention": "padded"}}, "is for packed attention, and that of mistral-7b"),
        ("h100", "mistral-7b", {"engine": {"compile": "off"}}, "is for joined layers, which engine.compile: off does"),
        ("h100", "mistral-7b", {"task": "embed"}, "is for tasks generate and score, not embed"),
        ("h100", "mistral-7b", {"dtype": "float16"}, "goes with model.dtype: bfloat16, and .* computes in float16"),
    ],
)
def test_products_of_8_bits_are_refused_where_nothing_computes_them(
    card: str, shape: str, changed: dict[str, Any], reason: str
) -> None:
    model = {"shape": shape, "quantization": "float8"} | {key: changed[key] for key in changed if key == "dtype"}
    job = job_of(model=model, **{key: changed[key] for key in changed if key != "dtype"})
    with pytest.raises(JobFileError, match=rf"^model.quantization: float8 {reason}"):
        placed_on(job, named_shape(shape), find_profile(card))


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"gated_attention": True}, "gated attention"), ({"recurrent": 1}, "layers that carry a state")],
)
def test_products_of_8_bits_are_for_plain_layers(changed: dict[str, Any], what: str) -> None:
    shape = replace(named_shape("mistral-7b"), **changed)
    with pytest.raises(JobFileError, match=f"of plain attention and dense MLPs, and mistral-7b has {what}"):
        placed_on(job_of(model={"shape": "mistral-7b", "quantization": "float8"}), shape, find_profile("h100"))


def test_products_of_8_bits_are_planned_for() -> None:
    """Half the weights and twice the rate, less what stays as it is and what rounding takes."""
    llama, h100 = named_shape("llama-3-8b"), find_profile("h100")
    wide, narrow = (
        placed_on(job_of(model={"shape": "llama-3-8b", "quantization": kind}), llama, h100)
        for kind in ("none", "float8")
    )
    assert 0.5 * wide.shape.weight_bytes < narrow.shape.weight_bytes < 0.6 * wide.shape.weight_bytes
    prompts, decodes = ([2048], [2048]), ([1] * 16, [500] * 16)
    for work, least, most in ((prompts, 0.6, 0.8), (decodes, 0.6, 0.8)):
        times = [CostModel(each.shape, h100) for each in (wide, narrow)]
        before_s, after_s = (cost.step_time_s(cost.work(*work)) for cost in times)
        assert least * before_s < after_s < most * before_s


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"model": {"shape": "mistral-7b", "quantization": "float8"}}, "8 bits: products are rounded to them"),
        ({"kv": {"dtype": "float8"}}, "8 bits: keys and values are rounded to them"),
    ],
)
def test_a_plan_says_what_is_rounded(changed: dict[str, Any], said: str) -> None:
    lengths = Lengths(np.full(4, 100), np.full(4, 20))
    plan = placed_on(job_of(**changed), named_shape("mistral-7b"), find_profile("h100")).plan(lengths)
    assert said in plan_table([plan], 200)
    assert plan.error == (0.25 if said else 0.18)
    assert ("8 bits" in plan_table([plan], 200)) == bool(said)


def test_a_run_refuses_products_of_8_bits_before_it_loads(tmp_path: Path, tiny_model: Path) -> None:
    job = written_job(tmp_path, tiny_model, model={"path": str(tiny_model), "quantization": "float8"})
    for command in ("check", "plan", "run"):
        done = CliRunner().invoke(main, [command, str(job)])
        assert done.exit_code == 2, command
        assert "model.quantization: float8 is for GPUs; on a CPU bfloat16 is the least" in done.output


@pytest.mark.parametrize("head_dim", [64, 100, 256, 264])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("generation", [(7, 5), (8, 0), (9, 0)])
def test_pages_are_for_what_the_packed_kernel_takes(
    generation: tuple[int, int], dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(named_shape("mistral-7b"), head_dim=head_dim).with_dtype(dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    preferred = varlen.preferred_block_tokens(getattr(torch, dtype), torch.device("cuda"), head_dim)
    assert page_tokens(shape, generation, "auto") == page_tokens(shape, generation, "packed") == preferred
    assert page_tokens(shape, generation, "paged") is None


@pytest.mark.parametrize(
    ("sections", "block_tokens"),
    [
        ({}, 256),
        ({"kv": {"block_tokens": 32}}, 32),
        ({"kv": {"dtype": "float32"}}, "auto"),
        ({"kv": {"dtype": "float8"}}, "auto"),
        ({"model": {"shape": "mistral-7b", "dtype": "float32"}}, "auto"),
        ({"engine": {"attention": "padded"}}, "auto"),
    ],
)
def test_blocks_of_a_card_elsewhere(sections: dict[str, dict[str, object]], block_tokens: int | str) -> None:
    placement = placed_on(job_of(**sections), named_shape("mistral-7b"), find_profile("a10"))
    assert placement.kv.block_tokens == block_tokens


def test_a_profile_that_names_our_kernel_leaves_the_size_of_blocks_to_the_planner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a card elsewhere, and of the same at hand."""
    shape, card = named_shape("mistral-7b"), find_profile("a10")
    write_profile(card.model_copy(update={"attention": "paged"}), tmp_path / "a10.yaml")
    monkeypatch.setenv("VASUKI_PROFILES", str(tmp_path))
    assert placed_on(job_of(), shape, find_profile("a10")).kv.block_tokens == "auto"
    monkeypatch.setattr(device, "gpu", lambda: Card("NVIDIA A10", 22 * GIB, 21 * GIB, (8, 6)))
    monkeypatch.setattr(cpu, "available_bytes", lambda: 32 * GIB)
    assert placed_here(job_of(), shape).kv.block_tokens == "auto"


@pytest.mark.parametrize("device_memory", [0.9, "4GiB"])
def test_a_card_at_hand_has_the_kv_that_was_planned_for_it(
    device_memory: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, profile = named_shape("llama-3-8b"), find_profile("a10")
    kv: dict[str, object] = {"device_memory": device_memory, "offload": "none"}
    job = job_of(kv=kv)
    lengths = Lengths(np.full(300, 1500), np.full(300, 150))
    elsewhere = placed_on(job, shape, profile).plan(lengths)
    total = profile.memory_bytes
    monkeypatch.setattr(device, "gpu", lambda: Card("NVIDIA A10", total, total, (8, 6)))
    monkeypatch.setattr(cpu, "available_bytes", lambda: 64 * GIB)
    here = placed_here(job, shape).plan(lengths)
    assert here.chunk_tokens == elsewhere.chunk_tokens
    assert here.settings.block_tokens == elsewhere.settings.block_tokens == 256
    assert abs(here.settings.num_blocks - elsewhere.settings.num_blocks) <= 1
    smaller = placed_here(job_of(kv=kv, engine={"chunk_tokens": 128, "max_num_seqs": 32}), shape).plan(lengths)
    assert smaller.settings.num_blocks >= here.settings.num_blocks  # of steps that need less room


def test_replicas_share_the_host_memory_that_nobody_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They take what there is, as one would, and a job that names it is refused."""
    monkeypatch.setattr(cpu, "total_bytes", lambda: 7 * GIB)
    monkeypatch.setattr(cpu, "available_bytes", lambda: 6 * GIB)
    for kv, refused in (({}, False), ({"host_memory": "8GiB"}, True)):
        job = job_of(kv={"offload": "park", **kv}, engine={"device": "cpu", "replicas": 2})
        share = job_of_replica(job, Share(threads=1), 2)
        if refused:
            with pytest.raises(JobFileError, match=r"kv\.host_memory: 4\.0 GiB are asked for"):
                placed_here(share, named_shape("qwen2.5-0.5b"))
        else:
            assert 0 < placed_here(share, named_shape("qwen2.5-0.5b")).kv.host_memory < 2 * GIB
            assert "taking those" in caplog.text
