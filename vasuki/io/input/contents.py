"""What each row asks for, as a hash of 16 bytes: rows of one job that have the same are answered alike.

The hash is of the values that make the prompt and the settings, and of the row's id where answers are drawn, for draws
depend on it. It says nothing of columns that are only copied, nor of when a row goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig, PlanConfig
from vasuki.base.config_values import Column
from vasuki.io.input.columns import BATCH_BODY, BATCH_URL, needed_columns
from vasuki.io.input.tables import InputTable
from vasuki.io.selection import Selection, Shard

CONTENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Contents:
    """Of rows of an input.

    Args:
        hashes: `[num_rows]`, of 16 bytes each.
        is_known: `[num_rows]`; not of rows that are malformed, nor of other shards.
    """

    hashes: NDArray[np.bytes_]
    is_known: NDArray[np.bool_]

    @classmethod
    def of(cls, table: InputTable, job: JobConfig, shard: Shard) -> Contents:
        """Read the rows of a shard, and what they ask for."""
        hashes = np.zeros(table.num_rows, f"S{CONTENT_BYTES}")
        is_known = np.zeros(table.num_rows, np.bool_)
        columns = _deciding_columns(job)
        for block in table.blocks(Selection(shard)):
            ids = table.ids(block)
            table.carried(block)  # which finds some of the malformed
            for position, row in enumerate(block.rows):
                if row in block.malformed:
                    continue
                values = {name: block.columns[name][position] for name in columns}
                deciding = [*values.items(), *([("", ids[position])] if _is_drawn(job, values) else [])]
                digest = hashlib.blake2b(repr(deciding).encode("utf-8", "surrogatepass"), digest_size=CONTENT_BYTES)
                hashes[row], is_known[row] = digest.digest(), True
        return cls(hashes, is_known)

    def originals(self, goes_first: NDArray[np.bool_]) -> Ints:
        """`[num_rows]`: of each row the one whose answer it takes; itself where it is the only one, or the first.

        Args:
            goes_first: rows that are before all others, such as those that have an answer.
        """
        halves = self.hashes.view(np.uint64).reshape(-1, 2)
        order = np.lexsort((~goes_first, halves[:, 1], halves[:, 0]))
        order = order[self.is_known[order]]
        begins = np.zeros(len(order), np.bool_)  # whether a row is the first of its kind
        begins[:1] = True
        for half in halves.T:
            begins[1:] |= np.diff(half[order]) != 0
        originals = np.arange(len(self.hashes))
        originals[order] = order[begins][np.cumsum(begins) - 1]
        return originals


def _deciding_columns(job: JobConfig) -> list[str]:
    """The columns that prompt and settings are made of."""
    nothing: dict[str, Any] = {"id": "", "priority": "", "deadline": ""}
    bare = job.model_copy(
        update={
            "input": job.input.model_copy(update=nothing),
            "output": job.output.model_copy(update={"columns": ()}),
            "plan": PlanConfig(),
        }
    )
    if job.input.format == "openai-batch":
        return [BATCH_BODY, BATCH_URL]
    return list(needed_columns(bare))


def _is_drawn(job: JobConfig, values: Mapping[str, Any]) -> bool:
    """Whether an answer depends on the row's id, as far as its values tell."""
    if job.task != "generate":
        return False
    temperature: Any = job.sampling.temperature
    if isinstance(temperature, Column):
        temperature = values[temperature.column]
    if job.input.format == "openai-batch" and isinstance(body := values[BATCH_BODY], Mapping):
        given = body.get("temperature")
        temperature = temperature if given in (None, "") else given  # as `SamplingReader.read` has it
    return temperature not in (0, None, "")
