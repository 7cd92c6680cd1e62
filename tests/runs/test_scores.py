"""How likely texts are: as transformers' own logits say, whatever is computed beside them, and after a kill."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from tiny_job import WORDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.commands.check import check_job
from vasuki.commands.cli import main
from vasuki.io.location import Location
from vasuki.io.output.trace import read_trace
from vasuki.runs.run import run_job

ROWS = 10
TEXTS = [" ".join(WORDS[row % 7 : row % 7 + 3 + row]) for row in range(ROWS)]
CHOICES = [[" a hill", " hills far away", "two"][: 1 + row % 3] for row in range(ROWS)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    ends = [" ".join(WORDS[row : row + 2]) for row in range(ROWS)]
    table = {"id": range(ROWS), "text": TEXTS, "end": ends, "choices": CHOICES}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def job(model: Path, rows: Path, out: str = "out", **sections: Any) -> JobConfig:
    tree: dict[str, Any] = {
        "task": "score",
        "model": {"path": str(model)},
        "input": {"path": str(rows), "id": "id", "prompt": "{text}", "chat": False},
        "output": {"path": str(rows.parent / out)},
        "engine": {"chunk_tokens": 16},
        "kv": {"device_memory": 2**21},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_job(tree)


def rows_of(config: JobConfig) -> list[dict[str, Any]]:
    run_job(config)
    found = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(found, key=lambda row: row["id"])


class Judge:
    """Log-probabilities by transformers alone."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def of(self, before: str, text: str) -> tuple[float, int]:
        """Of a text behind another, and its tokens, as lm-evaluation-harness splits them."""
        spaces = len(before) - len(before.rstrip())
        before, text = before.rstrip(), before[len(before) - spaces :] + text
        ids = self.tokenizer(before + text).input_ids
        return self.ending(ids, len(ids) - len(self.tokenizer(before).input_ids) if before else len(ids) - 1)

    def ending(self, ids: list[int], count: int) -> tuple[float, int]:
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -count - 1 : -1].double()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[-count:])[:, None]).sum().item(), count


