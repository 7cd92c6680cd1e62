"""Answers that have to look like something: they do, by the tokens that `generate` gives under the same masks, in both
backends, on replicas, and in memory that is too small."""

from __future__ import annotations

import datetime
import json
import shutil
from collections import Counter
from glob import glob
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
import transformers
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.base.job_file import parse_job
from vasuki.commands.check import check_job
from vasuki.runs.run import run_job

ROWS = 12
MAY_FAIL = {"max_fraction": 1}
PROMPTS = ["the cat sat " * (1 + row % 4) for row in range(ROWS)]
REGEX = r"(yes|no), [0-9]{2,4}( because [a-z]{1,6}){0,2}\."
ANSWER = {"kind": ["cat", "dog"], "n": [1, 2, 3], "sure": "boolean", "when": "date?"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": range(ROWS), "text": PROMPTS}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def job(model: Path, rows: Path, out: str, **sections: Any) -> JobConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "input": {"path": str(rows), "id": "id", "prompt": "{text}", "chat": False},
        "output": {"path": str(rows.parent / out), "token_ids": True},
        "sampling": {"max_tokens": 60},
        "engine": {"chunk_tokens": 32},
        "kv": {"device_memory": 2**21},
    }
    for name, section in sections.items():
        tree[name] = section if name == "answer" else {**tree.get(name, {}), **section}
    return parse_job(tree)


def run_and_read(config: JobConfig) -> list[dict[str, Any]]:
    run_job(config)
    rows = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: (row["id"], row.get("sample", 0)))


def answers(config: JobConfig) -> list[dict[str, Any]]:
    found = run_and_read(config)
    assert len(found) == ROWS
    return found


