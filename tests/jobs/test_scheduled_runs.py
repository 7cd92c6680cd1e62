"""The crontab, the systemd units and the container: their commands are run, and tools that know them read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRON = ROOT / "jobs" / "cron"


def commands() -> dict[str, str]:
    (line,) = [line for line in (CRON / "crontab").read_text().splitlines() if not line.startswith("#")]
    (start,) = re.findall(r"^ExecStart=(.*)", (CRON / "vasuki.service").read_text(), re.M)
    return {"crontab": line.split(maxsplit=5)[5], "service": f"cd /srv/batch && {start} 2>nightly.log"}


@pytest.mark.parametrize("kind", ["crontab", "service"])
def test_the_command_is_one_that_vasuki_takes(tmp_path: Path, kind: str) -> None:
    """By a shell with no environment, as cron has nearly none. The input is missing, and the last words say so."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / "nightly.yaml").write_text(
        "model: {path: m}\ninput: {path: in.jsonl, prompt: '{text}'}\noutput: {path: out}\n"
    )
    command = commands()[kind].replace("/srv/batch", str(tmp_path))
    assert "%" not in command, "cron would end the line there"
    ended = subprocess.run(["/bin/sh", "-c", command], env={"PATH": "/usr/bin:/bin"}, capture_output=True)
    assert ended.returncode == 4
    last = json.loads((tmp_path / "nightly.log").read_text().splitlines()[-1])
    assert last["exit_code"] == 4
    assert "in.jsonl" in last["message"]


def test_the_docs_show_the_line_of_the_crontab() -> None:
    (line,) = [line for line in (CRON / "crontab").read_text().splitlines() if not line.startswith("#")]
    assert f"\n    {line}\n" in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in ("vasuki.service", "vasuki.timer"):
        text = (CRON / unit).read_text().replace("/srv/batch/.venv/bin/vasuki", "/bin/true")
        (tmp_path / unit).write_text(text.replace("User=batch", "User=root"))
    units = [str(tmp_path / "vasuki.timer"), str(tmp_path / "vasuki.service")]
    checked = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("hadolint"), reason="no hadolint")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    checked = subprocess.run(["hadolint", ROOT / "jobs" / "container" / "Dockerfile"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")
