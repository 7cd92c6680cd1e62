"""Every value that the reference names can be written as it stands there, in a job file and after `--set`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import load_job
from vasuki.base.units import seconds_of

TRUE, FALSE = ("true", "True", "yes", "on"), ("false", "False", "no", "off")
JOB = """\
model: {path: m}
input: {path: in.csv, prompt: "{text}"}
output: {path: out}
"""


def words_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """(as it is written, what it means) for all words that a setting may be."""
    if kind is bool:
        yield from ((word, True) for word in TRUE)
        yield from ((word, False) for word in FALSE)
    elif get_origin(kind) is Literal:
        yield from ((value, value) for value in get_args(kind))
    else:
        for part in get_args(kind):
            yield from words_of(part)


def settings() -> Iterator[tuple[str, str, str, Any]]:
    """(section, key, as it is written, what it means)"""
    for section, field in JobConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key, entry in field.annotation.model_fields.items():
                yield from ((section, key, word, value) for word, value in words_of(entry.annotation))


SETTINGS = list(settings())


def test_the_reference_is_walked() -> None:
    assert {("engine", "compile", "off", "off"), ("kv", "offload", "none", "none")} <= set(SETTINGS)
    assert ("sampling", "ignore_eos", "no", False) in SETTINGS


@pytest.mark.parametrize(("section", "key", "word", "value"), SETTINGS, ids=lambda part: str(part))
def test_a_word_means_itself(tmp_path: Path, section: str, key: str, word: str, value: Any) -> None:
    base = JOB.replace(', prompt: "{text}"', "") if word == "openai-batch" else JOB
    job = tmp_path / "job.yaml"
    lines = [
        line if not line.startswith(f"{section}:") else line[:-1] + f", {key}: {word}}}" for line in base.split("\n")
    ]
    text = "\n".join(lines)
    job.write_text(text if text != base else f"{base}{section}: {{{key}: {word}}}\n")
    assert getattr(getattr(load_job(job, trusts_code=True), section), key) == value
    job.write_text(base)
    assert getattr(getattr(load_job(job, [f"{section}.{key}={word}"], trusts_code=True), section), key) == value


def test_columns_may_be_called_like_truth_values(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "sampling: {stop: [no, off]}\n")
    config = load_job(job, ["input.id=no", "output.columns=[yes, on]"])
    assert (config.input.id, config.output.columns, config.sampling.stop) == ("no", ("yes", "on"), ("no", "off"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5h45m", 20_700), ("90m", 5400), ("1d 12h", 129_600), ("30", 30), ("1.5 min", 90), ("2h", 7200)],
)
def test_times_are_read(tmp_path: Path, text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds
    (tmp_path / "job.yaml").write_text(JOB + f"plan: {{max_loss: {text}}}\n")
    assert load_job(tmp_path / "job.yaml").plan.max_loss == seconds


@pytest.mark.parametrize("text", ["", "soon", "3 days", "-1s", "45m5h"])
def test_what_is_no_time_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        seconds_of(text)
    (tmp_path / "job.yaml").write_text(JOB + f"plan: {{max_loss: '{text}'}}\n")
    with pytest.raises(JobFileError, match="max_loss"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Translate: {text}", "Translate: {text}"),
        ("{text}", "{text}"),
        ("- {text} # in short", "- {text} # in short"),
        ("[{text}]", "[{text}]"),
        ("'Say: {text}'", "Say: {text}"),
        ('"two\\nlines of {text}"', "two\nlines of {text}"),
    ],
)
def test_text_after_set_is_text_however_yaml_would_read_it(tmp_path: Path, text: str, prompt: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert load_job(tmp_path / "job.yaml", [f"input.prompt={text}"]).input.prompt == prompt


@pytest.mark.parametrize("name", ["2026-11-25", "20261125", "007", "1e3", "true", "null", "12:30"])
def test_a_folder_may_be_called_like_a_date_or_a_number(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert load_job(tmp_path / "job.yaml", [f"output.path={name}"]).output.path == name
    (tmp_path / "job.yaml").write_text(JOB.replace("path: out", "path: 2026-11-25"))
    assert load_job(tmp_path / "job.yaml").output.path == "2026-11-25"
