"""What the tests of the room share: a tokenizer, and a run of a whole job without a model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vasuki.base.config import JobConfig
from vasuki.engine.sequence import Decoded, FinishReason, Request, Sequence
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import open_table
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.sink import RowSink
from vasuki.io.selection import WHOLE, Shard

MAX_CONTEXT, VOCAB = 64, 300

# The fixtures `job`, `parquet` and `read`.
MakeJob = Callable[..., JobConfig]
WriteParquet = Callable[..., Path]
ReadRequests = Callable[..., list[Request]]


class ByteTokenizer:
    """One token a byte. Refuses conversations in which somebody shouts, as chat templates refuse odd roles."""

    has_chat_template = True

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_messages(self, conversations: list[list[dict[str, Any]]], now: datetime) -> list[list[int]]:
        if any(message["role"] == "SHOUTER" for messages in conversations for message in messages):
            raise ValueError("roles must alternate")
        return [list("|".join(m["role"] + ":" + m["content"] for m in messages).encode()) for messages in conversations]

    def encode_pairs(self, pairs: list[Any], most_tokens: int | None = None) -> list[tuple[list[int], int]]:
        return [(list((first + second).encode())[:most_tokens], len(first)) for first, second in pairs]

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def marked(self, text: str, own: Any = ()) -> str:
        return text

    def surely_exceeds(self, prompt: str | list[dict[str, Any]], num_tokens: int) -> bool:
        return False


def text_of(sequence: Sequence) -> Decoded:
    """The 'answer' of a sequence: its prompt in capitals."""
    return Decoded(bytes(sequence.request.prompt_token_ids.tolist()).decode().upper())


def finished(request: Request, error: str = "") -> Sequence:
    """The request as if the model had answered, or as the scheduler would reject it."""
    if error := request.error or error:
        return Sequence(request, error=error, finish_reason=FinishReason.ERROR)
    return Sequence(request, output_token_ids=[1, 2, 3], finish_reason=FinishReason.STOP, logprob=-1.5)


def run(
    job: JobConfig,
    shard: Shard = WHOLE,
    fresh: bool = False,
    step_s: float = 1.0,
    stop_after: int = -1,
    failing: tuple[int, ...] = (),
    retries_errors: bool = False,
) -> int:
    """Run a job as `vasuki run` does, each row taking one step, and the last sample of those `failing` coming to
    nothing. Returns how many rows were worked on."""
    table = open_table(job)
    options: dict[str, Any] = {"config_hash": job.config_hash("m"), "input_fingerprint": table.fingerprint}
    chosen: dict[str, Any] = {"shard": shard, "fresh": fresh, "retries_errors": retries_errors}
    with OutputFolder.open(job.output.path, num_rows=table.num_rows, **options, **chosen) as folder:
        if folder.is_finished:
            return 0
        folder.begin()
        sink = RowSink(folder.writer(answer_schema(job, table)), text_of)
        limits: dict[str, Any] = {"max_context_tokens": MAX_CONTEXT, "vocab_size": VOCAB}
        with RequestStream(table, job, ByteTokenizer(), **limits, selection=folder.selection) as requests:
            for step, request in enumerate(requests):
                if step == stop_after:
                    break
                is_last = request.sample_index == request.sampling.n - 1
                sink.write(finished(request, "no room" if is_last and request.row in failing else ""))
                sink.commit_if_due(step * step_s)
        sink.close()
        folder.finish(Manifest(job={}, **options))
        return sink.written.rows


def output(job: JobConfig) -> pa.Table:
    """Everything in the output folder."""
    parts = sorted(Path(job.output.path).glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts])
