"""Files that arrive in a folder: which of them are whole and still to be run."""

from __future__ import annotations

import logging

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError, one_line
from vasuki.io.input.followed import half_line
from vasuki.io.input.tables import stem
from vasuki.io.location import Location, find_files, folder_of, unreadable_name
from vasuki.io.output.output_folder import writable_folder

log = logging.getLogger(__name__)

Stamp = tuple[int, int]  # see `Location.stamp`

_UNDER_WAY = (".part", ".partial", ".tmp", ".crdownload")  # by convention; they get another name when they are whole


class Inbox:
    """The files of a job's input, and which of them are still to be run.

    Attributes:
        folder: in which they arrive.
        is_busy: whether the last look found a file that is still to be run, or something that had changed.
        trouble: why the last look failed; empty if it did not.
        broken_off: files that end in half a line, whose rest they wait for, with how it begins.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        try:
            self.folder = folder_of(config.input.path)
        except (OSError, ValueError) as error:
            raise JobFileError(f"cannot watch input.path: {one_line(error)}") from None
        self._outputs = writable_folder(config.output.path)
        if self.folder.overlaps(self._outputs):
            raise JobFileError(
                f"input.path {config.input.path} and output.path {config.output.path} lie in one another; "
                "answers would be taken for prompts"
            )
        self._seen: dict[str, Stamp] = {}  # at the last look
        self._settled: dict[str, Stamp] = {}  # as they were when they were run
        self.is_busy = False
        self.trouble = ""
        self.broken_off: dict[str, str] = {}

    def look(self) -> list[Location]:
        """Files still to be run that nobody wrote to between the last look and this one, the oldest first."""
        self.is_busy, before_trouble, self.trouble = False, self.trouble, ""
        try:
            found = find_files(self._config.input.path)
            files = {file.path: file for file in found if not file.name.lower().endswith(_UNDER_WAY)}
            before, self._seen = self._seen, {path: _stamp(file) for path, file in files.items()}
        except (OSError, ValueError) as error:  # a share or a store may be back at the next look
            self.trouble = f"cannot look into input.path {self._config.input.path}: {one_line(error)}"
            if self.trouble != before_trouble:
                log.warning("%s", self.trouble)
            return []
        left = [path for path, stamp in self._seen.items() if self._settled.get(path) != stamp]
        same = [path for path in left if before.get(path) == self._seen[path]]
        self.broken_off = {}
        whole = []
        for path in sorted(same, key=lambda path: (self._seen[path], path)):
            try:
                half = half_line(files[path])
            except (OSError, UnicodeError):  # which its run will tell
                half = ""
            if half:
                self.broken_off[path] = half
            else:
                whole.append(path)
        self.is_busy = len(left) > len(self.broken_off) or self._seen != before
        return [files[path] for path in whole]

    def is_as_seen(self, file: Location) -> bool:
        """Whether a file is still what the last look found, after others have been run."""
        try:
            return _stamp(file) == self._seen[file.path]
        except OSError:
            return False

    def settle(self, file: Location) -> None:
        """Leave a file alone until it changes."""
        self._settled[file.path] = self._seen[file.path]

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


def _stamp(file: Location) -> Stamp:
    """When it was written, and its size; nothing of a file whose name Arrow cannot take, which its run will tell."""
    return (0, 0) if unreadable_name(file.path) else file.stamp
