"""What has to run: the lengths of a job's requests, and the shape of its model.

Prompts are counted in the job's input or read from a LENGTHS.csv. Nothing here needs torch, unless a model has no
tokenizer.json.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from vasuki.base.config import JobConfig
from vasuki.base.errors import InputError
from vasuki.base.job_file import load_job, parse_overrides
from vasuki.base.units import plural
from vasuki.engine.sequence import TOKEN_BYTES, USUAL, Request
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import InputTable
from vasuki.io.input.tokenised import PromptEncoder
from vasuki.io.output.known_answers import KnownAnswers
from vasuki.io.output.output_folder import earlier_parts_of, usable_folder
from vasuki.io.output.rewriting import LabelledPart
from vasuki.io.selection import Selection
from vasuki.machines.here.measured import Tokens
from vasuki.models.config_json import encodes, read_config, shape_from_config
from vasuki.models.files import description_folder
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.models.token_counter import TokenCounter
from vasuki.planner.lengths import Lengths, SharedPrefixes, is_lengths_file, read_lengths
from vasuki.runs.observers.progress import HowFar, busy_if_slow
from vasuki.runs.opening import known_answers, read_table
from vasuki_solvers import shared_prefixes

if TYPE_CHECKING:
    from vasuki.hf.loading.plain_tokenizer import PlainTokenizer
    from vasuki.hf.loading.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MIN_SHARED_TOKENS = 8  # shorter common beginnings fill no block
PLANNED_REQUESTS = 4096  # read before the first step to plan from; a larger input is taken to go on like them
COUNTED_REQUESTS = 20_000  # a larger input is planned from its first rows, this many
PLANNED_BYTES = 48_000_000  # of requests that are planned from: of long ones there are fewer


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be planned."""

    config: JobConfig
    shape: ModelShape  # in the type that the model was saved in
    lengths: Lengths
    fingerprint: str = ""

    @property
    def config_hash(self) -> str:
        """The hash that a run of the job has."""
        return self.config.config_hash(model_fingerprint(self.config.model))


def workload_of(job_or_lengths: str, overrides: tuple[str, ...] = (), trusts_code: bool = False) -> Workload:
    """A workload from a job file, or from a LENGTHS.csv and `--set` alone.

    Raises:
        VasukiError: as the run would, as far as it can be known without weights.
    """
    if not job_or_lengths.endswith(".csv"):
        return job_workload(load_job(job_or_lengths, overrides, trusts_code))
    config = parse_overrides(
        overrides, {"input": {"path": job_or_lengths, "prompt_token_ids": "-"}, "output": {"path": "-"}}
    )
    return _recorded(config)


def job_workload(config: JobConfig) -> Workload:
    """Count the tokens of a job's prompts.

    Raises:
        InputError, JobFileError, ModelError: as the run would, as far as it can be known without weights.
    """
    if is_lengths_file(config.input.path):
        return _recorded(config)
    shape = shape_of(config)
    table = read_table(config)
    known = _known_beforehand(config, table)
    num_rows = table.num_rows - (known.count if known else 0)
    if known and not num_rows:
        raise InputError(f"{config.input.path}: every row keeps the answer that it has, there is nothing to plan")
    stream = RequestStream(
        table,
        config,
        tokenizer_of(config),
        max_context_tokens=shape.max_context_tokens,
        vocab_size=shape.vocab_size,
        selection=Selection(left_out=known.is_known if known else None),
    )
    with stream as requests, busy_if_slow("counting the tokens of prompts") as far:
        first = first_rows(requests, COUNTED_REQUESTS, far, num_rows, keeps=False)
        lengths = lengths_of(_naming_errors(first), num_rows, config.knows_lengths)
    for problem in table.unread:
        raise problem
    if not len(lengths):
        raise InputError(f"{config.input.path} has no row that can be run")
    return Workload(config, shape, lengths, table.fingerprint)


def _known_beforehand(config: JobConfig, table: InputTable) -> KnownAnswers | None:
    """The rows that a run over the whole input need not compute."""
    earlier: list[LabelledPart] = []
    if config.input.unchanged == "reuse" and config.model.path:
        config_hash = config.config_hash(model_fingerprint(config.model))
        earlier = earlier_parts_of(usable_folder(config.output.path), config_hash, table.fingerprint)
    return known_answers(config, table, earlier)


