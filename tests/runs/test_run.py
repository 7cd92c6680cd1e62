"""`vasuki run` as its users meet it: files in, files out, exit codes, one line for each mistake."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result
from tiny_job import WORDS, job_tree

from vasuki.base.config import InputConfig
from vasuki.commands.cli import main
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location
from vasuki.io.output.manifest import Bounds
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.trace import read_trace
from vasuki.machines.profile_files import find_profile
from vasuki.planner import make_plan
from vasuki.planner.any_schedule import AnySchedule
from vasuki.planner.job_sums import JobSums
from vasuki.runs.manifests import bounds_of

Job = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """Writes a job file over rows and returns its path."""

    def write(rows: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
        rows = texts(12) if rows is None else rows
        if rows:
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
        tree = job_tree(tiny_model, tmp_path / "in.parquet", tmp_path / "out")
        tree["input"]["duplicates"] = "each"
        for dotted, value in changes.items():
            section, _, key = dotted.partition("__")
            tree[section] = {**tree.get(section, {}), key: value} if key else value
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "text": " ".join(WORDS[: 1 + i * 7 % 17])} for i in range(count)]


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", str(path), "--quiet", *arguments])


def output(path: Path) -> list[dict[str, Any]]:
    folder = Path(yaml.safe_load(path.read_text())["output"]["path"])
    parts = sorted(folder.glob("part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def by_id(path: Path) -> dict[Any, dict[str, Any]]:
    rows = output(path)
    assert len({row["id"] for row in rows}) == len(rows), "a row appears twice"
    return {row["id"]: row for row in rows}


def test_greedy_output_equals_generate(job: Job, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = job(output__logprobs=True)
    result = run(path)
    assert result.exit_code == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = by_id(path)
    for row in texts(12):
        ids = tokenizer(row["text"])["input_ids"]
        expected = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, do_sample=False
        )[0, len(ids) :].tolist()
        got = rows[row["id"]]
        assert got["output_token_ids"] == expected
        assert got["output"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert got["finish_reason"] == ("stop" if expected[-1] == 1 else "length")
        assert (got["prompt_tokens"], got["output_tokens"]) == (len(ids), len(expected))
        with torch.no_grad():
            logits = model(torch.tensor([ids + expected])).logits[0, len(ids) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(expected)[:, None])
        assert got["logprob"] == pytest.approx(chosen.sum().item(), abs=1e-3)
        assert got["error"] is None


def tokens(path: Path) -> dict[Any, list[int]]:
    return {name: row["output_token_ids"] for name, row in by_id(path).items()}


def test_memory_is_what_layers_store_not_what_the_config_says(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    """GPT-NeoX knows no num_key_value_heads, and stores twice what a config with that key seems to say."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

    folder = tmp_path / "neox"
    sizes = AutoConfig.from_pretrained(tiny_model).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = GPTNeoXConfig(**{name: sizes[name] for name in names}, num_key_value_heads=2, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    path = job(texts(40), model__path=str(folder), kv={"device_memory": "16KiB", "block_tokens": 4, "offload": "park"})
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    kv = json.loads(result.stdout)["kv"]
    assert 12 * 1024 < kv["peak_device_bytes"] <= 16 * 1024


@pytest.fixture
def hybrid_model(tmp_path: Path, tiny_model: Path) -> Path:
    """Three layers that carry a state of 6 KiB together, and one that attends."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

    folder = tmp_path / "hybrid"
    config = Qwen3_5TextConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("memory", "weights_on_host"), [("4MiB", 0), ("64KiB", 0), ("4MiB", 2)])
def test_rows_with_a_state_take_its_memory_and_give_their_own_tokens(
    job: Job, hybrid_model: Path, memory: str, weights_on_host: int
) -> None:
    """Rows share a prefix, which is of no use to a state, and there is memory for all, or for a few."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    head = " ".join(WORDS)
    rows = [{"id": f"r{i}", "text": f"{head} {' '.join(WORDS[i % 17 : i % 17 + 4])}"} for i in range(20)]
    kv = {"device_memory": memory, "block_tokens": 4}
    path = job(
        rows, model__path=str(hybrid_model), engine={"chunk_tokens": 32, "weights_on_host": weights_on_host}, kv=kv
    )
    refused = run(path, "--set", "kv.offload=park")
    assert refused.exit_code == 2
    assert "kv.offload: park cannot be done: rows keep states" in refused.stderr
    (plan,) = json.loads(CliRunner().invoke(main, ["plan", str(path), "--json"]).stdout)
    assert (plan["offload"]["mode"], plan["offload"]["weights_on_host"]) == ("none", weights_on_host)
    assert "states" in plan["offload"]["reason"]
    assert plan["shared_tokens"] == 0
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    manifest = json.loads(result.stdout)
    assert manifest["tokens"]["shared"] == 0
    assert manifest["batch"]["max_seqs"] * 6144 < manifest["kv"]["peak_device_bytes"] <= 4 * 2**20
    if memory == "64KiB":
        assert manifest["kv"]["peak_device_bytes"] <= 64 * 1024
        assert 1 < manifest["batch"]["max_seqs"] < 14
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hybrid_model), AutoTokenizer.from_pretrained(hybrid_model)
    for name, answer in by_id(path).items():
        ids = tokenizer(next(row["text"] for row in rows if row["id"] == name))["input_ids"]
        expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
        assert answer["output_token_ids"] == expected


