"""A model of a well-known shape with random weights, on the spot: 16 GB in half a minute, for jobs that only measure.

    make_model.py FOLDER [--shape llama-3-8b]

Weights are in bfloat16, a file for each layer. All are cut from the same random numbers, which takes no longer than
copying them. The tokenizer is that of the shipped model, which knows few of the vocabulary's tokens: prompts are best
given as token ids.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vasuki.base.errors import ModelError
from vasuki.models.named import NAMED_CONFIGS, named_shape

_SHIPPED = Path(__file__).resolve().parents[2] / "models" / "dates"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_NUMBERS = 2**24 + 43  # drawn once: an odd number, so that no two rows of a matrix are the same
_DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is written to")
    parser.add_argument("--shape", default="llama-3-8b", help="a well-known model")
    options = parser.parse_args()
    try:
        tree = NAMED_CONFIGS[named_shape(options.shape).name]
    except ModelError as error:
        parser.error(str(error))
    print(json.dumps({"folder": str(options.folder), "bytes": write_model(options.folder, tree)}))


def write_model(folder: Path, tree: dict[str, Any], seed: int = 0) -> int:
    """Write a model as transformers saves it, of a `config.json` like this. Returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    family = {key: value for key, value in tree.items() if key != "model_type"}
    with torch.device("meta"):
        config = AutoConfig.for_model(tree["model_type"], **family)
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copy(_SHIPPED / name, folder)
    files: defaultdict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, parameter in model.named_parameters():  # one that is tied comes once
        layer = re.search(r"\blayers\.(\d+)\.", name)
        files[f"model-{layer[1] if layer else 'others'}.safetensors"][name] = parameter.shape
    weights = _Weights(seed, getattr(config, "initializer_range", 0.02))
    for file, shapes in files.items():
        tensors = {name: weights.ones(shape) if "norm" in name else weights(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": weights.bytes}, "weight_map": {n: file for file in files for n in files[file]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return weights.bytes


class _Weights:
    """Cuts tensors from random numbers, each from where the last one ended, again and again from the first."""

    def __init__(self, seed: int, scale: float) -> None:
        drawn = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(seed))
        self._numbers = (scale * drawn).to(_DTYPE)
        self._at = 0
        self.bytes = 0

    def ones(self, shape: torch.Size) -> torch.Tensor:
        """Of a norm."""
        self.bytes += shape.numel() * _DTYPE.itemsize
        return torch.ones(shape, dtype=_DTYPE)

    def __call__(self, shape: torch.Size) -> torch.Tensor:
        self.bytes += shape.numel() * _DTYPE.itemsize
        tensor, done = torch.empty(shape.numel(), dtype=_DTYPE), 0
        while done < len(tensor):
            part = self._numbers[self._at : self._at + len(tensor) - done]
            tensor[done : done + len(part)] = part
            done, self._at = done + len(part), (self._at + len(part)) % _NUMBERS
        return tensor.view(shape)


if __name__ == "__main__":
    main()
