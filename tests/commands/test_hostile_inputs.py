"""Models, jobs and names by somebody who means harm: none of them gets code to run, or a page to run it."""

from __future__ import annotations

import json
import pickle
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tiny_job import job_tree

from vasuki.commands.cli import main


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """The file that exists once somebody else's code has run."""
    return tmp_path / "sprung"


def vasuki(command: str, folder: Path, *arguments: str, **sections: Any) -> Result:
    (folder / "in.jsonl").write_text('{"id": "a", "text": "the cat sat"}\n')
    tree = job_tree(folder / "model", folder / "in.jsonl", folder / "out")
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys} if isinstance(keys, dict) else keys
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return CliRunner().invoke(main, [command, str(folder / "job.yaml"), *arguments])


def pickle_weights(model: Path) -> None:
    """Keep the weights as torch.save writes them."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


@pytest.mark.parametrize("command", ["check", "run"])
def test_pickled_weights_are_refused_unless_allowed(model: Path, tmp_path: Path, command: str) -> None:
    pickle_weights(model)
    result = vasuki(command, tmp_path)
    assert result.exit_code == 4
    assert "pytorch_model.bin is a pickle" in result.stderr.splitlines()[-1]
    assert "model.allow_pickle" in result.stderr.splitlines()[-1]
    assert vasuki(command, tmp_path, model={"allow_pickle": True}).exit_code == 0


def test_code_in_pickled_weights_never_runs(model: Path, tmp_path: Path, trap: Path) -> None:
    pickle_weights(model)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Trap(trap)}))
    for allowed in (False, True):
        assert vasuki("run", tmp_path, model={"allow_pickle": allowed}).exit_code == 4
    assert not trap.exists()


def test_code_of_a_model_never_runs_unless_trusted(model: Path, tmp_path: Path, trap: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.M"}}
    (model / "config.json").write_text(json.dumps(config))
    code = f"open({str(trap)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass Config(LlamaConfig): pass\n"
    (model / "theirs.py").write_text(code)
    for command in ("check", "run", "plan"):
        assert vasuki(command, tmp_path).exit_code in (0, 4)
    assert vasuki("run", tmp_path).exit_code == 4
    assert vasuki("run", tmp_path, model={"trust_remote_code": True}).exit_code == 2
    assert not trap.exists()
    vasuki("run", tmp_path, "--trust-remote-code", model={"trust_remote_code": True})
    assert trap.exists(), "the trap would have been sprung"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[-1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch TRAP') }}",
        "{% set _ = messages.append(1) %}{{ messages }}",
    ],
)
def test_chat_templates_reach_no_attributes(model: Path, tmp_path: Path, trap: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template.replace("TRAP", str(trap)))
    result = vasuki("run", tmp_path, "--quiet", input={"chat": True})
    assert result.exit_code in (3, 4), "a row that failed, or a model that was refused"
    assert "Traceback" not in result.stderr
    assert not trap.exists()


HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;{{7*7}}"


class _Elements(HTMLParser):
    """Collects what a browser would act upon."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_figure = tag == "img" and (dict(attrs).get("src") or "").startswith("data:image/")
        self.found += [tag] * (tag in ("script", "img", "iframe", "object", "a") and not is_figure)
        self.found += [name for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]


def test_names_in_reports_are_text(tmp_path: Path, tiny_model: Path) -> None:
    """The names of job, model, folder, prices' currency and card, as far as each may be hostile."""
    hostile_folder = tmp_path / HOSTILE.replace("/", "")
    sections: dict[str, Any] = {
        "name": HOSTILE,
        "model": {"path": str(tiny_model)},
        "cost": {"price_per_hour": 1.0, "currency": HOSTILE},
    }
    for name in ("first", "second"):
        result = vasuki("run", tmp_path, "--set", f"output.path={json.dumps(str(hostile_folder / name))}", **sections)
        assert result.exit_code == 0, result.stderr
        manifest = json.loads((hostile_folder / name / "manifest.json").read_text())
        manifest["device"] |= {"name": HOSTILE, "profile": HOSTILE, "type": HOSTILE}
        manifest["versions"] |= {"vasuki": HOSTILE}
        (hostile_folder / name / "manifest.json").write_text(json.dumps(manifest))
    page = tmp_path / "report.html"
    runs = [str(hostile_folder / "first"), str(hostile_folder / "second")]
    result = CliRunner().invoke(main, ["report", *runs, "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    text = page.read_text()
    assert "&lt;script&gt;" in text
    elements = _Elements()
    elements.feed(text)
    assert elements.found == []
