"""`vasuki run` as a user types it, in a process of its own: one that crashes takes no other section with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import yaml

from gpu_sections.setting import Record, Setting
from vasuki.io.output.manifest import MANIFEST

ROOT = Path(__file__).resolve().parents[3]
_LOOK_S = 0.01
_PLANNED, _AFTER_S = "planned: ", 0.2  # what a run says just before its rows begin


class Job:
    """A job in a folder of its own, of which the command makes answers.

    Args:
        folder: of `job.yaml`, the output, and what the command says.
        tree: of `job.yaml`, without `output.path` and the device.
    """

    def __init__(self, setting: Setting, folder: Path, tree: Record) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self._said, self._file = folder / "out", folder / "stderr.txt", folder / "job.yaml"
        engine = {**tree.get("engine", {}), "device": setting.device.type}
        output = {**tree.get("output", {}), "path": str(self.output)}
        self._file.write_text(yaml.safe_dump({**tree, "engine": engine, "output": output}))

    def run(self, stop: signal.Signals | None = None) -> int:
        """The exit code; of a run that is sent a signal soon after its rows begin, where one is given. What is raised
        meanwhile ends it."""
        paths = [str(ROOT), str(ROOT / "solvers"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "vasuki", "run", str(self._file), "--log-format", "text"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with self._said.open("wb") as said:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        try:
            while stop is not None and run.poll() is None:
                if _PLANNED in self._said.read_text(errors="replace"):
                    time.sleep(_AFTER_S)
                    run.send_signal(stop)
                    break
                time.sleep(_LOOK_S)
            return run.wait()
        finally:
            run.kill()

    def finished(self) -> Record:
        """The manifest of a run to the end. Raises RuntimeError with what the command says where it fails."""
        if code := self.run():
            raise RuntimeError(f"vasuki run: exit code {code}: {self.said}")
        return cast(Record, json.loads((self.output / MANIFEST).read_text()))

    @property
    def said(self) -> str:
        """The end of what the command wrote to stderr."""
        return " / ".join(self._said.read_text(errors="replace").splitlines()[-5:])

    def answers(self) -> dict[Any, str]:
        """Outputs by id."""
        tables = [pq.read_table(part, columns=["id", "output"]) for part in self.output.glob("part-*.parquet")]
        return {row["id"]: row["output"] for table in tables for row in table.to_pylist()}
