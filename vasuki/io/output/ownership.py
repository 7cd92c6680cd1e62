"""Which files of an output folder are ours. Names say little, since everybody writes a manifest.json; contents do.

part-*.parquet     our key in the footer
manifest*.json     a schema_version, and the hashes of a job and of its input
trace*.jsonl       begins with a step, as much of it as a full disk took
_SUCCESS           lies beside a part or a manifest of ours

Names with a leading `.vasuki` are ours alone.
"""

from __future__ import annotations

import json
import re

import pyarrow as pa

from vasuki.base.errors import OutputInUse
from vasuki.io.location import Location
from vasuki.io.output.parts import PART_NAME, read_label

SUCCESS = "_SUCCESS"
_MANIFEST = re.compile(r"manifest(?P<label>|-\d+-of-\d+)\.json")
_TRACE = re.compile(r"trace(?P<label>|-\d+-of-\d+)\.jsonl")
_JOURNAL = re.compile(r"\.vasuki-journal(?P<label>|-\d+-of-\d+)\.jsonl")
ARRIVED = ".vasuki-rows.jsonl"  # lines that came through a pipe
_FIRST_STEP = b'{"t_s":'
_MANIFEST_KEYS = {"schema_version", "config_hash", "input_fingerprint"}


def refuse_foreign(place: Location, replaces_parts: bool) -> None:
    """Refuse a folder where a run would write over what is not ours.

    Args:
        place: the output folder.
        replaces_parts: look into the parts too. A run that goes on with them does so anyway.

    Raises:
        OutputInUse: a file has a name that a run uses, but not its mark, or is a link.
    """
    children = place.children()
    has_ours = any(PART_NAME.fullmatch(child.name) for child in children)
    for child in children:
        if _MANIFEST.fullmatch(child.name):
            _refuse(place, child, unless=_is_manifest(child))
            has_ours = True
        elif _TRACE.fullmatch(child.name):
            _refuse(place, child, unless=_is_trace(child))
        elif replaces_parts and child.name.endswith(".parquet") and not child.name.startswith((".", "_")):
            _refuse(place, child, unless=_is_part(child))
    for child in children:
        if child.name == SUCCESS:
            _refuse(place, child, unless=child.is_file() and has_ours)


def is_own_name(name: str, label: str) -> bool:
    """Whether a run with this shard label writes files of that name; of an empty label, whether any run does."""
    for pattern in (PART_NAME, _MANIFEST, _TRACE, _JOURNAL):
        if match := pattern.fullmatch(name):
            return not label or match["label"] == label
    return name in (SUCCESS, ARRIVED)


def is_own_journal(name: str, label: str) -> bool:
    """Whether a run with this shard label goes on from a journal of that name; of an empty label, from any."""
    match = _JOURNAL.fullmatch(name)
    return match is not None and (not label or match["label"] == label)


def _refuse(place: Location, file: Location, unless: bool) -> None:
    if file.is_link():
        raise OutputInUse(f"{file} is a link, and links are not followed; remove it, or choose another output.path")
    if not unless:
        raise OutputInUse(f"{place} already holds {file.name}, which is not ours; choose another output.path")


def _is_manifest(file: Location) -> bool:
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and tree.keys() >= _MANIFEST_KEYS


def _is_trace(file: Location) -> bool:
    try:
        with file.open() as stream:
            start = bytes(stream.read(len(_FIRST_STEP)))
    except OSError:
        return False
    return _FIRST_STEP.startswith(start)


def _is_part(file: Location) -> bool:
    try:
        return read_label(file) is not None
    except (OSError, ValueError, pa.ArrowException):  # damaged, by whoever wrote it
        return False