def test_a_continuation(tiny_model: Path, rows: Path) -> None:
    judge = Judge(tiny_model)
    config = job(tiny_model, rows, input={"prompt": "{text} ", "continuation": "{end}"})
    for row, (text, found) in enumerate(zip(TEXTS, rows_of(config), strict=True)):
        logprob, tokens = judge.of(f"{text} ", " ".join(WORDS[row : row + 2]))
        assert found["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert (found["tokens"], found["error"], found["finish_reason"]) == (tokens, None, "stop")
        assert "output" not in found


def test_it_is_planned_and_exported_like_any_job(tiny_model: Path, rows: Path) -> None:
    config = job(tiny_model, rows, input={"continuation": [" a", " the"]})
    file = rows.parent / "job.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    plan = json.loads(CliRunner().invoke(main, ["plan", str(file), "--json"]).stdout)[0]
    assert (plan["requests"], plan["output_tokens_estimate"]) == (2 * ROWS, 2 * ROWS)
    assert plan["makespan_s"] >= plan["lower_bound_s"] > 0
    found = rows_of(config)
    for name, code in (("a.jsonl", 0), ("a.csv", 0)):
        out = CliRunner().invoke(main, ["export", config.output.path, "--to", str(rows.parent / name)])
        assert out.exit_code == code, out.stderr
    told = [json.loads(line) for line in (rows.parent / "a.jsonl").read_text().splitlines()]
    assert [row["logprob"] for row in told] == [row["logprob"] for row in found]
    refused = CliRunner().invoke(
        main, ["export", config.output.path, "--to", str(rows.parent / "b.jsonl"), "--format", "openai"]
    )
    assert (refused.exit_code, "has no answers that a hosted API" in refused.stderr) == (2, True)


def test_a_text_and_its_perplexity(tiny_model: Path, rows: Path) -> None:
    judge = Judge(tiny_model)
    for text, found in zip(TEXTS, rows_of(job(tiny_model, rows)), strict=True):
        logprob, tokens = judge.of("", text)
        assert found["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(-logprob / tokens), rel=1e-4)


@pytest.mark.parametrize("normalization", ["none", "tokens", "bytes"])
def test_several_continuations(tiny_model: Path, rows: Path, normalization: str) -> None:
    judge, by_column = Judge(tiny_model), {"continuation": {"column": "choices"}}
    score = {"normalization": normalization}
    for text, choices, found in zip(
        TEXTS, CHOICES, rows_of(job(tiny_model, rows, input=by_column, score=score)), strict=True
    ):
        judged = [judge.of(text, choice) for choice in choices]
        assert found["logprob"] == pytest.approx([logprob for logprob, _ in judged], abs=1e-4)
        assert found["tokens"] == [tokens for _, tokens in judged]
        lengths = {"none": 1.0, "tokens": [n for _, n in judged], "bytes": [len(choice.encode()) for choice in choices]}
        own = np.array([logprob for logprob, _ in judged]) / np.array(lengths[normalization])
        expected = torch.softmax(torch.tensor(own), 0)
        assert found["probabilities"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert found["best"] == choices[int(expected.argmax())]
        assert sum(found["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"chunk_tokens": 1}},
        {"engine": {"chunk_tokens": 5, "max_num_seqs": 2}},
        {"engine": {"replicas": 2}},
        {"kv": {"device_memory": 2**14, "block_tokens": 4}},
        {"engine": {"policy": "vllm"}},
    ],
    ids=str,
)
def test_it_is_the_same_however_it_is_computed(tiny_model: Path, rows: Path, changes: dict[str, Any]) -> None:
    source = {"continuation": {"column": "choices"}}
    expected = rows_of(job(tiny_model, rows, input=source))
    for found, row in zip(rows_of(job(tiny_model, rows, "other", input=source, **changes)), expected, strict=True):
        assert found.pop("logprob") == pytest.approx(row.pop("logprob"), abs=1e-4)
        assert found.pop("probabilities") == pytest.approx(row.pop("probabilities"), abs=1e-4)
        assert found == row


def test_the_prompt_is_computed_once(tiny_model: Path, rows: Path) -> None:
    long = " ".join(WORDS * 3)
    pq.write_table(pa.table({"id": [0], "text": [long], "choices": [[" a", " the", " hills"]]}), rows)
    config = job(tiny_model, rows, input={"continuation": {"column": "choices"}}, kv={"block_tokens": 4})
    run_job(config)
    computed = sum(step.prefill_tokens for step in read_trace(Location.parse(config.output.path)))
    assert computed < len(AutoTokenizer.from_pretrained(tiny_model)(long).input_ids) + 3 * 8


def test_a_conversation_is_continued(tiny_model: Path, rows: Path) -> None:
    judge = Judge(tiny_model)
    config = job(tiny_model, rows, input={"chat": True, "continuation": [" yes", " no {end}"]})
    for row, (text, found) in enumerate(zip(TEXTS, rows_of(config), strict=True)):
        messages = [{"role": "user", "content": text}]
        ids = judge.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ends = [" yes", f" no {' '.join(WORDS[row : row + 2])}"]
        own = [judge.tokenizer.encode(end, add_special_tokens=False) for end in ends]
        assert found["logprob"] == pytest.approx([judge.ending(ids + each, len(each))[0] for each in own], abs=1e-4)


def test_choices_have_probabilities(tiny_model: Path, rows: Path) -> None:
    judge, choices = Judge(tiny_model), [" a hill", " hills far away", " two"]
    config = job(
        tiny_model,
        rows,
        task="generate",
        sampling={"choices": choices, "temperature": 1.0, "n": 2},
        output={"choice_probabilities": True, "logprobs": "tokens"},
    )
    found = rows_of(config)
    assert len(found) == 2 * ROWS
    for row in found:
        judged = torch.tensor([judge.of(TEXTS[row["id"]], choice)[0] for choice in choices], dtype=torch.float64)
        assert [each["choice"] for each in row["choice_probabilities"]] == choices
        assert [each["logprob"] for each in row["choice_probabilities"]] == pytest.approx(judged.tolist(), abs=1e-5)
        shares = [each["probability"] for each in row["choice_probabilities"]]
        assert shares == pytest.approx(torch.softmax(judged, 0).tolist(), abs=1e-5)
        assert row["answer"] in choices
    plain = job(tiny_model, rows, "plain", task="generate", sampling={"choices": choices, "temperature": 1.0, "n": 2})
    assert [row["output"] for row in rows_of(plain)] == [row["output"] for row in found]


def test_what_is_no_number_fails_its_row_alone(tiny_model: Path, rows: Path) -> None:
    broken = rows.parent / "broken"
    shutil.copytree(tiny_model, broken)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(broken), AutoTokenizer.from_pretrained(broken)
    network.get_input_embeddings().weight.data[tokenizer(TEXTS[0]).input_ids[-1]] = math.nan
    network.save_pretrained(broken)
    config = job(broken, rows, input={"continuation": [" a", " the"]}, errors={"max_fraction": 1})
    errors = [row["error"] for row in rows_of(config)]
    assert errors[0] == "the model's logits are no numbers"
    assert None in errors


def test_long_prompts_lose_their_beginning_where_that_is_asked(tiny_model: Path, rows: Path) -> None:
    judge, long = Judge(tiny_model), " ".join(WORDS * 20)
    pq.write_table(pa.table({"id": [0, 1], "text": [long, "the cat"]}), rows)
    source = {"continuation": " hills far away", "truncate": True}
    found = rows_of(job(tiny_model, rows, input=source))
    ids = judge.tokenizer(f"{long} hills far away").input_ids
    count = len(ids) - len(judge.tokenizer(long).input_ids)
    assert found[0]["logprob"] == pytest.approx(judge.ending(ids[-129:], count)[0], abs=1e-4)
    assert found[1]["logprob"] == pytest.approx(judge.of("the cat", " hills far away")[0], abs=1e-4)


def test_rows_that_cannot_be_scored_fail_alone(tiny_model: Path, rows: Path) -> None:
    table = {
        "id": range(6),
        "text": ["the cat", "the cat", "the cat", "the cat", "", "the cat " * 60],
        "choices": [[" a"], [], [""], None, [" a"], [" a"]],
    }
    pq.write_table(pa.table(table), rows)
    config = job(tiny_model, rows, input={"continuation": {"column": "choices"}}, errors={"max_fraction": 1})
    errors = [row["error"] for row in rows_of(config)]
    assert errors[:5] == [
        None,
        "column 'choices' has 0 texts; there may be 1 to 1000",
        "continuation is empty",
        "column 'choices' is no list of texts",
        "prompt is empty",
    ]
    assert "no room is left in the model's context of 128" in errors[5]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling": {"temperature": 1.0}}, "sampling.temperature: means nothing to task: score"),
        ({"output": {"logprobs": True}}, "output.logprobs: means nothing to task: score"),
        ({"answer": {"a": "string"}}, "answer: means nothing to task: score"),
        ({"task": "generate", "input": {"continuation": "x"}}, "input.continuation: means nothing to task: generate"),
        ({"task": "generate", "score": {"normalization": "bytes"}}, "score: means nothing to task: generate"),
        ({"task": "generate", "output": {"choice_probabilities": True}}, "there are no sampling.choices"),
        ({"input": {"continuation": "{nothing}"}}, "input.continuation names column 'nothing'"),
        ({"engine": {"attention": "padded"}}, "engine.attention: texts are read in packed steps"),
    ],
)
def test_what_means_nothing_is_refused(tiny_model: Path, rows: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(JobFileError, match=why):
        check_job(job(tiny_model, rows, **changes))
