"""What a model's folder says of its tokenizer, before anything reads it: what splits text, and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LEGACY_TEMPLATE = "chat_template.json"  # as processors of multimodal models have it


def splits_by_file(folder: Path, trust_remote_code: bool = False) -> bool:
    """Whether tokenizer.json decides how text is split.

    It does where there is one: transformers' classes make their own splits from the vocabulary, which need not be those
    that the model was trained with. Only a class that comes with the model goes before it.
    """
    if not (folder / "tokenizer.json").is_file():
        return False
    own_class = read_json(folder / "tokenizer_config.json").get("auto_map") if trust_remote_code else None
    return not own_class


def legacy_template(folder: Path) -> str | None:
    """The chat template in chat_template.json, if there is one.

    Raises:
        ValueError: the file is something else.
    """
    tree = read_json(folder / LEGACY_TEMPLATE)
    template = tree.get("chat_template")
    if tree and not isinstance(template, str):
        raise ValueError(f"{LEGACY_TEMPLATE} has no chat_template in it that is text")
    return template


def read_json(file: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none. Raises ValueError if it is no JSON object."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
