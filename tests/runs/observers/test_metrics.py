"""What monitoring reads of a run."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tiny_job import job_tree

from vasuki.base.errors import JobFileError
from vasuki.commands.cli import main
from vasuki.io.location import Location
from vasuki.io.output.trace import read_trace
from vasuki.runs.observers import metrics as module
from vasuki.runs.observers.metrics import Metrics

NUM_ROWS = 9


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Path:
    """Nine rows, one of which is too long to be answered."""
    texts = ["the cat sat " * (200 if row == 4 else 1 + row % 3) for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts}), tmp_path / "in.parquet")
    tree = job_tree(tiny_model, tmp_path / "in.parquet", tmp_path / "out") | {"errors": {"max_fraction": 0.5}}
    tree["input"]["duplicates"] = "each"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


@pytest.fixture
def served() -> Iterator[Metrics]:
    with Metrics(address="0") as metrics:
        yield metrics


def run(job: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", str(job), *arguments])


def figures(text: str) -> dict[str, float]:
    """Values by name; fails on what is not OpenMetrics."""
    families: Any = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_last_figures_are_those_of_the_manifest(job: Path, tmp_path: Path) -> None:
    result = run(job, "--metrics", str(tmp_path / "figures.txt"), "--json", "--log-format", "json")
    assert result.exit_code == 0, result.stderr
    manifest = json.loads(result.stdout)
    (taken,) = manifest["runs"]
    text = (tmp_path / "figures.txt").read_text()
    assert f'vasuki_run_info{{run_id="{taken["run_id"]}"}}' in text
    assert {json.loads(line)["run_id"] for line in result.stderr.splitlines()} == {taken["run_id"]}
    seen, steps = figures(text), read_trace(Location.parse(str(tmp_path / "out")))
    del seen["vasuki_run_info"]
    assert seen == {
        "vasuki_rows": NUM_ROWS,
        "vasuki_rows_done_total": NUM_ROWS,
        "vasuki_rows_failed_total": manifest["rows"]["failed"],
        "vasuki_prompt_tokens_total": sum(step.prefill_tokens for step in steps),
        "vasuki_generated_tokens_total": manifest["tokens"]["output"],
        "vasuki_steps_total": manifest["steps"],
        "vasuki_preemptions_total": sum(manifest["preemptions"].values()),
        "vasuki_kv_copied_bytes_total": manifest["kv"]["offloaded_bytes"],
        "vasuki_running_sequences": 0,
        "vasuki_kv_used_ratio": 0,
        "vasuki_time_left_seconds": 0,
        "vasuki_at_risk_seconds": 0,
    } | {name: value for name, value in seen.items() if name.endswith("_created")}
    assert manifest["rows"]["failed"] == 1


def test_while_a_run_lasts_the_file_is_whole_and_the_server_says_the_same(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read both at each step."""
    monkeypatch.setattr(module, "WRITTEN_EVERY_S", 0.0)
    file, seen = tmp_path / "figures.txt", []
    write = Metrics.write_if_due

    def write_and_read(self: Metrics) -> None:
        write(self)
        assert self._server is not None
        address = f"http://127.0.0.1:{self._server.server_port}/metrics"
        request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request) as answer:
            over_http = figures(answer.read().decode())
        assert over_http == figures(file.read_text())
        seen.append(over_http)

    monkeypatch.setattr(Metrics, "write_if_due", write_and_read)
    assert run(job, "--metrics", str(file), "--metrics-port", "0").exit_code == 0
    steps = [one["vasuki_steps_total"] for one in seen[:-1]]
    assert steps == list(range(1, len(steps) + 1))
    middle = seen[len(seen) // 2]
    assert 0 < middle["vasuki_kv_used_ratio"] <= 1
    assert middle["vasuki_time_left_seconds"] > 0
    assert middle["vasuki_at_risk_seconds"] > seen[0]["vasuki_at_risk_seconds"] > 0
    assert middle["vasuki_running_sequences"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.txt", "in.parquet", "job.yaml", "out"]


def test_nobody_else_can_ask(served: Metrics) -> None:
    """The port answers on this machine's own address alone."""
    assert served._server is not None
    assert served._server.server_address[0] == "127.0.0.1"


def test_a_file_that_cannot_be_written_any_more_does_not_end_a_run(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITTEN_EVERY_S", 0.0)
    folder = tmp_path / "gone"
    folder.mkdir()
    look = module.RunMetrics.look

    def look_without_folder(self: Any, *arguments: Any) -> None:
        if folder.exists():
            (folder / "figures.txt").unlink()
            folder.rmdir()
        look(self, *arguments)

    monkeypatch.setattr(module.RunMetrics, "look", look_without_folder)
    result = run(job, "--metrics", str(folder / "figures.txt"))
    assert result.exit_code == 0
    assert result.stderr.count("no metrics from here on: cannot write") == 1


def test_mistakes_are_told_before_the_model_is_loaded(job: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, words in [
            (["--metrics", str(tmp_path / "nowhere" / "figures.txt")], "No such file or directory"),
            (["--metrics-port", str(port)], "Address already in use"),
            (["--metrics-port", "host:http"], "neither PORT nor HOST:PORT"),
            (["--metrics-port", "65536"], "neither PORT nor HOST:PORT"),
        ]:
            result = run(job, *arguments)
            assert result.exit_code == JobFileError.exit_code
            assert words in result.stderr
            assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_rows_that_are_copied_count_as_done(job: Path, tmp_path: Path) -> None:
    result = run(job, "--metrics", str(tmp_path / "figures.txt"), "--json", "--set", "input.duplicates=auto")
    assert result.exit_code == 0, result.stderr
    manifest, seen = json.loads(result.stdout), figures((tmp_path / "figures.txt").read_text())
    assert manifest["copied_rows"] == NUM_ROWS - 4
    assert seen["vasuki_rows_done_total"] == seen["vasuki_rows"] == NUM_ROWS
    assert seen["vasuki_generated_tokens_total"] < manifest["tokens"]["output"]


def test_figures_of_several_runs_add_up(job: Path, tmp_path: Path) -> None:
    """As of a process that watches a folder."""
    file = tmp_path / "figures.txt"
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.parquet").write_bytes((tmp_path / "in.parquet").read_bytes())
    arguments = ["--set", f"input.path={tmp_path}/in", "--every", "0.05", "--until-idle", "0.1"]
    result = CliRunner().invoke(main, ["watch", str(job), *arguments, "--metrics", str(file)])
    assert result.exit_code == 0, result.stderr
    assert figures(file.read_text())["vasuki_rows_done_total"] == 2 * NUM_ROWS
