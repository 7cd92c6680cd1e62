"""The lowest versions that pyproject.toml promises: they are those that are tried, and give the answers of the newest.
`make test-versions` makes an environment of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from documented import ROOT

LOWEST = ROOT / ".venvs" / "lowest"


def test_what_is_promised_is_tried() -> None:
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, version in (requirement.split(">=") for requirement in promised):
        assert re.fullmatch(rf"{re.escape(version)}(\.0|\.\d+)*", tried.pop(name)), name
    assert not tried, "what is not promised"


@pytest.mark.skipif(not (LOWEST / ".installed").exists(), reason="`make test-versions` makes the environment")
def test_answers_are_those_of_the_newest(tmp_path: Path) -> None:
    answers: list[list[str]] = []
    for programs in (LOWEST / "bin", Path(sys.executable).parent):
        out = tmp_path / str(len(answers))
        job = ("run", "jobs/quickstart.yaml", "--set", f"output.path={out}")
        subprocess.run([programs / "vasuki", *job], cwd=ROOT, check=True, capture_output=True)
        answers.append(pq.read_table(next(out.glob("part-*"))).sort_by("id")["output"].to_pylist())
    assert len(answers[0]) == 2000
    assert answers[0] == answers[1]
