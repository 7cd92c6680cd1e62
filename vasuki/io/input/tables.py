"""The input table of a job: one or many files of one format, checked at the start and then streamed.

Opening it costs one pass over what the job reads: a text file, or the bytes of a Parquet file's columns and the values
of its ids. After that the table is known to be readable, to have every column the job names and to have unique ids, so
that nothing of the kind can end a job half way. Rows are numbered from 0 over all files in the order of their paths.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import pyarrow as pa

from vasuki.base.config import CsvConfig, InputConfig, JobConfig
from vasuki.base.errors import InputError, JobFileError, did_you_mean, one_line
from vasuki.base.urls import without_keys
from vasuki.io.formats.arrow import ArrowSource
from vasuki.io.formats.cells import cell_value
from vasuki.io.formats.delimited import CsvSource
from vasuki.io.formats.json_array import JsonArraySource
from vasuki.io.formats.jsonl import JsonlSource
from vasuki.io.formats.kinds import common_type
from vasuki.io.formats.parquet import ParquetSource
from vasuki.io.formats.sources import Block, Source, Survey
from vasuki.io.ids import IdHashes, refuse_duplicates
from vasuki.io.input.columns import BATCH_URL, carried_columns, id_column, needed_columns
from vasuki.io.input.folders import folder_columns
from vasuki.io.location import Location, find_files, unreadable_name, would_find
from vasuki.io.selection import EVERY_ROW, Selection
from vasuki.io.values import as_text

log = logging.getLogger(__name__)

Format = Literal["parquet", "arrow", "jsonl", "json", "csv", "openai-batch"]

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet",
    ".arrow": "arrow", ".feather": "arrow",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
_SOURCES: dict[Format, Callable[[Location], Source]] = {  # but for CSV, which is told how it is written
    "parquet": ParquetSource, "arrow": ArrowSource,
    "jsonl": JsonlSource, "openai-batch": JsonlSource, "json": JsonArraySource,
}  # fmt: skip
_TYPED = (ParquetSource, ArrowSource)  # files that say which types their columns have
_UTC = ("+00:00", "-00:00", "Etc/UTC", "Zulu", "Z")
_PACKED = (".gz", ".bz2", ".zst", ".lz4")


class Rows(Protocol):
    """The rows of an input, whether all are there or still arriving."""

    @property
    def id_type(self) -> Any: ...

    @property
    def carried_types(self) -> dict[str, Any]: ...

    @property
    def fingerprint(self) -> str: ...

    def blocks(self, selection: Selection = EVERY_ROW) -> Iterator[Block]: ...

    def ids(self, block: Block) -> list[Any]: ...

    def carried(self, block: Block) -> dict[str, list[Any]]: ...


@dataclass(frozen=True, slots=True)
class InputTable:
    """An input that was checked and counted. Made by `open_table`."""

    files: tuple[Source, ...]
    file_rows: tuple[range, ...]  # numbers of each file's rows
    of_folders: tuple[dict[str, str | None], ...]  # by file: the columns that only its folders' names give
    num_rows: int
    columns: tuple[str, ...]  # those the job reads
    id_column: str  # empty: the row number is the id
    id_type: Any  # pyarrow type of the output's `id`: an integer type or string
    carried_types: dict[str, Any]  # pyarrow types of the columns copied to the output, in their order there
    fingerprint: str
    infer: bool = False  # values are text, which stands for numbers and dates where their column has such a type
    unread: list[InputError] = field(default_factory=list)  # why rows were left out, set by blocks

    def blocks(self, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        """Stream the wanted rows in order, a bounded number at a time.

        A file that has changed or become unreadable since the table was opened is left out from there on, and `unread`
        says so: rows of the others can be answered all the same.
        """
        for file, rows, of_folders in zip(self.files, self.file_rows, self.of_folders, strict=True):
            own = [name for name in self.columns if name not in of_folders]
            try:
                for block in file.blocks(own, rows, selection):
                    for name, value in of_folders.items():
                        block.columns[name] = [value] * len(block.rows)
                    yield block
            except InputError as problem:
                if str(problem) not in map(str, self.unread):  # a job reads its rows more than once
                    log.info("%s; the job goes on with its other files", problem)
                    self.unread.append(problem)

    def ids(self, block: Block) -> list[Any]:
        """The ids of a block's rows, in the type they have in the output."""
        if not self.id_column:
            return list(block.rows)
        values = self._typed(block.ids(self.id_column), self.id_type)
        return values if pa.types.is_integer(self.id_type) else [as_text(value) for value in values]

    def carried(self, block: Block) -> dict[str, list[Any]]:
        """The values to copy to the output, in the types they have there.

        A row with a value that its column's type cannot hold joins the malformed ones, and the value is null: files may
        disagree on the unit of times, or in the depths of a nested type.
        """
        columns = {name: self._typed(block.columns[name], kind) for name, kind in self.carried_types.items()}
        for name, arrow_type in self.carried_types.items():
            if pa.types.is_string(arrow_type):
                columns[name] = [stored_text(value) for value in columns[name]]
            if not _holds(arrow_type, columns[name]):
                held = [_holds(arrow_type, [value]) for value in columns[name]]
                columns[name] = [value if fits else None for value, fits in zip(columns[name], held, strict=True)]
                for row, fits in zip(block.rows, held, strict=True):
                    if not fits:
                        block.malformed.setdefault(row, f"column '{name}' has a value that is no {arrow_type}")
        return columns

    def _typed(self, values: list[Any], arrow_type: Any) -> list[Any]:
        if not self.infer or pa.types.is_string(arrow_type):
            return values
        return [cell_value(value) if isinstance(value, str) else value for value in values]


