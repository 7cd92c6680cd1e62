"""Finished rows -> `part-00000.parquet`, `part-00001.parquet`, ...: each there as a whole or not at all.

A part is committed when the buffered rows reach 32 MiB, or when the time since the last commit reaches

    max(5 s, 3 % of the time the run has taken so far)

or more often, where the job allows less to be lost (`vasuki.base.commits`). So of the rows that have ended, a machine
that is taken away costs at most 3 % of the work done (never less than 5 s, which is cheap). Since each interval is 3 %
longer than the one before, the number of parts grows with the logarithm of the run's length: about 33 in the first
three minutes, 23 more each time the run's length doubles, some 210 in ten hours.

Every part says in its Parquet metadata, under the key `vasuki`, which input rows it holds and for which job and input.
The output folder is therefore its own checkpoint: resuming reads footers, compares no ids, and needs no other file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vasuki.base.commits import commit_interval_s
from vasuki.base.errors import Interrupted, UnreadableError, one_line
from vasuki.io.input.contents import CONTENT_BYTES
from vasuki.io.location import Location, writing
from vasuki.io.output.answers import Answer, to_table

T = TypeVar("T")

METADATA_KEY = b"vasuki"
PART_NAME = re.compile(r"part-(?P<index>\d{5,})(?P<label>|-\d+-of-\d+)(-[0-9a-f]{8})?\.parquet")
COMMIT_BYTES = 2**25
NO_CONTENTS: NDArray[np.bytes_] = np.empty(0, f"S{CONTENT_BYTES}")
GROUP_BYTES = 2**23  # of answers that become Arrow data together, a row group
LABEL_VERSION = 3
COPIES_VERSION = 4  # of labels that say more than version 3 can read
_READABLE = (2, 3, 4)  # 1 knew a model by its path alone; 2 has an empty `error` where there was none


class DamagedPart(UnreadableError):
    """A part whose content makes no sense, so that its rows are lost."""


@contextmanager
def reading(part: Location) -> Iterator[None]:
    """Around reading a part.

    Raises:
        UnreadableError: the file system does not give it, for want of permission or of handles: it may be whole.
        Interrupted: the file server has let go of it: a later run may read it.
        DamagedPart: it is not whole.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Interrupted(f"cannot read {part}: its server let go of it; {Interrupted.goes_on}") from None
        if error.errno or not part.is_local:
            reason = os.strerror(error.errno) if error.errno else one_line(error)
            raise UnreadableError(f"cannot read {part}: {reason}") from None
        raise _damaged(part) from None
    except (ValueError, pa.ArrowException):
        raise _damaged(part) from None


def once_more(read: Callable[[], T]) -> T:
    """What is read, the second time if the file server let go of the file the first time, as NFS does of one that was
    written anew. Raises what reading does."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return read()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over finished rows. A row with several samples is one row, and failed if any of them did."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    copied: int = 0  # of the rows, those that have the answer of another one

    @property
    def succeeded(self) -> int:
        return self.rows - self.failed

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.rows + other.rows,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.copied + other.copied,
        )

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Totals:
        return cls(
            rows=len({answer.row for answer in answers}),
            failed=len({answer.row for answer in answers if answer.error}),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            output_tokens=sum(answer.output_tokens for answer in answers),
        )


@dataclass(frozen=True, slots=True)
class PartLabel:
    """The label in a part's footer: which rows it holds, and of which job. Hashes of another version mean something
    else, so they are left empty."""

    config_hash: str
    input_fingerprint: str
    rows: NDArray[np.int64]  # numbers of the input rows it holds, rising
    totals: Totals
    pages: str = ""  # size and hash of everything before the footer
    began: str = ""  # the time that prompts were told, see `input.date`
    contents: NDArray[np.bytes_] = field(
        default_factory=lambda: NO_CONTENTS
    )  # `[rows]`, what each asks for, where that is kept
    computed_on: str = ""  # machine and libraries, as far as answers depend on them

    def to_json(self) -> bytes:
        gaps = np.diff(self.rows, prepend=0).astype("<i8")
        packed = base64.b64encode(zlib.compress(gaps.tobytes())).decode()
        totals = asdict(self.totals)
        more: dict[str, Any] = {"computed_on": self.computed_on} if self.computed_on else {}
        if self.totals.copied or len(self.contents):
            more |= {"version": COPIES_VERSION, "contents": base64.b64encode(self.contents.tobytes()).decode()}
        else:
            del totals["copied"]
        label = {"config_hash": self.config_hash, "input_fingerprint": self.input_fingerprint, "rows": packed}
        return json.dumps(
            {"version": LABEL_VERSION} | label | {"totals": totals, "pages": self.pages, "began": self.began} | more
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> PartLabel:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` did not write."""
        label = json.loads(text)
        if label["version"] not in _READABLE:
            return cls("", "", np.empty(0, dtype=np.int64), Totals())
        gaps = np.frombuffer(zlib.decompress(base64.b64decode(label["rows"])), dtype="<i8")
        totals = Totals(**label["totals"])
        rows = np.cumsum(gaps, dtype=np.int64)
        began = label.get("began", "")  # which older ones lack
        contents = np.frombuffer(base64.b64decode(label.get("contents", "")), NO_CONTENTS.dtype)
        hashes, machine = (label["config_hash"], label["input_fingerprint"]), label.get("computed_on", "")
        return cls(*hashes, rows, totals, label["pages"], began, contents, machine)


