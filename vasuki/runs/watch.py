"""`vasuki watch`: files that arrive in a folder, each run as soon as it is whole, on a model that stays loaded.

    in/monday.parquet          out/monday/          part-*.parquet  manifest.json  trace.jsonl  _SUCCESS
    in/emea/monday.parquet     out/emea/monday/     ...

Every file is a run of its own with an output folder of its own, so all that holds for `vasuki run` holds for it: it
goes on where a killed process ended, and a file's answers are complete with their `_SUCCESS`. Several
processes may watch the same folder: the first to lock a file's output runs it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vasuki.base.config import JobConfig
from vasuki.base.errors import (
    InputError,
    JobFileError,
    ModelError,
    OutputInUse,
    OutputLocked,
    ProfileError,
    TooManyRowErrors,
    UnreadableError,
)
from vasuki.base.units import duration
from vasuki.base.urls import without_keys
from vasuki.engine.policy import runnable_policy
from vasuki.io.input.followed import BY_LINE
from vasuki.io.location import shown, unreadable_name
from vasuki.io.output.manifest import RowCounts
from vasuki.io.output.output_folder import usable_folder
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.rows.inbox import Inbox
from vasuki.runs.run import Runner
from vasuki.runs.signals import StopSignals

log = logging.getLogger(__name__)

# What concerns one file, or the folder of its answers; but a model or a profile would fail the next one too.
_OF_ONE_FILE = (JobFileError, OutputInUse, TooManyRowErrors, UnreadableError)
_OF_ALL_FILES = (ModelError, ProfileError)


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """What became of a file. The exit code is the one that `vasuki run` on this file alone would have."""

    input: str
    output: str
    rows: int = 0
    failed: int = 0
    exit_code: int = 0
    error: str = ""


@dataclass(slots=True)
class Watched:
    """What became of the files that came, in the order in which they were run last."""

    files: list[FileOutcome] = field(default_factory=list)

    def add(self, outcome: FileOutcome) -> None:
        """Note what became of a file, in place of what became of it before: one that came slowly may be right now."""
        self.files = [*(file for file in self.files if file.input != outcome.input), outcome]

    @property
    def exit_code(self) -> int:
        """The highest of all files'."""
        return max((file.exit_code for file in self.files), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"files": [asdict(file) for file in self.files]}


def watch_job(
    config: JobConfig,
    watched: Watched,
    every_s: float = 10.0,
    until_idle_s: float | None = None,
    options: RunOptions = AS_USUAL,
) -> None:
    """Run a job on each file of its input as it comes, until a signal comes or no file for some time.

    Args:
        config: the job. `input.path` names a folder or a glob, `output.path` the folder of the files' output folders.
        watched: gets what becomes of each file.
        every_s: between two looks at the input. A file is run when two looks found it the same.
        until_idle_s: how long to wait for another file once all are answered or refused; for ever if None.
        options: how to run each.

    Raises:
        JobFileError: the job asks for replicas or for a policy that no run has, the input is a single file, the output
            cannot be written, or one of both lies in the other.
        InputError: the input could not be looked into when it was time to end.
        VasukiError: that the next file would meet as well. What concerns one file alone is logged and noted.
        KeyboardInterrupt: a signal while the model is loaded, or between a file's first look and its first step.
    """
    runnable_policy(config.engine.policy, config.engine.attention)
    refuse_ignored(config)
    if config.engine.replicas != 1:
        raise JobFileError("engine.replicas: a watch has one; start one watch for each device, all on the same folder")
    inbox = Inbox(config)
    with StopSignals() as signals:
        runner = Runner(signals, options)
        runner.load(config)  # what is wrong with it should be known before a file comes, perhaps at night
        log.info("watching %s%s", config.input.path, "" if inbox.folder.exists() else ", which is not there yet")
        busy_s = time.monotonic()
        while True:
            with signals.deferred():
                whole = inbox.look()
            for file in whole:
                if not signals.asked() and inbox.is_as_seen(file) and (outcome := _outcome(runner, inbox.job_of(file))):
                    watched.add(outcome)
                    inbox.settle(file)
            is_busy = bool(whole) or inbox.is_busy
            busy_s = time.monotonic() if is_busy else busy_s
            is_idle = not is_busy and until_idle_s is not None and time.monotonic() - busy_s >= until_idle_s
            if signals.asked() or is_idle or not _slept(every_s):
                break
        for path, half in inbox.broken_off.items():
            error = f"{path} ends in half a line, and waits for its rest: {half}"
            log.error("%s", error)
            watched.add(FileOutcome(path, "", exit_code=InputError.exit_code, error=error))
        if is_idle and inbox.trouble:
            raise InputError(inbox.trouble)


def is_followed(config: JobConfig) -> bool:
    """Whether the input is one file to which rows are appended, rather than a place where files arrive."""
    if "://" in config.input.path or config.input.format not in BY_LINE:
        return False
    return Path(config.input.path).is_file() and config.input.path.lower().endswith((".jsonl", ".ndjson"))


def _outcome(runner: Runner, job: JobConfig) -> FileOutcome | None:
    """Run a file; None if another process has it in hand."""
    source, output = job.input.path, job.output.path
    rows = RowCounts()
    try:
        if problem := unreadable_name(source):
            raise InputError(problem)
        usable_folder(output)  # which costs less than a pass over the file
        log.info("%s -> %s", shown(source), shown(output))
        outcome = runner.run(job)
        rows = outcome.manifest.rows
        outcome.raise_for_errors()
    except OutputLocked:
        return None
    except _OF_ALL_FILES:
        raise
    except _OF_ONE_FILE as error:
        log.warning("%s: %s", shown(source), error)
        words = without_keys(str(error))
        return FileOutcome(
            shown(without_keys(source)), shown(without_keys(output)), rows.total, rows.failed, error.exit_code, words
        )
    log.info("%s: %d rows in %s", shown(source), rows.total, duration(outcome.manifest.timings.makespan_s))
    return FileOutcome(shown(without_keys(source)), shown(without_keys(output)), rows.total, rows.failed)


def _slept(seconds: float) -> bool:
    """Wait. False if a signal came."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True
