"""Each room's list names its files, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from vasuki.base.config import JobConfig

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for top in ("vasuki", "solvers/vasuki_solvers") for file in (ROOT / top).rglob("*.py")]
# Names of other libraries, papers and tools, and of an example, that docstrings mention and no code does.
ELSEWHERE = {"ChatCompletion", "Dataset", "NativeFile", "Schema", "apply_rotary_pos_emb", "exec_time", "monday", "mv"}
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
    """A name stands for one thing, in every room."""
    places = Counter(
        node.name
        for room in ROOMS
        for file in room.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in places.items() if count > 1} == {}


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            expression = node.body[0]
            assert isinstance(expression, ast.Expr)
            assert isinstance(expression.value, ast.Constant)
            yield expression.value


def words_of_code(file: Path) -> set[str]:
    """Every word of a file but for its docstrings and comments."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for docstring in docstrings(tree):
        docstring.value = ""
    return set(re.findall(r"\w+", ast.unparse(tree))) | {file.stem, file.parent.name}


def mentions(file: Path) -> Iterator[str]:
    """Names, and names with dots between them, that stand in backticks in a file's docstrings."""
    for docstring in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
        yield from re.findall(r"`([A-Za-z_][\w.]*\w)`", str(docstring.value))


def test_names_that_docstrings_mention_exist() -> None:
    known = set().union(*(words_of_code(file) for file in FILES), ELSEWHERE)
    for source in (ROOT / "vasuki").rglob("*.[ch]pp"):
        known |= {source.stem, *re.findall(r"\w+", source.read_text(encoding="utf-8"))}
    ghosts = {(file.name, name) for file in FILES for name in mentions(file) if not set(name.split(".")) <= known}
    assert ghosts == set()


def is_there(folder: Path, parts: list[str]) -> bool:
    """Whether a name with dots leads from a room to a file, and to a word of that file's code."""
    for number, part in enumerate(parts):
        if (file := folder / f"{part}.py").is_file():
            return set(parts[number + 1 :]) <= words_of_code(file)
        if not (folder / part).is_dir():
            return part in words_of_code(folder / "__init__.py")
        folder /= part
    return True


def test_places_that_docstrings_mention_exist() -> None:
    """Such as `engine.loop.Executor`, unless it is a key of a job file."""
    ghosts = set()
    for file in FILES:
        for name in mentions(file):
            first, *rest = name.removeprefix("vasuki.").split(".")
            section = JobConfig.model_fields.get(first)
            keys = getattr(section.annotation, "model_fields", {}) if section else {}
            is_place = rest and rest[0] not in keys and (ROOT / "vasuki" / first / "__init__.py").is_file()
            if is_place and not is_there(ROOT / "vasuki" / first, rest):
                ghosts.add((file.name, name))
    assert ghosts == set()
