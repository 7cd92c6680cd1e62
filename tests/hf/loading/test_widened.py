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
