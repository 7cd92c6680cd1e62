"""The Python page does what it says, block by block, and importing vasuki takes no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vasuki
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    prompts = pq.read_table(ROOT / "jobs/data/dates.parquet")
    assert sorted(names["answers"]["id"].to_pylist()) == sorted(map(str, prompts["id"].to_pylist()))
    parts = sorted((tmp_path / "out/python").glob("part-*.parquet"))
    stored = pa.concat_tables([pq.read_table(part, columns=["id", "output"]) for part in parts])
    assert names["answers"].equals(stored)
    assert len(capsys.readouterr().out.splitlines()) > 4
    again = vasuki.run(parse_job(names["job"]), vasuki.RunOptions(quiet=True))
    assert again.manifest.finished_at == names["outcome"].manifest.finished_at, "nothing was left to do"


def test_a_job_runs_in_a_thread(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "3 May 2021"}\n')
    job = {
        "model": {"path": str(ROOT / "models/dates")},
        "input": {"path": str(tmp_path / "rows.jsonl"), "prompt": "{text}"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": 12},
    }
    with ThreadPoolExecutor() as threads:
        assert len(threads.submit(vasuki.plan, job).result()) == 1
        outcome = threads.submit(vasuki.run, job, vasuki.RunOptions(quiet=True)).result()
    assert outcome.manifest.rows.succeeded == 1


def test_a_dict_that_is_no_job_is_refused_as_a_file_is() -> None:
    with pytest.raises(JobFileError, match="model"):
        vasuki.run({"input": {"path": "rows.jsonl"}})


def test_importing_vasuki_imports_none_of_its_rooms() -> None:
    said = (
        "import sys, vasuki; print([name for name in sys.modules if name.startswith(('vasuki.', 'torch', 'pyarrow'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", said], text=True).strip() == "[]"
