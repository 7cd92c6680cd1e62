"""JobConfig: one frozen object that says everything a job needs, checked before anything is loaded.

Unknown keys are refused, with the closest known key suggested. The description of each field is the reference
documentation.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from vasuki.base.config_values import (
    MAX_SAMPLES,
    Bytes,
    Column,
    JsonSchema,
    OrColumn,
    OrInline,
    OutputLength,
    Place,
    Seconds,
    Section,
    StopStrings,
)
from vasuki.base.constraint import CONSTRAINTS, Constraint, Kind, schema_of
from vasuki.base.errors import JobFileError

Auto = Literal["auto"]

# Keys that jobs were hashed without before there were such, and still are where they say nothing.
_LATER_KEYS = (
    ("input", "csv"),
    ("input", "control_tokens"),
    ("input", "date"),
    ("output", "special_tokens"),
    ("output", "reasoning"),
    ("output", "flatten"),
    ("output", "dates"),
    ("output", "check"),
    ("output", "choice_probabilities"),
    ("output", "scores"),
    ("input", "truncate"),
    ("input", "continuation"),
    ("input", "pair"),
    ("sampling", "min_p"),
    ("sampling", "repetition_penalty"),
    ("sampling", "frequency_penalty"),
    ("sampling", "presence_penalty"),
    ("sampling", "min_tokens"),
    ("sampling", "logit_bias"),
    ("sampling", "bad_words"),
    ("sampling", "stop_token_ids"),
)


class ModelConfig(Section):
    """Which model answers."""

    path: str = ""
    """A local folder or a Hugging Face hub id."""
    shape: str = ""
    """Instead of `path`, for `plan` and `simulate` without weights: llama-3-8b, mistral-7b, llama-13b, gpt-3, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache. `auto`: the one the model was saved in, if the device is fast with it. With
    bfloat16 on a CPU, only matrix products use it."""
    quantization: Literal["none", "float8"] = "none"
    """`float8` rounds the weights of attention and MLP layers, and what they are multiplied with, to 8 bits: for GPUs
    with such instructions, from Ada on. It [changes answers](same-answers.md#products-of-8-bits)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    allow_pickle: bool = False
    """Read `.bin` files, with torch's `weights_only`, where there are no safetensors."""
    trust_remote_code: bool = False
    """Run code that comes with the model. It also needs `--trust-remote-code` on the command line, or
    `VASUKI_TRUST_REMOTE_CODE=1` in the environment."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if bool(self.path) == bool(self.shape):
            raise ValueError("give either model.path or model.shape")
        return self


class MessageTemplate(Section):
    """One message of a conversation, written as a template over columns."""

    role: Annotated[str, Field(min_length=1)]
    """Who speaks: `system`, `user`, `assistant`, or whatever else the model's chat template knows."""
    content: str
    """Text with columns in braces, e.g. `"Summarise: {text}"`."""


def _one_character(value: Any) -> Any:
    value = {"tab": "\t", "\\t": "\t"}.get(value, value) if isinstance(value, str) else value
    if isinstance(value, str) and (len(value) > 1 or value in ("\n", "\r", "\0")):
        raise ValueError("should be one character, or tab")
    return value


def _delimiter(value: Any) -> Any:
    return value if value == "auto" else _one_character(value)


def _known_encoding(name: str) -> str:
    try:
        b"\0\0\0\0".decode(name if name != "auto" else "utf-8")
    except (LookupError, ValueError):
        raise ValueError(f"{name!r} is no encoding that Python knows") from None
    return name


class CsvConfig(Section):
    """How CSV files are written, where their first lines leave doubt."""

    delimiter: Annotated[str, BeforeValidator(_delimiter), Field(min_length=1)] = "auto"
    """What separates cells: one character, or `tab`. `auto`: a comma, or a semicolon, tab or bar if only that gives the
    first lines as many cells as the header."""
    quote: Annotated[str, BeforeValidator(_one_character)] = '"'
    """What surrounds cells that hold a delimiter or a line break; may be empty."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "auto"
    """Such as `cp1252`. `auto`: UTF-8, or UTF-16 if the file begins with its mark."""
    header: bool | Annotated[tuple[str, ...], Field(min_length=1)] = True
    """Whether the first line names the columns. Files without it: a list of names, or `false` for column0, column1,
    ..."""
    types: Literal["text", "infer"] = "text"
    """Types of copied columns and ids. `infer`: integers, numbers, dates, times and truth values keep their type, and
    empty cells are null, where all cells of a column agree."""

    @model_validator(mode="after")
    def _two_characters(self) -> CsvConfig:
        if self.delimiter == self.quote:
            raise ValueError("delimiter and quote are the same character")
        return self


def _date_or_time(text: str) -> str:
    if text != "auto":
        try:
            datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text!r} is no date; write it like 2026-11-25 or 2026-11-25T07:30:00") from None
    return text


class InputConfig(Section):
    """Where the rows come from and which columns make the prompt."""

    path: Place
    """File, folder or glob, s3:// or gs:// URL, or `hf://datasets/OWNER/NAME/...` on the Hugging Face hub (private ones
    with `HF_TOKEN`). Parquet, Arrow, JSON, JSONL or CSV, by extension. A folder named like `year=2024` adds a column of
    text, unless a file has that column itself."""
    format: Literal["auto", "parquet", "arrow", "jsonl", "json", "csv", "openai-batch"] = "auto"
    """Needed if the extension doesn't say it, and always for `openai-batch`."""
    csv: CsvConfig = CsvConfig()
    """How CSV files are written, where their first lines leave doubt."""
    id: str = ""
    """Column that names each row, unique in the input. Without it, rows are numbered from 0."""
    prompt: str = ""
    """Template over columns, e.g. `"Translate: {text}"`. Write `{{` and `}}` for braces."""
    system: str = ""
    """System message before each prompt or conversation; a template like `prompt`."""
    chat: Auto | bool = "auto"
    """Whether a prompt is sent as a user's message in the model's chat template. `auto`: if the model has one."""
    messages: str | Annotated[tuple[MessageTemplate, ...], Field(min_length=1)] = ""
    """A conversation: a column with lists of `{role, content}`, or one such list whose contents are templates over
    columns. One that ends with an assistant's message is continued there."""
    control_tokens: Literal["auto", "text", "tokens"] = "auto"
    """What control tokens of the model, such as `<|im_end|>`, are where a row spells them: `text`, so that no row can
    forge a turn, or `tokens`. `auto`: text in messages and in prompts that a chat template wraps, tokens in bare text,
    which may be rendered already. In the job file itself they are tokens."""
    date: Annotated[str, AfterValidator(_date_or_time)] = "auto"
    """Date or time for chat templates that print it, such as `2026-11-25` or `2026-11-25T07:30:00`. `auto`: when the
    job began, also in a run that continues it; when rows arrive, that time."""
    prompt_token_ids: str = ""
    """Column of token ids, used as they are."""
    continuation: OrColumn[str | Annotated[tuple[str, ...], Field(min_length=1)]] = ""
    """What [`task: score`](tasks.md) finds the likelihood of, behind the prompt: a template like `prompt`, a list of
    them, or a column of lists of texts. Empty: the prompt itself is scored."""
    pair: str = ""
    """The second text of a pair, a template like `prompt`, for models that [classify](tasks.md) two texts together: the
    cross-encoders."""
    truncate: bool = False
    """Whether texts longer than the model's limit are cut there, where they are [scored, embedded or
    classified](tasks.md). Otherwise such a row fails."""
    duplicates: Literal["auto", "each"] = "auto"
    """Rows that ask for the same, such as equal prompts with temperature 0. `auto`: they are computed once, and written
    for each; not when rows arrive or may be urgent. `each`: every row is computed."""
    unchanged: Literal["compute", "reuse"] = "compute"
    """Where the output folder has the answers of an input that has changed since. `compute`: the run is refused.
    `reuse`: rows that ask for the same keep their answers, and the others are computed; the earlier run must have had
    this setting, too."""
    priority: str = ""
    """Column of numbers; null is 0. Rows above 0 are urgent: the highest goes first, and with the policies `vasuki` and
    `prefill-packing` other rows make room for it."""
    deadline: str = ""
    """Column of seconds, from a row's arrival or the start of the run, within which it should end. Such rows are urgent
    too, the earliest first. The manifest counts late ones."""

    @property
    def now(self) -> datetime:
        """The time that chat templates get."""
        return datetime.now() if self.date == "auto" else datetime.fromisoformat(self.date)

    @property
    def computes_equal_rows_once(self) -> bool:
        """Whether rows that ask for the same share an answer: not if some are urgent, for copies come last."""
        return self.duplicates == "auto" and not self.may_be_urgent

    @property
    def may_be_urgent(self) -> bool:
        """Whether a column says what is urgent."""
        return bool(self.priority or self.deadline)

    @model_validator(mode="after")
    def _one_of(self) -> InputConfig:
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name)]
        if self.csv != CsvConfig() and self.format not in ("auto", "csv"):
            raise ValueError(f"input.csv goes with CSV files, not {self.format}")
        if self.format == "openai-batch":
            if given:
                raise ValueError(f"openai-batch rows carry their own messages; remove input.{given[0]}")
        elif len(given) != 1:
            raise ValueError("give exactly one of input.prompt, input.messages, input.prompt_token_ids")
        if self.system and (self.prompt_token_ids or isinstance(self.messages, tuple)):
            raise ValueError("input.system goes with input.prompt or a column of messages; write it into the others")
        if self.pair and (not self.prompt or self.system or self.chat is True or self.control_tokens == "text"):
            raise ValueError("input.pair goes with input.prompt, as bare text; without system, chat and control_tokens")
        if self.chat is False and not self.prompt:
            raise ValueError("input.chat: false goes with input.prompt")
        if self.chat is True and not (self.prompt or self.messages):
            raise ValueError("input.chat: true goes with input.prompt; leave it out")
        if self.chat is False and self.system:
            raise ValueError("input.system needs the chat template that input.chat: false turns off")
        return self


