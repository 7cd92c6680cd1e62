"""Weights that stay in their files while a process computes with them: a CPU reads them where the kernel has mapped
them, so writing into such a file changes the model in the midst of a job. A file that takes the place of another, as
with `mv`, does not: the one that was mapped lives on.
"""

from __future__ import annotations

import os

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.models.files import description_folder
from vasuki.models.fingerprint import weights_in

_MAPS = "/proc/self/maps"

Stamp = tuple[int, int, int]  # the file's number, when it was written last, and its bytes


class MappedWeights:
    """The weight files of a model that was loaded just now and that are mapped, all where that cannot be found out."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model.path
        mapped = _mapped_files()
        files = [os.path.realpath(file) for file in weights_in(description_folder(model))]
        self._seen = {file: _stamp(file) for file in files if mapped is None or file in mapped}

    def refuse_changed(self) -> None:
        """Raises ModelError if somebody has written into one of them."""
        for file, seen in self._seen.items():
            number, *content = _stamp(file)
            if number == seen[0] and tuple(content) != seen[1:]:
                raise ModelError(
                    f"model {self._model}: {os.path.basename(file)} was written into while the job ran; "
                    "rows finished before it are kept"
                )


def _stamp(file: str) -> Stamp:
    try:
        status = os.stat(file)
    except OSError:  # its name is gone, or its server: what is mapped is not
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size


def _mapped_files() -> set[str] | None:
    """What this process has mapped; None where the system does not say."""
    try:
        with open(_MAPS, errors="surrogateescape") as maps:
            return {fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    except OSError:
        return None
