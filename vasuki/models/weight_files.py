"""The files that hold a model's weights, and the tensors that their headers promise: looked at without reading them.

A header of a safetensors file says everything but the numbers:

    8 bytes        length of the header
    header         {name: {dtype, shape, data_offsets: [begin, end]}}, as JSON
    the numbers    to the largest `end`
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.models.files import IS_POINTER, POINTER, description_folder

_ALONE, _PICKLED, _ADAPTER = "model.safetensors", "pytorch_model.bin", "adapter_config.json"
_MERGE = "which is not applied: merge the two (merge_and_unload of peft), or take the adapter out of the folder"
_MOST_HEADER_BYTES = 100 * 2**20  # as in safetensors itself
_GGUF = b"GGUF"
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= dict.fromkeys(("I8", "U8", "BOOL"), 8)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a header describes it."""

    dtype: str  # as safetensors spells it, such as BF16
    shape: tuple[int, ...]


def weight_files(model: ModelConfig) -> list[Path]:
    """The files that transformers would read; none for a model whose weights are still on the hub.

    Raises:
        ModelError: there are none, some are missing, or they are of a kind that is not read.
    """
    folder = description_folder(model)
    adapter = (folder / _ADAPTER).is_file()
    for name in (_ALONE, f"{_ALONE}.index.json", _PICKLED, f"{_PICKLED}.index.json"):
        file = folder / name
        if not file.is_file():
            continue
        files = _shards(model, file) if name.endswith(".json") else [file]
        if name.startswith(_PICKLED) and not model.allow_pickle:
            raise ModelError(
                f"model {model.path}: {files[0].name} is a pickle, in which code can hide; convert it to safetensors, "
                "or set model.allow_pickle"
            )
        if adapter:
            raise ModelError(f"model {model.path}: {_ADAPTER} tells of an adapter for the model, {_MERGE}")
        return files
    if not Path(model.path).expanduser().is_dir():
        return []
    raise ModelError(f"model {model.path} has no weights: {_what_is_there_instead(folder)}")


def stored_tensors(model: ModelConfig, files: list[Path]) -> dict[str, StoredTensor]:
    """The tensors in safetensors files, by name. Raises ModelError for a file that is no such, or was cut."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            tensors |= _header(file)
        except OSError as error:
            raise ModelError(f"cannot read model {model.path}: {file.name}: {error.strerror}") from None
        except ValueError as error:
            raise ModelError(f"cannot read model {model.path}: {file.name} {error}") from None
    return tensors


def _shards(model: ModelConfig, index: Path) -> list[Path]:
    """The files that an index names, all of which are there."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"model {model.path}: {index.name} is no index of weights") from None
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {model.path}: {index.name} names {missing[0]}{more}, which the folder lacks")
    return files


def _what_is_there_instead(folder: Path) -> str:
    """What a folder without weights may hold in their place, and what helps."""
    if (folder / _ADAPTER).is_file():
        return "it holds an adapter alone; merge it into its base model (merge_and_unload of peft) and give that"
    if any(folder.glob("*.gguf")):
        return "GGUF is not read; take the model's safetensors"
    others = sorted({file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)})
    if others:
        return f"no {_ALONE}, nor an index that names {others[0]}"
    return f"no {_ALONE} in its folder"


def _header(file: Path) -> dict[str, StoredTensor]:
    """Raises OSError, and ValueError that says what the file is instead."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start == POINTER[:8]:
            raise ValueError(IS_POINTER)
        if start.startswith(_GGUF):
            raise ValueError("is GGUF, which is not read; take the model's safetensors")
        if not 0 < length <= _MOST_HEADER_BYTES:
            raise ValueError(f"is no safetensors file ({size:,} bytes)")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"ends in its header, after {size:,} bytes: copy or fetch it again")
    try:
        entries = json.loads(text)
        tensors = {name: _tensor(entry) for name, entry in entries.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError("has a header that is no safetensors header") from None
    if size != whole:
        raise ValueError(f"has {size:,} bytes, its header promises {whole:,}: copy or fetch it again")
    return tensors


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])))
    bits = _BITS.get(tensor.dtype)
    if bits is not None and math.prod(tensor.shape) * bits != 8 * (end - begin):
        raise ValueError("a shape that its bytes do not fill")
    return tensor
