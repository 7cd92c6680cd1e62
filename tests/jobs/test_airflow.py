"""The DAG, run by Airflow itself: `make test-airflow` sets it up and names its command in VASUKI_AIRFLOW."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

AIRFLOW = os.environ.get("VASUKI_AIRFLOW", "")
ROOT = Path(__file__).parents[2]
NUM_ROWS = 160  # several seconds of work, so that some are durable long before the others

pytestmark = pytest.mark.skipif(not AIRFLOW, reason="VASUKI_AIRFLOW names no command")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An Airflow of its own, on SQLite."""
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "jobs" / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "VASUKI": str(Path(sys.executable).with_name("vasuki")),
        "VASUKI_RETRY_DELAY_S": "1",
    }
    subprocess.run([AIRFLOW, "db", "migrate"], env=environment, check=True, capture_output=True)
    return environment


def start(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [AIRFLOW, "dags", "test", "vasuki", "--conf", json.dumps({"job": str(folder / "job.yaml")})]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)


def test_a_killed_run_is_retried_and_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    """Kill it in the midst of the decodes; then see a job fail at once that no retry could mend."""
    rows = [json.dumps({"id": str(row), "text": f"{1 + row % 28} May 2021"}) for row in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    job = {
        "model": {"path": str(ROOT / "models" / "dates")},
        "input": {"path": str(tmp_path / "in.jsonl"), "id": "id", "prompt": "{text}"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": 1500, "ignore_eos": True},
        "engine": {"max_num_seqs": 4},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    process = start(tmp_path, environment)
    while not list((tmp_path / "out").glob("part-*.parquet")):
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.05)
    os.kill(json.loads((tmp_path / "out" / ".vasuki.lock").read_text())["pid"], signal.SIGKILL)
    assert process.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    log = (tmp_path / "log").read_text()
    assert "exit code -9" in log
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rows"] == {"total": NUM_ROWS, "succeeded": NUM_ROWS, "failed": 0}
    assert 0 < manifest["runs"][-1]["rows"] < NUM_ROWS, "it started again"
    assert manifest["run_id"].startswith("manual__"), "Airflow's own name of the run"
    parts = (tmp_path / "out").glob("part-*.parquet")
    assert sum(pq.read_metadata(part).num_rows for part in parts) == NUM_ROWS

    (tmp_path / "in.jsonl").unlink()
    assert start(tmp_path, environment).wait() != 0
    log = (tmp_path / "log").read_text()
    assert "exit code 4: vasuki: " in log
    assert "end task task_id=plan" not in log