class OutputConfig(Section):
    """Where the answers go."""

    path: Place
    """Folder, or an s3:// or gs:// URL, for this job alone."""
    columns: tuple[str, ...] = ()
    """Input columns to copy. Numbers that no single type holds exactly are copied as text."""
    token_ids: bool = False
    """Add the column `output_token_ids`."""
    special_tokens: bool = False
    """Keep special tokens in `output`, such as the channels of gpt-oss."""
    reasoning: bool = False
    """Add the column `reasoning` with what a model that thinks aloud writes between its own markers, such as `<think>`.
    `output` is what comes behind them, and so is what answers have to look like."""
    flatten: bool = False
    """Write the fields of [typed answers](answers.md) as columns of their own, in place of `answer`."""
    dates: Literal["text", "typed"] = "text"
    """Dates and times of typed answers: as they are written, or as Parquet's own types."""
    scores: bool = False
    """Add the column `scores` with those of all labels, where [`task: classify`](tasks.md) writes that of one."""
    choice_probabilities: bool = False
    """Add the column `choice_probabilities`: how likely the model finds each of `sampling.choices` there."""
    check: str = ""
    """A [condition over the fields](answers.md#what-else-an-answer-has-to-be) of typed answers, such as `amount >= 0`.
    Those that fail it are `invalid`."""
    logprobs: bool | Literal["tokens"] | Annotated[int, Field(ge=1, le=100)] = False
    """Add the column `logprob`: the sum of the log-probabilities of the output tokens, as the model gives them, before
    settings and constraints. `tokens`: also the column `logprobs`, with each token's own. A number: with as many of the
    likeliest tokens at its place."""

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are wanted for each token; None where not even its own log-probability is."""
        if isinstance(self.logprobs, bool):
            return None
        return 0 if self.logprobs == "tokens" else self.logprobs


warnings.filterwarnings("ignore", 'Field name "schema"')  # of pydantic, which once had a method of that name


class SamplingConfig(Section):
    """How tokens are chosen. Each setting is a value or `{column: name}`. Of the model's generation_config.json, only
    what ends an answer is used; a warning names other settings that would change greedy output."""

    max_tokens: OrColumn[Annotated[int, Field(ge=1)]] = 256
    """Most output tokens of a row."""
    temperature: OrColumn[Annotated[float, Field(ge=0)]] = 0.0
    """0 is greedy."""
    top_p: OrColumn[Annotated[float, Field(gt=0, le=1)]] = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""
    top_k: OrColumn[Annotated[int, Field(ge=0)]] = 0
    """Keep this many of the likeliest tokens. 0 keeps all."""
    min_p: OrColumn[Annotated[float, Field(ge=0, le=1)]] = 0.0
    """Keep tokens that are at least this share as likely as the likeliest, of what `top_k` and `top_p` keep."""
    repetition_penalty: OrColumn[Annotated[float, Field(gt=0)]] = 1.0
    """Divides the positive logits of tokens that prompt or output has, and multiplies the others. Above 1 against
    loops."""
    frequency_penalty: OrColumn[Annotated[float, Field(ge=-2, le=2)]] = 0.0
    """Taken from an output token's logit for each time that it is there."""
    presence_penalty: OrColumn[Annotated[float, Field(ge=-2, le=2)]] = 0.0
    """The same, once for each token that is there."""
    min_tokens: OrColumn[Annotated[int, Field(ge=0)]] = 0
    """Output tokens before which no token is chosen that ends the answer."""
    logit_bias: OrInline[dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]]] = {}
    """What is added to the logits of tokens, by token id."""
    bad_words: OrColumn[StopStrings] = ()
    """Words that are not written, as the tokens that they usually are, with and without a space before them."""
    stop: OrColumn[StopStrings] = ()
    """Strings or special tokens, such as `<end_of_turn>`, that end the answer and are not part of it."""
    stop_token_ids: OrColumn[tuple[Annotated[int, Field(ge=0)], ...]] = ()
    """Ids of tokens that end the answer, beside the model's own. They are part of it, unless they are special."""
    seed: OrColumn[int] = 0
    """A sampled row depends only on the seed and its id, never on other rows."""
    n: OrColumn[Annotated[int, Field(ge=1, le=MAX_SAMPLES)]] = 1
    """Answers for each row. With n > 1 the output has a column `sample`, from 0."""
    ignore_eos: OrColumn[bool] = False
    """Generate `max_tokens` tokens even if the model ends sooner. For benchmarks."""
    schema: OrInline[JsonSchema] = {}  # type: ignore[assignment]
    """A JSON schema that [every answer](answers.md) is made to follow, or a file with one. `answer` is its short
    form."""
    regex: OrColumn[str] = ""
    """An expression (as Rust's `regex` has it, without look-around) that the whole answer is made to match."""
    choices: OrColumn[tuple[str, ...]] = ()
    """Texts of which each answer is one."""