def open_table(job: JobConfig, on_file: Callable[[int, int], None] = lambda index, files: None) -> InputTable:
    """Find, check and count the input of a job.

    Args:
        job: whose input it is.
        on_file: told the index of each file before it is read, and how many there are.

    Raises:
        JobFileError: a column does not exist, ids are not unique or missing, or the format cannot be told.
        InputError: a file is missing, unreadable or corrupt, or files disagree.
    """
    needed = needed_columns(job)
    stored = carried_columns(job)
    id_name = id_column(job)
    _refuse_output_within(job)
    files = _find(job.input)
    _refuse_output_among(files, job)
    ids = IdHashes(id_name) if id_name else None
    digest = hashlib.blake2b(digest_size=16)
    file_rows: list[range] = []
    of_folders: list[dict[str, str | None]] = []
    num_rows = 0
    types: dict[str, Any] = {}
    types_at_first: dict[str, Any] = {}
    numbers: defaultdict[str, list[tuple[Any, tuple[Any, ...]]]] = defaultdict(list)  # by file: their type, extremes
    for index, file in enumerate(files):
        on_file(index, len(files))
        survey = file.survey(needed, {*stored, id_name} - {""}, ids)
        file_rows.append(range(num_rows, num_rows + survey.num_rows))
        num_rows += survey.num_rows
        given = {name: value for name, value in folder_columns(file.location).items() if name in needed}
        given = {name: value for name, value in given.items() if name not in {*survey.types, id_name}}
        of_folders.append(given)
        survey = replace(survey, types=survey.types | dict.fromkeys(given, pa.string()))
        is_nothing = not survey.num_rows and not survey.types  # which disagrees with none
        if not (isinstance(file, JsonlSource) or is_nothing):  # a file with a schema has to have every column itself
            _check_columns(needed, survey.types, file.location)
        types = _merge(types, survey, file, {*stored, id_name})
        types_at_first = survey.types | types_at_first
        for name, extremes in survey.numbers.items():
            numbers[name].append((survey.types[name], extremes))
        digest.update(f"{survey.num_rows}\0".encode() + survey.digest)
        digest.update(repr(sorted(given.items())).encode() if given else b"")
    if num_rows:
        _check_columns(needed, types, job.input.path)
    else:
        types = types_at_first  # nothing can disagree
    columns = tuple(needed) + ((BATCH_URL,) if job.input.format == "openai-batch" else ())
    id_type = pa.int64()
    if id_name:
        id_type = _output_type(types.get(id_name, pa.string()), numbers[id_name])
        id_type = id_type if pa.types.is_integer(id_type) else pa.string()
    carried_types = {name: _output_type(types.get(name, pa.string()), numbers[name]) for name in stored}
    table = InputTable(
        tuple(files),
        tuple(file_rows),
        tuple(of_folders),
        num_rows,
        columns,
        id_name,
        id_type,
        carried_types,
        digest.hexdigest(),
        infer=job.input.csv.types == "infer",
    )
    if ids is not None and len(suspects := ids.suspects()):
        refuse_duplicates(id_name, suspects, _numbered_ids(table))
    return table


