"""A LENGTHS.csv: prompt and output lengths of requests, recorded somewhere or made up, and when they arrived.

    num_prefill_tokens,num_decode_tokens,arrived_at
    3772,54,0.0

`arrived_at` (seconds) may be absent; of other columns, those are read that the job names as `input.priority` and
`input.deadline`, as a run reads them.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vasuki.base.arrays import Floats, Ints
from vasuki.base.errors import InputError, did_you_mean
from vasuki.base.files import refuse_special
from vasuki.engine.sequence import NO_TOKENS, TOKEN_BYTES, Request

PROMPT_COLUMN, OUTPUT_COLUMN, ARRIVAL_COLUMN = "num_prefill_tokens", "num_decode_tokens", "arrived_at"


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The beginning that each row shares with another one.

    Args:
        token_ids: of each prefix, int32; the first prefix is empty.
        of_row: `[rows]` which of them.
    """

    token_ids: list[npt.NDArray[np.int32]]
    of_row: Ints

    def tokens(self, block_tokens: int = 1) -> Ints:
        """`[rows]` tokens that each shares, in whole blocks."""
        lengths: Ints = np.array([len(prefix) // block_tokens * block_tokens for prefix in self.token_ids], np.int64)
        return lengths[self.of_row]

    def found(self, block_tokens: int = 1) -> Ints:
        """`[rows]` the same, but for the first row of each prefix, which has to compute it."""
        tokens = self.tokens(block_tokens)
        tokens[np.unique(self.of_row, return_index=True)[1]] = 0
        return tokens

    def computed_once(self, shared_tokens: Ints) -> tuple[Ints, Ints]:
        """Stretches of positions that some row has to compute, whatever the others find: each of the tree that the
        prefixes are, cut at the `[rows]` tokens that each row shares. `[stretches]` where they start, and end."""
        most = np.zeros(len(self.token_ids), np.int64)
        np.maximum.at(most, self.of_row, shared_tokens)
        prefixes = sorted(ids[:length].tobytes() for ids, length in zip(self.token_ids, most.tolist(), strict=True))
        starts = [0, *(_common_bytes(*pair) // TOKEN_BYTES for pair in pairwise(prefixes))]
        return np.array(starts[: len(prefixes)], np.int64), np.array([len(each) // TOKEN_BYTES for each in prefixes])


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths of the requests of a job, row by row.

    Args:
        prompt_tokens: `[rows]`, each at least 1.
        output_tokens: `[rows]`, each at least 1: recorded, or what a plan expects.
        arrived_at_s: `[rows]`, never falling; None if all rows are there from the start; all zero for rows that stand
            for others, of which nobody knows when they come.
        max_tokens: `[rows]` what each output may have at most; None where nothing is known but the longest of them.
        prefixes: what rows begin with that others begin with too; None where prompts are not known.
        priority: `[rows]` the highest goes first; None where all are equal.
        deadline_s: `[rows]` seconds from a row's arrival by which it should have ended; None where no row has one.
        known: whether a run is told `output_tokens` beforehand.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    arrived_at_s: Floats | None = None
    max_tokens: Ints | None = None
    prefixes: SharedPrefixes | None = None
    priority: Floats | None = None
    deadline_s: Floats | None = None
    known: bool = False

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def limits(self) -> Ints:
        """`[rows]` what each output may have at most."""
        if self.max_tokens is not None:
            return self.max_tokens
        return np.full(len(self), self.output_tokens.max(initial=1), dtype=np.int64)

    @property
    def peak_tokens(self) -> Ints:
        """`[rows]` tokens of KV that each holds at most: its last token is never read back."""
        return self.prompt_tokens + self.limits - 1

    @property
    def own_prompt_tokens(self) -> Ints:
        """`[rows]` prompt tokens that no other row begins with, at least the last one."""
        if self.prefixes is None:
            return self.prompt_tokens
        own: Ints = np.maximum(1, self.prompt_tokens - self.prefixes.tokens())
        return own

    def take(self, rows: Ints, arriving: bool = False) -> Lengths:
        """Some of the rows, in rising order if they keep arriving; else as if all were there from the start."""
        arrived_at_s = self.arrived_at_s[rows] if arriving and self.arrived_at_s is not None else None
        prefixes = self.prefixes and SharedPrefixes(self.prefixes.token_ids, self.prefixes.of_row[rows])
        priority, deadline_s = (None if values is None else values[rows] for values in (self.priority, self.deadline_s))
        return Lengths(
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            arrived_at_s,
            self.limits[rows],
            prefixes,
            priority,
            deadline_s,
            self.known,
        )

    def requests(self, known: bool = False) -> Iterator[Request]:
        """A request for each row, in order. If lengths are known, or `known` says so, the scheduler is told them as its
        estimate."""
        known = known or self.known
        limits, prefixes, arrivals = self.limits, self.prefixes, self.arrived_at_s
        for row in range(len(self)):
            limit = int(limits[row])
            arrived_s = 0.0 if arrivals is None else float(arrivals[row])
            yield Request(
                row,
                row,
                int(self.prompt_tokens[row]),
                limit,
                prefixes.token_ids[prefixes.of_row[row]] if prefixes else NO_TOKENS,
                estimated_tokens=min(int(self.output_tokens[row]), limit) if known else 0,
                priority=0.0 if self.priority is None else float(self.priority[row]),
                arrived_s=arrived_s,
                due_s=math.inf if self.deadline_s is None else arrived_s + float(self.deadline_s[row]),
            )


def _common_bytes(one: bytes, other: bytes) -> int:
    """How many bytes two strings begin with in common."""
    length = min(len(one), len(other))
    a, b = (np.frombuffer(each, np.uint8, length) for each in (one, other))
    differs = a != b
    return int(np.argmax(differs)) if differs.any() else length


def is_lengths_file(path: str) -> bool:
    """Whether a local file is a CSV whose header has the columns of a LENGTHS.csv."""
    if not path.endswith(".csv") or not Path(path).is_file():
        return False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        header = [name.strip() for name in file.readline().split(",")]
    return PROMPT_COLUMN in header and OUTPUT_COLUMN in header


def read_lengths(path: str | Path, priority: str = "", deadline: str = "", known: bool = False) -> Lengths:
    """Read a LENGTHS.csv.

    Args:
        path: of the file.
        priority: column of priorities, 0 where a cell is empty; none is read if empty.
        deadline: column of deadlines in seconds, no deadline where a cell is empty; likewise.
        known: whether a run is told the lengths of outputs.

    Raises:
        InputError: it cannot be read, lacks a column or has no rows, or a value is not a length or a time.
    """
    prompts, outputs, arrivals, lines = array("q"), array("q"), array("d"), array("q")
    urgency = {name: array("d") for name in (priority, deadline) if name}
    try:
        refuse_special(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            for name in (PROMPT_COLUMN, OUTPUT_COLUMN):
                if name not in header:
                    raise InputError(
                        f"{path} has no column {name}{did_you_mean(name, header)}; a file of lengths starts with "
                        f"{PROMPT_COLUMN},{OUTPUT_COLUMN} and may have {ARRIVAL_COLUMN}"
                    )
            for name in urgency:
                if name not in header:
                    raise InputError(f"{path} has no column {name}{did_you_mean(name, header)}, which the job names")
            prompt, output = header.index(PROMPT_COLUMN), header.index(OUTPUT_COLUMN)
            arrival = header.index(ARRIVAL_COLUMN) if ARRIVAL_COLUMN in header else None
            for cells in reader:
                if not cells:
                    continue
                lines.append(reader.line_num)
                try:
                    prompts.append(int(cells[prompt]))
                    outputs.append(int(cells[output]))
                    if arrival is not None:
                        arrivals.append(float(cells[arrival]))
                    for name, values in urgency.items():
                        values.append(_number(cells[header.index(name)], 0 if name == priority else math.inf))
                except (ValueError, IndexError, OverflowError):
                    raise InputError(
                        f"{path}, line {reader.line_num}: not a row of lengths: {','.join(cells)}"
                    ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file: {error}") from None
    if not prompts:
        raise InputError(f"{path} has no rows")
    lengths = Lengths(
        _ints(prompts),
        _ints(outputs),
        np.array(arrivals) if arrival is not None else None,
        priority=np.array(urgency[priority]) if priority else None,
        deadline_s=np.array(urgency[deadline]) if deadline else None,
        known=known,
    )
    return _checked(path, lines, lengths)


def _checked(path: str | Path, lines: array[int], lengths: Lengths) -> Lengths:
    """Raises InputError for a length below 1, times that fall or are no times, or a priority that is no number."""

    def refuse(wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise InputError(f"{path}, line {lines[int(np.argmax(wrong))]}: {what}")

    for name, values in ((PROMPT_COLUMN, lengths.prompt_tokens), (OUTPUT_COLUMN, lengths.output_tokens)):
        refuse(values < 1, f"{name} must be at least 1")
    priorities, deadlines, arrivals = lengths.priority, lengths.deadline_s, lengths.arrived_at_s
    if priorities is not None:
        refuse(~np.isfinite(priorities), "the priority is not a number")
    if deadlines is not None:
        refuse(~(deadlines >= 0), "the deadline must be seconds from 0 on")
    if arrivals is not None:
        refuse(~(np.isfinite(arrivals) & (arrivals >= 0)), f"{ARRIVAL_COLUMN} must be seconds from 0 on")
        refuse(np.diff(arrivals, prepend=0.0) < 0, f"{ARRIVAL_COLUMN} falls; sort the file by it")
    return lengths


def _number(cell: str, otherwise: float) -> float:
    """What a cell says, `otherwise` where it is empty, NaN where it is no number."""
    try:
        return float(cell) if cell else otherwise
    except ValueError:
        return math.nan


def _ints(values: array[int]) -> Ints:
    return np.array(values, dtype=np.int64)
