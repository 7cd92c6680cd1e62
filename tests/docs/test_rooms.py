"""Each room's list names its files, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [init.parent for top in ("vasuki", "solvers/vasuki_solvers") for init in (ROOT / top).rglob("__init__.py")]


def listed(room: Path) -> str:
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""


def files_of(room: Path) -> set[str]:
    folders = {init.parent.name for init in room.glob("*/__init__.py")}
    return folders | {file.stem for file in room.glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_every_file_stands_in_its_rooms_list(room: Path) -> None:
    assert files_of(room) - set(re.findall(r"\w+", listed(room))) == set()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_rooms_list_names_no_file_that_is_gone(room: Path) -> None:
    """A line of the list is a name, or several, and two spaces or more before what it says."""
    entries = re.findall(r"^ *((?:\w+/?)(?:, \w+/?)*) {2,}\S", listed(room), re.MULTILINE)
    names = {name.strip("/") for entry in entries for name in entry.split(", ")}
    assert {name for name in names if re.fullmatch(r"[a-z_0-9]+", name)} - files_of(room) - {
        "packed",
        "groups",
    } == set()


def test_no_two_classes_share_a_name() -> None:
    """Whoever reads a name knows what it stands for, in whichever room."""
    places = Counter(
        node.name
        for room in ROOMS
        for file in room.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in places.items() if count > 1} == {}
