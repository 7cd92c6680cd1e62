"""A table in memory comes back as what it was, with the columns of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest
from tiny_job import WORDS

import vasuki
from vasuki.base.errors import JobFileError

TEXTS = [" ".join(WORDS[row : row + 3]) for row in range(6)]
COLUMNS: dict[str, Any] = {"text": TEXTS, "kind": ["a", "b"] * 3}
QUIET = vasuki.RunOptions(quiet=True)


def enriched(table: Any, model: Path, **settings: Any) -> Any:
    given = {"input": {"chat": False}, "sampling": {"max_tokens": 6}, **settings}
    return vasuki.enrich(table, model=str(model), prompt="{text}", options=QUIET, **given)


def test_tables_of_three_packages(tiny_model: Path) -> None:
    table = pa.table(COLUMNS)
    answered = enriched(table, tiny_model)
    assert answered.select(table.column_names).equals(table)
    outputs = answered["output"].to_pylist()
    frame = pandas.DataFrame(COLUMNS, index=list("uvwxyz")).astype({"kind": "category"})
    of_pandas = enriched(frame, tiny_model)
    assert of_pandas[["text", "kind"]].equals(frame)
    assert of_pandas["output"].tolist() == outputs
    of_polars = enriched(polars.DataFrame(COLUMNS, schema_overrides={"kind": polars.Categorical}), tiny_model)
    assert of_polars.schema["kind"] == polars.Categorical
    assert of_polars["output"].to_list() == outputs


@pytest.mark.parametrize("make", [pa.table, pandas.DataFrame, polars.DataFrame])
def test_rows_with_several_answers_are_there_as_often(tiny_model: Path, make: Any) -> None:
    answered = enriched(make(COLUMNS), tiny_model, sampling={"n": 2, "temperature": 1.0, "max_tokens": 3})
    assert len(answered) == 12
    assert type(answered) is type(make(COLUMNS))
    texts = answered["text"]
    assert (texts.to_pylist() if make is pa.table else list(texts)) == [text for text in TEXTS for _ in range(2)]


def test_other_tasks_and_settings(tiny_model: Path) -> None:
    scored = vasuki.enrich(
        pa.table(COLUMNS),
        model=str(tiny_model),
        prompt="{text}",
        task="score",
        input={"chat": False, "continuation": [" a", " the"]},
        options=QUIET,
    )
    assert set(scored["best"].to_pylist()) <= {" a", " the"}


def test_columns_that_answers_to_something_else_would_have_stay(tiny_model: Path) -> None:
    table = pa.table({**COLUMNS, **{name: list("uvwxyz") for name in ("tokens", "label", "score", "answer")}})
    answered = enriched(table, tiny_model)
    assert answered.select(table.column_names).equals(table)
    assert answered["output"].null_count == 0


@pytest.mark.parametrize(
    ("table", "settings", "why"),
    [
        ([1, 2], {}, "a list is no table of pyarrow, pandas or Polars"),
        (pa.table({"output": ["a"], "text": ["b"]}), {}, "a column 'output', as the answers have"),
        (
            pa.table({"tokens": ["a"], "text": ["b"]}),
            {"task": "score", "input": {"chat": False, "continuation": [" a"]}, "sampling": {}},
            "a column 'tokens', as the answers have",
        ),
        (
            pa.table({"amount": [1], "text": ["b"]}),
            {"answer": {"amount": "integer"}, "output": {"flatten": True}},
            "output.flatten: there is a column 'amount' already",
        ),
        (pa.table({"words": ["a"]}), {}, "input.prompt names column 'text'"),
        (pa.table(COLUMNS), {"sampler": {}}, "enrich: unknown key 'sampler' .did you mean 'sampling'"),
    ],
)
def test_what_cannot_be_is_refused(tiny_model: Path, table: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(JobFileError, match=why):
        enriched(table, tiny_model, **settings)
