"""Files that lack what a model computes with, or hold what it does not read, are refused by name, before and while it
is loaded; what transformers itself saves is taken."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_model

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.hf.loading.accounting import refuse_unscaled
from vasuki.hf.loading.load_model import check_model, load_model
from vasuki.models.weight_files import StoredTensor

TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "dates"
Tensors = dict[str, torch.Tensor]


def saved(name: str, folder: Path) -> Path:
    """A tiny model as transformers writes it."""
    random_model.__wrapped__(name).save_pretrained(folder)  # no other test's, which may have wrapped its layers
    for file in TOKENIZER.glob("token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["up.weight", "up.weight_scale_inv"], False),
        (["up.weight", "up.weight_scale", "up.input_scale"], False),
        (["experts.gate_up_proj", "experts.gate_up_proj_scale_inv"], False),
        (["w1.weight", "w1.scale"], False),
        (["up.weight", "down.weight", "down.weight_scale_inv"], True),
        (["up.weight", "up.input_scale"], True),
        (["up.weight", "up.activation_scale"], True),
        (["attn.q.weight", "attn.k_scale"], True),
    ],
)
def test_weights_of_8_bits_have_a_scale_beside_them(names: list[str], refused: bool) -> None:
    stored = {name: StoredTensor("F32" if "scale" in name else "F8_E4M3", (16, 16)) for name in names}
    with pytest.raises(ModelError, match=names[0]) if refused else nullcontext():
        refuse_unscaled("here", stored)


def spoil(folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> None:
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | config))


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def scaled(tensors: Tensors) -> Tensors:
    scales = {f"{name}_scale": torch.ones(1) for name in tensors if "_proj" in name}
    return {name: t.to(torch.float8_e4m3fn) if "_proj" in name else t for name, t in tensors.items()} | scales


def whole_numbers(tensors: Tensors) -> Tensors:
    return {name: t.to(torch.int8) if "_proj" in name else t for name, t in tensors.items()}


def classifying(tensors: Tensors) -> Tensors:
    return without("lm_head")(tensors) | {"score.weight": torch.ones(2, 32)}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], list[str]]] = {
    "no head": (without("lm_head"), {}, ["lack lm_head.weight [97, 32]"]),
    "a layer is missing": (without("layers.2."), {}, ["lack 9 tensors model.layers.2.*.weight", "input_layernorm"]),
    "a layer too many": (lambda tensors: tensors, {"num_hidden_layers": 2}, ["hold 9 tensors model.layers.2.*.weight"]),
    "compiled": (prefixed("_orig_mod."), {}, ["lack", "_orig_mod.", "torch.compile"]),
    "parallel": (prefixed("module."), {}, ["lack", "module.", "DistributedDataParallel"]),
    "another task": (classifying, {}, ["lack lm_head.weight [97, 32]", "they hold score.weight instead"]),
    "scales": (scaled, {}, ["21 tensors model.layers.*.weight_scale", "does not read"]),
    "whole numbers": (whole_numbers, {}, ["21 tensors", "integers", "quantization_config"]),
    "biases": (
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
        {},
        ["model.layers.0.self_attn.q_proj.bias [32]", "does not read"],
    ),
    "a norm": (
        lambda tensors: tensors | {"model.layers.1.self_attn.q_norm.weight": torch.ones(8)},
        {},
        ["model.layers.1.self_attn.q_norm.weight [8]"],
    ),
    "vocabulary": (
        lambda tensors: tensors,
        {"vocab_size": 99},
        ["model.embed_tokens.weight is [97, 32] in its files, config.json wants [99, 32]", "lm_head.weight is"],
    ),
    "unknown quantisation": (
        lambda tensors: tensors,
        {"quantization_config": {"quant_method": "theirs"}},
        ["quantised by theirs"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_accounted_for_is_refused_in_the_same_words_before_loading(tmp_path: Path, case: str) -> None:
    change, config, words = REFUSED[case]
    spoil(saved("llama", tmp_path), change, **config)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError) as refused:
        load_model(model, "cpu", compiles=False)
    for word in words:
        assert word in str(refused.value)
    with pytest.raises(ModelError) as foreseen:
        check_model(model, "cpu")
    assert str(foreseen.value) == str(refused.value)


@pytest.mark.parametrize(
    "extra",
    [
        "score.weight",
        "mtp.layers.0.eh_proj.weight",
        "vision_tower.blocks.0.attn.qkv.bias",
        "model.layers.0.attn.k_scale",
    ],
)
def test_what_no_model_reads_is_let_go(tmp_path: Path, extra: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil(saved("llama", tmp_path), lambda tensors: tensors | {extra: torch.ones(3, 5)})
    model = ModelConfig(path=str(tmp_path))
    with caplog.at_level(logging.INFO):
        check_model(model, "cpu")
        load_model(model, "cpu", compiles=False)
    assert ("k_scale" in extra) or caplog.text.count(f"{extra} [3, 5]") == 2


@pytest.mark.parametrize(
    "name", ["llama", "gpt_neox", "qwen3_moe", "deepseek_v3", "gemma4", "gpt_oss", "jamba", "falcon", "bart", "mamba"]
)
def test_what_transformers_saves_is_whole(tmp_path: Path, name: str) -> None:
    """Tied heads, experts that are renamed and joined, buffers, other backends."""
    check_model(ModelConfig(path=str(saved(name, tmp_path))), "cpu")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _gguf(file: Path) -> None:
    file.rename(file.with_name("model.gguf"))


def _adapter(file: Path) -> None:
    file.with_name("adapter_config.json").write_text("{}")


def _gone_shard(file: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors", "a": "model-2.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    file.rename(file.with_name("model-1.safetensors"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cut, "its header promises"),
        (_pointer, "git lfs pull"),
        (_gguf, "GGUF is not read"),
        (_adapter, "an adapter for the model"),
        (_gone_shard, "names model-2.safetensors, which the folder lacks"),
    ],
)
def test_files_that_hold_no_weights_are_named(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    change(saved("llama", tmp_path) / "model.safetensors")
    model = ModelConfig(path=str(tmp_path))
    for load in (check_model, load_model):
        with pytest.raises(ModelError, match=words):
            load(model, "cpu")