def by_generate(model: Path, config: JobConfig) -> list[list[int]]:
    """Greedy tokens of transformers, with the tokens taken out that no answer may go on with."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    vocabulary = from_tokenizer(tokenizer, n_vocab=network.config.vocab_size)
    assert config.constraint is not None
    found: list[list[int]] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        matcher, seen = LLMatcher(vocabulary, config.constraint.grammar), [ids.shape[1]]

        def allowed(_: int, tokens: torch.Tensor, matcher: Any = matcher, seen: list[int] = seen) -> list[int]:
            matcher.consume_tokens(tokens[seen[0] :].tolist())
            seen[0] = len(tokens)
            bits = matcher.compute_logit_bias()
            return [token for token, bias in enumerate(bits) if bias] or [tokenizer.eos_token_id]

        output = network.generate(ids, max_new_tokens=60, do_sample=False, prefix_allowed_tokens_fn=allowed)
        tokens = output[0, ids.shape[1] :].tolist()
        found.append([token for token in tokens if token != tokenizer.eos_token_id])
    return found


@pytest.mark.parametrize(
    "sections",
    [{"sampling": {"regex": REGEX}}, {"sampling": {"choices": ["dog", "dogs run", "cat"]}}, {"answer": ANSWER}],
    ids=["regex", "choices", "answer"],
)
@pytest.mark.parametrize("attention", ["ragged", "padded"])
def test_tokens_are_those_of_generate_under_the_same_masks(
    tiny_model: Path, rows: Path, sections: dict[str, Any], attention: str
) -> None:
    config = job(tiny_model, rows, "out", **sections, engine={"attention": attention})
    eos = transformers.AutoTokenizer.from_pretrained(tiny_model).eos_token_id
    found = [[token for token in row["output_token_ids"] if token != eos] for row in answers(config)]
    assert found == by_generate(tiny_model, config)


def test_answers_are_typed_or_said_to_be_cut(tiny_model: Path, rows: Path) -> None:
    few: dict[str, Any] = {"kind": ["cat", "dog"], "when": "date?"}
    found = answers(job(tiny_model, rows, "out", answer=few, sampling={"max_tokens": 70, "temperature": 1.5}))
    states = Counter(row["answer_status"] for row in found)
    assert states["ok"] > 3
    assert states["ok"] + states["truncated"] + states["invalid"] == ROWS
    for row in found:
        assert row["error"] is None
        assert (row["answer"] is None) == (row["answer_status"] != "ok")
        if row["answer_status"] == "ok":
            assert json.loads(row["output"]) == row["answer"]
            assert row["answer"]["kind"] in few["kind"]
            assert row["answer"]["when"] is None or datetime.date.fromisoformat(row["answer"]["when"])
        if row["answer_status"] == "truncated":
            assert row["finish_reason"] == "length"


def test_nothing_changes_on_replicas_or_in_little_memory(tiny_model: Path, rows: Path) -> None:
    sampling = {"regex": REGEX, "temperature": 1.0}
    alone = answers(job(tiny_model, rows, "alone", sampling=sampling))
    assert {row["answer_status"] for row in alone} <= {"ok", "truncated"}
    tight = job(tiny_model, rows, "tight", sampling=sampling, kv={"device_memory": 2**15, "block_tokens": 4})
    assert answers(tight) == alone
    assert answers(job(tiny_model, rows, "two", sampling=sampling, engine={"replicas": 2})) == alone


def test_choices_are_a_dictionary(tiny_model: Path, rows: Path) -> None:
    config = job(tiny_model, rows, "out", sampling={"choices": ["dog", "dogs run", "cat"]})
    assert {row["answer"] for row in answers(config)} <= {"dog", "dogs run", "cat"}
    for part in Path(config.output.path).glob("*.parquet"):
        assert pq.read_schema(part).field("answer").type == pa.dictionary(pa.int32(), pa.string())


def test_check_names_the_columns(tiny_model: Path, rows: Path) -> None:
    said = check_job(job(tiny_model, rows, "out", answer=ANSWER))["columns"]
    assert "answer: struct<kind: dictionary<" in str(said)
    assert "answer_status: string" in str(said)


def test_a_column_of_that_name_is_copied_where_no_answer_has_a_type(tiny_model: Path, rows: Path) -> None:
    table = pq.read_table(rows).append_column("answer", pa.array(["known"] * ROWS))
    pq.write_table(table, rows)
    found = answers(job(tiny_model, rows, "out", output={"columns": ["answer"], "path": str(rows.parent / "out")}))
    assert {row["answer"] for row in found} == {"known"}
    typed = job(
        tiny_model, rows, "typed", output={"columns": ["answer"], "path": str(rows.parent / "typed")}, answer=ANSWER
    )
    with pytest.raises(JobFileError, match=r"output.columns: 'answer' is a column of the answer"):
        run_job(typed)


def test_fields_may_be_columns_and_dates_values(tiny_model: Path, rows: Path) -> None:
    output = {"path": str(rows.parent / "flat"), "flatten": True, "dates": "typed", "columns": ["text"]}
    few = {"kind": ["cat", "dog"], "when": "date?"}
    found = answers(
        job(tiny_model, rows, "flat", answer=few, output=output, sampling={"max_tokens": 70, "temperature": 1.5})
    )
    [part] = (rows.parent / "flat").glob("*.parquet")
    assert pq.read_schema(part).field("when").type == pa.date32()
    right = [row for row in found if row["answer_status"] == "ok"]
    assert right
    for row in right:
        said = json.loads(row["output"])
        assert (row["kind"], row["when"] and row["when"].isoformat()) == (said["kind"], said["when"])
        assert row["text"] in PROMPTS
    assert "answer" not in found[0]


def test_rows_say_themselves_what_they_want(tiny_model: Path, rows: Path) -> None:
    said = [["yes", "no"], ["cat"], None] * 4
    pq.write_table(pq.read_table(rows).append_column("said", pa.array(said)), rows)
    found = answers(job(tiny_model, rows, "out", sampling={"choices": {"column": "said"}}))
    for choices, row in zip(said, found, strict=True):
        assert row["answer_status"] == (choices and "ok")
        assert row["answer"] in choices if choices else row["answer"] is None
    schemas = [json.dumps({"enum": [row, str(row)]}) for row in range(ROWS - 1)] + ["not"]
    pq.write_table(pq.read_table(rows).append_column("schema", pa.array(schemas)), rows)
    *found, bad = answers(job(tiny_model, rows, "more", sampling={"schema": {"column": "schema"}}, errors=MAY_FAIL))
    told = [row["id"] for row in found]
    assert [row["answer"] in (str(n), f'"{n}"') for n, row in zip(told, found, strict=True)] == [True] * (ROWS - 1)
    assert bad["error"] == "column 'schema' is not JSON"


def test_an_expression_that_outgrows_all_limits_fails_its_row_alone(tiny_model: Path, rows: Path) -> None:
    said = ["(a?){500}a{500}", "[0-9]{3}", r"(.*a){200}"] * 4
    pq.write_table(pq.read_table(rows).append_column("said", pa.array(said)), rows)
    config = job(tiny_model, rows, "out", sampling={"regex": {"column": "said"}, "temperature": 1.0}, errors=MAY_FAIL)
    for pattern, row in zip(said, answers(config), strict=True):
        if pattern[0] == "[":
            assert row["answer_status"] == "ok"
        elif pattern[-1] == "}" and pattern[1] == "a":
            assert row["error"].startswith("column 'said' became too complex to be followed: lexer error")


def with_tokenizer(model: Path, folder: Path, made: tokenizers.Tokenizer) -> Path:
    shutil.copytree(model, folder)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    saved.save_pretrained(folder)
    return folder


def test_a_vocabulary_that_cannot_spell_the_answer(tiny_model: Path, rows: Path) -> None:
    letters = [letter for letter in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) if not letter.isdigit()]
    words = {word: number for number, word in enumerate(["<s>", "</s>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    folder = with_tokenizer(tiny_model, rows.parent / "letters", made)
    config = job(folder, rows, "out", sampling={"regex": "[0-9]+"}, errors=MAY_FAIL)
    why = "no token of the model's vocabulary goes on with an answer as sampling.regex has it"
    assert {row["error"] for row in answers(config)} == {why}


def test_a_tokenizer_whose_bytes_nobody_knows(tiny_model: Path, rows: Path) -> None:
    words = {word: number for number, word in enumerate(["<s>", "</s>", "[UNK]", *"the cat sat".split()])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = with_tokenizer(tiny_model, rows.parent / "words", made)
    with pytest.raises(ModelError, match="answers cannot be made to look like something by the model's tokenizer"):
        run_job(job(folder, rows, "out", sampling={"regex": "[0-9]+"}))


def test_some_rows_are_constrained_and_others_not(tiny_model: Path, rows: Path) -> None:
    said = ["[0-9]{3}", None, None] * 4
    pq.write_table(pq.read_table(rows).append_column("said", pa.array(said)), rows)
    mixed = answers(job(tiny_model, rows, "mixed", sampling={"regex": {"column": "said"}}))
    free = answers(job(tiny_model, rows, "free"))
    for pattern, row, unbound in zip(said, mixed, free, strict=True):
        assert row["output"].isdigit() if pattern else row["output_token_ids"] == unbound["output_token_ids"]


def test_readers_of_parquet_find_the_types(tiny_model: Path, rows: Path) -> None:
    shape = {"kind": ["cat", "dog"], "n": "integer", "tags": [["a", "b"]], "when": "date?", "of": {"sure": "boolean"}}
    output = {"path": str(rows.parent / "typed"), "dates": "typed"}
    sampling = {"max_tokens": 110, "temperature": 1.0}
    ok = [
        row["answer"] for row in answers(job(tiny_model, rows, "typed", answer=shape, output=output, sampling=sampling))
    ]
    files = str(rows.parent / "typed" / "*.parquet")
    right = "answer_status = 'ok' order by id"
    by_duckdb = duckdb.sql(f"select answer.kind, answer.n, answer.of.sure, answer.when from '{files}' where {right}")
    assert by_duckdb is not None
    assert by_duckdb.types == ["VARCHAR", "BIGINT", "BOOLEAN", "DATE"]
    expected = [(row["kind"], row["n"], row["of"]["sure"], row["when"]) for row in ok if row]
    assert expected
    assert by_duckdb.fetchall() == expected
    by_polars = polars.read_parquet(files).filter(polars.col("answer_status") == "ok").sort("id")
    assert dict(by_polars["answer"].struct.schema)["n"] == polars.Int64
    assert by_polars["answer"].to_list() == [row for row in ok if row]
    by_pandas = pandas.read_parquet(glob(files), dtype_backend="pyarrow").query("answer_status == 'ok'")
    assert by_pandas.sort_values("id")["answer"].tolist() == [row for row in ok if row]


def test_answers_that_fail_a_check_are_asked_for_again(tiny_model: Path, rows: Path) -> None:
    sampling = {"regex": "[0-9]", "temperature": 3.0, "n": 2}
    output = {"path": str(rows.parent / "out"), "check": "answer in ['1', '2', '3', '4', '5']"}
    once = run_and_read(job(tiny_model, rows, "out", sampling=sampling, output=output))
    output["path"] = str(rows.parent / "again")
    config = job(tiny_model, rows, "again", sampling=sampling, output=output, errors={"retries": 2})
    again = run_and_read(config)
    assert [(row["id"], row["sample"]) for row in again] == [(row, sample) for row in range(ROWS) for sample in (0, 1)]
    for first, last in zip(once, again, strict=True):
        if first["answer_status"] == "ok":
            assert (last["output"], last["tries"]) == (first["output"], 1)
        else:
            assert first["answer"] is None
            assert last["tries"] > 1
            assert (last["tries"] == 3) or last["answer_status"] == "ok"
        assert (last["answer_status"] == "ok") == (last["output"] in "12345")
    tries = Counter(row["tries"] for row in again)
    assert min(tries[1], tries[2], tries[3]) > 0, tries
    output["path"] = str(rows.parent / "two")
    two = config.model_copy(update={"output": config.output.model_copy(update={"path": output["path"]})})
    assert run_and_read(two.model_copy(update={"engine": config.engine.model_copy(update={"replicas": 2})})) == again


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"output": {"check": "amount >"}}, "output.check: invalid syntax"),
        ({"output": {"check": "amont > 0"}}, r"output.check: there is no field 'amont' \(did you mean 'amount'\?\)"),
        ({"output": {"check": "amount"}}, "output.check: comes out as double, and has to be true or false"),
        ({"output": {"check": "amount > 'a'"}}, "output.check: Function 'greater' has no kernel"),
        ({"errors": {"retries": 1}, "sampling": {"temperature": 0}}, "errors.retries: at temperature 0 each try is"),
        ({"errors": {"retries": 1}, "answer": {}}, "errors.retries: answers have no type here"),
        ({"output": {"check": "answer"}, "answer": {}}, "output.check: answers have no type here"),
    ],
)
def test_checks_and_retries_that_cannot_be_are_refused(
    tiny_model: Path, rows: Path, sections: dict[str, Any], why: str
) -> None:
    told: dict[str, Any] = {"answer": {"amount": "number"}, "sampling": {"temperature": 1.0}, **sections}
    told["output"] = {"path": str(rows.parent / "never"), **sections.get("output", {})}
    with pytest.raises(JobFileError, match=why):
        check_job(job(tiny_model, rows, "never", **told))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"answer": {"text": "string"}}, "output.flatten: there is a column 'text' already"),
        ({"answer": {"error": "string"}}, "output.flatten: there is a column 'error' already"),
        ({"sampling": {"regex": "a"}}, "output.flatten: answers have no fields here"),
        ({}, "output.flatten: answers have no type here"),
    ],
)
def test_columns_that_cannot_be_are_refused(tiny_model: Path, rows: Path, sections: dict[str, Any], why: str) -> None:
    output = {"path": str(rows.parent / "flat"), "flatten": True, "columns": ["text"]}
    with pytest.raises(JobFileError, match=why):
        run_job(job(tiny_model, rows, "flat", output=output, **sections))
