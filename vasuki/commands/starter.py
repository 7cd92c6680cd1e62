"""`vasuki init`: a job file to start from, or the shipped demo."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from vasuki.base.errors import JobFileError

_JOB = """\
# docs/job.md says what each key means, and lists the others
name: {name}
model: {{path: PATH_OR_HUB_ID}}            # a folder with config.json, weights and tokenizer, or a Hugging Face id
input:
  path: {folder}/prompts.jsonl            # Parquet, JSONL or CSV; a file, folder or glob
  id: id
  prompt: "Translate into French: {{text}}"   # sent in the model's chat template when it has one
output: {{path: {folder}/out, columns: [text]}}
sampling: {{max_tokens: 128, temperature: 0}}
errors: {{max_fraction: 0.01}}             # more failed rows than this end the run with exit code 3
"""
_PROMPTS = ["The cheese is on the table.", "Where is the library?", "It will rain tomorrow."]


# Each part of the demo: where it lies in a checkout, and what the job calls it there.
_DATES = {
    "job.yaml": ("jobs/quickstart.yaml", ""),
    "dates.parquet": ("jobs/data/dates.parquet", "jobs/data/dates.parquet"),
    "model": ("models/dates", "models/dates"),
}


def write_example(folder: str) -> list[str]:
    """Copy the shipped demo into a folder: a job that rewrites dates, its prompts and its small model.

    Raises:
        JobFileError: something is there already, cannot be written, or the demo is not part of this installation.
    """
    base, text = Path(folder), folder.rstrip("/")
    sources = {base / name: _shipped(name, checked_out) for name, (checked_out, _) in _DATES.items()}
    _refuse_existing(sources)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for path, source in sources.items():
            shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)
        job = base / "job.yaml"
        lines = job.read_text(encoding="utf-8").replace("path: out/dates", f"path: {text}/out")
        for name, (_, called) in _DATES.items():
            lines = lines.replace(f"path: {called}", f"path: {text}/{name}") if called else lines
        job.write_text(lines.replace("jobs/quickstart.yaml", f"{text}/job.yaml"), encoding="utf-8")
    except OSError as error:
        raise JobFileError(f"cannot write to {folder}: {error.strerror}") from None
    return [str(path) for path in sources]


def _shipped(name: str, checked_out: str) -> Path:
    """A part of the demo. Raises JobFileError if it is not there."""
    places = (
        Path(__file__).resolve().parents[2] / checked_out,
        Path(sys.prefix, "share", "vasuki", "examples", "dates", name),
    )
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise JobFileError(f"the example is not part of this installation: {name} is missing")
    return found


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise JobFileError(f"{path} exists already")


def write_starter(folder: str) -> list[str]:
    """Write `job.yaml` and `prompts.jsonl` into a folder. Raises JobFileError rather than overwrite one."""
    base = Path(folder)
    files = {
        base / "job.yaml": _JOB.format(name=base.resolve().name, folder=folder.rstrip("/")),
        base / "prompts.jsonl": "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(_PROMPTS)),
    }
    _refuse_existing(files)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobFileError(f"cannot write to {folder}: {error.strerror}") from None
    return [str(path) for path in files]