def column_kinds(config: InputConfig) -> dict[str, Literal["text", "messages", "other"]]:
    """The columns of an input's first file, with what may be made of them. Raises as `open_table` does."""
    file = _find(config)[0]
    types = file.survey({""}, (), None).types
    names = [name for name in types if name]
    if not isinstance(file, _TYPED):
        types = file.survey(names, names, None).types
    return {name: _kind(name, types[name]) for name in names} | dict.fromkeys(folder_columns(file.location), "text")


def _kind(name: str, arrow_type: Any) -> Literal["text", "messages", "other"]:
    """Conversations tell by their type, or in a text file by their name."""
    is_list = pa.types.is_list(arrow_type) and pa.types.is_struct(arrow_type.value_type)
    if name in ("messages", "conversations") or (is_list and arrow_type.value_type.get_field_index("role") >= 0):
        return "messages"
    return "text" if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type) else "other"


def _find(config: InputConfig) -> list[Source]:
    try:
        locations = find_files(config.path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read input.path {config.path}: {one_line(error)}") from None
    locations = _without_notes_of_datasets(locations)
    if not locations:
        raise InputError(f"input.path {config.path} does not exist, or holds no files")
    for location in locations:
        if problem := unreadable_name(location.path):
            raise InputError(problem)
    if config.format != "auto":
        return [_source(config.format, location, config) for location in locations]
    formats = {_format_of(location): location for location in reversed(locations)}
    if len(formats) > 1:
        names = " and ".join(location.name for location in list(formats.values())[-2:])
        raise JobFileError(
            f"input.path {config.path} mixes formats ({names}); name one kind with a glob such as *.parquet"
        )
    (only,) = formats
    return [_source(only, location, config) for location in locations]


def _without_notes_of_datasets(locations: list[Location]) -> list[Location]:
    """Of a folder that the package datasets saved to disk, the table alone: not what it notes beside it, nor what it
    keeps of steps that were tried on it."""
    saved = {file.path.rpartition("/")[0] for file in locations if file.name == "state.json"}
    return [
        file
        for file in locations
        if not saved
        or (file.name != "dataset_dict.json" and file.path.rpartition("/")[0] not in saved)
        or (file.name.endswith(".arrow") and not file.name.startswith("cache-"))
    ]


def _source(format: Format, location: Location, config: InputConfig) -> Source:
    if format == "csv":
        return CsvSource(location, config.csv)
    if config.csv != CsvConfig():
        raise JobFileError(f"input.csv goes with CSV files, not {format}")
    return _SOURCES[format](location)


def _refuse_output_within(job: JobConfig) -> None:
    """What the first run writes must not be the input of the second."""
    try:
        within = would_find(job.input.path, Location.parse(job.output.path))
    except (OSError, ValueError):  # which is said where either of them is used
        return
    if within:
        raise JobFileError(
            f"output.path {job.output.path} lies in input.path {job.input.path}, so that answers would be read as "
            "prompts; choose a folder beside it, or name the input's files with a glob such as *.parquet"
        )


def _refuse_output_among(files: list[Source], job: JobConfig) -> None:
    """A folder or glob that takes in the output would make the next run read what this one writes."""
    output_path = job.output.path
    in_store = "://" in output_path
    folder = _address(output_path) if in_store else os.path.abspath(os.path.expanduser(output_path))
    for file in files:
        own = _address(file.location.url) if in_store else file.location.path
        if file.location.url != job.input.path and own.startswith(folder.rstrip("/") + "/"):
            raise JobFileError(
                f"output.path {output_path} holds the input file {file.location.name}; choose another folder"
            )


def _address(url: str) -> str:
    """Return a URL without what tells how to reach it."""
    return without_keys(url).partition("?")[0]


def stem(name: str) -> str:
    """A file's name without what tells its format: `monday` of `monday.jsonl.gz`."""
    return re.sub(rf"({_any_of(_SUFFIXES)})?({_any_of(_PACKED)})?$", "", name, flags=re.IGNORECASE) or name


def _format_of(location: Location) -> Format:
    match = re.search(rf"({_any_of(_SUFFIXES)})({_any_of(_PACKED)})?$", location.name, flags=re.IGNORECASE)
    if match:
        return _SUFFIXES[match[1].lower()]
    raise JobFileError(
        f"the name {location.name} does not tell its format; set input.format to parquet, arrow, jsonl, json or csv"
    )


def _any_of(suffixes: Iterable[str]) -> str:
    return "|".join(map(re.escape, suffixes))


def _check_columns(needed: dict[str, str], known: dict[str, Any], where: Location | str) -> None:
    for column, setting in needed.items():
        if column not in known:
            hint = did_you_mean(column, known) or f"; it has {', '.join(list(known)[:8]) or 'no columns'}"
            if isinstance(where, Location) and column in folder_columns(where):  # as its id
                hint = ": a folder's name gives it, the same for all rows of a file"
            raise JobFileError(f"{setting} names column '{column}', which {where} does not have{hint}")


def _merge(types: dict[str, Any], survey: Survey, file: Source, stored: Collection[str]) -> dict[str, Any]:
    """The types of the columns over all files so far. Only files of types, with rows, can disagree, and only on columns
    that the output gets."""
    more = {name: _in_utc(arrow_type) for name, arrow_type in survey.types.items()}
    if not isinstance(file, _TYPED):
        return types | {name: common_type(types.get(name, pa.null()), other) for name, other in more.items()}
    if not survey.num_rows:
        return types | {name: types.get(name, pa.null()) for name in more}
    merged = more | types
    for name in stored:
        if name not in more or more[name] == merged[name]:
            continue
        try:
            pair = [pa.schema([(name, merged[name])]), pa.schema([(name, more[name])])]
            merged[name] = pa.unify_schemas(pair, promote_options="permissive").field(name).type
        except pa.ArrowException:
            raise InputError(
                f"column '{name}' is {more[name]} in {file.location} but {types[name]} in files before it"
            ) from None
    return merged


def _in_utc(arrow_type: Any) -> Any:
    """Times of UTC by its usual name: some writers call it `+00:00` or `Etc/UTC`."""
    is_utc = pa.types.is_timestamp(arrow_type) and arrow_type.tz in _UTC
    return pa.timestamp(arrow_type.unit, "UTC") if is_utc else arrow_type


def _output_type(arrow_type: Any, of_files: list[tuple[Any, tuple[Any, ...]]]) -> Any:
    """The type in which a column is copied to the output: text if numbers in it would be rounded or do not fit."""
    stored = pa.string() if pa.types.is_null(arrow_type) else arrow_type
    numbers = [number for kind, extremes in of_files if kind != stored for number in extremes]
    # Making pyarrow's first array costs half a second where pandas is installed: it imports that.
    return stored if not numbers or _holds(stored, numbers) else pa.string()


def _holds(arrow_type: Any, values: list[Any]) -> bool:
    """Return whether a column of this type can be made of the values, each as it is."""
    try:
        pa.array(values, type=arrow_type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False
    return True


def _numbered_ids(table: InputTable) -> Iterator[tuple[int, Any]]:
    for file, rows in zip(table.files, table.file_rows, strict=True):
        for block in file.blocks([table.id_column], rows, EVERY_ROW):
            named = zip(block.rows, block.columns[table.id_column], strict=True)
            yield from (row_and_id for row_and_id in named if row_and_id[0] not in block.malformed)


def stored_text(value: Any) -> Any:
    """The text of a value, or the value itself if it has none."""
    try:
        return value if value is None or isinstance(value, (str, pa.Scalar)) else as_text(value)
    except ValueError:
        return value
