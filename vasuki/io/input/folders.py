"""Columns that folders' names give, as Hive, Spark and DuckDB lay tables out: `in/year=2024/lang=de/p.parquet` has
`year` and `lang`, in every row the text that the name has.
"""

from __future__ import annotations

from urllib.parse import unquote

from vasuki.io.location import Location

_NULL = "__HIVE_DEFAULT_PARTITION__"  # how a null is written in a folder's name


def folder_columns(file: Location) -> dict[str, str | None]:
    """The columns that the folders above a file give, and their value in all of its rows; the innermost one counts."""
    pairs = [name.partition("=") for name in file.path.split("/")[:-1]]
    return {unquote(key): None if value == _NULL else unquote(value) for key, sign, value in pairs if key and sign}
