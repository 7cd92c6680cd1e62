"""job.yaml -> JobConfig.

`--set key.path=value` is applied to the YAML tree before it is checked, so that the command line obeys the same rules
as the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from vasuki.base.config import JobConfig
from vasuki.base.config_values import MOST_BYTES, Section
from vasuki.base.errors import JobFileError, one_line
from vasuki.base.files import read_short
from vasuki.base.schema import explain
from vasuki.base.yaml_text import read_yaml


def load_job(path: str | Path, overrides: Iterable[str] = (), trusts_code: bool = False) -> JobConfig:
    """Read a job file and apply `key.path=value` overrides.

    Args:
        path: of the file; `/dev/stdin` reads what is piped in.
        overrides: replace what the file says.
        trusts_code: whether code that comes with a model may run, if the job asks for it too.

    Raises:
        JobFileError: the file is missing, is not YAML, does not describe a job, or asks for a model's code untrusted.
    """
    try:
        tree = read_yaml(read_short(path, MOST_BYTES))
    except OSError as error:
        raise JobFileError(f"cannot read job file {path}: {error.strerror or error}") from None
    except ValueError as error:  # also if it is not UTF-8
        raise JobFileError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise JobFileError(f"{path} does not describe a job: expected keys such as model, input and output")
    config = parse_overrides(overrides, tree, source=str(path))
    if config.model.trust_remote_code and not trusts_code:
        raise JobFileError(
            f"{path}: model.trust_remote_code runs code that comes with {config.model.path}; if you trust its author, "
            "add --trust-remote-code, or set VASUKI_TRUST_REMOTE_CODE=1"
        )
    return config


def parse_overrides(overrides: Iterable[str], tree: dict[str, Any], source: str = "--set") -> JobConfig:
    """Apply `key.path=value` overrides to a tree and check it."""
    for override in overrides:
        _apply_override(tree, override)
    return parse_job(tree, source)


def parse_job(tree: Mapping[str, Any], source: str = "job") -> JobConfig:
    """Check a parsed tree. Raises JobFileError with one line that names every mistake."""
    try:
        return JobConfig.model_validate(tree)
    except pydantic.ValidationError as error:
        raise JobFileError(f"{source}: " + "; ".join(explain(error, JobConfig))) from None


def _is_text(path: Sequence[str]) -> bool:
    """Whether the setting at this path is text and nothing else."""
    kind: Any = JobConfig
    for key in path:
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        kind = kind.model_fields[key].annotation if is_section and key in kind.model_fields else None
    return kind is str


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise JobFileError(f"--set {override!r}: write it as key.path=value")
    *parents, last = dotted.split(".")
    try:
        value = read_yaml(text)
    except ValueError:  # not YAML
        value = text
    is_quoted = isinstance(value, str) and text.lstrip()[:1] in ("'", '"')
    if _is_text([*parents, last]) and not is_quoted:  # though YAML reads `20261125`, `Translate: {text}` or `a # b`
        value = text.strip()  # in another way
    for key in parents:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise JobFileError(f"--set {override!r}: {key} is a value, not a section")
        tree = child
    tree[last] = value
