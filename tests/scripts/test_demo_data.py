"""The demo table and its model: reproducible, disjoint from training, small. Needs no torch."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from demo_dates import (
    FIRST_DATE,
    LAST_DATE,
    MAX_TEXT_CHARS,
    SPELLINGS,
    Spelling,
    draw_example,
    evaluation_examples,
    is_held_out,
    spell_compact,
    spell_log,
    spell_mail,
    spell_uk,
    spell_us,
    spell_words,
    training_examples,
)
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "jobs" / "data" / "dates.parquet"
MODEL = ROOT / "models" / "dates"
ROWS = 2000

days = st.dates(FIRST_DATE, LAST_DATE)
rngs = st.integers(0, 2**32).map(Random)
untimed = settings(deadline=None)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(TABLE).to_pylist()
    return rows


def test_every_row_has_an_id_a_text_and_a_date(rows: list[dict[str, str]]) -> None:
    assert len(rows) == ROWS
    assert all(row.keys() == {"id", "text", "iso"} for row in rows)
    assert len({row["id"] for row in rows}) == ROWS
    assert len({row["text"] for row in rows}) == ROWS
    assert all(FIRST_DATE <= date.fromisoformat(row["iso"]) <= LAST_DATE for row in rows)


def test_lengths_are_skewed(rows: list[dict[str, str]]) -> None:
    chars = [len(row["text"]) for row in rows]
    assert statistics.mean(chars) > 1.3 * statistics.median(chars)
    assert 8 * statistics.median(chars) < max(chars) <= MAX_TEXT_CHARS


def test_the_table_is_what_the_seed_says(rows: list[dict[str, str]]) -> None:
    expected = [(example.text, example.iso) for example in islice(evaluation_examples(0), ROWS)]
    assert [(row["text"], row["iso"]) for row in rows] == expected


def test_data_only_writes_the_same_table_without_torch(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    script, table = ROOT / "scripts" / "demo" / "train_demo_model.py", tmp_path / "dates.parquet"
    without_torch = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        f"sys.path.insert(0, {str(script.parent)!r}); sys.argv[1:] = ['--data-only', '--data', {str(table)!r}]; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", without_torch], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"seed": 0, "rows": ROWS}
    assert pq.read_table(table).to_pylist() == rows


def test_training_sees_neither_the_texts_nor_the_spelled_dates(rows: list[dict[str, str]]) -> None:
    evaluation = list(islice(evaluation_examples(0), ROWS))
    for max_chars in (48, MAX_TEXT_CHARS):
        training = list(islice(training_examples(0, max_chars), 10_000))
        assert {example.text for example in training}.isdisjoint(row["text"] for row in rows)
        assert {example.spelled for example in training}.isdisjoint(example.spelled for example in evaluation)


def test_a_spelled_date_means_one_date() -> None:
    rng = Random(1)
    meaning: dict[str, str] = {}
    for _ in range(10_000):
        example = draw_example(rng, held_out=rng.random() < 0.5, max_chars=0)
        assert example.text == example.spelled
        assert meaning.setdefault(example.spelled, example.iso) == example.iso


@untimed
@given(rngs, st.booleans(), st.integers(0, MAX_TEXT_CHARS))
def test_an_example_holds_its_date_and_keeps_its_side(rng: Random, held_out: bool, max_chars: int) -> None:
    example = draw_example(rng, held_out=held_out, max_chars=max_chars)
    assert example.text.count(example.spelled) >= 1
    assert is_held_out(example.spelled) == held_out
    assert "{" not in example.text


@untimed
@given(days, rngs, st.sampled_from(list(SPELLINGS)))
def test_a_spelling_is_one_plain_line(day: date, rng: Random, spelling: Spelling) -> None:
    spelled = spelling(day, rng)
    assert spelled
    assert spelled == spelled.strip()
    assert spelled.isprintable()


@pytest.mark.parametrize(
    ("spelling", "directives"),
    [
        (spell_compact, "%Y%m%d"),
        (spell_log, "%a %b %d %H:%M:%S %Y"),
        (spell_us, "%m/%d/%Y (US)"),
        (spell_uk, "%d/%m/%Y (UK)"),
    ],
)
@untimed
@given(day=days, rng=rngs)
def test_the_standard_library_reads_the_same_date(spelling: Spelling, directives: str, day: date, rng: Random) -> None:
    spelled = spelling(day, rng)
    if str(day.year) not in spelled:
        directives = directives.replace("%Y", "%y")  # also holds the pivot of two-digit years to POSIX
    assert datetime.strptime(spelled, directives).date() == day


@untimed
@given(days, rngs)
def test_mail_dates_are_not_moved_to_utc(day: date, rng: Random) -> None:
    assert parsedate_to_datetime(spell_mail(day, rng)).date() == day


def test_years_in_words() -> None:
    def spelled(*day: int) -> set[str]:
        return {spell_words(date(*day), Random(seed)) for seed in range(100)}

    assert "the twenty-first of June two thousand and three" in spelled(2003, 6, 21)
    assert "November thirtieth, nineteen ninety-nine" in spelled(1999, 11, 30)
    assert "the first of January nineteen hundred" in spelled(1900, 1, 1)
    assert "the twelfth of May twenty twenty-four" in spelled(2024, 5, 12)
    assert "the third of March nineteen oh seven" in spelled(1907, 3, 3)


def test_the_model_folder_is_complete_and_small() -> None:
    sizes_bytes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sizes_bytes.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(sizes_bytes.values()) < 3_000_000
    assert TABLE.stat().st_size < 300_000


def test_the_tokenizer_frames_a_text_for_the_model() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    generation = json.loads((MODEL / "generation_config.json").read_text())
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    frame = [next(iter(piece.values()))["id"] for piece in tokenizer["post_processor"]["single"]]
    assert frame == ["<bos>", "A", "<iso>"]
    assert generation["eos_token_id"] == config["eos_token_id"] == ids["<eos>"]
    assert config["vocab_size"] == len(tokenizer["model"]["vocab"])