class PlanConfig(Section):
    """How the rows are ordered."""

    solver: Literal["auto", "greedy", "local_search", "milp", "fifo"] = "auto"
    """`auto` is greedy, and searches further where 32 rows or fewer have known lengths. `milp` orders up to 32 rows,
    `local_search` up to 2,000, by expected lengths. `fifo` leaves rows as they come."""
    solver_time: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Seconds for a better order of a few rows, never more than it can save. `auto` is 2 % of the predicted makespan,
    at most 60 s."""
    gpu: str = "auto"
    """Hardware profile: a name from profiles/, a path, or `auto` for this machine."""
    output_length: OutputLength = "auto"
    """Expected output tokens of a row: `max` is max_tokens; `auto` starts there and learns from finished rows."""
    window_rows: Annotated[int, Field(ge=1)] = 32768
    """Rows held in memory and ordered at a time."""
    max_loss: Auto | Seconds = "auto"
    """Work that a kill may lose, averaged over the job. The fastest plan within it is taken, and parts are committed at
    least as often. `auto` is 3 % of the makespan and at least 30 s, and takes a slower plan only if that ends sooner
    after a kill."""

    @property
    def length_column(self) -> str:
        """The input column that says how long outputs become; empty where none does."""
        return self.output_length.column if isinstance(self.output_length, Column) else ""


class EngineConfig(Section):
    """How steps are formed and executed."""

    policy: Literal[
        "vasuki",
        "sarathi",
        "sarathi-paper",
        "vasuki-paper",
        "orca",
        "orca-best",
        "orca-worst",
        "vllm",
        "vllm-v0",
        "static",
        "static-sorted",
        "static-pd",
        "baton",
        "baton-pd",
        "baton-preemptive",
        "prefill-packing",
    ] = "vasuki"
    """Which rows run in the next step. All but `vasuki` are for comparison; `static` to `baton-preemptive` run
    with `attention: padded`."""
    chunk_tokens: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Token budget of a step: decodes first, then prompt chunks."""
    max_num_seqs: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Most sequences in a step."""
    attention: Literal["auto", "ragged", "padded"] = "auto"
    """[Backend](models.md). `ragged` packs chunks without padding; `padded` pads rows to equal length, or computes them
    one by one if the model cannot mask padding. `auto`: ragged if the model allows it, else padded."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Whether prompts share padded rows (Prepacking). `auto`: where that costs less."""
    compile: Literal["auto", "off"] = "auto"
    """On a CPU, `auto` compiles kernels for the processor; `off` uses torch's slower operators. On CUDA, `auto` records
    small steps as graphs where the model allows it; `off` launches every kernel by itself."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    replicas: Auto | Annotated[int, Field(ge=1)] = 1
    """Copies of the model that share the job, each on its own GPU or share of a CPU's cores. `auto`, the default on a
    Ray cluster: one for each GPU, or for each memory node of a CPU. `kv.device_memory` in bytes is for each."""
    weights_on_host: Auto | Annotated[int, Field(ge=0)] = "auto"
    """Decoder layers whose weights stay in host memory and are fetched in every step. `auto`: none if all fit the
    device, otherwise as many as make the job fastest, within `kv.host_memory`."""


class KVConfig(Section):
    """Memory for keys and values."""

    block_tokens: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Tokens in a block."""
    device_memory: Annotated[float, Field(gt=0, le=1)] | Bytes = 0.9
    """Share of the device's memory for weights, activations, KV and recurrent states; or the size of the pool of KV and
    states."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"
    """Type of keys and values. `auto` keeps the model's type, so tokens don't change. `float8`, for GPUs alone,
    holds twice as many rows as 16 bits, and [changes answers](same-answers.md#keys-and-values-of-8-bits)."""
    host_memory: Bytes = 8 * 2**30
    """Pinned host memory for weights that stay on the host and for offloaded KV. A CPU takes it from its own memory, at
    most half of that unless it is set."""
    offload: Literal["auto", "none", "stream", "park", "ahead", "by_batch"] = "auto"
    """[What moves to the host](offload.md): some layers of all rows (`stream`), as many as each batch hides
    (`by_batch`), rows that have to make room (`park`), or also rows whose prompt is computed ahead (`ahead`). `auto`
    takes what makes the job fastest, often nothing."""
    conditions: Literal["corrected", "printed"] = "corrected"
    """By which the algorithms of the paper Vasuki decide for `by_batch`: with our [corrections](offload.md), or as
    printed."""

    @property
    def asks_for_offload(self) -> bool:
        """Whether the job itself says that KV is to move."""
        return self.offload not in ("auto", "none")


class ArrivalsConfig(Section):
    """How `engine.policy: prefill-packing` gathers and packs rows that arrive, in `simulate` and `watch`, for
    comparison: as the paper Dynamic Prefill Packing does, whose other numbers are constants. `engine.chunk_tokens` is
    what a batch may hold, 20,000 prompt tokens by default; a longer prompt gets its own."""

    controller: Literal["load", "aimd"] = "load"
    """How the number of rows to gather is set. `load`: more when first tokens are late and the device is busy, fewer
    when it has time to spare. `aimd`: by the paper's equation 1."""
    packing: Literal["greedy", "exact"] = "greedy"
    """`greedy` takes the first batch with room, `exact` finds the fewest batches."""
    target_s: Annotated[float, Field(gt=0)] = 2.0
    """Time to first token that 95 rows of 100 should keep to (the paper's SLO)."""
    max_rows: Annotated[int, Field(ge=1)] = 32
    """Most rows to gather; 1 holds none back."""


class ErrorsConfig(Section):
    """When failed rows fail the job."""

    max_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """If a larger share of rows fails, the run ends with exit code 3; the output is complete."""
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a row is asked again, with other draws, whose [typed answer](answers.md) is `invalid`. The column
    `tries` counts."""


class ScoreConfig(Section):
    """What `task: score` makes of several continuations."""

    normalization: Literal["none", "tokens", "bytes"] = "none"
    """What their log-probabilities are divided by, for `best` and `probabilities`."""


class EmbedConfig(Section):
    """How `task: embed` makes a vector of a text."""

    pooling: Literal["auto", "mean", "last", "cls"] = "auto"
    """What is taken of the hidden states of its tokens; `cls` is the first. `auto`: as the model's own
    `1_Pooling/config.json` says."""
    normalize: Auto | bool = "auto"
    """Whether vectors have the length 1. `auto`: as the model's own `modules.json` says."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """How many numbers are kept, from the first, of models that are trained for it. By default all."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers in the output."""
    prompt_name: str = ""
    """Which of the model's own prompts, such as `query`, goes before each text. By default the one that it names
    itself, if it does."""


class CostConfig(Section):
    """What the machine costs."""

    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """By default the price in the hardware profile."""
    currency: str = "USD"
    """Currency of all amounts."""


class JobConfig(Section):
    """A whole job."""

    name: str = "job"
    """Shown in reports."""
    task: Literal["generate", "score", "embed", "classify"] = "generate"
    """What is asked of each row: an answer, [how likely](tasks.md) a text is, its vector, or its label."""
    model: ModelConfig
    input: InputConfig
    output: OutputConfig
    sampling: SamplingConfig = SamplingConfig()
    answer: dict[str, Any] = {}
    """Fields of [every answer](answers.md), and their types."""
    plan: PlanConfig = PlanConfig()
    engine: EngineConfig = EngineConfig()
    kv: KVConfig = KVConfig()
    arrivals: ArrivalsConfig = ArrivalsConfig()
    errors: ErrorsConfig = ErrorsConfig()
    cost: CostConfig = CostConfig()
    score: ScoreConfig = ScoreConfig()
    embed: EmbedConfig = EmbedConfig()

    @property
    def knows_lengths(self) -> bool:
        """Whether it is known beforehand how long outputs become: a column says so, or there are none."""
        return self.task != "generate" or bool(self.plan.length_column)

    @property
    def reads(self) -> bool:
        """Whether some of what the model says is of tokens that it did not choose."""
        return self.task != "generate" or self.output.choice_probabilities

    @property
    def scores_lists(self) -> bool:
        """Whether rows have several texts to be scored."""
        return self.task == "score" and not isinstance(self.input.continuation, str)

    @property
    def constraint_column(self) -> tuple[Kind, str] | None:
        """The column that says what each row's answer has to look like, if one does, and how it says that."""
        for kind in CONSTRAINTS:
            if isinstance(column := getattr(self.sampling, kind), Column):
                return kind, column.column
        return None

    @property
    def constraint(self) -> Constraint | None:
        """What every answer has to look like; None where the job does not say. Raises JobFileError."""
        sampling = self.sampling
        given = [f"sampling.{key}" for key in CONSTRAINTS if getattr(sampling, key)]
        given += ["answer"] if self.answer else []
        if not given:
            if self.errors.retries:
                raise JobFileError("errors.retries: answers have no type here, so that none is wrong; leave it out")
            for name in ("flatten", "dates", "check"):
                if getattr(self.output, name) != OutputConfig.model_fields[name].default:
                    raise JobFileError(f"output.{name}: answers have no type here; set answer or sampling.schema")
            return None
        if len(given) > 1:
            raise JobFileError(f"{given[0]} and {given[1]} both say what answers look like; give one of them")
        if sampling.ignore_eos:
            raise JobFileError(f"sampling.ignore_eos: an answer ends when it is what {given[0]} says; leave it out")
        if sampling.min_tokens:
            raise JobFileError(f"sampling.min_tokens: an answer is as long as {given[0]} says; leave it out")
        if self.input.format == "openai-batch":
            raise JobFileError(f"{given[0]}: rows of openai-batch say themselves what they want; leave it out")
        if self.errors.retries and sampling.temperature == 0:
            raise JobFileError("errors.retries: at temperature 0 each try is the same; set sampling.temperature")
        if self.constraint_column:
            return None
        if self.answer:
            try:
                return Constraint("schema", json.dumps(schema_of(self.answer)), "answer")
            except ValueError as error:
                raise JobFileError(f"answer: {error}") from None
        kind = next(kind for kind in CONSTRAINTS if getattr(sampling, kind))
        said = getattr(sampling, kind)
        return Constraint(kind, said if kind == "regex" else json.dumps(said), f"sampling.{kind}")

    def config_hash(self, model: str) -> str:
        """Hash of everything that decides what the answers are: model, input, sampling and output columns.

        A run continues an output folder only if this matches; speed settings may change in between, and so may paths:
        the input's content has a fingerprint of its own.

        Args:
            model: the fingerprint of the model's content (`vasuki.models.fingerprint`).
        """
        deciding = self.model_dump(mode="json", include={"input", "sampling", "output"})
        if self.task != "generate":
            deciding |= {"task": self.task, "score": self.score.model_dump(), "embed": self.embed.model_dump()}
        for kind in CONSTRAINTS:
            if not isinstance(getattr(self.sampling, kind), Column):
                del deciding["sampling"][kind]
        if constraint := self.constraint:
            deciding["constraint"] = constraint.text
        if self.errors.retries:
            deciding["retries"] = self.errors.retries
        del deciding["output"]["path"], deciding["input"]["path"]
        for key in ("priority", "deadline", "duplicates", "unchanged"):
            del deciding["input"][key]
        for section, key in _LATER_KEYS:
            given = getattr(self, section)
            if getattr(given, key) == type(given).model_fields[key].default:
                del deciding[section][key]  # as before there was such a key
        deciding["model"] = {"content": model, "dtype": self.model.dtype, "kv_dtype": self.kv.dtype}
        if self.model.quantization != "none":
            deciding["model"]["quantization"] = self.model.quantization
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]
