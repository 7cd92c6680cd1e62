"""Which model answers, by the content of its files: a copy elsewhere is the same model, other weights are another one.

    config.json, tokenizer, chat template, ...    whole
    weights                                       size, table of tensors, and samples of every part of the file
    a model from the hub                          its commit stands for everything

Samples take milliseconds where a hash of everything takes minutes. They see every change to a whole tensor, and miss
one that stays between them: somebody who edits single numbers of a large file has to use `--fresh`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.models.files import DESCRIPTION, description_folder

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLE_BYTES = 4096
_SPREAD_SAMPLES = 64  # of a file, at equal distances
_TENSOR_SAMPLES = 256  # of a file at most, in the midst of tensors: a layer that was tuned by itself is small
_MOST_HEADER_BYTES = 100 * 2**20  # as in safetensors itself
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_fingerprint(model: ModelConfig) -> str:
    """What decides a model's answers, as 32 hexadecimal digits. Its path does not, nor what it is loaded with.

    Raises:
        ModelError: there is no such model, or a file of it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    if model.shape:
        digest.update(model.shape.encode())
        return digest.hexdigest()
    folder = description_folder(model)
    if commit := _commit_of(folder):
        digest.update(commit.encode())
        return digest.hexdigest()
    patterns = (*DESCRIPTION, "additional_chat_templates/*", *(("*.py",) if model.trust_remote_code else ()))
    try:
        for file in _matching(folder, patterns):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
        for file in weights_in(folder):
            digest.update(f"{file.name}\0".encode())
            with file.open("rb", buffering=0) as stream:
                for piece in _weight_samples(stream, file.stat().st_size):
                    digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read model {model.path}: {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def weights_in(folder: Path) -> list[Path]:
    """The weight files of a model's folder, by name."""
    return _matching(folder, _WEIGHTS)


def _commit_of(folder: Path) -> str:
    """The commit of a model in the hub's local cache; empty for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else ""


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _weight_samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The size, a safetensors header, and samples of what follows."""
    yield size.to_bytes(8, "little")
    offsets = {size * index // _SPREAD_SAMPLES for index in range(_SPREAD_SAMPLES)} | {max(0, size - _SAMPLE_BYTES)}
    header_bytes = int.from_bytes(file.read(8), "little")
    if 0 < header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
        header = file.read(header_bytes)
        yield header
        offsets |= {8 + header_bytes + middle for middle in _tensor_middles(header)}
    for offset in sorted(offsets):
        file.seek(offset)
        yield file.read(_SAMPLE_BYTES)


def _tensor_middles(header: bytes) -> list[int]:
    """Where tensors have their middles, in bytes after the header, thinned out evenly where there are many."""
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        middles = [sum(entry["data_offsets"]) // 2 for entry in tensors]
    except (ValueError, AttributeError, KeyError, TypeError):  # some other kind of file
        return []
    return middles[:: 1 + len(middles) // _TENSOR_SAMPLES]