@pytest.mark.parametrize("offload", ["none", "park", "stream", "ahead"])
def test_what_moves_to_the_host_changes_no_token(job: Job, tmp_path: Path, deep_model: Path, offload: str) -> None:
    """Five of eight layers' weights, with each way to move KV."""
    path = job(model__path=str(deep_model))
    assert run(path).exit_code == 0
    expected = tokens(path)
    path = job(
        model__path=str(deep_model),
        output={"path": str(tmp_path / "out2"), "token_ids": True},
        engine={"max_num_seqs": 8, "chunk_tokens": 16, "weights_on_host": 5},
        kv={"device_memory": "512KiB", "block_tokens": 4, "offload": offload},
    )
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    assert tokens(path) == expected
    kv = json.loads(result.stdout)["kv"]
    assert kv["exposed_copy_s"] + kv["hidden_copy_s"] > 0
    steps = [json.loads(line) for line in (tmp_path / "out2" / "trace.jsonl").read_text().splitlines()]
    assert sum(step["copied_bytes"] for step in steps) == kv["offloaded_bytes"]
    for tier in ("device", "host"):
        held = max(step[f"kv_{tier}_bytes"] for step in steps)  # after a step, when ended rows are gone
        assert 0.5 * kv[f"peak_{tier}_bytes"] <= held <= kv[f"peak_{tier}_bytes"]
    if offload == "stream":
        assert kv["offloaded_bytes"] > 0
        assert kv["peak_host_bytes"] > 0
        assert {step["streamed_layers"] for step in steps} == {steps[0]["streamed_layers"]} != {0}
    assert run(job(model__path=str(deep_model), engine={"weights_on_host": 8}), "--fresh").exit_code == 4


def test_rows_whose_prompts_are_computed_ahead_are_counted(job: Job, tmp_path: Path) -> None:
    long = {"max_tokens": 40, "ignore_eos": True}
    path = job(sampling=long)
    assert run(path).exit_code == 0
    expected = tokens(path)
    path = job(
        sampling=long,
        output={"path": str(tmp_path / "out2"), "token_ids": True},
        engine={"max_num_seqs": 12, "chunk_tokens": 32},
        kv={"device_memory": "48KiB", "block_tokens": 4, "offload": "ahead"},
    )
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    assert tokens(path) == expected
    assert json.loads(result.stdout)["kv"]["prefilled_ahead"] > 0


def test_a_model_larger_than_its_card_runs_with_weights_on_the_host(job: Job, tmp_path: Path, deep_model: Path) -> None:
    """The plan is for a card of 14 MiB; only here the memory of the real device is another."""
    from vasuki.machines.profile_files import find_profile

    card = find_profile("a10").model_copy(update={"name": "small", "memory_mib": 14})
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(card.model_dump(mode="json", exclude={"measured"})))
    path = job(model__path=str(deep_model), kv={"device_memory": "512KiB"})
    assert run(path).exit_code == 0
    expected = tokens(path)
    path = job(
        model__path=str(deep_model),
        kv={"device_memory": "512KiB"},
        plan__gpu=str(tmp_path / "small.yaml"),
        output={"path": str(tmp_path / "out2"), "token_ids": True},
    )
    planned = CliRunner().invoke(main, ["plan", str(path)])
    assert "of 8 layers stay on the host, since 0.0 GiB" in " ".join(planned.stdout.split()), planned.output
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    assert tokens(path) == expected
    assert json.loads(result.stdout)["kv"]["hidden_copy_s"] > 0


def test_compiled_kernels_change_no_token(job: Job, tmp_path: Path) -> None:
    answers = []
    for compiles in ("auto", "off"):
        path = job(engine__compile=compiles, output__path=str(tmp_path / compiles), model__dtype="float32")
        assert run(path).exit_code == 0
        manifest = json.loads((tmp_path / compiles / "manifest.json").read_text())
        assert (manifest["timings"]["compile_s"] > 0) == (compiles == "auto")
        answers.append({key: row["output_token_ids"] for key, row in by_id(path).items()})
    assert answers[0] == answers[1]


def test_keys_and_values_of_half_the_width_take_half_the_memory(job: Job, tmp_path: Path) -> None:
    peaks, steps = [], []
    for dtype in ("auto", "bfloat16"):
        path = job(kv={"device_memory": "16KiB", "dtype": dtype}, output__path=str(tmp_path / dtype))
        result = run(path, "--json", "--set", "sampling.ignore_eos=true")
        assert result.exit_code == 0, result.stderr
        manifest = json.loads(result.stdout)
        peaks.append(manifest["kv"]["peak_device_bytes"])
        steps.append(manifest["steps"])
    assert peaks[1] <= peaks[0] <= 16 * 1024
    assert steps[1] < 0.8 * steps[0]  # there is room for twice as many rows


def test_manifest_counts_and_success_marker(job: Job) -> None:
    path = job()
    result = run(path, "--json")
    manifest = json.loads(result.stdout)
    folder = path.parent / "out"
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == {"total": 12, "succeeded": 12, "failed": 0}
    assert manifest["tokens"]["output"] == sum(row["output_tokens"] for row in output(path))
    steps = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert manifest["steps"] == len(steps)
    assert manifest["tokens"]["output"] == sum(step["sampled_tokens"] for step in steps)
    assert manifest["input_fingerprint"]
    assert (folder / "_SUCCESS").exists()