def _naming_errors(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests; at their end says which of them can never run."""
    errors = 0
    first = ""
    for request in requests:
        if request.error:
            errors, first = errors + 1, first or f"row {request.row}: {request.error}"
        yield request
    if errors:
        log.warning("%s can never run: %s", plural(errors, "row"), first)


def _recorded(config: JobConfig) -> Workload:
    """A job whose input is a LENGTHS.csv."""
    source, shape, known = config.input, shape_of(config), config.knows_lengths
    lengths = read_lengths(source.path, source.priority, source.deadline, known)
    return Workload(config, shape, _within_context(lengths, shape.max_context_tokens, source.path))


def _within_context(lengths: Lengths, context: int, path: str) -> Lengths:
    """The rows that a model with such a context runs, to the ends that it lets them have: as a run, which has an error
    row for a prompt that fills it, and stops outputs at its end. Says so where that is less than was recorded.

    Raises InputError if no row is left.
    """
    room = context - lengths.prompt_tokens
    if (room < 1).any():
        row = int(np.argmax(room < 1))
        first = f"row {row} has a prompt of {lengths.prompt_tokens[row]:,} tokens, the model a context of {context:,}"
        if not (room >= 1).any():
            raise InputError(f"{path} has no row that can be run: {first}")
        log.warning("%s can never run: %s", plural(int((room < 1).sum()), "row"), first)
        lengths, room = lengths.take(np.flatnonzero(room >= 1), arriving=True), room[room >= 1]
    if (cut := lengths.output_tokens > room).any():
        row = int(np.argmax(cut))
        log.warning(
            "%s shorter than recorded: after %s prompt tokens the first has %s left of the model's context, %s",
            "1 row is" if cut.sum() == 1 else f"{cut.sum():,} rows are",
            *(f"{tokens:,}" for tokens in (lengths.prompt_tokens[row], room[row], context)),
        )
    if (lengths.limits <= room).all():
        return lengths
    outputs = np.minimum(lengths.output_tokens, room)
    return replace(lengths, output_tokens=outputs, max_tokens=np.minimum(lengths.limits, room))


def tokenizer_of(config: JobConfig) -> PromptEncoder:
    """The model's own tokenizer; where there is only a shape, tokens are guessed from characters.

    Raises:
        ModelError: it cannot be read.
    """
    return model_tokenizer(config) if config.model.path else TokenCounter()


def model_tokenizer(config: JobConfig) -> PlainTokenizer | Tokenizer:
    """The model's own tokenizer. Raises ModelError if it cannot be read."""
    from vasuki.hf.loading.plain_tokenizer import tokenizer_without_torch  # jinja2 takes a while to import

    return tokenizer_without_torch(config.model)


def first_rows(
    requests: Iterable[Request], num_requests: int, far: HowFar, num_rows: int, keeps: bool = True
) -> Iterator[Request]:
    """The first `num_requests` to plan from, or as many as take `PLANNED_BYTES`, and the other samples of the last
    one's row.

    Args:
        requests: of `num_rows` rows.
        num_requests: at most, but for samples.
        far: is told how many were taken.
        num_rows: there are.
        keeps: the caller keeps them. If not, prompts alone count, and one can be run if any of the first can.
    """
    num_bytes, rows, is_runnable = 0, 0, keeps
    for count, request in enumerate(requests, 1):
        num_bytes += request.num_bytes if keeps else TOKEN_BYTES * request.num_prompt_tokens
        rows += request.sample_index == 0
        is_runnable |= not request.error
        far.share = max(count / num_requests, num_bytes / PLANNED_BYTES * is_runnable, rows / max(1, num_rows))
        far.words = f"{rows:,} rows"
        yield request
        is_enough = count >= num_requests or (is_runnable and num_bytes >= PLANNED_BYTES)
        if is_enough and (request.error or request.sample_index == request.sampling.requests - 1):
            return


def lengths_of(requests: Iterable[Request], num_rows: int = 0, known: bool = False) -> Lengths:
    """Lengths of requests that can run: prompts, what is expected of outputs, their limits, and what prompts share.

    If they are the first of `num_rows` rows, the others are taken to go on like them. `known`: as in `Lengths`.
    """
    rows: list[tuple[int, int, int]] = []
    urgency: list[tuple[float, float]] = []
    rows_read = 0

    def prompts() -> Iterator[ArrayLike]:
        nonlocal rows_read
        for request in requests:
            rows_read += request.sample_index == 0
            if not request.error:
                known = len(request.progress.output_token_ids)  # computed with the prompt
                left = max(1, request.expected_tokens - known), max(1, request.max_tokens - known)
                rows.append((request.num_prompt_tokens + known, *left))
                urgency.append((request.priority, request.due_s - request.arrived_s))
                yield request.prompt_token_ids

    of_row, token_ids = shared_prefixes(prompts(), min_shared=MIN_SHARED_TOKENS)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    priority, deadline_s = (np.array(values) for values in zip(*urgency or [USUAL], strict=True))
    lengths = Lengths(
        table[:, 0],
        table[:, 1],
        None,
        table[:, 2],
        SharedPrefixes(token_ids, of_row),
        priority if priority.any() else None,
        deadline_s if np.isfinite(deadline_s).any() else None,
        known,
    )
    if not rows or rows_read >= num_rows:
        return lengths
    log.info("planning %d rows from the first %d", num_rows, rows_read)
    return lengths.take(np.arange(round(len(rows) * num_rows / rows_read)) % len(rows))


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of the job's model as it was saved: a named one, or read from its files.

    Raises:
        ModelError: there is no such shape or model, or its type is unknown.
    """
    from vasuki.hf.loading.known_types import refuse_unknown_type

    model = config.model
    if model.shape:
        return named_shape(model.shape)
    folder = description_folder(model)
    tree = read_config(folder / "config.json")
    refuse_unknown_type(model.path, tree)
    is_encoder = config.task in ("embed", "classify") and encodes(tree)
    return shape_from_config(folder, Path(model.path).name, "uncached" if is_encoder else None)


def tokens_of(lengths: Lengths) -> Tokens:
    """Count the tokens of all requests."""
    return Tokens(float(lengths.prompt_tokens.sum()), float(lengths.output_tokens.sum()))
