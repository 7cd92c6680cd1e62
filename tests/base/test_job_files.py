"""Job files that somebody else wrote."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from vasuki.base.errors import JobFileError
from vasuki.base.job_file import load_job
from vasuki.base.yaml_text import read_yaml
from vasuki.commands.cli import main

JOB = "model: {path: m}\ninput: {path: in.parquet, prompt: '{text}'}\noutput: {path: out}\n"


def written(tmp_path: Path, more: str = "", text: str = JOB) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text + more)
    return path


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (bomb(30) + "\nname: *a29", "its aliases stand for over 100,000 values"),
        ("a: &a [*a]", "an alias stands for something that holds it"),
        ("a: " + "[" * 20_000, "nested too deeply"),
        ("name: one\nname: two", "line 5 has the key 'name' a second time"),
        ("sampling: {temperature: 0, temperature: 1}", "line 4 has the key 'temperature' a second time"),
        ("sampling: {temperature: .inf}", "sampling.temperature: should be a finite number"),
        ("sampling: {top_p: .nan}", "sampling.top_p: should be a finite number"),
        ("cost: {price_per_hour: .inf}", "cost.price_per_hour: should be a finite number"),
        ("#" * 2**20, "it has over 1,048,576 bytes"),
    ],
)
def test_what_no_job_holds_is_a_line(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job(written(tmp_path, more))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pipes_and_devices_as_job_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(JobFileError, match="does not describe a job"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(JobFileError, match="it has over 1,048,576 bytes"):
        load_job("/dev/zero")
    read, write = os.pipe()
    writer = threading.Timer(0.05, lambda: os.close(write))  # the reader is there first, as in `vasuki run <(...)`
    os.write(write, JOB.encode())
    writer.start()
    assert load_job(f"/dev/fd/{read}").model.path == "m"
    os.close(read)


def test_a_character_that_no_yaml_holds() -> None:
    with pytest.raises(ValueError, match="unacceptable character"):
        read_yaml("name: a\x06b")


def test_merged_keys_do_not_multiply() -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 30)]
    with pytest.raises(ValueError, match="over 100,000 values"):
        read_yaml("\n".join(lines))


def test_aliases_as_people_use_them() -> None:
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}}
    assert read_yaml("") is None


def test_a_models_code_takes_the_word_of_who_runs_it(tmp_path: Path) -> None:
    path = written(tmp_path, text=JOB.replace("path: m}", "path: m, trust_remote_code: true}"))
    with pytest.raises(JobFileError, match=r"runs code that comes with m; .* add --trust-remote-code, or set VASUKI_"):
        load_job(path)
    assert load_job(path, trusts_code=True).model.trust_remote_code
    for command in ("run", "plan", "simulate", "check", "watch"):
        refused = CliRunner().invoke(main, [command, str(path)])
        assert (refused.exit_code, "--trust-remote-code" in refused.stderr) == (2, True), command
    for arguments, environment in ((["--trust-remote-code"], {}), ([], {"VASUKI_TRUST_REMOTE_CODE": "1"})):
        result = CliRunner(env=environment).invoke(main, ["check", str(path), *arguments])
        assert result.exit_code == 4, "now it misses the input"
    assert not load_job(written(tmp_path), trusts_code=True).model.trust_remote_code


def test_last_words_are_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, text=JOB.replace("in.parquet", '"in\\nput.parquet"'))
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 4
    assert len(result.stderr.splitlines()) == 1
