"""The JSON schema of job.yaml, by which editors complete and check it."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

from vasuki.base import config, config_values
from vasuki.base.config import JobConfig

NAME = "job.schema.json"


def job_schema() -> dict[str, Any]:
    """Every key of a job file, with what it may be and what it means."""
    schema = _any_of(JobConfig.model_json_schema())
    for section in (schema, *schema["$defs"].values()):
        meanings = meanings_of(section["title"])
        for key, part in section.get("properties", {}).items():
            part.pop("title", None)
            if meaning := meanings.get(key):
                part["description"] = " ".join(meaning.split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A job of vasuki"}


def _any_of(schema: Any) -> Any:
    """The schema, with values allowed that two members of a union describe."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _any_of(part) for key, part in schema.items()}
    return [_any_of(part) for part in schema] if isinstance(schema, list) else schema


def meanings_of(section: str) -> dict[str, str]:
    """The docstrings below the keys of a section. pydantic could read them too, but would do so at every start."""
    return {
        key.target.id: str(text.value.value)
        for module in (config, config_values)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == section
        for key, text in itertools.pairwise(node.body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
