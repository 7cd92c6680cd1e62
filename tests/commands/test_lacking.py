"""What machines lack - memory, a home, docstrings, locks - is told in one line, or done without."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from resumed_job import NUM_ROWS, answers, job_into

from vasuki.commands.cli import main

VASUKI = (sys.executable, "-m", "vasuki")
NOBODY = ("unshare", "--user", "--map-user=12345", "--map-group=12345")


def vasuki(
    *arguments: str, before: tuple[str, ...] = (), start: Callable[[], None] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [*before, *VASUKI, *arguments]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, preexec_fn=start, capture_output=True, text=True, check=False)


def test_too_few_addresses_for_torch(tmp_path: Path, tiny_model: Path) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    most_bytes = 1_500_000_000
    ended = vasuki("run", str(job), "--quiet", start=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes,) * 2))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("vasuki: ")
    assert "; it may use 1.4 GiB (ulimit -v)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_docstrings(tmp_path: Path, tiny_model: Path) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    ended = vasuki("run", str(job), PYTHONOPTIMIZE="2")
    assert ended.returncode == 2
    assert ended.stderr == (
        "vasuki: without docstrings transformers loads no model: unset PYTHONOPTIMIZE, or python -OO\n"
    )


@pytest.mark.parametrize("command", ["run", "check"])
def test_without_locks(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    job = job_into(tmp_path / "job", tiny_model)
    (job.parent / "out").mkdir()
    result = CliRunner().invoke(main, [command, str(job)])
    assert result.exit_code == 2
    assert "its file system has no locks, which keep two runs apart: mount it with them" in result.stderr
    assert "(No locks available)" in result.stderr


def test_without_a_home(tmp_path: Path, tiny_model: Path) -> None:
    """A user of whom the system knows nothing, as in containers: nothing is left where the run was started."""
    if subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user without a name can be had here")
    job = job_into(tmp_path / "job", tiny_model, max_tokens=2)
    folder = tmp_path / "here"
    folder.mkdir()
    bare = ("env", "-i", "-C", str(folder), f"PATH={os.environ['PATH']}", "VASUKI_MEASURE=off")
    ended = vasuki("run", str(job), "--quiet", before=(*NOBODY, *bare))
    assert ended.returncode == 0, ended.stderr
    assert answers(job).num_rows == NUM_ROWS
    assert "this user has no home folder (HOME)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == []


def test_a_machine_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp', '/']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)
    monkeypatch.setattr("vasuki.commands.check.check_job", lambda config: tempfile.gettempdir())
    ended = CliRunner().invoke(main, ["check", "jobs/quickstart.yaml"])
    assert (ended.exit_code, ended.stderr) == (
        2,
        "vasuki: there is no folder for temporary files: set TMPDIR to one that can be written to\n",
    )