def test_the_bound_is_of_the_lengths_that_came(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that were planned for; and of a run that goes on, of what was left."""
    monkeypatch.setattr("vasuki.runs.workers.here.is_affordable", lambda *_: True)
    done: list[JobSums] = []

    def noted(schedules: AnySchedule, sums: JobSums, pace: float | None) -> Bounds:
        done.append(sums)
        return bounds_of(schedules, sums, pace)

    monkeypatch.setattr("vasuki.runs.workers.here.bounds_of", noted)
    path = job(sampling={"max_tokens": 60})
    manifest = json.loads(run(path, "--json").stdout)
    (sums,), rows = done, output(path)
    assert sums.sums.samples == sum(row["output_tokens"] for row in rows) < 12 * 60
    assert sums.sums.pairs == sum(n * (n + 1) // 2 for n in (row["prompt_tokens"] for row in rows))
    bounds = manifest["bounds"]
    assert 0 < bounds["datasheet_s"] < bounds["schedule_s"] < manifest["timings"]["generate_s"]
    assert bounds["uncertainty"] is not None
    assert run(path, "--fresh", "--max-time", "0s", "--json").exit_code == 75
    assert done[-1].sums.samples <= 12
    assert run(path, "--json").exit_code == 0
    assert done[-1].sums.samples + done[-2].sums.samples == sums.sums.samples


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_formats_agree(job: Job, tmp_path: Path, name: str) -> None:
    import csv

    rows = texts(6)
    path = job(rows)
    run(path)
    expected = {row["id"]: row["output"] for row in output(path)}
    file = tmp_path / f"in.{name}"
    if name == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    path = job([], input__path=str(file), output__path=str(tmp_path / "out2"))
    assert run(path).exit_code == 0
    assert {row["id"]: row["output"] for row in output(path)} == expected


def test_messages_and_token_ids(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "two dogs run"}]
    ids = AutoTokenizer.from_pretrained(tiny_model).apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    source = {"path": str(tmp_path / "in.parquet")}
    path = job([{"m": messages}], input={**source, "messages": "m"})
    assert run(path).exit_code == 0
    chat = output(path)
    path = job([{"t": ids}], input={**source, "prompt_token_ids": "t"}, output__path=str(tmp_path / "out2"))
    assert run(path).exit_code == 0
    assert chat[0]["output"] == output(path)[0]["output"]
    assert chat[0]["prompt_tokens"] == len(ids)


def test_lengths_are_learned_from_rows_that_still_run_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short outputs end first: without those that still run, estimates would be too short."""
    from vasuki.planner.ordering.output_length import OutputLengths

    running: list[int] = []
    watch = OutputLengths.watch

    def spy(lengths: OutputLengths, rows: Iterable[tuple[int, int]]) -> None:
        rows = list(rows)
        running.extend(produced for _, produced in rows)
        watch(lengths, rows)

    monkeypatch.setattr(OutputLengths, "watch", spy)
    rows = [{**row, "limit": 2 if index % 4 else 60} for index, row in enumerate(texts(40))]
    result = run(job(rows, sampling={"max_tokens": {"column": "limit"}, "ignore_eos": True}))
    assert result.exit_code == 0, result.stderr
    assert max(running) > 2


def test_sampled_rows_do_not_depend_on_their_neighbours(job: Job, tmp_path: Path) -> None:
    settings = {"max_tokens": 10, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 5, "n": 2}
    path = job(texts(12), sampling=settings)
    assert run(path).exit_code == 0
    together = {(row["id"], row["sample"]): row["output_token_ids"] for row in output(path)}
    path = job(texts(12)[3:5], sampling=settings, output__path=str(tmp_path / "out2"))
    assert run(path).exit_code == 0
    apart = {(row["id"], row["sample"]): row["output_token_ids"] for row in output(path)}
    assert apart.items() <= together.items()
    assert together["r3", 0] != together["r3", 1]


def test_stop_strings_end_the_answer(job: Job, tmp_path: Path) -> None:
    path = job(sampling__ignore_eos=True)
    run(path)
    full = by_id(path)["r3"]["output"]
    stop = full[5:7]
    path = job(sampling={"max_tokens": 8, "stop": [stop]}, output__path=str(tmp_path / "out2"))
    run(path)
    row = by_id(path)["r3"]
    assert row["finish_reason"] == "stop"
    assert row["output"] == full[: full.index(stop)]


def test_a_special_token_is_a_stop_string(job: Job, tmp_path: Path) -> None:
    """The name of the token that ends answers, where that is to be ignored, ends them all the same."""
    answers = []
    for out, settings in (("out", {}), ("out2", {"ignore_eos": True, "stop": ["</s>"]})):
        sampling = {"max_tokens": 60, "temperature": 1.5, **settings}
        path = job(sampling=sampling, output={"path": str(tmp_path / out), "token_ids": True})
        assert run(path).exit_code == 0
        rows = by_id(path).items()
        answers.append({name: (row["output_token_ids"], row["output"], row["finish_reason"]) for name, row in rows})
    assert answers[0] == answers[1]
    assert "stop" in {reason for _, _, reason in answers[0].values()}


def test_settings_come_from_columns(job: Job) -> None:
    rows = [row | {"limit": 1 + i} for i, row in enumerate(texts(5))]
    path = job(rows, sampling={"max_tokens": {"column": "limit"}, "ignore_eos": True})
    assert run(path).exit_code == 0
    assert [by_id(path)[f"r{i}"]["output_tokens"] for i in range(5)] == [1, 2, 3, 4, 5]


def test_bad_rows_become_error_rows_and_the_job_goes_on(job: Job) -> None:
    rows = [
        {"id": "null", "text": None, "limit": 4},
        {"id": "empty", "text": "", "limit": 4},
        {"id": "long", "text": "cat " * 200, "limit": 4},
        {"id": "zero", "text": "the cat", "limit": 0},
        {"id": "good", "text": "the cat", "limit": 4},
    ]
    path = job(rows, sampling={"max_tokens": {"column": "limit"}})
    result = run(path)
    assert result.exit_code == 3
    assert "4 of 5 rows failed" in result.stderr
    answers = by_id(path)
    reasons = {name: row["error"] for name, row in answers.items() if row["finish_reason"] == "error"}
    assert set(reasons) == {"null", "empty", "long", "zero"}
    assert all(reasons.values())
    assert answers["good"]["output_tokens"] > 0
    assert run(path, "--fresh", "--set", "errors.max_fraction=0.9").exit_code == 0


def test_rows_that_failed_are_run_once_more_where_there_is_room(job: Job) -> None:
    rows = [{"id": "short", "text": "the cat"}, {"id": "long", "text": "the cat " * 30}]
    path = job(rows, kv__device_memory="8KiB")
    assert run(path).exit_code == 3
    short = by_id(path)["short"]
    assert "needs KV memory" in by_id(path)["long"]["error"]
    roomy = ("--set", "kv.device_memory=4MiB")
    assert run(path, *roomy).exit_code == 3, "without being asked, nothing is run again"
    assert run(path, *roomy, "--retry-errors").exit_code == 0
    assert (by_id(path)["short"], by_id(path)["long"]["error"]) == (short, None)
    assert by_id(path)["long"]["output_tokens"] > 0


def test_the_share_of_failed_rows_is_counted_as_written(tmp_path: Path) -> None:
    """29 of 100 rows are no more than 0.29, though the float 0.29 is less than that."""
    from vasuki.base.errors import TooManyRowErrors
    from vasuki.io.output.manifest import Manifest, RowCounts
    from vasuki.runs.opening import Outcome

    for share in range(100):
        fraction = float(f"0.{share:02d}")
        Outcome(Manifest({}, "", "", RowCounts(100, 100 - share, share)), fraction).raise_for_errors()
        with pytest.raises(TooManyRowErrors):
            Outcome(Manifest({}, "", "", RowCounts(100, 99 - share, share + 1)), fraction).raise_for_errors()


def test_penalties_that_the_model_asks_for_are_named(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    defaults = folder / "generation_config.json"
    asked = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 0, "forced_eos_token_id": 0, "suppress_tokens": []}
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | asked))
    result = run(job(texts(1), model__path=str(folder)))
    assert result.exit_code == 0, result.stderr
    words = "generation_config.json asks for repetition_penalty 1.05 and forced_eos_token_id 0, which are not applied"
    assert words in result.stderr
    assert "generation_config" not in run(job(texts(1)), "--fresh").stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"eos_token_id": 2', "is not valid JSON"),
        ("[1, 2]", "does not say how to generate"),
        ('{"eos_token_id": "</s>"}', "eos_token_id should be a token id or a list of them, not '</s>'"),
        ('{"eos_token_id": [1, null]}', "eos_token_id should be a token id or a list of them, not [1, None]"),
    ],
)
def test_broken_defaults_of_a_model_are_refused_by_name(
    job: Job, tmp_path: Path, tiny_model: Path, content: str, words: str
) -> None:
    """What ends an answer is in them."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(content)
    path = job(texts(1), model__path=str(folder))
    for result in (run(path), CliRunner().invoke(main, ["check", str(path)])):
        assert result.exit_code == 4, result.output
        assert f"generation_config.json{'' if 'valid' in words or 'does' in words else ':'} {words}" in result.stderr


def test_rows_reach_as_far_as_generate_with_scaled_rotary_embeddings(
    job: Job, tmp_path: Path, tiny_model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16, "rope_parameters": rope}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[5 + 7 * place % 300 for place in range(count)] for count in (6, 14, 40)]
    rows = [{"id": str(number), "ids": prompt} for number, prompt in enumerate(prompts)]
    source = {"path": str(tmp_path / "in.parquet"), "id": "id", "prompt_token_ids": "ids"}
    sampling = {"max_tokens": 20, "ignore_eos": True}
    path = job(rows, model__path=str(folder), input=source, sampling=sampling)
    assert run(path).exit_code == 0
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert by_id(path)[row["id"]]["output_token_ids"] == tokens[0, len(prompt) :].tolist()


def test_special_tokens_are_kept_where_the_job_says_so(job: Job, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    path = job(texts(12), sampling__max_tokens=40)
    assert run(path, "--set", "output.special_tokens=true").exit_code == 0
    rows = output(path)
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    assert ended, "the token that ends an answer is a special one"
    for row in ended:
        assert row["output"] == tokenizer.decode(row["output_token_ids"], skip_special_tokens=False)
        assert row["output"].endswith("</s>")
    assert run(path).exit_code == 5, "whose texts are others"


def test_prompts_are_told_when_the_job_began(
    job: Job, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the rest of it runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y, %H:%M') }} {{ messages[0].content }}")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = texts(6)
    path = job(rows, model__path=str(folder), input__chat=True)
    began = datetime(2020, 2, 29, 7, 30, 1)
    with monkeypatch.context() as patched:
        patched.setattr(InputConfig, "now", began)
        assert run(path, "--shard", "0/2").exit_code == 0
    assert run(path, "--shard", "1/2").exit_code == 0
    answers = by_id(path)
    for row in rows:
        prompt = tokenizer(f"29 Feb 2020, 07:30 {row['text']}", return_tensors="pt")["input_ids"]
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=2)[0, prompt.shape[1] :]
        assert answers[row["id"]]["output_token_ids"] == tokens.tolist()
    manifest = json.loads((path.parent / "out" / "manifest-1-of-2.json").read_text())
    assert manifest["job"]["input"]["date"] == began.isoformat()
    assert run(path, "--shard", "0/2", "--set", "input.date=2020-02-29T07:30:01").exit_code == 5, "it may be another"
    assert run(path, "--set", "input.date=tomorrow").exit_code == 2


def test_a_date_is_text_whether_a_calendar_has_it_or_not(job: Job) -> None:
    path = job()
    assert run(path, "--set", "name=2026-02-30").exit_code == 0
    path.write_text(path.read_text() + "\nname: 2026-02-30\n")
    assert run(path).exit_code == 0
    manifest = json.loads((path.parent / "out" / "manifest.json").read_text())
    assert manifest["job"]["name"] == "2026-02-30"


MISTAKES: dict[str, tuple[dict[str, Any], int, str]] = {
    "no input": ({"input__path": "/nowhere/in.parquet"}, 4, "/nowhere/in.parquet"),
    "unknown key": ({"sampling__max_token": 3}, 2, "did you mean 'max_tokens'"),
    "no such column": ({"input__prompt": "{txt}"}, 2, "did you mean 'text'"),
    "no model": ({"model__path": "/nowhere/model"}, 4, "/nowhere/model"),
    "bad policy": ({"engine__policy": "fastest"}, 2, "engine.policy"),
    "two prompts": ({"input__messages": "text"}, 2, "exactly one"),
    "no tokens": ({"sampling__max_tokens": 0}, 2, "sampling.max_tokens: should be greater than or equal to 1, not 0"),
    "empty stop": ({"sampling__stop": [""]}, 2, "sampling.stop: holds an empty string\n"),
    "neither type": (
        {"engine__chunk_tokens": 0},
        2,
        "engine.chunk_tokens: should be 'auto' or greater than or equal to 1, not 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_its_exit_code(job: Job, name: str) -> None:
    changes, exit_code, words = MISTAKES[name]
    result = run(job(**changes))
    assert result.exit_code == exit_code
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_duplicate_ids_are_refused(job: Job) -> None:
    result = run(job([*texts(3), {"id": "r1", "text": "again"}]))
    assert result.exit_code == 2
    assert "r1" in result.stderr


def test_a_corrupt_file_is_named(job: Job, tmp_path: Path) -> None:
    path = job()
    data = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(data[:-20])
    result = run(path)
    assert result.exit_code == 4
    assert "in.parquet" in result.stderr


def test_a_model_without_tokenizer_is_refused(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_model / name).read_bytes())
    result = run(job(model__path=str(bare)))
    assert result.exit_code == 4
    assert "tokenizer" in result.stderr


def test_a_plan_counts_what_a_run_takes_and_leaves_out_what_it_refuses(
    job: Job, tmp_path: Path, tiny_model: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'crowd' %}{{ raise_exception('one at a time') }}{% endif %}"
        "{{ bos_token }}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    chats = {"a": "user", "b": "crowd", "c": "user"}
    rows = [{"id": i, "m": [{"role": role, "content": "two dogs"}] * 2} for i, role in chats.items()]
    source = {"path": str(tmp_path / "in.parquet"), "id": "id", "messages": "m", "duplicates": "each"}
    path = job(rows, model__path=str(folder), input=source)
    for command in ("plan", "simulate"):
        result = CliRunner().invoke(main, [command, str(path), "--json"])
        assert result.exit_code == 0, result.stderr
        (planned,) = json.loads(result.stdout)
        assert planned["requests"] == 2
    assert run(path).exit_code == 3
    answers = by_id(path)
    assert [name for name, row in answers.items() if row["error"]] == ["b"]
    assert "one at a time" in answers["b"]["error"]
    assert planned["prompt_tokens"] == sum(row["prompt_tokens"] for row in answers.values())


@pytest.mark.parametrize("command", ["check", "plan", "simulate", "run"])
def test_a_tokenizer_that_does_not_do_is_refused_by_every_command(
    job: Job, tmp_path: Path, tiny_model: Path, command: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "chat"))
    (folder / "chat_template.jinja").unlink()
    source = {"path": str(tmp_path / "in.parquet"), "messages": "m"}
    path = job([{"m": [{"role": "user", "content": "two dogs"}]}], model__path=str(folder), input=source)

    def assert_refused(words: str) -> None:
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 4
        assert words in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr

    assert_refused("no chat template")
    (folder / "tokenizer_config.json").write_text("{")
    assert_refused("tokenizer_config.json is not valid JSON")


def test_another_job_in_the_output_folder_is_refused(job: Job) -> None:
    assert run(job()).exit_code == 0
    result = run(job(sampling__max_tokens=3))
    assert result.exit_code == 5
    assert "--fresh" in result.stderr
    assert run(job(sampling__max_tokens=3), "--fresh").exit_code == 0


def test_a_finished_job_does_nothing(job: Job) -> None:
    path = job()
    assert run(path).exit_code == 0
    before = sorted((file, file.stat().st_mtime_ns) for file in (path.parent / "out").glob("part-*"))
    assert run(path).exit_code == 0
    assert before == sorted((file, file.stat().st_mtime_ns) for file in (path.parent / "out").glob("part-*"))


def test_shards_fill_one_folder(job: Job) -> None:
    path = job()
    assert run(path, "--shard", "0/2").exit_code == 0
    assert not (path.parent / "out" / "_SUCCESS").exists()
    assert run(path, "--shard", "1/2").exit_code == 0
    assert len(by_id(path)) == 12
    assert (path.parent / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize("shard", ["0/1", "0/2"])
def test_rows_that_do_not_fit_become_error_rows_even_if_no_other_is_left(job: Job, shard: str) -> None:
    """There is memory for 64 tokens; of the first shard's rows none fits."""
    fits = [shard == "0/2" and i % 2 == 1 for i in range(4)]
    rows = [{"id": i, "text": "the cat" if fits[i] else " ".join(WORDS)} for i in range(4)]
    path = job(rows, sampling={"max_tokens": 50}, kv={"device_memory": "16KiB"})
    result = run(path, "--shard", shard)
    assert result.exit_code == 3, result.stderr
    failed = by_id(path)
    assert sorted(failed) == [i for i in range(4) if not fits[i]]
    assert all("needs KV memory for" in row["error"] for row in failed.values())
    assert run(path, "--set", "errors.max_fraction=1").exit_code == 0
    assert CliRunner().invoke(main, ["plan", str(path)]).exit_code == (4 if shard == "0/1" else 0)


