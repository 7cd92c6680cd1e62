"""A model that thinks aloud: what it thinks is its own affair, and its answer is what the job wants."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_job import WORDS, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.commands.check import check_job
from vasuki.runs.run import run_job

ROWS = 12
PATTERN = "(yes|no), [0-9]{2}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the markers of Qwen3."""
    folder = write_tiny_model(tmp_path_factory.mktemp("thinker"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    torch.manual_seed(3)
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def job(model: Path, folder: Path, out: str, prompt: str = "{text} <think>", **sections: Any) -> JobConfig:
    texts = [" ".join(WORDS[row : row + 4]) for row in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "text": texts}), folder / "in.parquet")
    close = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("</think>")
    sampling = {"max_tokens": 60, "temperature": 1.0, "logit_bias": {close: 3.0}, **sections.pop("sampling", {})}
    tree = {
        "model": {"path": str(model)},
        "input": {"path": str(folder / "in.parquet"), "id": "id", "prompt": prompt, "chat": False},
        "output": {"path": str(folder / out), "token_ids": True, "reasoning": True},
        "sampling": sampling,
        "engine": {"chunk_tokens": 32},
        "kv": {"device_memory": 2**21},
        **sections,
    }
    return parse_job(tree)


def rows_of(config: JobConfig) -> list[dict[str, Any]]:
    run_job(config)
    rows = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


def test_only_the_answer_is_constrained(thinker: Path, tmp_path: Path) -> None:
    close = AutoTokenizer.from_pretrained(thinker).convert_tokens_to_ids("</think>")
    free = rows_of(job(thinker, tmp_path, "free"))
    bound = rows_of(job(thinker, tmp_path, "bound", sampling={"regex": PATTERN}))
    ended = [row for row in bound if close in row["output_token_ids"]]
    assert len(ended) > ROWS // 2
    assert len({len(row["reasoning"] or "") for row in ended}) > 3, "thoughts of many lengths"
    for row, other in zip(bound, free, strict=True):
        assert row["reasoning"] == other["reasoning"]
        if row not in ended:
            assert (row["answer"], row["answer_status"], row["output"]) == (None, "truncated", "")
            continue
        thoughts = row["output_token_ids"].index(close) + 1
        assert row["output_token_ids"][:thoughts] == other["output_token_ids"][:thoughts]
        assert re.fullmatch(PATTERN, row["output"]) or row["finish_reason"] == "length"
        assert (row["answer"] == row["output"]) == (row["answer_status"] == "ok")
    assert sum(row["answer_status"] == "ok" for row in bound) > ROWS // 2


@pytest.mark.parametrize("engine", [{"replicas": 2}, {"attention": "padded"}, {"chunk_tokens": 1}])
def test_it_is_the_same_however_it_is_computed(thinker: Path, tmp_path: Path, engine: dict[str, Any]) -> None:
    sampling = {"regex": PATTERN}
    expected = rows_of(job(thinker, tmp_path, "one", sampling=sampling))
    kv = {"device_memory": 2**15, "block_tokens": 4} if "chunk_tokens" in engine else {"device_memory": 2**21}
    assert rows_of(job(thinker, tmp_path, "other", sampling=sampling, engine=engine, kv=kv)) == expected


def test_the_model_chooses_whether_it_thinks(thinker: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    opens, close = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    sampling: dict[str, Any] = {"regex": PATTERN, "logit_bias": {opens: 4.0, close: 4.0}}
    rows = rows_of(job(thinker, tmp_path, "out", prompt="{text}", sampling=sampling))
    thought = [row for row in rows if row["output_token_ids"][0] == opens]
    assert 0 < len(thought) < ROWS
    for row in rows:
        assert (row["reasoning"] is None) or row in thought
        if row not in thought:
            assert re.fullmatch(PATTERN, row["output"])
    assert any(row["answer_status"] == "ok" for row in thought)


def test_a_model_that_does_not_think_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = job(tiny_model, tmp_path, "out", sampling={"logit_bias": {}})
    for refuse in (check_job, run_job):
        with pytest.raises(JobFileError, match=r"output\.reasoning: the model's tokenizer has no token"):
            refuse(config)
