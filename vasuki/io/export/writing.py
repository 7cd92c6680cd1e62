"""Rows -> a JSONL or CSV file, or the result and error files of a hosted batch API."""

from __future__ import annotations

import base64
import csv
import io
import logging
from collections import Counter
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Literal

from vasuki.base.errors import InputError, JobFileError, one_line
from vasuki.io.export.answers import Line, column_names, incompleteness, read_rows
from vasuki.io.export.openai_results import result_line
from vasuki.io.location import Location
from vasuki.io.output.manifest import MANIFEST, read_manifest
from vasuki.io.values import as_text, json_text

log = logging.getLogger(__name__)

Form = Literal["jsonl", "csv", "openai"]


def export_answers(run_dir: str, file: str, form: Form, partial: bool = False) -> dict[str, int]:
    """Write the answers in an output folder into a file. Returns the lines in each file.

    `openai` puts failed rows into a second file, `answers.errors.jsonl`, if there are any.

    Args:
        run_dir: folder or URL.
        file: path or URL; what is there is replaced.
        form: of the file.
        partial: also if the output lacks rows, which is logged.

    Raises:
        InputError, UnreadableError: there is no output, it lacks rows, or it is damaged.
        JobFileError: the file cannot be written.
    """
    try:
        folder, target = Location.parse(run_dir), Location.parse(file)
        names = column_names(folder)
        if what := incompleteness(folder):
            if not partial:
                raise InputError(f"{folder} has {what}; run its job again, or export what there is with --partial")
            log.warning("%s has %s", folder, what)
        if form == "openai":
            return _write_results(folder, target)
        rows = (line for samples in read_rows(folder) for line in samples)
        count = 0
        as_bytes = _json if form == "jsonl" else lambda line: _csv([_cell(line[name]) for name in names])
        with target.replaced() as out:
            if form == "csv":
                out.write(_csv(names))
            for line in rows:
                out.write(as_bytes(line))
                count += 1
        return {file: count}
    except (OSError, ValueError) as error:
        raise JobFileError(f"cannot export {run_dir} to {file}: {one_line(error)}") from None


def _write_results(folder: Location, target: Location) -> dict[str, int]:
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    model = str(manifest.job.get("model", {}).get("path", "")) if manifest else ""
    ended = manifest.finished_at if manifest else ""
    created_s = int(datetime.fromisoformat(ended).timestamp()) if ended else 0
    if "output" not in column_names(folder):
        raise JobFileError(f"{folder} has no answers that a hosted API could have given; export it as jsonl or csv")
    errors = target.sibling(target.name.removesuffix(".jsonl") + ".errors.jsonl")
    errors.delete()
    counts: Counter[str] = Counter({str(target): 0})
    with ExitStack() as files:
        out = {str(target): files.enter_context(target.replaced())}
        for samples in read_rows(folder):
            line = result_line(samples, model, created_s)
            place = errors if line["error"] else target
            if str(place) not in out:
                out[str(place)] = files.enter_context(place.replaced())
            out[str(place)].write(_json(line))
            counts[str(place)] += 1
    return dict(counts)


def _json(line: Line) -> bytes:
    return json_text(line, _plain).encode() + b"\n"


def _csv(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # so that a cell with either of them is quoted
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _cell(value: Any) -> str:
    return "" if value is None else _plain(value)


def _plain(value: Any) -> str:
    """A value as text, bytes as base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return json_text(value, _plain) if isinstance(value, (dict, list)) else as_text(value)
