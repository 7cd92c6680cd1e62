"""Conditions over typed answers: what pyarrow computes, and what DuckDB's CHECK lets pass."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.errors import JobFileError
from vasuki.io.output.check import Check

FIELDS = [
    pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
    pa.field("n", pa.int64()),
    pa.field("x", pa.float64()),
    pa.field("due", pa.date32()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("of", pa.struct([("sure", pa.bool_())])),
]
# As we write it, and as SQL does.
SAME = {
    "n > 2": "n > 2",
    "kind == 'a'": "kind = 'a'",
    "kind in ['a', 'b'] and n != 1": "kind in ('a', 'b') and n <> 1",
    "kind not in ('a',)": "kind not in ('a')",
    "due > '2026-01-02'": "due > '2026-01-02'",
    "due is None or x < 0.5": "due is null or x < 0.5",
    "due is not None and not of.sure": "due is not null and not of.sure",
    "0 < len(tags) <= 2": "0 < len(tags) and len(tags) <= 2",
    "len(kind) == 1": "length(kind) = 1",
    "n + 1 == 2 * x": "n + 1 = 2 * x",
    "-n < x - 1": "-n < x - 1",
    "starts_with(kind, pattern='a')": "starts_with(kind, 'a')",
    "of.sure": "of.sure",
}
answers = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["a", "b", "ab", None]),
        "n": st.integers(-2, 4) | st.none(),
        "x": st.sampled_from([0.0, 0.25, 1.0, 1.5, None]),
        "due": st.sampled_from([datetime.date(2026, 1, 2), datetime.date(2026, 1, 3), None]),
        "tags": st.lists(st.sampled_from(["a", "b"]), max_size=3) | st.none(),
        "of": st.fixed_dictionaries({"sure": st.booleans() | st.none()}),
    }
)


@pytest.mark.parametrize("text", SAME)
@given(rows=st.lists(answers, min_size=1, max_size=20))
def test_it_is_met_where_sql_would_take_the_row(text: str, rows: list[dict[str, Any]]) -> None:
    sent = pa.Table.from_pylist(rows, pa.schema(FIELDS))
    found = duckdb.sql(f"select ({SAME[text]}) is not false from sent")
    assert found is not None
    assert [Check(text, FIELDS).holds(row) for row in rows] == [met for (met,) in found.fetchall()]
    assert len(sent) == len(rows)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n >", "invalid syntax"),
        ("m > 1", "there is no field 'm'"),
        ("n", "comes out as int64"),
        ("kind", "comes out as string"),
        ("kind > 3", "has no kernel"),
        ("of.other", "No match for"),
        ("n.x", "has no kernel"),
        ("sum(n) > 1", "there is no function 'sum'"),
        ("open('x')", "there is no function 'open'"),
        ("__import__('os').system('x')", "cannot be computed here"),
        ("[n for n in tags]", "cannot be computed here"),
        ("lambda: n", "cannot be computed here"),
        ("n ** 2 > 1", "cannot be computed here"),
        ("n > 1" + " and n > 1" * 2000, "has more than"),
        ("9" * 400 + " > n", ""),
        ("(" * 300 + "n" + ")" * 300, "too many nested parentheses"),
        ("not " * 3000 + "n", ""),
        ("n in []", "a list has no values"),
        ("starts_with(kind, patern='a')", ""),
        ("\0", ""),
        ("", ""),
    ],
)
def test_what_is_no_condition_is_refused_with_a_line(text: str, why: str) -> None:
    with pytest.raises(JobFileError, match="^output.check: .*" + why) as error:
        Check(text, FIELDS)
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(JobFileError):
        Check(text, FIELDS).holds({"n": 1})


def test_what_overflows_is_not_met() -> None:
    assert not Check("n + 9223372036854775807 > 0", FIELDS).holds({"n": 5})
    assert not Check("n / 0 > 1", FIELDS).holds({"n": 5})
