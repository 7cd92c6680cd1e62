"""`vasuki check` ends as the run would: with the same code and the same words, for whatever a run refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tiny_job import job_tree
from tiny_models import random_model

from vasuki.commands.cli import main

Cases = dict[str, tuple[Callable[["Place"], object], int, str]]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@dataclass
class Place:
    """A good job in a folder, to be spoiled."""

    folder: Path
    tree: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    @property
    def rows(self) -> Path:
        return self.folder / "in.jsonl"

    def set(self, **values: Any) -> None:
        """`section__key=value`."""
        for name, value in values.items():
            section, key = name.split("__")
            self.tree.setdefault(section, {})[key] = value

    def json(self, name: str, **keys: Any) -> None:
        """Keys of a file of the model; None takes one away."""
        file = self.model / name
        tree = (json.loads(file.read_text()) if file.exists() else {}) | keys
        file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))

    def tensors(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        changed = {name: tensor.contiguous() for name, tensor in change(load_file(self.weights)).items()}
        save_file(changed, self.weights, metadata={"format": "pt"})

    def family(self, name: str) -> None:
        """Another model, with the same tokenizer."""
        self.weights.unlink()
        random_model.__wrapped__(name).save_pretrained(self.model)

    def vasuki(self, command: str, *arguments: str) -> Result:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(self.tree))
        return CliRunner().invoke(main, [command, str(self.folder / "job.yaml"), *arguments])


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Place:
    shutil.copytree(tiny_model, tmp_path / "model")
    rows = [
        {"id": name, "text": "the cat sat", "n": 1, "m": [{"role": "user", "content": "two dogs"}]} for name in "ab"
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(tmp_path, job_tree(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out"))


def _shards(place: Place, *there: str) -> None:
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors", "model.norm.weight": "model-2.safetensors"}}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in there:
        shutil.copy(place.weights, place.model / name)
    place.weights.unlink()


def _pickled(place: Place) -> None:
    torch.save(load_file(place.weights), place.model / "pytorch_model.bin")
    place.weights.unlink()


def _remote_code(place: Place) -> None:
    (place.model / "theirs.py").write_text("class Theirs: ...\n")
    place.json("config.json", model_type="theirs", auto_map={"AutoConfig": "theirs.Theirs"})


def _encoder(place: Place) -> None:
    place.weights.unlink()
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64)
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(place.model)


def _encoder_decoder(place: Place) -> None:
    place.weights.unlink()
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(place.model)


def _without(part: str) -> Callable[[Place], None]:
    return lambda place: place.tensors(lambda tensors: {name: t for name, t in tensors.items() if part not in name})


def _no_tokenizer(place: Place) -> None:
    for file in place.model.glob("token*"):
        file.unlink()


def each(*changes: Callable[[Place], object]) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        for one in changes:
            one(place)

    return change


def _parquet(place: Place, table: Any) -> None:
    pq.write_table(table, place.folder / "in.parquet")
    place.set(input__path=str(place.folder / "in.parquet"))


MODELS: Cases = {
    "no folder": (lambda p: p.set(model__path="./nowhere"), 4, "no such folder"),
    "no folder, and no name of the hub's": (lambda p: p.set(model__path="a/b/c"), 4, "no name"),
    "a folder without a model": (lambda p: p.set(model__path=str(p.folder)), 4, "no config.json"),
    "a config that is no JSON": (lambda p: (p.model / "config.json").write_text("{"), 4, "config.json"),
    "a config that is a list": (lambda p: (p.model / "config.json").write_text("[1]"), 4, "config.json"),
    "a config that is a folder": (
        each(lambda p: (p.model / "config.json").unlink(), lambda p: (p.model / "config.json").mkdir()),
        4,
        "no config.json",
    ),
    "a config of bytes": (lambda p: (p.model / "config.json").write_bytes(b"\xff\xfe\x00"), 4, "config.json"),
    "a config without a type": (lambda p: p.json("config.json", model_type=None), 4, "model_type"),
    "an unknown type": (lambda p: p.json("config.json", model_type="llama9"), 4, "llama9"),
    "a type that is a number": (lambda p: p.json("config.json", model_type=7), 4, "7"),
    "no layers": (lambda p: p.json("config.json", num_hidden_layers=0), 4, ""),
    "a size that is text": (lambda p: p.json("config.json", hidden_size="wide"), 4, "sizes that are not understood"),
    "a size that is nothing": (lambda p: p.json("config.json", hidden_size=0), 4, ""),
    "heads that do not divide": (lambda p: p.json("config.json", num_attention_heads=5, head_dim=None), 4, ""),
    "an unknown activation": (lambda p: p.json("config.json", hidden_act="sigh"), 4, "sigh"),
    "a vocabulary of another size": (lambda p: p.json("config.json", vocab_size=330), 4, "[320, 32]"),
    "layers of an unknown kind": (lambda p: p.json("config.json", layer_types=["odd", "odd"]), 4, "layer_types"),
    "code that comes along": (_remote_code, 4, "trust_remote_code"),
    "a quantisation that nobody knows": (
        lambda p: p.json("config.json", quantization_config={"quant_method": "theirs"}),
        4,
        "theirs",
    ),
    "a quantisation whose package is not there": (
        lambda p: p.json("config.json", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}),
        4,
        "AWQ",
    ),
    "8 bits without scales": (
        each(
            lambda p: p.json("config.json", quantization_config={"quant_method": "fp8"}),
            lambda p: p.tensors(
                lambda held: {n: t.to(torch.float8_e4m3fn) if "_proj" in n else t for n, t in held.items()}
            ),
        ),
        4,
        "in 8 bits, and lack what they are to be multiplied by",
    ),
    "a quantisation by gptq": (
        lambda p: p.json("config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        4,
        "",
    ),
    "a quantisation by bitsandbytes": (
        lambda p: p.json("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        4,
        "",
    ),
    "a quantisation that is text": (lambda p: p.json("config.json", quantization_config="int4"), 4, ""),
    "no weights": (lambda p: p.weights.unlink(), 4, "no weights"),
    "weights of another name": (lambda p: p.weights.rename(p.model / "theirs.safetensors"), 4, "theirs.safetensors"),
    "GGUF alone": (lambda p: p.weights.rename(p.model / "model.gguf"), 4, "GGUF is not read"),
    "GGUF by another name": (lambda p: p.weights.write_bytes(b"GGUF" + bytes(100)), 4, "GGUF"),
    "an adapter alone": (
        each(lambda p: p.json("adapter_config.json"), lambda p: p.weights.unlink()),
        4,
        "merge it into its base model",
    ),
    "an adapter for the model": (lambda p: p.json("adapter_config.json"), 4, "merge the two"),
    "a pickle": (_pickled, 4, "allow_pickle"),
    "a pickle that is a pointer": (
        each(
            lambda p: p.weights.unlink(),
            lambda p: (p.model / "pytorch_model.bin").write_bytes(LFS),
            lambda p: p.set(model__allow_pickle=True),
        ),
        4,
        "git lfs",
    ),
    "a pickle that is cut": (
        each(
            lambda p: _pickled(p),
            lambda p: (p.model / "pytorch_model.bin").write_bytes((p.model / "pytorch_model.bin").read_bytes()[:500]),
            lambda p: p.set(model__allow_pickle=True),
        ),
        4,
        "pytorch_model.bin",
    ),
    "a pickle that is empty": (
        each(
            lambda p: p.weights.unlink(),
            lambda p: (p.model / "pytorch_model.bin").touch(),
            lambda p: p.set(model__allow_pickle=True),
        ),
        4,
        "pytorch_model.bin",
    ),
    "a shard that is not there": (lambda p: _shards(p, "model-1.safetensors"), 4, "model-2.safetensors, which"),
    "shards that are not there": (_shards, 4, "and 1 more"),
    "an index that is none": (
        each(lambda p: (p.model / "model.safetensors.index.json").write_text("[]"), lambda p: p.weights.unlink()),
        4,
        "is no index",
    ),
    "a shard that is a pointer": (
        each(
            lambda p: _shards(p, "model-1.safetensors", "model-2.safetensors"),
            lambda p: (p.model / "model-2.safetensors").write_bytes(LFS),
        ),
        4,
        "git lfs pull",
    ),
    "a pointer": (lambda p: p.weights.write_bytes(LFS), 4, "git lfs pull"),
    "weights that are cut": (lambda p: p.weights.write_bytes(p.weights.read_bytes()[:-9]), 4, "promises"),
    "weights that are cut in their header": (lambda p: p.weights.write_bytes(p.weights.read_bytes()[:99]), 4, "header"),
    "weights that are empty": (lambda p: p.weights.write_bytes(b""), 4, "0 bytes"),
    "weights of something else": (lambda p: p.weights.write_bytes(b"<html>" * 99), 4, "no safetensors file"),
    "weights that are a folder": (each(lambda p: p.weights.unlink(), lambda p: p.weights.mkdir()), 4, "no weights"),
    "a head that is missing": (_without("lm_head"), 4, "lack lm_head.weight"),
    "a layer that is missing": (_without("layers.1."), 4, "lack 9 tensors"),
    "an encoder": (_encoder, 4, "attend to those behind them"),
    "an encoder-decoder": (_encoder_decoder, 4, "an encoder (config key"),
    "a kind without a language": (
        lambda p: p.json("config.json", model_type="vit", architectures=["ViTModel"]),
        4,
        "ViT",
    ),
    "a model for the other backend": (
        each(lambda p: p.family("falcon"), lambda p: p.set(engine__attention="ragged")),
        4,
        "ragged",
    ),
    "a model of its own cache": (
        each(lambda p: p.family("mamba"), lambda p: p.set(engine__attention="ragged")),
        4,
        "ragged",
    ),
    "no CUDA device": (lambda p: p.set(engine__device="cuda"), 4, "no CUDA device"),
    "no model but a shape": (
        each(lambda p: p.tree["model"].pop("path"), lambda p: p.set(model__shape="llama-3-8b")),
        4,
        "model.shape",
    ),
    "an unknown shape": (
        each(lambda p: p.tree["model"].pop("path"), lambda p: p.set(model__shape="llama-9")),
        4,
        "llama-9",
    ),
    "no tokenizer": (_no_tokenizer, 4, "no tokenizer.json in it, nor a file that one could be made of"),
    "no tokenizer.json": (lambda p: (p.model / "tokenizer.json").unlink(), 4, "tokenizer.json"),
    "a tokenizer that is no JSON": (lambda p: (p.model / "tokenizer.json").write_text("{"), 4, "tokenizer.json"),
    "a tokenizer of nothing": (lambda p: (p.model / "tokenizer.json").write_text("{}"), 4, "tokenizer"),
    "tokenizer settings that are no JSON": (
        lambda p: (p.model / "tokenizer_config.json").write_text("{"),
        4,
        "tokenizer_config.json is not valid JSON",
    ),
    "a tokenizer of an unknown class": (
        each(
            lambda p: p.json("tokenizer_config.json", tokenizer_class="TheirTokenizer"),
            lambda p: (p.model / "tokenizer.json").unlink(),
        ),
        4,
        "tokenizer",
    ),
    "a tokenizer of SentencePiece": (
        each(
            lambda p: p.json("tokenizer_config.json", tokenizer_class="LlamaTokenizer"),
            lambda p: (p.model / "tokenizer.json").unlink(),
            lambda p: (p.model / "tokenizer.model").write_bytes(b"\x0a\x0b"),
        ),
        4,
        "sentencepiece",
    ),
    "a tokenizer that is a pointer": (lambda p: (p.model / "tokenizer.json").write_bytes(LFS), 4, "git lfs"),
    "a config that is a pointer": (lambda p: (p.model / "config.json").write_bytes(LFS), 4, "git lfs"),
    "no chat template": (
        each(lambda p: (p.model / "chat_template.jinja").unlink(), lambda p: p.set(input__chat=True)),
        4,
        "no chat template",
    ),
}

INPUTS: Cases = {
    "no file": (lambda p: p.rows.unlink(), 4, "does not exist"),
    "an empty folder": (
        each(lambda p: (p.folder / "rows").mkdir(), lambda p: p.set(input__path=str(p.folder / "rows"))),
        4,
        "holds no files",
    ),
    "a format that the name does not tell": (
        lambda p: p.set(input__path=str(p.rows.rename(p.folder / "in.rows"))),
        2,
        "does not tell its format",
    ),
    "several formats": (
        each(
            lambda p: (p.folder / "in.csv").write_text("id,text\n"), lambda p: p.set(input__path=str(p.folder / "in.*"))
        ),
        2,
        "mixes formats",
    ),
    "Parquet that is none": (
        lambda p: p.set(input__path=str(p.rows.rename(p.folder / "in.parquet"))),
        4,
        "as Parquet",
    ),
    "a pack that is none": (
        lambda p: p.set(input__path=str(p.rows.rename(p.folder / "in.jsonl.gz"))),
        4,
        "in.jsonl.gz",
    ),
    "CSV without a header": (
        each(lambda p: (p.folder / "in.csv").touch(), lambda p: p.set(input__path=str(p.folder / "in.csv"))),
        4,
        "is empty",
    ),
    "CSV of bytes": (
        each(
            lambda p: (p.folder / "in.csv").write_bytes(b"id,text\na,\xff\xfe\n"),
            lambda p: p.set(input__path=str(p.folder / "in.csv"), input__csv={"encoding": "utf-8"}),
        ),
        4,
        "in.csv",
    ),
    "settings for CSV": (lambda p: p.set(input__csv={"delimiter": ";"}), 2, "input.csv goes with CSV"),
    "a column twice": (
        each(
            lambda p: (p.folder / "in.csv").write_text("id,text,text\na,b,c\n"),
            lambda p: p.set(input__path=str(p.folder / "in.csv")),
        ),
        4,
        "several columns named 'text'",
    ),
    "no such column": (lambda p: p.set(input__prompt="{words}"), 2, "names column 'words'"),
    "no such id": (lambda p: p.set(input__id="name"), 2, "names column 'name'"),
    "no such column to copy": (lambda p: p.set(output__columns=["more"]), 2, "names column 'more'"),
    "no such column of a setting": (lambda p: p.set(sampling__top_p={"column": "p"}), 2, "names column 'p'"),
    "a column of the answer": (lambda p: p.set(output__columns=["error"]), 2, "is a column of the answer"),
    "a column copied twice": (lambda p: p.set(output__columns=["text", "text"]), 2, "twice"),
    "ids that are not unique": (lambda p: p.rows.write_text('{"id": 1, "text": "a"}\n' * 2), 2, "not unique"),
    "a row without an id": (lambda p: _parquet(p, pa.table({"id": [None, "b"], "text": ["a", "b"]})), 2, "has no id"),
    "a template that is none": (lambda p: p.set(input__prompt="{text"), 2, "input.prompt"),
    "a template without a name": (lambda p: p.set(input__prompt="{}"), 2, "names no column"),
    "a template that reaches further": (lambda p: p.set(input__prompt="{text!r}"), 2, "plain column name"),
    "a template without a column": (lambda p: p.set(input__prompt="hello"), 2, "names no column"),
    "messages without a column": (
        each(
            lambda p: p.tree["input"].pop("prompt"),
            lambda p: p.set(input__messages=[{"role": "user", "content": "hello"}], input__chat="auto"),
        ),
        2,
        "names no column",
    ),
    "the output among the input": (
        each(
            lambda p: (p.folder / "out").mkdir(),
            lambda p: p.rows.rename(p.folder / "out" / "in.jsonl"),
            lambda p: p.set(input__path=str(p.folder / "out" / "*.jsonl")),
        ),
        2,
        "holds the input file",
    ),
    "an output that is a file": (lambda p: (p.folder / "out").touch(), 2, "is a file"),
}

JOBS: Cases = {
    "no section": (lambda p: p.tree.pop("input"), 2, "input"),
    "an unknown key": (lambda p: p.set(engine__speed=3), 2, "speed"),
    "an unknown policy": (lambda p: p.set(engine__policy="lifo"), 2, "lifo"),
    "a policy that pads": (lambda p: p.set(engine__policy="baton"), 2, "engine.attention: padded"),
    "an unknown card": (lambda p: p.set(plan__gpu="a11"), 4, "a11"),
    "a profile that is none": (
        each(
            lambda p: (p.folder / "mine.yaml").write_text("[]"), lambda p: p.set(plan__gpu=str(p.folder / "mine.yaml"))
        ),
        4,
        "mine.yaml",
    ),
    "memory for no block": (lambda p: p.set(kv__device_memory="1KiB"), 4, "kv.device_memory"),
    "more host memory than there is": (
        lambda p: p.set(kv__host_memory="900TiB", kv__offload="park"),
        2,
        "kv.host_memory",
    ),
    "more devices than there are": (lambda p: p.set(engine__replicas=4096), 2, "engine.replicas"),
    "more layers on the host than there are": (lambda p: p.set(engine__weights_on_host=9), 4, ""),
    "numbers of an unknown type": (lambda p: p.set(model__dtype="float13"), 2, "float13"),
    "a model's code": (lambda p: p.set(model__trust_remote_code=True), 2, "trust_remote_code"),
}


REFUSED = {**MODELS, **INPUTS, **JOBS}


@pytest.mark.parametrize("name", REFUSED)
def test_check_ends_as_the_run(place: Place, name: str) -> None:
    change, code, words = REFUSED[name]
    change(place)
    checked, run = place.vasuki("check"), place.vasuki("run")
    assert checked.exit_code == code, checked.stderr
    assert words in checked.stderr
    assert len(checked.stderr.splitlines()) == 1
    assert (run.exit_code, _said(run)[-1:]) == (code, _said(checked))


def _said(result: Result) -> list[str]:
    """Lines, without how much memory other programs have left meanwhile."""
    return re.sub(r"[\d.]+ GiB are free", "some is free", result.stderr).splitlines()


def test_a_plan_ends_as_the_run_for_an_unknown_type(place: Place) -> None:
    place.json("config.json", model_type="llama9")
    planned, run = place.vasuki("plan"), place.vasuki("run")
    assert (planned.exit_code, planned.stderr) == (4, run.stderr.splitlines()[-1] + "\n")
    assert "knows no model_type 'llama9' (did you mean 'llama'?)" in planned.stderr
    place.json("config.json", model_type="gemma3_text")  # without a folder of its own in transformers
    assert place.vasuki("plan").exit_code == 0
