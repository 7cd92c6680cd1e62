"""`vasuki watch`: files that arrive in a folder, each run as soon as it is whole, on a model that stays loaded.

    in/monday.parquet          out/monday/          part-*.parquet  manifest.json  trace.jsonl  _SUCCESS
    in/emea/monday.parquet     out/emea/monday/     ...

Every file is a run of its own with an output folder of its own, so all that holds for `vasuki run` holds for it: it
goes on where a killed process ended, and whoever waits for a file's answers waits for their `_SUCCESS`. Several
processes may watch the same folder: the first to lock a file's output runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from vasuki.config import JobConfig
from vasuki.errors import InputError, JobFileError, OutputInUse, TooManyRowErrors
from vasuki.io.location import Location, find_files, folder_of
from vasuki.io.lock import FolderLock
from vasuki.io.manifest import RowCounts
from vasuki.io.output_folder import SUCCESS
from vasuki.io.tables import stem
from vasuki.job import Runner
from vasuki.signals import StopSignals
from vasuki.units import duration

log = logging.getLogger(__name__)

Stamp = tuple[int, int]  # see `Location.stamp`

_OF_ONE_FILE = (InputError, JobFileError, OutputInUse, TooManyRowErrors)  # other errors would meet the next file too


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """What became of a file. The exit code is that of a `vasuki run` of it alone."""

    input: str
    output: str
    rows: int = 0
    failed: int = 0
    exit_code: int = 0
    error: str = ""


@dataclass(slots=True)
class Watched:
    """What became of the files that came, in the order in which they were run."""

    files: list[FileOutcome] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The highest of all files'."""
        return max((file.exit_code for file in self.files), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"files": [asdict(file) for file in self.files]}


def watch_job(
    config: JobConfig, every_s: float = 10.0, until_idle_s: float | None = None, quiet: bool = False
) -> Watched:
    """Run a job on each file of its input as it comes, until a signal comes or no file for some time.

    Args:
        config: the job. `input.path` names a folder or a glob, `output.path` the folder of the files' output folders.
        every_s: between two looks at the input. A file is run when two looks found it the same.
        until_idle_s: how long to wait for another file; for ever if None.
        quiet: without progress bars.

    Raises:
        JobFileError: the input is a single file, or the output would lie in it.
        VasukiError: that the next file would meet as well. What concerns one file alone is logged and noted.
        KeyboardInterrupt: a signal before the first look, or between a file's arrival and its first step.
    """
    inbox = _Inbox(config)
    watched = Watched()
    with StopSignals() as signals:
        runner = Runner(signals, quiet)
        runner.load(config)  # what is wrong with it should be known before a file comes, perhaps at night
        log.info("watching %s%s", config.input.path, "" if inbox.folder.exists() else ", which is not there yet")
        busy_s = time.monotonic()
        while not signals.asked():
            for file in inbox.whole_files():
                if not signals.asked() and (outcome := _outcome(runner, inbox.job_of(file))):
                    watched.files.append(outcome)
                    inbox.settle(file, outcome)
            if inbox.has_changed:
                busy_s = time.monotonic()
            is_idle = until_idle_s is not None and time.monotonic() - busy_s >= until_idle_s
            if is_idle or not _slept(every_s):
                break
    return watched


class _Inbox:
    """The files of a job's input, and which of them are still to be run."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._outputs = Location.parse(config.output.path)
        try:
            self.folder = folder_of(config.input.path)
        except (OSError, ValueError) as error:
            raise JobFileError(f"cannot watch input.path: {error}") from None
        if (self._outputs / "any").inside(self.folder):
            raise JobFileError(f"output.path {config.output.path} lies in the watched folder; choose another")
        self._seen: dict[str, Stamp] = {}  # at the last look
        self._refused: dict[str, Stamp] = {}  # with an error that another look may not find any more
        self._answered: set[str] = set()
        self.has_changed = False  # between the last two looks

    def whole_files(self) -> list[Location]:
        """Files still to be run that nobody wrote to between the last look and this one, the oldest first."""
        try:
            files = {file.path: file for file in self._unanswered()}
            before, self._seen = self._seen, {path: file.stamp for path, file in files.items()}
        except OSError as error:  # a share or a store may be back at the next look
            log.warning("cannot look into %s: %s", self._config.input.path, " ".join(str(error).split()))
            return []
        self.has_changed = before != self._seen
        whole = [path for path, stamp in self._seen.items() if before.get(path) == stamp != self._refused.get(path)]
        return [files[path] for path in sorted(whole, key=lambda path: (self._seen[path], path))]

    def _unanswered(self) -> Iterator[Location]:
        for file in find_files(self._config.input.path):
            if file.path not in self._answered and file.path not in self._seen and self._was_answered(file):
                self._answered.add(file.path)
            if file.path not in self._answered:
                yield file

    def _was_answered(self, file: Location) -> bool:
        """Whether an earlier process ran the file to its end, and nobody wrote to it since."""
        (written, _), (success, _) = file.stamp, (self._output_of(file) / SUCCESS).stamp
        return success > written

    def settle(self, file: Location, outcome: FileOutcome) -> None:
        """Take note of what became of a file."""
        if outcome.exit_code in (0, TooManyRowErrors.exit_code):
            self._answered.add(file.path)
        else:
            self._refused[file.path] = self._seen[file.path]

    def job_of(self, file: Location) -> JobConfig:
        """The job for one file alone."""
        config = self._config
        return config.model_copy(
            update={
                "input": config.input.model_copy(update={"path": file.url}),
                "output": config.output.model_copy(update={"path": self._output_of(file).url}),
            }
        )

    def _output_of(self, file: Location) -> Location:
        *folders, name = file.inside(self.folder).split("/")
        return self._outputs / "/".join([*folders, stem(name)])


def _outcome(runner: Runner, job: JobConfig) -> FileOutcome | None:
    """Run a file; None if another process has it in hand."""
    source, output = job.input.path, job.output.path
    try:
        FolderLock.refuse_held(Location.parse(output))
    except OutputInUse:
        return None
    log.info("%s -> %s", source, output)
    rows = RowCounts()
    try:
        outcome = runner.run(job)
        rows = outcome.manifest.rows
        outcome.raise_for_errors()
    except _OF_ONE_FILE as error:
        log.warning("%s: %s", source, error)
        return FileOutcome(source, output, rows.total, rows.failed, error.exit_code, str(error))
    log.info("%s: %d rows in %s", source, rows.total, duration(outcome.manifest.timings.makespan_s))
    return FileOutcome(source, output, rows.total, rows.failed)


def _slept(seconds: float) -> bool:
    """Wait. False if a signal came."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True
