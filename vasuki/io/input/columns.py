"""The input columns that a job reads, and the part of the job file that names each."""

from __future__ import annotations

from vasuki.base.config import JobConfig
from vasuki.base.config_values import Column
from vasuki.base.errors import JobFileError
from vasuki.io.input.continuations import continuation_columns
from vasuki.io.input.prompts import conversation_templates, pair_template

BATCH_ID, BATCH_BODY, BATCH_URL = "custom_id", "body", "url"  # of an openai-batch row
ANSWER_COLUMNS = (
    "id", "sample", "output", "finish_reason", "error", "prompt_tokens", "output_tokens", "output_token_ids", "logprob",
    "logprobs",
    "answer", "answer_status", "tries", "reasoning", "tokens", "perplexity", "best", "probabilities",
    "choice_probabilities", "embedding", "label", "score", "scores",
)  # fmt: skip
LATER_COLUMNS = ("tries", "output_token_ids", "logprob", "logprobs")  # which stand behind those of typed answers
TYPED_COLUMNS = ("answer", "answer_status", "tries")  # where the job says what answers look like


def id_column(job: JobConfig) -> str:
    """The column that names a row; empty when the row number does."""
    return job.input.id or (BATCH_ID if job.input.format == "openai-batch" else "")


def carried_columns(job: JobConfig) -> tuple[str, ...]:
    """Columns copied to the output.

    Raises:
        JobFileError: a name is given twice, or is that of a column of the answer.
    """
    names = tuple(name for name in job.output.columns if not name == id_column(job) == "id")
    for name in names:
        if is_of_answer(name, job):
            raise JobFileError(f"output.columns: '{name}' is a column of the answer; rename it in the input")
        if names.count(name) > 1:
            raise JobFileError(f"output.columns names '{name}' twice")
    return names


def is_of_answer(name: str, job: JobConfig) -> bool:
    """Whether a name is kept for a column that the job's output has, or may come to have."""
    return name in ANSWER_COLUMNS and not _is_free(name, job)


def _is_free(name: str, job: JobConfig) -> bool:
    """Whether a job's output has no column of that name, which others have."""
    if name == "reasoning":
        return not job.output.reasoning
    if name in ("embedding", "label", "score", "scores"):
        return job.task not in ("embed", "classify")
    if name in ("tokens", "perplexity", "best", "probabilities"):
        return job.task != "score"
    if name == "choice_probabilities":
        return not job.output.choice_probabilities
    if name == "logprobs":
        return job.output.alternatives is None
    return name in TYPED_COLUMNS and not (job.constraint or job.constraint_column)


def needed_columns(job: JobConfig) -> dict[str, str]:
    """Every column the job reads, with the setting that names it first.

    Raises:
        JobFileError: the prompt template or `output.columns` is wrong in itself.
    """
    named: list[tuple[str, str]] = []
    if column := id_column(job):
        named.append((column, "input.id"))
    if job.input.format == "openai-batch":
        named.append((BATCH_BODY, "openai-batch"))
    for role, template in conversation_templates(job.input):
        setting = "input.messages" if job.input.messages else "input.prompt" if role == "user" else "input.system"
        named += [(column, setting) for column in template.columns]
    if isinstance(job.input.messages, str) and job.input.messages:
        named.append((job.input.messages, "input.messages"))
    if job.input.prompt_token_ids:
        named.append((job.input.prompt_token_ids, "input.prompt_token_ids"))
    if job.input.pair:
        named += [(column, "input.pair") for column in pair_template(job.input).columns]
    named += [(column, "input.continuation") for column in continuation_columns(job)]
    for name in ("priority", "deadline"):
        if column := getattr(job.input, name):
            named.append((column, f"input.{name}"))
    for setting, value in job.sampling:
        if isinstance(value, Column):
            named.append((value.column, f"sampling.{setting}"))
    if job.plan.length_column:
        named.append((job.plan.length_column, "plan.output_length"))
    named += [(column, "output.columns") for column in carried_columns(job)]
    needed: dict[str, str] = {}
    for column, setting in named:
        needed.setdefault(column, setting)
    return needed
