"""What pages say of the tree is true: paths, names, the order of rooms, the template of a profile, data files."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from documented import PAGES, ROOT

from vasuki.machines.profile import HardwareProfile

_PATH = re.compile(r"`((?:vasuki|solvers|scripts|tests|profiles|jobs|docs|models)/[\w./-]*)`")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [path for path in _PATH.findall(text) if not (ROOT / path).exists() and "NAME" not in path]
    assert missing == []


def test_the_walk_of_a_request_names_what_is_there() -> None:
    walk = re.findall(r"^\| \d+ \| `([^`]+)` \| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)
    assert len(walk) == 14
    for path, name in walk:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in defined, f"{path} has no {name}"


def test_the_drawing_has_the_rooms_in_the_order_of_their_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["name"].startswith("the house"))
    rooms = [room.strip().removeprefix("vasuki.") for floor in floors for room in floor.split("|")]
    drawing = ARCHITECTURE[ARCHITECTURE.index("## Rooms") : ARCHITECTURE.index("A room imports")]
    drawn = [word.rstrip("/") for word in re.findall(r"\b(?:[a-z]+/|vasuki_solvers\b)", drawing)]
    assert [room for room in drawn if room in rooms] == rooms


def test_as_many_models_are_served_as_pages_say() -> None:
    counts = re.findall(r"^## (.+): (\d+)$", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.MULTILINE)
    served = sum(int(number) for title, number in counts if title not in ("Refused", "Not known"))
    of = sum(int(number) for _, number in counts)
    assert f"for [{served} model types]" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{served} of transformers' {of} causal" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_template_is_a_profile_with_every_key() -> None:
    text = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    tree = yaml.safe_load(block[1])
    assert HardwareProfile.model_validate(tree).name == "my-card"
    assert set(tree) == set(HardwareProfile.model_fields)
    for section in ("efficiency", "overheads", "link", "interconnect", "power", "price"):
        field = HardwareProfile.model_fields[section].annotation
        kind = next(k for k in (field, *getattr(field, "__args__", ())) if hasattr(k, "model_fields"))
        assert set(tree[section]) == set(kind.model_fields), section


def test_older_drivers_get_the_torch_that_was_tested() -> None:
    """Built for another CUDA, from an index of its own."""
    pins = [
        re.search(r"^torch==([\d.]+)(\+cu12\d)?$", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("constraints.txt", "constraints-cuda12.txt")
    ]
    (tested, none), (older, build) = (pin.groups() for pin in pins if pin is not None)
    assert (tested, none) == (older, None)
    assert f"/whl/{build[1:]}\n" in (ROOT / "constraints-cuda12.txt").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "data").glob("*.json")), ids=lambda path: path.name)
def test_data_files_are_linked_and_read(path: Path) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))
    assert any(f"data/{path.name}" in page.read_text(encoding="utf-8") for page in PAGES)
