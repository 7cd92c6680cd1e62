"""Whether transformers knows a model's type, looked up without importing it, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vasuki.base.errors import ModelError, did_you_mean

_TABLES = ("auto_mappings.py", "configuration_auto.py")  # in which all types are written


def refuse_unknown_type(path: str, config: Mapping[str, Any]) -> None:
    """Refuse a config.json whose type neither transformers knows nor code that comes with the model.

    Args:
        path: as errors call the model.
        config: what it holds.

    Raises:
        ModelError: by name.
    """
    if "model_type" not in config or "auto_map" in config:
        return
    name = str(config["model_type"])
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec else None
    for file in (Path(place, "models", "auto", table) for place in places or () for table in _TABLES):
        if file.is_file() and f'"{name}"' in file.read_text(encoding="utf-8"):
            return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        raise ModelError(
            f"cannot read model {path}: transformers {metadata.version('transformers')} knows no model_type '{name}'"
            f"{did_you_mean(name, CONFIG_MAPPING)}; a newer one may"
        )
