"""The table of mechanisms says what runs: every command in it does, on a job small enough."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reproduce
import yaml
from tiny_job import job_tree
from write_page import PAGE

ROOT = Path(__file__).resolve().parents[2]
TABLE = PAGE.read_text(encoding="utf-8").partition("## Mechanisms")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+) \| (.+) \| `(.+)` \|$", TABLE, re.MULTILINE)
MINUTES = {"vasuki profile", "python scripts/reproduce/forest_on_cpu.py"}  # which measure; they only have to be there
GPU = ["--gpu", "a10"]


def test_every_mechanism_has_a_command() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| mechanism")]
    assert len(ROWS) == len(lines) > 15
    assert "not available" not in TABLE


@pytest.mark.sweep
@pytest.mark.parametrize("command", sorted({command for *_, command in ROWS}))
def test_its_command_runs(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        assert command in MINUTES or words[2] in reproduce.CLAIMS
        if command in MINUTES or words[2] == "baton-mix":  # which `test_reproduction_page` computes
            return
        words = [sys.executable, str(ROOT / words[1]), *words[2:], "--quick"]
    elif command in MINUTES:
        words = [sys.executable, "-m", "vasuki", "profile", "--help"]
    else:
        words = [sys.executable, "-m", "vasuki", *words[1:]]
        if words[3] in ("simulate", "plan") and "--gpu" not in words:
            words += GPU
    rows = pa.table({"id": range(6), "text": ["the cat sat on a mat " * (1 + row % 3) for row in range(6)]})
    pq.write_table(rows, tmp_path / "in.parquet")
    tree = job_tree(tiny_model, tmp_path / "in.parquet", tmp_path / "out")
    if "engine.policy=prefill-packing" in command or "vasuki-paper" in command:
        tree["engine"] = {}
    if re.search("static|baton|orca|prefill-packing", command):
        tree["engine"].pop("chunk_tokens", None)
    if "vasuki-paper" in command or "offload" in command:
        tree["model"] = {"shape": "llama-3-8b"}
        tree["input"]["chat"] = False
        tree["kv"] = {"device_memory": 2**28}
    if "watch" in words:
        tree["engine"] = {"attention": "padded"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "gpt3.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "200,20\n" * 8)
    line = b'{"id": 1, "text": "the cat"}\n'
    ended = subprocess.run(words, input=line, cwd=tmp_path, env=os.environ, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout or (tmp_path / "out" / "manifest.json").is_file()
