"""Which files of an output folder are ours. Names say little, since everybody writes a manifest.json; contents do.

part-*.parquet     our key in the footer, which a damaged one may have lost: others of ours lie in the same folder
manifest*.json     a schema_version, and the hashes of a job and of its input; if it says nothing, parts lie there
trace*.jsonl       begins with a step, as much of it as a full disk took
_SUCCESS           lies in a folder with a part or a manifest of ours

Names with a leading `.vasuki` are ours alone. Whatever has a name that we use is a file, and no link, folder or pipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from vasuki.base.errors import OutputInUse, UnreadableError, one_line
from vasuki.io.location import Location
from vasuki.io.output.manifest import MANIFEST, SCHEMA_VERSION, is_manifest
from vasuki.io.output.parts import PART_NAME, DamagedPart, PartLabel, read_label

SUCCESS = "_SUCCESS"
_MANIFEST = re.compile(r"manifest(?P<label>|-\d+-of-\d+)\.json")
_TRACE = re.compile(r"trace(?P<label>|-\d+-of-\d+)\.jsonl")
_JOURNAL = re.compile(r"\.vasuki-journal(?P<label>|-\d+-of-\d+)\.jsonl")
ARRIVED = ".vasuki-rows.jsonl"  # lines that came through a pipe
_FIRST_STEP = b'{"t_s":'
_MANIFEST_KEYS = {"schema_version", "config_hash", "input_fingerprint"}


def refuse_irregular(place: Location) -> None:
    """Refuse a folder where something else than a file has a name that runs use: links are not followed, and a pipe
    would be waited for. Nothing is opened, so that locks may be taken afterwards.

    Raises:
        OutputInUse: names what is there.
    """
    for child, kind in place.irregular_children():
        if _is_part(child.name) or child.name.startswith(".vasuki") or is_own_name(child.name, ""):
            raise OutputInUse(f"{child} is {kind}, where a run has a file; remove it, or choose another output.path")


def refuse_fixed(place: Location, label: str = "") -> None:
    """Raises OSError for a file that a run with this shard label would replace or delete, and could not."""
    for child in place.children():
        if child.name == MANIFEST or is_own_name(child.name, label):
            child.refuse_fixed()


def refuse_foreign(place: Location) -> None:
    """Refuse a folder where a run would write over what is not ours.

    Raises:
        OutputInUse: a file has a name that a run uses, but not its mark.
        UnreadableError: a part cannot be read, or is damaged and lies among files of ours.
    """
    children = place.children()
    has_ours = False
    damages = []
    broken = []
    for child in children:
        if _MANIFEST.fullmatch(child.name):
            if is_broken_manifest(child):
                broken.append(child)
                continue
            _refuse(place, child, unless=_is_manifest(child))
            has_ours = True
        elif _TRACE.fullmatch(child.name):
            _refuse(place, child, unless=_is_trace(child))
        elif is_own_journal(child.name, ""):
            has_ours = True
        elif _is_part(child.name):
            try:
                _refuse(place, child, unless=read_label(child) is not None)
                has_ours = True
            except DamagedPart as problem:
                damages.append((child, problem))
    for part, damage in damages:
        _refuse(place, part, unless=has_ours)
        raise damage
    for child in broken:
        _refuse(place, child, unless=has_ours)
    for child in children:
        if child.name == SUCCESS:
            _refuse(place, child, unless=has_ours)


def labelled_parts(
    place: Location, with_pages: bool = False, broken: list[str] | None = None
) -> Iterator[tuple[Location, PartLabel]]:
    """What readers of the folder take for parts, whatever their names, and their labels. Those whose names runs give
    come first: of a copy and its original, readers who go by names see that one.

    Args:
        place: the folder.
        with_pages: see `read_label`.
        broken: gets what is wrong with each part that cannot be read, or is damaged; such a part is left out then.

    Raises:
        OutputInUse: a part is not ours.
        UnreadableError: a part cannot be read, or is damaged.
    """
    parts = [child for child in place.children() if _is_part(child.name)]
    for part in sorted(parts, key=lambda part: PART_NAME.fullmatch(part.name) is None):
        try:
            label = read_label(part, with_pages)
        except UnreadableError as error:
            if _is_gone(part):
                continue
            if broken is None:
                raise
            broken.append(str(error))
            continue
        if label is None:
            raise _not_ours(place, part)
        yield part, label


def has_parts(place: Location) -> bool:
    """Whether any part lies in the folder. Raises as `labelled_parts` does."""
    return any(True for _ in labelled_parts(place))


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


def is_broken_manifest(file: Location) -> bool:
    """Whether a file has the name of a manifest and cannot be understood: half of one, an empty value, or values of
    other types under our keys."""
    if not _MANIFEST.fullmatch(file.name):
        return False
    try:
        tree = json.loads(file.read_bytes())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnreadableError(f"cannot read {file}: {error.strerror or one_line(error)}") from None
    except (ValueError, RecursionError):
        return True
    if isinstance(tree, dict) and tree.keys() >= _MANIFEST_KEYS:
        return not is_manifest(tree)
    return not (isinstance(tree, dict) and tree)


def is_newer_manifest(file: Location) -> bool:
    """Whether a manifest is of a version of vasuki that says more than this one understands."""
    if not _MANIFEST.fullmatch(file.name):
        return False
    version = _tree_of(file).get("schema_version")
    return isinstance(version, int) and version > SCHEMA_VERSION


def _is_gone(part: Location) -> bool:
    """Whether somebody has removed a part just now. Where permission is lacking, nobody can tell."""
    try:
        return not part.exists()
    except OSError:
        return False


def _is_part(name: str) -> bool:
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def _refuse(place: Location, file: Location, unless: bool) -> None:
    if not unless:
        raise _not_ours(place, file)


def _not_ours(place: Location, file: Location) -> OutputInUse:
    return OutputInUse(f"{place} already holds {file.name}, which is not ours; choose another output.path")


def _is_manifest(file: Location) -> bool:
    return _tree_of(file).keys() >= _MANIFEST_KEYS


def _tree_of(file: Location) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is none."""
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_trace(file: Location) -> bool:
    try:
        with file.open() as stream:
            start = bytes(stream.read(len(_FIRST_STEP)))
    except OSError:
        return False
    return _FIRST_STEP.startswith(start)