class PartWriter:
    """Buffers answers and commits them as parts.

    Args:
        next_part: gives the location of each new part.
        schema: `pyarrow.Schema` of every part.
        config_hash: of the job; written into every part.
        input_fingerprint: of the input; written into every part.
        began: the time that prompts are told; written into every part.
        started_s: the time, on the clock of `commit_if_due`, at which the run began.
        max_loss_s: what the job allows to lose; parts are no further apart.
        computed_on: see `PartLabel`; written into every part.
        contents: `[num_rows]`, of all rows of the input, to be written into every part; empty if it need not be.
        even_if_empty: `close` writes a part without rows if there was none: an empty input has an empty output, with
            the columns that readers expect.

    Attributes:
        committed: rows that are durable.
        committed_s: when it was last time for a part.
    """

    def __init__(
        self,
        next_part: Callable[[], Location],
        schema: Any,
        *,
        config_hash: str,
        input_fingerprint: str,
        began: str = "",
        computed_on: str = "",
        started_s: float = 0.0,
        max_loss_s: float = math.inf,
        contents: NDArray[np.bytes_] = NO_CONTENTS,
        even_if_empty: bool = False,
    ) -> None:
        self._next_part = next_part
        self._began, self._computed_on = began, computed_on
        self.schema = schema
        self._config_hash = config_hash
        self._input_fingerprint = input_fingerprint
        self._started_s = started_s
        self._max_loss_s = max_loss_s
        self.committed_s = started_s
        self._contents = contents
        self._even_if_empty = even_if_empty
        self._answers: list[Answer] = []
        self._num_bytes = 0
        self.committed = Totals()

    def append(self, answers: Sequence[Answer]) -> None:
        """Buffer all answers of one input row; they go into the same part."""
        self._answers.extend(answers)
        self._num_bytes += sum(answer.num_bytes for answer in answers)

    def is_due(self, now_s: float) -> bool:
        """Return whether the buffer is full, or the last commit long enough ago."""
        interval_s = commit_interval_s(now_s - self._started_s, self._max_loss_s)
        return self._num_bytes >= COMMIT_BYTES or now_s - self.committed_s >= interval_s

    def commit_if_due(self, now_s: float) -> bool:
        """Write a part if it is time and there are answers. Returns whether it was time.

        Raises:
            Interrupted: the disk is full or the store cannot be reached. Parts written before are kept.
        """
        if not self.is_due(now_s):
            return False
        self.commit()
        self.committed_s = now_s
        return True

    def commit(self) -> None:
        """Write a part if there are answers. Raises as `commit_if_due` does."""
        if self._answers:
            self._commit()

    def close(self) -> None:
        """Write whatever is left. Raises as `commit_if_due` does."""
        if self._answers or self._even_if_empty:
            self._commit()

    def _commit(self) -> None:
        """Write everything buffered as one part, sorted by input row.

        The buffer is given up once the part is made, before it is written: should writing fail half way, its rows are
        the next run's, and never there twice.
        """
        answers = sorted(self._answers, key=lambda answer: (answer.row, answer.sample))
        totals = Totals.of(answers)
        rows = np.unique(np.array([answer.row for answer in answers], dtype=np.int64))
        contents = self._contents[rows] if len(self._contents) else NO_CONTENTS
        own = self._config_hash, self._input_fingerprint
        label = PartLabel(*own, rows, totals, "", self._began, contents, self._computed_on)
        content = to_parquet((to_table(some, self.schema) for some in _groups(answers)), label)
        self._answers = []
        self._num_bytes = 0
        self._even_if_empty = False
        part = self._next_part()
        with writing(part):
            part.write_bytes(content)
        self.committed += totals


def read_label(part: Location, with_pages: bool = False) -> PartLabel | None:
    """The label of a part; None for a Parquet file that is not ours.

    Args:
        part: the file.
        with_pages: compare its pages with what the label says of them. A footer may be whole, and what lies before it
            lost with the power of a machine.

    Raises:
        UnreadableError, DamagedPart: see `reading`.
    """
    with reading(part):
        return once_more(lambda: _label_of(part, with_pages))


def _label_of(part: Location, with_pages: bool) -> PartLabel | None:
    with part.open() as stream:
        metadata = pq.read_metadata(stream).metadata or {}
        if METADATA_KEY not in metadata:
            return None
        try:
            label = PartLabel.from_json(metadata[METADATA_KEY])
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"its label is damaged: {error}") from None
        if with_pages and label.pages:
            num_bytes = int(label.pages.split("-")[0])
            stream.seek(0)
            if _pages(stream.read(num_bytes)) != label.pages:
                raise ValueError("its pages are damaged")
    return label


def _damaged(part: Location) -> DamagedPart:
    return DamagedPart(f"{part} is damaged; delete it and run again to compute its rows again")


def _groups(answers: list[Answer]) -> Iterator[list[Answer]]:
    """The answers, a row group after the other; one without rows if there are none."""
    group: list[Answer] = []
    num_bytes = 0
    for answer in answers:
        if group and num_bytes + answer.num_bytes > GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(answer)
        num_bytes += answer.num_bytes
    yield group


def to_parquet(tables: Iterable[Any], label: PartLabel) -> bytes:
    """The file of a part: its answers as one or more `pyarrow.Table`, and in the footer its label with the hash of its
    pages."""
    tables = iter(tables)
    first = next(tables)
    file = io.BytesIO()
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        del first
        for table in tables:
            writer.write_table(table)
        with file.getbuffer() as pages:
            label = replace(label, pages=_pages(pages))
        writer.add_key_value_metadata({METADATA_KEY: label.to_json()})
    return file.getvalue()


def _pages(content: bytes | memoryview) -> str:
    return f"{len(content)}-{hashlib.blake2b(content, digest_size=16).hexdigest()}"
