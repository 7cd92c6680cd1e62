from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rooms import MAX_CONTEXT, VOCAB, ByteTokenizer, MakeJob, ReadRequests, WriteParquet

from vasuki.base.config import JobConfig
from vasuki.base.job_file import parse_job
from vasuki.engine.sequence import Request
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import open_table

Rows = list[dict[str, Any]]


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    """`job(path, prompt="{text}", sampling={...})`: a job whose input section takes the keywords it knows."""

    def build(path: Path | str, **keys: Any) -> JobConfig:
        sections = {name: keys.pop(name) for name in ("output", "sampling", "plan") if name in keys}
        if not {"prompt", "messages", "prompt_token_ids"} & set(keys) and keys.get("format") != "openai-batch":
            keys["prompt"] = "{text}"
        if "prompt" in keys:
            keys.setdefault("chat", False)
        tree = {"model": {"path": "m"}, "input": {"path": str(path), **keys}, "output": {"path": str(tmp_path / "out")}}
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        return parse_job(tree)

    return build


@pytest.fixture
def parquet(tmp_path: Path) -> WriteParquet:
    """`parquet(text=["a", "b"])`: a Parquet file with these columns."""

    def write(name: str = "in.parquet", row_group_size: int = 1000, **columns: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture
def read() -> Iterator[ReadRequests]:
    """`read(job)`: every request of a job; keywords go to `RequestStream`."""
    with ExitStack() as stack:

        def requests(config: JobConfig, **options: Any) -> list[Request]:
            options = {"max_context_tokens": MAX_CONTEXT, "vocab_size": VOCAB, "tokenizer": ByteTokenizer(), **options}
            return list(stack.enter_context(RequestStream(open_table(config), config, **options)))

        yield requests
