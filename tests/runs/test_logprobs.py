"""How likely each token was: as transformers' own logits say, as OpenAI's package reads it, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from click.testing import CliRunner
from openai.types.chat import ChatCompletion

from vasuki.base.config import JobConfig
from vasuki.base.job_file import parse_job
from vasuki.commands.cli import main
from vasuki.runs.run import run_job

TEXTS = ["the cat sat", "the dog ran and the cat", "a fish", "the moon is red"]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"guided_regex": "[a-z ]{3,9}"},
    {"frequency_penalty": 1.5, "logit_bias": {"5": 4}},
    {"temperature": 1.0},
)


def batch(model: Path, folder: Path, **sections: Any) -> JobConfig:
    """A batch of OpenAI's form, a row of each setting."""
    lines = []
    for row, (text, settings) in enumerate(zip(TEXTS, SETTINGS, strict=True)):
        body = {"prompt": text, "max_tokens": 8, "logprobs": 2, **settings}
        lines.append(json.dumps({"custom_id": f"r{row}", "url": "/v1/completions", "body": body}))
    (folder / "in.jsonl").write_text("\n".join(lines))
    return parse_job(
        {
            "model": {"path": str(model)},
            "input": {"path": str(folder / "in.jsonl"), "format": "openai-batch"},
            "output": {"path": str(folder / "out"), "token_ids": True, "logprobs": 2},
            "engine": {"chunk_tokens": 16},
            "kv": {"device_memory": 2**21},
            **sections,
        }
    )


def rows_of(config: JobConfig) -> list[dict[str, Any]]:
    run_job(config)
    rows = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_they_are_the_models_own_whatever_a_row_asks_for(tiny_model: Path, tmp_path: Path, replicas: int) -> None:
    config = batch(tiny_model, tmp_path, engine={"replicas": replicas, "chunk_tokens": 16})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    for text, row in zip(TEXTS, rows_of(config), strict=True):
        ids, output = tokenizer(text).input_ids, row["output_token_ids"]
        with torch.no_grad():
            logits = network(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        likely = logprobs.topk(2)
        assert [each["token_id"] for each in row["logprobs"]] == output
        assert row["logprob"] == pytest.approx(sum(each["logprob"] for each in row["logprobs"]))
        for place, each in enumerate(row["logprobs"]):
            assert each["token"] == tokenizer.decode([output[place]])
            assert each["logprob"] == pytest.approx(logprobs[place, output[place]].item(), abs=1e-4)
            top = each["top_logprobs"]
            assert [other["token_id"] for other in top] == likely.indices[place].tolist()
            assert [other["logprob"] for other in top] == pytest.approx(likely.values[place].tolist(), abs=1e-4)


def test_openais_package_reads_what_is_exported(tiny_model: Path, tmp_path: Path) -> None:
    config = batch(tiny_model, tmp_path)
    rows = rows_of(config)
    target = tmp_path / "results.jsonl"
    exported = CliRunner().invoke(main, ["export", config.output.path, "--to", str(target), "--format", "openai"])
    assert exported.exit_code == 0, exported.stderr
    for row, line in zip(rows, target.read_text().splitlines(), strict=True):
        [choice] = ChatCompletion.model_validate(json.loads(line)["response"]["body"], strict=True).choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [each.logprob for each in choice.logprobs.content] == [each["logprob"] for each in row["logprobs"]]
        assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * row["output_tokens"]


def test_tokens_alone(tiny_model: Path, tmp_path: Path) -> None:
    config = batch(tiny_model, tmp_path)
    text = (tmp_path / "in.jsonl").read_text().replace('"logprobs": 2', '"logprobs": true')
    (tmp_path / "in.jsonl").write_text(text)
    output = config.output.model_copy(update={"logprobs": "tokens", "path": str(tmp_path / "tokens")})
    for row in rows_of(config.model_copy(update={"output": output})):
        assert row["error"] is None
        assert len(row["logprobs"]) == row["output_tokens"]
        assert set(row["logprobs"][0]) == {"token", "token_id", "logprob"}
