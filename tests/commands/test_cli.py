"""The commands that need no weights: plan, simulate, report, check, init."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result

from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.commands.cli import main
from vasuki.commands.job_schema import job_schema
from vasuki.io.output.output_folder import OutputFolder

PLAN_FIELDS = {
    "gpu", "requests", "prompt_tokens", "output_tokens_estimate", "makespan_s", "lower_bound_s", "gap", "solver",
    "schedule_bound_s", "source", "range_s", "at_risk_s", "at_risk_most_s",
    "optimal", "policy", "chunk_tokens", "max_num_seqs", "shared_tokens", "offload", "cost",
    "host_bytes", "backend", "uncertainty", "plan_s", "predicted_from", "order_gap", "one_replica_s",
}  # fmt: skip
SIMULATED_FIELDS = {
    "ttft", "latency", "urgent_latency", "missed_deadlines", "steps", "batch", "kv", "preemptions", "layout", "bubbles",
    "interruptions",
}  # fmt: skip
SHAPE = ("--set", "model.shape=llama-3-8b")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    rows = [f"{200 + 37 * i % 900},{20 + 13 * i % 120}" for i in range(60)]
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    return path


def vasuki(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_plan_prints_a_list_with_one_object_for_each_gpu(lengths: Path) -> None:
    result = vasuki("plan", lengths, *SHAPE, "--gpu", "a10", "--gpu", "a40", "--json")
    assert result.exit_code == 0, result.stderr
    plans = json.loads(result.stdout)
    assert [plan["gpu"] for plan in plans] == ["a10", "a40"]
    for plan in plans:
        assert set(plan) == PLAN_FIELDS
        assert plan["requests"] == 60
        assert plan["makespan_s"] >= plan["schedule_bound_s"] > plan["lower_bound_s"] > 0
        assert plan["source"] == "datasheet"
        assert set(plan["offload"]) == {"mode", "layers", "reason", "weights_on_host"}


def test_plan_of_a_job_counts_the_tokens_that_the_run_would(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["two dogs run", "the cat sat on a mat"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{path: {tiny_model}}}\ninput: {{path: {tmp_path}/in.jsonl, prompt: '{{text}}', chat: false}}\n"
        f"output: {{path: {tmp_path}/out}}\nsampling: {{max_tokens: 5}}\n"
    )
    (plan,) = json.loads(vasuki("plan", job, "--json").stdout)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert plan["prompt_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert plan["gpu"] == "cpu"
    assert not (tmp_path / "out").exists()
    findings = json.loads(vasuki("check", job, "--json").stdout)
    assert findings["rows"] == 2


def test_plan_of_a_job_needs_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "a cat " * count}) + "\n" for count in (4, 40)))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{shape: llama-3-8b}}\ninput: {{path: {tmp_path}/in.jsonl, prompt: '{{text}}', chat: false}}\n"
        f"output: {{path: {tmp_path}/out}}\n"
    )
    (plan,) = json.loads(vasuki("plan", job, "--gpu", "a10", "--json").stdout)
    assert (plan["requests"], plan["prompt_tokens"]) == (2, 24 // 4 + 1 + 240 // 4 + 1)


def test_the_table_fits_a_terminal(lengths: Path) -> None:
    table = vasuki("plan", lengths, *SHAPE, "--gpu", "a10", "--gpu", "h100").stdout
    assert "makespan" in table
    assert max(map(len, table.splitlines())) <= 100


def test_simulated_runs_can_be_reported(lengths: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = ("simulate", lengths, *SHAPE, "--gpu", "a10", "--policy", "vasuki", "--policy", "vllm")
    result = vasuki(*arguments, "--set", f"output.path={out}", "--json")
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)
    assert [run["policy"] for run in runs] == ["vasuki", "vllm"]
    assert all(set(run) == PLAN_FIELDS | SIMULATED_FIELDS for run in runs)
    assert vasuki(*arguments, "--json").stdout.count('"steps"') == 2
    folders = sorted(folder.name for folder in out.iterdir())
    assert folders == ["a10-vasuki", "a10-vllm"]
    manifest = json.loads((out / "a10-vasuki" / "manifest.json").read_text())
    assert manifest["simulated"] is True
    assert manifest["steps"] == len((out / "a10-vasuki" / "trace.jsonl").read_text().splitlines())
    report = vasuki("report", *sorted(out.iterdir()), "--html", tmp_path / "page.html")
    assert report.exit_code == 0, report.stderr
    assert "simulated" in report.stdout
    assert (tmp_path / "page.html").stat().st_size > 10_000
    compared = json.loads(vasuki("report", *sorted(out.iterdir()), "--json").stdout)
    assert compared


def test_what_unknown_lengths_cost_is_simulated_both_ways(lengths: Path, tmp_path: Path) -> None:
    """On every row, and against the plan that known lengths would have got."""
    arguments = ("simulate", lengths, *SHAPE, "--gpu", "a10", "--json")
    out = tmp_path / "runs"
    (learned,) = json.loads(vasuki(*arguments, "--set", f"output.path={out}").stdout)
    (known,) = json.loads(vasuki(*arguments, "--set", "plan.output_length={column: recorded}").stdout)
    assert learned["uncertainty"] == pytest.approx(learned["makespan_s"] / known["makespan_s"] - 1) != 0
    assert known["uncertainty"] is None
    (foreign,) = json.loads(vasuki(*arguments, "--policy", "vllm").stdout)
    assert foreign["uncertainty"] is None
    manifest = json.loads((out / "a10" / "manifest.json").read_text())
    assert manifest["bounds"] == {
        "schedule_s": learned["schedule_bound_s"],
        "pace": 1.0,
        "datasheet_s": learned["lower_bound_s"],
        "uncertainty": learned["uncertainty"],
    }
    table = vasuki(*arguments[:-1]).stdout
    assert re.search(r"unknown outputs add +[+-]\d", table)
    assert re.search(r"datasheet bound +\d", table)


def test_a_simulation_does_not_replace_a_real_run(lengths: Path, tmp_path: Path) -> None:
    arguments = ("simulate", lengths, *SHAPE, "--gpu", "a10", "--set", f"output.path={tmp_path}/out")
    manifest, trace = (tmp_path / "out" / "a10" / name for name in ("manifest.json", "trace.jsonl"))
    for _ in range(2):
        assert vasuki(*arguments).exit_code == 0
    manifest.write_text(manifest.read_text().replace('"simulated": true', '"simulated": false'))
    before = manifest.read_bytes(), trace.read_bytes()
    result = vasuki(*arguments)
    assert result.exit_code == 5, result.output
    assert "out/a10 holds the output of a real run" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert (manifest.read_bytes(), trace.read_bytes()) == before


def test_check_looks_at_the_output_folder(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(
        f"model: {{path: {tiny_model}}}\ninput: {{path: {tmp_path}/in.jsonl, prompt: '{{text}}', chat: false}}\n"
        f"output: {{path: {out}}}\n"
    )
    assert vasuki("check", job).exit_code == 0
    assert not out.exists()
    out.write_text("")
    result = vasuki("check", job)
    assert result.exit_code == 2
    assert "is a file; name a folder" in result.stderr
    out.unlink()
    with OutputFolder.open(str(out), num_rows=1, config_hash="c", input_fingerprint="f"):
        result = vasuki("check", job)
    assert result.exit_code == 5
    assert "is in use by process" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert vasuki("check", job).exit_code == 0


def test_layouts_are_simulated_with_their_bubbles(lengths: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = ("simulate", lengths, *SHAPE, "--gpu", "a100", "--policy", "orca", "--set", f"output.path={out}")
    one, cut, replicated = (
        json.loads(vasuki(*arguments, *options, "--json").stdout)[0]
        for options in ((), ("--pipeline-parallel-size", 4), ("--tp", 2, "--dp", 2))
    )
    assert one["layout"] == {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1, "gpus": 1}
    assert cut["layout"]["gpus"] == replicated["layout"]["gpus"] == 4
    assert one["bubbles"]["share"] == replicated["bubbles"]["share"] == 0 < cut["bubbles"]["share"] < 1
    assert cut["bubbles"]["micro_batch_s"]["max"] >= cut["bubbles"]["micro_batch_s"]["mean"] > 0
    for run in (one, cut, replicated):
        assert run["makespan_s"] > run["lower_bound_s"]
        assert run["cost"]["gpu_hours"] == pytest.approx(run["makespan_s"] * run["layout"]["gpus"] / 3600)
        assert run["requests"] == 60
    assert sorted(folder.name for folder in out.iterdir()) == ["a100", "a100-pp4", "a100-tp2-dp2"]
    assert json.loads((out / "a100-pp4" / "manifest.json").read_text())["device"]["count"] == 4
    assert vasuki("report", *out.iterdir()).exit_code == 0
    text = vasuki(*arguments, "--pp", 4, "--explain").stdout
    assert all(words in text for words in ("GPUs", "micro-batch", "a100 pp4: a step of"))
    assert max(map(len, text.splitlines())) <= 100


def test_explain_splits_a_step(lengths: Path) -> None:
    text = vasuki("simulate", lengths, *SHAPE, "--gpu", "a10", "--explain").stdout
    assert all(word in text for word in ("matmuls", "attention", "overhead", "copies hidden", "decodes"))


MISTAKES = {
    "unknown gpu": (("plan", "LENGTHS", *SHAPE, "--gpu", "a11"), 4, "a10"),
    "cards of a run": (("run", "job.yaml", "--gpu", "a10:4"), 2, "--gpu a10 --replicas 4"),
    "unknown shape": (("plan", "LENGTHS", "--set", "model.shape=llama-3-8c"), 4, "llama-3-8b"),
    "unknown policy": (("simulate", "LENGTHS", *SHAPE, "--gpu", "a10", "--policy", "vllmm"), 2, "vllm"),
    "too large": (("plan", "LENGTHS", "--set", "model.shape=llama-3-70b", "--gpu", "a10"), 4, "llama-3-70b"),
    "heads": (("simulate", "LENGTHS", *SHAPE, "--gpu", "a100", "--tp", "3"), 2, "32 heads"),
    "stages": (("simulate", "LENGTHS", *SHAPE, "--gpu", "a100", "--pp", "64"), 2, "32 layers"),
    "no replica": (("simulate", "LENGTHS", *SHAPE, "--gpu", "a100", "--dp", "0"), 2, "greater than or equal to 1"),
    "no link": (
        ("simulate", "LENGTHS", *SHAPE, "--set", "model.dtype=bfloat16", "--gpu", "cpu", "--tp", "2"),
        4,
        "interconnect",
    ),
    "streams": (
        ("simulate", "LENGTHS", *SHAPE, "--set", "kv.offload=stream", "--pp", "2", "--gpu", "a100"),
        2,
        "stream",
    ),
    "no file": (("plan", "nowhere.csv", *SHAPE), 4, "nowhere.csv"),
    "no job": (("run", "nowhere.yaml"), 2, "nowhere.yaml"),
    "no run": (("report", "nowhere"), 4, "nowhere"),
    "nothing to report": (("report",), 2, "--history"),
    "price of no card": (("plan", "LENGTHS", *SHAPE, "--gpu", "a10", "--price", "a11=1"), 2, "a10"),
    "no price": (("plan", "LENGTHS", *SHAPE, "--gpu", "a10", "--price", "a10=nan"), 2, "per hour"),
    "set without value": (("plan", "LENGTHS", "--set", "model"), 2, "key.path=value"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_its_exit_code(name: str, lengths: Path) -> None:
    arguments, exit_code, words = MISTAKES[name]
    result = vasuki(*(str(lengths) if word == "LENGTHS" else word for word in arguments))
    assert result.exit_code == exit_code, result.output
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_columns_and_no_rows_are_told(tmp_path: Path) -> None:
    for text, words in (("a,b\n1,2\n", "num_prefill_tokens"), ("num_prefill_tokens,num_decode_tokens\n", "no rows")):
        (tmp_path / "lengths.csv").write_text(text)
        result = vasuki("plan", tmp_path / "lengths.csv", *SHAPE)
        assert result.exit_code == 4
        assert words in result.stderr


def test_init_writes_a_job_that_only_lacks_a_model(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "my-job"
    assert vasuki("init", folder).exit_code == 0
    assert vasuki("check", folder / "job.yaml").exit_code == 4
    assert vasuki("check", folder / "job.yaml", "--set", f"model.path={tiny_model}").exit_code == 0
    assert vasuki("init", folder).exit_code == 2


INPUTS: dict[str, tuple[dict[str, list[Any]], list[str], str]] = {
    "texts": ({"n": [1, 1], "uuid": ["a", "b"], "text": ["x", "y"]}, [], "x"),
    "ids that are none": ({"id": [1, 1], "question": ["x", "y"]}, [], "x"),
    "odd names": ({"{a}": ["z", "z"], "b: c": ["z", "z"], "d e": ["x", "y"]}, [], "x"),
    "a column of ours": ({"output": ["x", "y"]}, [], "x"),
    "messages": ({"id": [1, 2], "messages": [[{"role": "user", "content": "x"}]] * 2}, [], "user: x"),
    "a prompt": ({"id": [1, 2], "a": ["x", "y"], "b": ["z", "z"]}, ["--prompt", "{a} or {b}?"], "x or z?"),
    "batch": ({"custom_id": ["a", "b"], "url": [None] * 2, "body": [{"prompt": "x"}] * 2}, [], "x"),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_init_finds_the_columns_and_the_job_runs(tmp_path: Path, tiny_model: Path, case: str, form: str) -> None:
    columns, arguments, prompt = INPUTS[case]
    rows = pa.table(columns).to_pylist()
    source = tmp_path / f"in.{form}"
    if (form, case) in [("csv", "messages"), ("csv", "batch"), ("parquet", "batch")]:
        pytest.skip("no such file has them")
    if form == "parquet":
        pq.write_table(pa.table(columns), source)
    elif form == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with source.open("w", newline="") as file:
            csv.DictWriter(file, columns).writeheader()
            csv.DictWriter(file, columns).writerows(rows)
    given = [*arguments, "--model", tiny_model, "--input", source]
    if case != "batch":
        given += ["--answer", "kind: [a, 'b c'], n: integer?, of: {x: [number]}"]
    made = vasuki("init", tmp_path / "my job", *given)
    assert made.exit_code == 0, made.stderr
    job = tmp_path / "my job" / "job.yaml"
    first = json.loads(vasuki("check", job, "--json").stdout)["first_prompt"]
    assert prompt in first
    assert ("Answer as JSON with kind (one of a, b c), n (integer or null)" in first) == (
        case not in ("batch", "messages")
    )
    assert vasuki("run", job, "--set", "sampling.max_tokens=4", "--quiet").exit_code == 0
    schema = jsonschema.Draft202012Validator(json.loads((tmp_path / "my job" / "job.schema.json").read_text()))
    schema.validate(yaml.safe_load(job.read_text()))


def test_init_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "n.xlsx").write_text("")
    pq.write_table(pa.table({"n": [1], "m": [2]}), tmp_path / "n.parquet")
    cases: list[tuple[int, str, list[object]]] = [
        (2, "--answer 'x: foo': x: 'foo' is no type", ["--answer", "x: foo"]),
        (2, "--answer '['", ["--answer", "["]),
        (4, "does not exist", ["--input", tmp_path / "nothing.csv"]),
        (2, "is text; say by --prompt what is asked of n, m", ["--input", tmp_path / "n.parquet"]),
        (2, "does not tell its format", ["--input", tmp_path / "n.xlsx"]),
    ]
    for code, words, arguments in cases:
        result = vasuki("init", tmp_path / "new", *arguments)
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
        assert not (tmp_path / "new").exists()


def test_init_asks_in_a_terminal(tmp_path: Path, tiny_model: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vasuki", "init", "my-job"]
    started = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, cwd=tmp_path, text=True)
    os.write(ours, f"{tiny_model}\n\nkind: [a, b]\n".encode())
    said, _ = started.communicate(timeout=60)
    assert started.returncode == 0
    assert "Model (a folder" in said
    tree = yaml.safe_load((tmp_path / "my-job" / "job.yaml").read_text())
    assert (tree["model"], tree["answer"]) == ({"path": str(tiny_model)}, {"kind": ["a", "b"]})
    for descriptor in (ours, theirs):
        os.close(descriptor)


def test_the_schema_of_job_files_says_what_the_program_says() -> None:
    schema = jsonschema.Draft202012Validator(job_schema())
    base: dict[str, Any] = {"model": {"path": "m"}, "input": {"path": "i", "prompt": "{a}"}, "output": {"path": "o"}}
    changed: list[dict[str, Any]] = [
        {}, {"sampling": {"schema": {"column": "x"}}}, {"kv": {"host_memory": "8GiB", "device_memory": 0.5}},
        {"plan": {"max_loss": "10 min"}}, {"samplin": {}}, {"sampling": {"max_tokens": "a"}},
        {"answer": {"a": "string"}}, {"kv": {"host_memory": -1}},
        {"sampling": {"logit_bias": {"5": 3}}}, {"engine": {"policy": "x"}}, {"output": {"path": "z", "logprobs": 3}},
        {"plan": {"output_length": {"quantile": 0.5}}}, {"plan": {"output_length": "long"}},
        {"sampling": {"temperature": {"column": "t"}}}, {"sampling": {"temperature": -1}}, {"cost": {"price": 1}},
    ]  # fmt: skip
    for changes in changed:
        try:
            parse_job(base | changes)
            is_right = True
        except JobFileError:
            is_right = False
        assert schema.is_valid(base | changes) == is_right, changes


def test_the_example_runs_wherever_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert vasuki("init", "demo", "--example", "dates").exit_code == 0
    assert json.loads(vasuki("check", "demo/job.yaml", "--json").stdout)["rows"] == 2000
    job = yaml.safe_load((tmp_path / "demo" / "job.yaml").read_text())
    paths = [job[section]["path"] for section in ("model", "input", "output")]
    assert all(path.startswith("demo/") for path in paths)
    again = vasuki("init", "demo", "--example", "dates")
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_plans_are_sorted_priced_and_compared(lengths: Path) -> None:
    def plans(*arguments: object) -> list[dict[str, Any]]:
        cards = [word for card in ("a10", "h100", "l4") for word in ("--gpu", card)]
        found: list[dict[str, Any]] = json.loads(vasuki("plan", lengths, *SHAPE, *cards, "--json", *arguments).stdout)
        return found

    assert [plan["gpu"] for plan in plans()] == ["a10", "h100", "l4"]
    assert plans("--sort", "time")[0]["gpu"] == "h100"
    prices = ("--price", "A10=9", "--price", "l4=0.01", "--set", "cost.price_per_hour=5")
    given = {plan["gpu"]: plan["cost"]["amount"] / plan["cost"]["gpu_hours"] for plan in plans(*prices)}
    assert given == {"a10": pytest.approx(9), "h100": pytest.approx(5), "l4": pytest.approx(0.01)}
    assert plans(*prices, "--sort", "cost")[0]["gpu"] == "l4"
    text = vasuki("plan", lengths, *SHAPE, "--gpu", "a10", "--gpu", "l4", *prices).stdout
    assert "a10 would finish first: " in text
    assert "l4 would be cheapest: " in text
    assert text.startswith("a10 would")  # the answer comes before the figures
    both = vasuki("plan", lengths, *SHAPE, "--gpu", "a10", "--gpu", "l4", "--price", "a10=0.01").stdout
    assert both.startswith("Take a10: it would finish first and cost least.")
    assert max(map(len, text.splitlines())) <= 100


def test_plans_share_layers_as_simulations_do(lengths: Path) -> None:
    one, two = (
        json.loads(vasuki("plan", lengths, *SHAPE, "--gpu", "a100", "--tp", tp, "--json").stdout)[0] for tp in (1, 2)
    )
    assert two["makespan_s"] < one["makespan_s"]
    assert two["cost"]["gpu_hours"] == pytest.approx(2 * two["makespan_s"] / 3600)


def test_every_command_explains_itself_with_an_example() -> None:
    for name in main.commands:
        text = vasuki(name, "--help").stdout
        assert "Example:" in text, name
    assert "did you mean" in vasuki("repot").stderr.lower()


def test_forecasts_need_no_torch(lengths: Path) -> None:
    code = (
        "import sys; from vasuki.commands.cli import main\n"
        f"main(['plan', {str(lengths)!r}, '--set', 'model.shape=llama-3-8b', '--gpu', 'a10'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_job_reference_is_current() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "docs" / "job_reference.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)


def json_lines(result: Result) -> list[dict[str, Any]]:
    """Every line of stderr."""
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return lines


def test_json_logs_are_json_to_the_last_word(tmp_path: Path) -> None:
    """Summaries, mistakes in the job, in the arguments, and bugs."""
    job = tmp_path / "job.yaml"
    for arguments, exit_code, words in (
        (["run", str(job), "--log-format", "json"], 2, "cannot read job file"),
        (["run", "--log-format=json"], 2, "Missing argument 'JOB'"),
        (["plan", str(job), "--log-format", "json", "--nonsense"], 2, "No such option"),
    ):
        result = CliRunner().invoke(main, arguments)
        (line,) = json_lines(result)
        assert (result.exit_code, line["exit_code"], line["level"]) == (exit_code, exit_code, "error")
        assert words in line["message"]


def test_a_bug_is_a_json_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("vasuki.base.job_file.load_job", fail)
    result = CliRunner().invoke(main, ["run", str(tmp_path / "job.yaml"), "--log-format", "json"])
    (line,) = json_lines(result)
    assert (result.exit_code, line["exit_code"]) == (1, 1)
    assert "ZeroDivisionError: one\ntwo" in line["traceback"]


@pytest.fixture
def arriving(tmp_path: Path) -> Path:
    """Ten rows, half a second apart."""
    path = tmp_path / "arriving.csv"
    rows = "".join(f"{200 + 50 * row},20,{row / 2}\n" for row in range(10))
    path.write_text("num_prefill_tokens,num_decode_tokens,arrived_at\n" + rows)
    return path


def test_rows_that_arrive_are_simulated_and_reported(arriving: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = ("simulate", arriving, *SHAPE, "--gpu", "a10", "--policy", "vllm", "--policy", "prefill-packing")
    result = vasuki(*arguments, "--set", f"output.path={out}", "--json")
    assert result.exit_code == 0, result.stderr
    at_once, packed = json.loads(result.stdout)
    assert 0 < at_once["ttft"]["p50_s"] <= packed["ttft"]["p50_s"] <= packed["ttft"]["p99_s"] < 2
    assert at_once["ttft"]["mean_s"] < at_once["latency"]["mean_s"]
    assert "first token after, mean" in vasuki("report", out).stdout
    text = vasuki(*arguments).stdout
    assert [line.split()[1] for line in text.splitlines() if "to the first token" in line] == [
        "vllm",
        "prefill-packing",
    ]


def test_a_trickle_of_urgent_rows_is_simulated_as_it_would_run(tmp_path: Path) -> None:
    """Long rows from the start on, and a short one each second: with a priority those are answered within seconds, and
    the job loses little. A deadline that nothing could hold counts as missed."""
    rows = [(0.0, 800, 250, "", "")] * 400 + [(2.0 + row, 100, 10, 1, 0.001 if row == 7 else 30) for row in range(20)]
    path, out = tmp_path / "rows.csv", tmp_path / "runs"
    lines = [f"{prompt},{output},{at_s},{how},{within}" for at_s, prompt, output, how, within in rows]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens,arrived_at,how,within", *lines]) + "\n")
    arguments = ("simulate", path, *SHAPE, "--gpu", "a40")
    named = ("--set", "input.priority=how", "--set", "input.deadline=within")
    (usual,), (urgent,) = (json.loads(vasuki(*arguments, *more, "--json").stdout) for more in ((), named))
    assert usual["urgent_latency"] is usual["missed_deadlines"] is None
    assert urgent["offload"]["mode"] == "park"
    assert urgent["preemptions"]["recompute"] == 0
    assert urgent["urgent_latency"]["p95_s"] < 3 < usual["latency"]["p50_s"]
    assert urgent["makespan_s"] < 1.1 * usual["makespan_s"]
    assert urgent["missed_deadlines"] == 1
    text = vasuki(*arguments, *named, "--set", f"output.path={out}").stdout
    assert re.search(r"vasuki +deadlines missed +1\n", text)
    assert re.search(r"deadlines missed +1\b", vasuki("report", out).stdout)


def test_rows_that_are_there_are_late_too(tmp_path: Path) -> None:
    """On one card, on two, and on two stages; in a job over a table as in a file of lengths."""
    path = tmp_path / "rows.jsonl"
    lines = (
        json.dumps({"tokens": [1] * 500, "how": int(row % 10 == 0), "within": 0.001 if row in (3, 30) else None})
        for row in range(50)
    )
    path.write_text("\n".join(lines))
    job = {
        "model": {"shape": "llama-3-8b"},
        "input": {"path": str(path), "prompt_token_ids": "tokens", "priority": "how", "deadline": "within"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": 20},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    for layout in ((), ("--dp", 2), ("--pp", 2)):
        result = vasuki("simulate", tmp_path / "job.yaml", "--gpu", "a10", *layout, "--json")
        assert result.exit_code == 0, result.stderr
        (found,) = json.loads(result.stdout)
        assert found["missed_deadlines"] == 2
        assert 0 < found["urgent_latency"]["mean_s"] < found["makespan_s"]


def test_rows_that_are_there_have_no_waiting_times(lengths: Path) -> None:
    result = vasuki("simulate", lengths, *SHAPE, "--gpu", "a10", "--json")
    assert (run := json.loads(result.stdout)[0])["ttft"] is None
    assert run["latency"] is None


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("max_rows=0", "arrivals.max_rows: should be greater than or equal to 1, not 0"),
        ("target_s=1e-4", "arrivals.target_s: 0.0001 s is below one step's time: the shortest prompt alone takes"),
        ("target=1", "unknown key 'arrivals.target'"),
    ],
)
def test_settings_of_arrivals_that_make_no_sense_are_one_line(arriving: Path, setting: str, problem: str) -> None:
    arguments = ("simulate", arriving, *SHAPE, "--gpu", "a10", "--policy", "prefill-packing")
    result = vasuki(*arguments, "--set", f"arrivals.{setting}")
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if " simulating, a10" not in line]  # where that takes a while
    assert len(said) == 1
    assert problem in said[0]


def test_rows_are_not_gathered_for_several_replicas(lengths: Path) -> None:
    result = vasuki("simulate", lengths, *SHAPE, "--gpu", "a10", "--dp", "2", "--policy", "prefill-packing")
    assert result.exit_code == 2
    assert "prefill-packing is not simulated with several replicas or stages" in result.stderr


FLEETS = ("--gpu", "a10:2", "--gpu", "a40", "--deadline", "1h", "--spot")


def test_a_plan_of_fleets_has_an_object_for_each_choice_and_the_best_first(lengths: Path) -> None:
    result = vasuki("plan", lengths, *SHAPE, *FLEETS, "--json")
    assert result.exit_code == 0, result.stderr
    choices = json.loads(result.stdout)
    assert {(choice["gpu"], choice["fleet"]["market"]) for choice in choices} == {
        (gpu, market) for gpu in ("a10", "a40") for market in ("spot", "on demand")
    }
    for choice in choices:
        assert set(choice) == PLAN_FIELDS | {"fleet"}
        fleet = choice["fleet"]
        assert fleet["holds"] == (fleet["in_time"] >= 0.9)
        assert fleet["ends_s"]["p5"] < fleet["ends_s"]["p50"] < fleet["ends_s"]["p95"]
        assert choice["cost"]["amount"] > 0
    assert choices[0]["cost"]["amount"] == min(choice["cost"]["amount"] for choice in choices)
    assert choices[0]["fleet"]["flips"]["per_hour"] > 0


@pytest.mark.parametrize("columns", [80, 120])
def test_a_page_of_fleets_fits_and_names_what_to_rent(
    lengths: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = vasuki("plan", lengths, *SHAPE, *FLEETS)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert re.match(r"Take 1 a\d+ on spot: [\d.]+ USD, done within 1 h 00 min \(> 99 % sure\)\.", result.stdout)


def test_a_fleet_is_simulated_with_interruptions(lengths: Path) -> None:
    market = ("--spot", "--interruptions", "a10=2000", "--interruptions", "a40=2000", "--boot", "1s")
    results = [
        vasuki("simulate", lengths, *SHAPE, "--gpu", "a10:2+a40", *market, "--seed", seed, "--json")
        for seed in (1, 1, 2)
    ]
    one, same, other = (json.loads(result.stdout)[0] for result in results)
    assert set(one) == PLAN_FIELDS | SIMULATED_FIELDS
    assert one["interruptions"] > 0
    assert one["makespan_s"] == same["makespan_s"] != other["makespan_s"]
    assert "interruptions" in vasuki("simulate", lengths, *SHAPE, "--gpu", "a10:2+a40", *market).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a10:0"], "write it like a10:4"),
        (["--gpu", "a10:many"], "write it like a10:4"),
        (["--gpu", "a10:2+a10:1"], "names a10 twice"),
        (["--gpu", "a10:2", "--gpu", "a10:4", "--deadline", "1h"], "name each card once"),
        (["--gpu", "a10:3", "--tp", "2"], "give a multiple of 2"),
        (["--gpu", "cpu", "--spot"], "give --spot-price cpu=AMOUNT and --interruptions cpu=RATE"),
        (["--gpu", "a10", "--spot-price", "a10=0.2"], "go with --spot"),
        (["--gpu", "a10", "--spot", "--interruptions", "a40=1"], "--interruptions a40: not one of the cards"),
        (["--gpu", "a10", "--spot", "--interruptions", "a10=often"], "write it as NAME=RATE_PER_HOUR"),
        (["--gpu", "a10", "--deadline", "0"], "give a time after now"),
        (["--gpu", "a10", "--deadline", "1h", "--sort", "cost"], "leave --sort out"),
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused_in_one_line(lengths: Path, arguments: list[str], message: str) -> None:
    result = vasuki("plan", lengths, *SHAPE, *arguments)
    assert result.exit_code == 2
    assert len([line for line in result.stderr.splitlines() if message in line]) == 1
    assert "Traceback" not in result.stderr
