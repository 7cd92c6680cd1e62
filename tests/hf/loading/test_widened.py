"""Weights that are 8 or 4 bits in their files, against what the formats say that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_job import job_tree
from tiny_models import random_config
from transformers import AutoModelForCausalLM
from versions import WIDENS_COMPRESSED

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.commands.cli import main
from vasuki.hf.loading.load_model import load_model

Tensors = dict[str, torch.Tensor]
BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # Open Compute Project, Microscaling formats 1.0


def rewritten(source: Path, folder: Path, tensors: Tensors, quantization: Mapping[str, object]) -> None:
    """A model's folder with other tensors, which are said to be quantised so."""
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def in_blocks_of_8_bits(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What the files hold, and what it stands for: blocks with a scale each (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""
    held, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            held[name] = meant[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        held |= {name: numbers.view(rows, columns), f"{name}_scale_inv": scales}
        meant[name] = (numbers.double() * scales[:, None, :, None]).view(rows, columns).bfloat16()
    return held, meant


def of_4_bits(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The same for experts as gpt-oss has them: 32 numbers of 4 bits in 16 bytes, the first in the lower half, and a
    power of two for all of them."""
    held, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            held[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(118, 123, blocks.shape[:-1], dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        numbers = E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
        numbers *= torch.exp2(exponents.float() - 127).unsqueeze(-1)
        meant[name] = numbers.view(experts, outputs, inputs).transpose(1, 2).bfloat16()
    return held, meant


def in_rows_of_8_bits(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The same for products, each row with a scale, as compressed-tensors has them (`float-quantized`)."""
    held, meant = {}, {}
    for name, tensor in tensors.items():
        held[name] = meant[name] = tensor.bfloat16()
        if name.endswith("_proj.weight"):
            scales = (tensor.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            numbers = (tensor.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            held |= {name: numbers, f"{name}_scale": scales}
            meant[name] = (numbers.double() * scales.double()).bfloat16()
    return held, meant


def packed_in_groups_of_4_bits(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The same with 8 numbers of 4 bits in one of 32, the first in the lowest bits and each 8 more than it is, and a
    scale for each 16 of a row (`pack-quantized`)."""
    held, meant = {}, {}
    for name, tensor in tensors.items():
        held[name] = meant[name] = tensor.bfloat16()
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            groups = tensor.float().view(rows, -1, BLOCK)
            scales = (groups.abs().amax(-1) / 7).bfloat16()
            numbers = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).view(rows, columns)
            shifted = ((numbers.long() + 8).view(rows, -1, 8) << (4 * torch.arange(8))).sum(-1)
            del held[name]
            held[f"{name}_packed"] = (shifted - (shifted >> 31 << 32)).to(torch.int32)
            held |= {f"{name}_scale": scales, f"{name}_shape": torch.tensor([rows, columns])}
            meant[name] = (numbers.view(rows, -1, BLOCK).double() * scales.double().unsqueeze(-1)).view_as(tensor)
            meant[name] = meant[name].bfloat16()
    return held, meant


def loads_what_is_meant(folder: Path, meant: Tensors) -> None:
    model = load_model(ModelConfig(path=str(folder), dtype="bfloat16"), "cpu", compiles=False).model
    loaded = model.state_dict()
    assert loaded.keys() - {"lm_head.weight"} == meant.keys() - {"lm_head.weight"}
    assert all(torch.equal(loaded[name], meant[name]) for name in meant)


@pytest.fixture
def of_8_bits(tiny_model: Path, tmp_path: Path) -> tuple[Path, Tensors]:
    held, meant = in_blocks_of_8_bits(load_file(tiny_model / "model.safetensors"))
    folder, how = tmp_path / "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    rewritten(tiny_model, folder, held, how | {"weight_block_size": [BLOCK, BLOCK]})
    return folder, meant


def test_blocks_of_8_bits_are_widened(of_8_bits: tuple[Path, Tensors]) -> None:
    loads_what_is_meant(*of_8_bits)


def test_numbers_of_4_bits_are_widened(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = random_config("gpt_oss", intermediate_size=64, vocab_size=320)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "wide")
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path / "wide")
    held, meant = of_4_bits(load_file(tmp_path / "wide" / "model.safetensors"))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    rewritten(tmp_path / "wide", tmp_path / "mxfp4", held, how)
    loads_what_is_meant(tmp_path / "mxfp4", meant)


NUMBERS = {"symmetric": True, "dynamic": False}
COMPRESSED = {  # how numbers are stored, what the format is called, and what config.json says of them
    "rows of 8 bits": (
        in_rows_of_8_bits,
        "float-quantized",
        {
            "weights": NUMBERS | {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        },
    ),
    "groups of 4 bits": (
        packed_in_groups_of_4_bits,
        "pack-quantized",
        {"weights": NUMBERS | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK}},
    ),
}


@WIDENS_COMPRESSED
@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_are_widened(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    store, name, group = COMPRESSED[kind]
    held, meant = store(load_file(tiny_model / "model.safetensors"))
    groups = {"group_0": {"targets": ["Linear"], "format": name} | group}
    how = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, "ignore": ["lm_head"]}
    rewritten(tiny_model, tmp_path / "few", held, how | {"quantization_status": "compressed"})
    loads_what_is_meant(tmp_path / "few", meant)


def test_experts_in_blocks_of_8_bits_are_widened(tiny_model: Path, tmp_path: Path) -> None:
    """Each has a scale of its own in the files, and all of a layer are one tensor in memory."""
    config = random_config("qwen3_moe", moe_intermediate_size=32, vocab_size=320)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "wide")
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path / "wide")
    held, meant = in_blocks_of_8_bits(load_file(tmp_path / "wide" / "model.safetensors"))
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    rewritten(tmp_path / "wide", tmp_path / "fp8", held, how)
    save_file(meant, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    few, wide = (
        load_model(ModelConfig(path=str(tmp_path / name), dtype="bfloat16"), "cpu", compiles=False).model.state_dict()
        for name in ("fp8", "wide")
    )
    assert few.keys() == wide.keys()
    assert all(torch.equal(few[name], wide[name]) for name in few)


def test_scales_of_inputs_are_left_out(of_8_bits: tuple[Path, Tensors], tmp_path: Path) -> None:
    """With weights of 16 bits nothing rounds what they are multiplied with."""
    folder, meant = of_8_bits
    held = load_file(folder / "model.safetensors")
    held |= {name.replace("weight_scale_inv", "activation_scale"): torch.ones(()) for name in held if "scale" in name}
    how = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [BLOCK, BLOCK]}
    rewritten(folder, tmp_path / "static", held, how)
    loads_what_is_meant(tmp_path / "static", meant)


def test_weights_without_their_scale_are_refused(of_8_bits: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, _ = of_8_bits
    held = load_file(folder / "model.safetensors")
    del held["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    rewritten(folder, tmp_path / "lacks", held, json.loads((folder / "config.json").read_text())["quantization_config"])
    with pytest.raises(ModelError, match=r"hold model\.layers\.0\.self_attn\.q_proj\.weight .* in 8 bits, and lack"):
        load_model(ModelConfig(path=str(tmp_path / "lacks")), "cpu")


def test_a_job_of_such_a_model_runs(of_8_bits: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, _ = of_8_bits
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"id": 1, "text": "one two"}\n{"id": 2, "text": "three"}\n')
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(job_tree(folder, rows, tmp_path / "out")))
    for command in ("check", "plan", "run"):
        done = CliRunner().invoke(main, [command, str(job)])
        assert done.exit_code == 0, done.output
        assert "accounted for" not in done.output
