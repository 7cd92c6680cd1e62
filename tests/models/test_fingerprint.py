from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.models.fingerprint import model_fingerprint

TENSOR_BYTES = 2**16


def print_of(folder: Path | str, **options: Any) -> str:
    return model_fingerprint(ModelConfig(path=str(folder), **options))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 400 tensors in one file, all of zeros."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    table = {
        f"layer{i}": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i in range(200)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(200 * TENSOR_BYTES)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def change(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = print_of(model)
    shutil.copytree(model, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("# A model")
    os.utime(tmp_path / "elsewhere" / "config.json", (1, 1))
    assert print_of(tmp_path / "elsewhere") == first
    monkeypatch.chdir(tmp_path)
    assert print_of("elsewhere") == first
    assert print_of(model, revision="main") == first, "a folder has no revisions"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"])
def test_other_words_are_another_model(model: Path, name: str) -> None:
    first = print_of(model)
    (model / name).write_text('{"other": 1}')
    assert print_of(model) != first


def test_every_tensor_counts(model: Path) -> None:
    """A layer that was tuned by itself is seen, wherever it lies in the file."""
    first, file = print_of(model), model / "model.safetensors"
    rng = np.random.default_rng(0)
    start = file.stat().st_size - 200 * TENSOR_BYTES
    for tensor in (0, 57, 123, 199):
        before = file.read_bytes()
        change(file, start + tensor * TENSOR_BYTES, rng.bytes(TENSOR_BYTES))
        assert print_of(model) != first
        file.write_bytes(before)
    assert print_of(model) == first


def test_code_that_comes_along_counts_where_it_runs(model: Path) -> None:
    first = print_of(model)
    (model / "modeling.py").write_text("1")
    assert print_of(model) == first
    trusted = print_of(model, trust_remote_code=True)
    (model / "modeling.py").write_text("2")
    assert print_of(model, trust_remote_code=True) != trusted


def test_files_that_are_no_safetensors(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"\xff" * 100)
    (model / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"[1,2]" + b"x")
    first = print_of(model)
    change(model / "pytorch_model.bin", 50, b"0")
    assert print_of(model) != first


def test_a_commit_stands_for_a_model_from_the_hub(model: Path, tmp_path: Path) -> None:
    """Its weights may still have to come."""
    commit = tmp_path / "hub" / "snapshots" / ("0123456789" * 4)
    shutil.copytree(model, commit)
    first = print_of(commit)
    (commit / "model.safetensors").unlink()
    assert print_of(commit) == first
    assert print_of(commit.rename(commit.with_name("f" * 40))) != first


def test_shapes_have_names() -> None:
    first = model_fingerprint(ModelConfig(shape="llama-3-8b"))
    assert model_fingerprint(ModelConfig(shape="llama-2-7b")) != first


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_a_pipe_in_a_model_is_not_waited_for(model: Path, name: str) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    (model / "notes.txt").symlink_to("nowhere")
    with pytest.raises(ModelError, match=rf"cannot read model {model}: {model / name}: it is a pipe"):
        print_of(model)
