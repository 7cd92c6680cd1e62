"""`vasuki init`: a job file to start from, over the columns that the input has, or the shipped demo."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vasuki.base.config import InputConfig
from vasuki.base.constraint import is_array, schema_of
from vasuki.base.errors import JobFileError, one_line
from vasuki.base.job_file import parse_job
from vasuki.base.yaml_text import read_yaml
from vasuki.commands.job_schema import NAME, job_schema
from vasuki.io.input.columns import ANSWER_COLUMNS
from vasuki.io.input.tables import column_kinds, open_table

_JOB = """\
# yaml-language-server: $schema={schema}
# docs/job.md says what each key means, and lists the others
name: {name}
model: {{path: {model}}}  # a folder with config.json, weights and tokenizer, or a Hugging Face id
input:
  path: {input}  # Parquet, JSONL or CSV; a file, folder or glob
{reads}
output: {{path: {folder}/out{copied}}}
{answer}sampling: {{max_tokens: {max_tokens}, temperature: 0}}
errors: {{max_fraction: 0.01}}  # more failed rows than this end the run with exit code 3
"""
_ID = "  id: {column}  # names each row; without it rows are numbered"
_PROMPT = "  prompt: {template}  # columns in braces; sent in the model's chat template when it has one"
_ANSWER = "answer: {answer}  # every answer has these fields, as columns; docs/answers.md\n"
_PROMPTS = ["The cheese is on the table.", "Where is the library?", "It will rain tomorrow."]
_IDS = ("id", "custom_id", "key", "uuid", "guid", "doc_id", "row_id", "name", "index")
_TEXTS = ("prompt", "text", "question", "instruction", "content", "body", "document", "message", "input", "description")


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job is begun with; what is empty is left open.

    Args:
        model: a folder or hub id.
        input: where the rows are.
        prompt: a template over their columns.
        answer: fields and their types, in the short form, as YAML.
    """

    model: str = ""
    input: str = ""
    prompt: str = ""
    answer: str = ""


def write_starter(folder: str, wanted: Wanted) -> list[str]:
    """Write a job into a folder, the schema of job files, and some prompts where no input is named.

    Raises:
        JobFileError: a file is there already, the answer is none, or no column can be the prompt.
        InputError: the input cannot be read.
    """
    base, text = Path(folder), folder.rstrip("/")
    answer = _read_answer(wanted.answer)
    reads, columns = _reads(wanted, answer)
    job = _JOB.format(
        schema=NAME,
        name=_scalar(base.resolve().name),
        model=_scalar(wanted.model or "PATH_OR_HUB_ID"),
        input=_scalar(wanted.input or f"{text}/prompts.jsonl"),
        reads="\n".join(reads),
        folder=text,
        copied=f", columns: [{', '.join(map(_scalar, columns))}]" if columns else "",
        answer=_ANSWER.format(answer=_flow(answer)) if answer else "",
        max_tokens=256 if answer else 128,
    )
    files = {base / "job.yaml": job, base / NAME: json.dumps(job_schema(), indent=1) + "\n"}
    if not wanted.input:
        lines = [json.dumps({"id": row, "text": prompt}) + "\n" for row, prompt in enumerate(_PROMPTS)]
        files[base / "prompts.jsonl"] = "".join(lines)
    _refuse_existing(files)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise JobFileError(f"cannot write to {folder}: {error.strerror}") from None
    return [str(path) for path in files]


def _read_answer(text: str) -> dict[str, Any]:
    """The short form of an answer, with or without its outer braces. Raises JobFileError."""
    if not text.strip():
        return {}
    try:
        answer = read_yaml(text if text.strip().startswith("{") else f"{{{text}}}")
        schema_of(answer)
    except (ValueError, AttributeError) as error:
        raise JobFileError(f"--answer {text!r}: {one_line(error)}") from None
    return dict(answer)


def _reads(wanted: Wanted, answer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of the input section, and the columns to copy."""
    if not wanted.input:
        template = wanted.prompt or "Translate into French: {text}"
        return [_ID.format(column="id"), _prompt(template, answer)], ["text"]
    kinds = column_kinds(InputConfig(path=wanted.input, prompt_token_ids="-"))
    if {"custom_id", "body"} <= set(kinds):
        return ["  format: openai-batch"], []
    lines: list[str] = []
    texts = [name for name, kind in kinds.items() if kind == "text" and not set(name) & set("{}:!")]
    if id_column := _id_among(wanted.input, kinds):
        lines.append(_ID.format(column=_scalar(id_column)))
    if wanted.prompt:
        return [*lines, _prompt(wanted.prompt, answer)], []
    if messages := next((name for name, kind in kinds.items() if kind == "messages"), ""):
        return [*lines, f"  messages: {messages}  # each a list of {{role, content}}"], []
    column = next((name for name in _TEXTS if name in texts), "") or next(
        (name for name in texts if name != id_column), ""
    )
    if not column:
        raise JobFileError(f"no column of {wanted.input} is text; say by --prompt what is asked of {', '.join(kinds)}")
    return [*lines, _prompt(f"{{{column}}}", answer)], [column] if column not in ANSWER_COLUMNS else []


def _id_among(path: str, names: Iterable[str]) -> str:
    """A column whose values name the rows, if one does."""
    for name in _IDS:
        if name in names:
            tree = {"input": {"path": path, "id": name, "prompt_token_ids": name}, "output": {"path": "-"}}
            try:
                open_table(parse_job({"model": {"path": "-"}, **tree}))
            except JobFileError:  # nulls, or some of them twice
                continue
            return name
    return ""


def _prompt(template: str, answer: Mapping[str, Any]) -> str:
    """The line of a prompt, which says what is wanted of the answer."""
    if answer:
        fields = ", ".join(f"{name} ({_said(kind)})" for name, kind in answer.items())
        template = f"{template}\n\nAnswer as JSON with {fields}.".replace("\\n", "\n")
    return _PROMPT.format(template=json.dumps(template, ensure_ascii=False))


def _said(kind: Any) -> str:
    """A type in words, for a prompt."""
    if isinstance(kind, Mapping):
        return "an object with " + ", ".join(f"{name} ({_said(part)})" for name, part in kind.items())
    if isinstance(kind, list):
        return f"a list, each {_said(kind[0])}" if is_array(kind) else f"one of {', '.join(map(str, kind))}"
    return str(kind).replace("?", " or null")


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(name)}: {_flow(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value) if isinstance(value, str) else json.dumps(value)


def _scalar(text: str) -> str:
    """A text as YAML has it, in quotes where it would be something else, or would end, without."""
    try:
        is_plain = re.fullmatch(r"[\w./:-]+", text) and read_yaml(f"{{a: {text}}}") == {"a": text}
    except ValueError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)