def test_the_plan_counts_every_sample(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made from the first 50 requests, and from the other samples of the last one's row."""
    import vasuki.runs.run
    import vasuki.runs.workload

    rows = [{**row, "n": 1 + 2 * (i % 2)} for i, row in enumerate(texts(60))]
    path = job(rows, sampling={"max_tokens": 2, "n": {"column": "n"}})
    monkeypatch.setattr(vasuki.runs.workload, "COUNTED_REQUESTS", 50)
    monkeypatch.setattr("vasuki.runs.rows.table.PLANNED_REQUESTS", 50)
    (plan,) = json.loads(CliRunner().invoke(main, ["plan", str(path), "--json"]).stdout)
    assert plan["requests"] == 120
    planned: list[int] = []

    def spy(lengths: Any, *arguments: Any, **options: Any) -> Any:
        planned.append(len(lengths))
        return make_plan(lengths, *arguments, **options)

    monkeypatch.setattr("vasuki.runs.placement.make_plan", spy)
    assert run(path).exit_code == 0
    assert planned == [120]
    assert len(output(path)) == 120


def test_the_profile_is_read_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def spy(name: str) -> Any:
        read.append(name)
        return find_profile(name)

    monkeypatch.setattr("vasuki.runs.placement.find_profile", spy)
    assert run(job(plan__gpu="cpu")).exit_code == 0
    assert read == ["cpu"]


@pytest.mark.parametrize("count", [1, 12, 30])
def test_an_input_that_changes_meanwhile_is_told(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """After the survey one of two files is another: rows of the other one are answered, and those go on once it is what
    it was."""
    path = job([], input__path=str(tmp_path / "in"))
    (tmp_path / "in").mkdir()
    rows = texts(24)
    for name, some in (("a", rows[:12]), ("b", rows[12:])):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"in/{name}.parquet")
    before = (tmp_path / "in/b.parquet").read_bytes()

    def survey(config: Any, *more: Any) -> Any:
        table = open_table(config, *more)
        others = [{**row, "text": "the dog"} for row in texts(count)]
        pq.write_table(pa.Table.from_pylist(others), tmp_path / "in/b.parquet")
        return table

    with monkeypatch.context() as patched:
        patched.setattr("vasuki.runs.opening.open_table", survey)
        result = run(path)
    assert result.exit_code == 4
    assert f"input changed while it was read: {tmp_path}/in/b.parquet; all other rows are answered" in result.stderr
    assert "the output lacks 12 rows until it is as it was" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert set(by_id(path)) == {row["id"] for row in rows[:12]}
    (tmp_path / "in/b.parquet").write_bytes(before)
    assert run(path).exit_code == 0
    assert set(by_id(path)) == {row["id"] for row in rows}


def test_parts_that_are_removed_while_the_job_runs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run says that rows are missing, and the same command computes them again."""
    path = job()
    finish = OutputFolder.finish

    def remove_first(self: OutputFolder, *arguments: Any) -> Any:
        next((path.parent / "out").glob("part-*.parquet")).unlink()
        return finish(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "finish", remove_first)
        result = run(path)
    assert result.exit_code == 75
    assert "lacks 12 rows, removed while the job ran" in result.stderr
    assert not (path.parent / "out/_SUCCESS").exists()
    assert run(path).exit_code == 0
    assert len(by_id(path)) == 12


def start(path: Path, *program: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(program or ("-m", "vasuki")), "run", str(path), "--quiet"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_killed_interrupted_and_continued(job: Job) -> None:
    """Kill -9, then SIGTERM, then to the end: every row once, and the same as in a run without accidents."""
    rows = [{"id": i, "text": " ".join(WORDS[: 1 + i % 15])} for i in range(800)]
    path = job(rows, sampling={"max_tokens": 60, "ignore_eos": True})
    folder = path.parent / "out"

    process = start(path, "-c", COMMITTING_OFTEN)
    wait_for(lambda: list(folder.glob("part-*.parquet")), process)
    process.kill()
    process.communicate()
    survived = len(output(path))
    assert 0 < survived < len(rows)

    process = start(path, "-c", COMMITTING_OFTEN)
    wait_for(lambda: len(list(folder.glob("part-*.parquet"))) > 1, process)
    process.send_signal(signal.SIGSTOP)  # it must not end before the second has looked
    second = start(path)
    assert second.wait(timeout=300) == 5
    assert "in use by process" in second.communicate()[1]
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "run the same command again" in message
    assert len(output(path)) > survived
    assert not (folder / "_SUCCESS").exists()

    assert run(path).exit_code == 0
    continued = {i: row["output"] for i, row in by_id(path).items()}
    assert sorted(continued) == list(range(len(rows)))
    assert run(path, "--fresh").exit_code == 0
    assert {i: row["output"] for i, row in by_id(path).items()} == continued


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stop_after(steps)`: runs from now on are asked to end after `steps` looks, as by SIGTERM."""
    from vasuki.runs.signals import StopSignals

    def after(steps: int) -> None:
        looks = iter(range(steps))
        monkeypatch.setattr(StopSignals, "asked", lambda self: next(looks, None) is None)

    return after


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40},
    "drawn": {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    "several samples": {"max_tokens": 24, "temperature": 1.0, "n": 3},
    "stop strings": {"max_tokens": 60, "stop": ["at", "e "], "temperature": 1.0},
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_rows_go_on_as_if_nothing_had_happened(
    job: Job, tmp_path: Path, stop_after: Callable[[int], None], case: str
) -> None:
    """A run that is stopped every few steps has the rows of one that is not, and computes no decode again."""

    def job_into(folder: str) -> Path:
        columns = {"path": str(tmp_path / folder), "token_ids": True, "logprobs": True}
        return job(texts(10), output=columns, sampling=CASES[case], model__dtype="float32")

    path = job_into("undisturbed")
    assert run(path).exit_code == 0
    expected = sorted(output(path), key=lambda row: (row["id"], row.get("sample")))
    path, runs, code = job_into("disturbed"), 0, 75
    while code == 75:
        stop_after(11 + runs)
        runs, code = runs + 1, run(path).exit_code
    assert (code, runs > 3) == (0, True)
    rows = sorted(output(path), key=lambda row: (row["id"], row.get("sample")))
    assert [row.pop("logprob") for row in rows] == pytest.approx([row.pop("logprob") for row in expected], abs=1e-4)
    assert rows == expected
    assert decode_tokens(tmp_path / "disturbed") <= decode_tokens(tmp_path / "undisturbed")
    assert not list((tmp_path / "disturbed").glob(".vasuki-journal*"))
    manifest = json.loads((tmp_path / "disturbed" / "manifest.json").read_text())
    assert sum(taken["resumed_rows"] for taken in manifest["runs"]) > runs


def test_a_run_ends_when_its_time_is_over_and_goes_on(job: Job) -> None:
    path = job(sampling={"max_tokens": 20, "ignore_eos": True})
    result = run(path, "--max-time", "0s")
    assert (result.exit_code, output(path)) == (75, [])
    assert "of --max-time are over, and loading and planning alone took " in result.stderr
    assert "; allow more; 12 rows are left, run the same command again to go on" in result.stderr
    assert decode_tokens(path.parent / "out") == 0, "one step, and no more"
    assert (path.parent / "out" / ".vasuki-journal.jsonl").exists()
    assert run(path, "--max-time", "1h").exit_code == 0
    assert len(by_id(path)) == 12
    assert run(path, "--max-time", "soon").exit_code == 2


def test_memory_that_does_not_suffice_is_the_jobs_fault(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command would end there again, so nobody should retry it; rows that had ended are kept."""
    from vasuki.hf.ragged_executor import RaggedExecutor

    logits, steps = RaggedExecutor._logits, itertools.count()

    def without_memory(self: RaggedExecutor, batch: Any) -> Any:
        if next(steps) > 15:
            raise MemoryError
        return logits(self, batch)

    path = job(engine={"max_num_seqs": 2})
    with monkeypatch.context() as patch:
        patch.setattr(RaggedExecutor, "_logits", without_memory)
        result = run(path)
    done = len(output(path))
    assert (result.exit_code, 0 < done < 12) == (2, True)
    assert f"; {12 - done} rows are left, they go on once the job takes less memory" in result.stderr
    assert run(path).exit_code == 0
    assert len(by_id(path)) == 12


def decode_tokens(folder: Path) -> int:
    return sum(step.decode_tokens for step in read_trace(Location.parse(str(folder))))


def ends_with_one_line(process: subprocess.Popen[str], words: str) -> None:
    """Asserts that a run is interrupted as it should be."""
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 75, message
    assert words in message
    assert len(message.strip().splitlines()) == 1, message


COMMITTING_OFTEN = """
import vasuki.base.commits
from vasuki.commands.cli import main
vasuki.base.commits.COMMIT_S = 0.1
main()
"""


@pytest.mark.parametrize("accident", ["two signals", "no folder"])
def test_an_accident_in_the_middle_is_an_interruption(job: Job, accident: str) -> None:
    rows = [{"id": i, "text": " ".join(WORDS[: 1 + i % 15])} for i in range(4000)]
    path = job(rows, sampling={"max_tokens": 60, "ignore_eos": True})
    folder = path.parent / "out"
    process = start(path, "-c", COMMITTING_OFTEN)
    wait_for(lambda: list(folder.glob("part-*.parquet")), process)
    process.send_signal(signal.SIGSTOP)  # the accident must find it between two commits, and all at once
    if accident == "no folder":
        shutil.rmtree(folder)
    else:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    ends_with_one_line(process, f"cannot write {folder}" if accident == "no folder" else "stopped by a signal")
    if accident == "two signals":
        assert output(path)


SURVEYING = """
import sys, time, vasuki.runs.opening
from vasuki.commands.cli import main
def survey(config, *more):
    print("busy", flush=True)
    time.sleep(60)
vasuki.runs.opening.open_table = survey
main(["run", sys.argv[1]])
"""
IMPORTING = """
import sys, time
from vasuki.commands.cli import main
class Slow:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "pyarrow":
            print("busy", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow)
main(["run", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [SURVEYING, IMPORTING])
def test_a_signal_before_the_first_step_ends_the_run(job: Job, code: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", code, str(job())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(number)
    ends_with_one_line(process, "stopped by a signal")


def test_a_signal_within_generated_code_ends_the_run_too(job: Job, tmp_path: Path) -> None:
    """Named tuples and data classes are made by `exec`, where Python keeps a signal in mind to die of at its end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'pyarrow':\n"
        "            print('busy', flush=True)\n"
        "            exec('time.sleep(60)')\n"
        "sys.meta_path.insert(0, Slow)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vasuki", "run", str(job())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGTERM)
    ends_with_one_line(process, "stopped by a signal")


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, vasuki.commands.cli, vasuki.runs.run, vasuki.simulator, vasuki.planner, vasuki.report\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counting_a_jobs_tokens_needs_no_torch(job: Job) -> None:
    path = str(job())
    code = (
        "import sys; from vasuki.commands.cli import main\n"
        f"for command in ('plan', 'simulate'): main([command, {path!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("memory", ["4MiB", "24KiB"])
def test_prefixes_are_shared_as_planned(job: Job, memory: str) -> None:
    """Three instructions, one after the other, each before many texts; there is memory for all, or for hardly two."""
    heads = [" ".join(WORDS[k:] + WORDS[:k]) for k in (0, 5, 11)]
    rows = [{"id": f"r{i}", "text": f"{heads[i % 3]} {' '.join(WORDS[i % 17 : i % 17 + 4])}"} for i in range(30)]
    path = job(rows, kv={"device_memory": memory, "block_tokens": 8})
    arguments = ["--set", "sampling.ignore_eos=true"]
    (plan,) = json.loads(CliRunner().invoke(main, ["plan", str(path), "--json", *arguments]).stdout)
    shared, computed, steps = {}, {}, {}
    for solver in ("auto", "fifo"):
        result = run(path, "--fresh", "--set", f"plan.solver={solver}", *arguments)
        assert result.exit_code == 0, result.stderr
        manifest = json.loads((path.parent / "out" / "manifest.json").read_text())
        counted = manifest["tokens"]
        shared[solver], steps[solver] = counted["shared"], manifest["steps"]
        computed[solver] = counted["prompt"] + counted["recomputed"] - counted["shared"]
    assert plan["shared_tokens"] > 0.5 * plan["prompt_tokens"]
    if memory == "4MiB":
        assert shared == {"auto": plan["shared_tokens"], "fifo": plan["shared_tokens"]}
    else:  # a preempted row may find blocks of its own text again, which the plan does not know
        assert shared["auto"] == pytest.approx(plan["shared_tokens"], rel=0.06)
        assert computed["auto"] < computed["fifo"]
        assert steps["auto"] < 0.9 * steps["fifo"]


def with_noise(model: Path, folder: Path) -> Path:
    """A copy of a model whose weights are a little off."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_folder_holds_the_answers_of_one_model(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    """Half of a job by one model, the other half by what lies at the same path afterwards."""
    shutil.copytree(tiny_model, tmp_path / "model")
    path = job(model__path=str(tmp_path / "model"))
    assert run(path, "--shard", "0/2").exit_code == 0
    shutil.rmtree(tmp_path / "model")
    with_noise(tiny_model, tmp_path / "model")
    result = run(path)
    assert (result.exit_code, len(output(path))) == (5, 6)
    assert "holds the output of a job with another model, input, sampling or output columns" in result.stderr


def test_kv_of_another_type_is_another_job(job: Job) -> None:
    path = job()
    assert run(path, "--shard", "0/2").exit_code == 0
    assert run(path, "--set", "kv.dtype=bfloat16").exit_code == 5


def test_the_same_files_under_other_paths_go_on(job: Job, tmp_path: Path, tiny_model: Path) -> None:
    path = job()
    assert run(path, "--shard", "0/2").exit_code == 0
    shutil.copytree(tiny_model, tmp_path / "mounted" / "model")
    shutil.copy(tmp_path / "in.parquet", tmp_path / "mounted" / "d.parquet")
    elsewhere = [f"model.path={tmp_path}/mounted/model", f"input.path={tmp_path}/mounted/d.parquet"]
    result = run(path, *(argument for override in elsewhere for argument in ("--set", override)))
    assert result.exit_code == 0, result.stderr
    assert len(by_id(path)) == 12


def test_json_logs_hold_the_summary_of_all_runs(job: Job) -> None:
    path = job()
    assert run(path, "--shard", "0/2").exit_code == 0
    result = CliRunner().invoke(main, ["run", str(path), "--log-format", "json"])
    messages = [json.loads(line)["message"] for line in result.stderr.splitlines()]
    assert "rows   12 of 12 succeeded, 0 failed" in messages
    assert any(message.startswith("time ") and message.endswith(" in 2 runs") for message in messages)
