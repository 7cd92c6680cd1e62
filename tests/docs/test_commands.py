"""Every command in the README and in docs/ can be typed: its options and scripts exist, and the cheap ones are run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from documented import ROOT, Command, commands

from vasuki.commands.cli import main


def _source(command: Command) -> str:
    path = ROOT / command.words[1]
    return path.read_text(encoding="utf-8") if path.is_file() else ""


DOCUMENTED = commands()
OURS = [command for command in DOCUMENTED if command.program == "vasuki"]
WHOLE = [command for command in OURS if not command.is_mention]
SCRIPTS = [
    command
    for command in DOCUMENTED
    if command.program == "python" and len(command.words) > 1 and command.words[1].endswith(".py")
]
CHEAP = ("init", "check", "plan", "simulate", "report")

# Runs each documented script up to where it has parsed its arguments, and says which it refuses.
_PARSE = """
import argparse, json, runpy, sys
from pathlib import Path

class Parsed(BaseException): pass

def parse_only(parser, args=None, namespace=None):
    parse(parser, args, namespace)
    raise Parsed

parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_only
refused = []
for words in json.loads(sys.argv[1]):
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
        refused.append([words, "ended without a look at its arguments"])
    except Parsed:
        pass
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] != "accelerate":  # which one script compares with, and no extra installs
            raise
    except SystemExit as error:
        refused.append([words, str(error)])
print(json.dumps(refused))
"""


def _name(command: Command) -> str:
    return f"{command.page}: {command}"


def test_pages_hold_commands_of_every_kind() -> None:
    assert len(WHOLE) >= 20
    assert len(SCRIPTS) >= 10
    assert {words[1] for words in (command.words for command in WHOLE)} >= {*CHEAP, "run", "watch", "profile"}


@pytest.mark.parametrize("command", OURS, ids=_name)
def test_a_command_of_vasuki_parses(command: Command) -> None:
    if len(command.words) == 1:
        return
    name, *arguments = command.words[1:]
    assert name in main.commands, f"there is no `vasuki {name}`"
    try:
        main.commands[name].make_context(name, arguments)
    except click.MissingParameter:
        assert command.is_mention


@pytest.mark.parametrize("script", sorted({command.words[1] for command in SCRIPTS}))
def test_a_script_exists(script: str) -> None:
    assert (ROOT / script).is_file()


def test_scripts_take_the_arguments_that_pages_give_them() -> None:
    calls = sorted({command.words[1:] for command in SCRIPTS if "ArgumentParser" in _source(command)})
    assert calls
    process = subprocess.run(
        [sys.executable, "-c", _PARSE, json.dumps(calls)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == [], process.stderr


@pytest.mark.parametrize("command", [c for c in SCRIPTS if "ArgumentParser" not in _source(c)], ids=_name)
def test_flags_of_plain_scripts_exist(command: Command) -> None:
    assert all(word in _source(command) for word in command.words[2:] if word.startswith("--"))


@pytest.mark.parametrize("command", [c for c in DOCUMENTED if c.program == "make"], ids=_name)
def test_a_target_of_make_exists(command: Command) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(command.words[1:]) <= set(targets)


@pytest.mark.parametrize("command", [c for c in DOCUMENTED if c.words[1:3] == ("-m", "pytest")], ids=_name)
def test_tests_that_pages_name_exist(command: Command) -> None:
    path, *rest = command.words[3:]
    assert (ROOT / path).exists()
    if "-k" in rest:
        assert re.search(rf"def test_\w*{rest[rest.index('-k') + 1]}", (ROOT / path).read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout with small inputs, in which jobs have run that pages report on."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("models", "profiles"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    dates = folder / "jobs" / "data" / "dates.parquet"
    pq.write_table(pq.read_table(dates).slice(0, 12), dates)
    for lengths in (folder / "jobs" / "compare").glob("*.csv"):
        lines = lengths.read_text().splitlines(keepends=True)
        lengths.write_text("".join(lines[:13]))
        for name in ("lengths.csv", "gpt3.csv"):
            (folder / name).write_text("".join(lines[:13]))
    for card in ("a10", "a40"):
        out = folder / "out" / card
        done = _run(folder, f"simulate jobs/compare/translate.yaml --gpu {card} --set output.path={out.parent}")
        assert done.exit_code == 0, done.output
        for place in (f"compare/{card}", f"nightly/{card}", "dates"):
            shutil.copytree(out, folder / "out" / place, dirs_exist_ok=True)
    return folder


def _run(folder: Path, line: str | list[str]) -> click.testing.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(main, line)


def test_cheap_commands_run_in_the_order_of_the_pages(checkout: Path) -> None:
    run: list[str] = []
    for command in WHOLE:
        name, *arguments = command.words[1:]
        if name not in CHEAP or str(command) in run:
            continue
        if "--html" in arguments and any("--html" in line for line in run):  # drawing a page once is enough
            continue
        if "my-job/job.yaml" in arguments:  # as the tutorial says: "set model.path in it to a model of yours"
            job = checkout / "my-job" / "job.yaml"
            job.write_text(job.read_text().replace("PATH_OR_HUB_ID", "models/dates"))
        result = _run(checkout, [name, *arguments])
        assert result.exit_code == 0, f"{_name(command)}: {result.output}"
        run.append(str(command))
    assert {line.split()[1] for line in run} == set(CHEAP)


def test_the_job_of_the_readme_is_one(checkout: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    (checkout / "readme.yaml").write_text(text[1])
    result = _run(checkout, "check readme.yaml --set output.path=out/readme")
    assert result.exit_code == 0, result.output


PAPERS = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
MECHANISMS = re.findall(r"^\| .+ \| .+ \| `vasuki (plan|simulate) ([^`]+)` \|$", PAPERS, re.MULTILINE)


def test_mechanisms_of_the_papers_have_commands() -> None:
    assert len(MECHANISMS) >= 10


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "arguments"), MECHANISMS, ids=[" ".join(each) for each in MECHANISMS])
def test_a_mechanism_of_the_papers_runs(checkout: Path, name: str, arguments: str) -> None:
    arguments = arguments.replace("job.yaml", "jobs/compare/translate.yaml")
    result = _run(checkout, f"{name} {arguments}{'' if '--gpu' in arguments else ' --gpu a10'}")
    assert result.exit_code == 0, result.output
