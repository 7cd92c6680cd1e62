"""A JSON array gives the rows that Python's own json reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import MakeJob

from vasuki.base.errors import InputError
from vasuki.io.formats import json_array
from vasuki.io.formats.json_array import JsonArraySource
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\é', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.fixed_dictionaries({"text": VALUES}), max_size=6)


def read(path: Path, data: bytes) -> tuple[list[Any], dict[int, str]]:
    path.write_bytes(data)
    source = JsonArraySource(Location.parse(str(path)))
    survey = source.survey(["text"], [], None)
    blocks = list(source.blocks(["text"], range(survey.num_rows)))
    assert sum(len(block.rows) for block in blocks) == survey.num_rows
    return [value for block in blocks for value in block.columns["text"]], {
        row: why for block in blocks for row, why in block.malformed.items()
    }


@settings(max_examples=150, deadline=None)
@given(objects=OBJECTS, piece=st.integers(1, 40), indent=st.sampled_from([None, 0, 2]), plain=st.booleans())
def test_rows_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, objects: list[Any], piece: int, indent: int | None, plain: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "PIECE_BYTES", piece)
        data = json.dumps(objects, indent=indent, ensure_ascii=plain).encode()
        assert read(path, b"\xef\xbb\xbf \n" * (piece % 2) + data + b"\n")[0] == [each["text"] for each in objects]
        lines = "".join(json.dumps(each, ensure_ascii=plain) + "\n" for each in objects).encode()
        assert read(path, lines)[0] == [each["text"] for each in objects]


def test_a_row_that_cannot_be_used_fails_alone(tmp_path: Path) -> None:
    data = b'[{"text": "a"},\n 5,\n {"text": "caf\xe9"}, {"text": "\\ud800"}, {"text": "e"}]'
    values, malformed = read(tmp_path / "a.json", data)
    assert (values[0], values[4], sorted(malformed)) == ("a", "e", [1, 2, 3])
    assert malformed[1] == "the row that ends in line 2 is not a JSON object"
    assert malformed[2] == "the row that ends in line 3 is not UTF-8 text"
    assert "half a surrogate pair" in malformed[3]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ('[{"text": "a"}', "the file ends before the end of the array, at line 1"),
        ('[{"text": "a"}\n {"text": "b"}]', "a comma is missing before the end of the array, at line 2"),
        ('[{"text": "a"},\n{"text": tru}]', "Expecting value, at line 2"),
        ('[{"text": "a"},', "Expecting value, at line 1"),
        ('[{"text": "a', "Unterminated string starting at, at line 1"),
        ('[{"text": "a"}] [1]', "there is more behind the array, at line 1"),
        ("[" * 100_000, "recursion"),
        ('[{"text": ' + "9" * 10_000 + "}]", "digits"),
    ],
)
def test_what_is_no_array_is_said_before_anything_runs(job: MakeJob, tmp_path: Path, data: str, why: str) -> None:
    (tmp_path / "a.json").write_text(data)
    with pytest.raises(InputError, match=f"a.json is no JSON array of objects: .*{why}"):
        open_table(job(tmp_path / "a.json"))


def test_ids_and_types_as_of_json_lines(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"id": 7, "text": "a", "n": 1}, {"id": 9, "text": "b", "n": 2.5}]')
    table = open_table(job(tmp_path / "a.json", id="id", output={"columns": ["n"]}))
    (block,) = table.blocks()
    assert (table.ids(block), table.carried(block)) == ([7, 9], {"n": [1.0, 2.5]})
