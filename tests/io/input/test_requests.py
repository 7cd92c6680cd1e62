from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms import MAX_CONTEXT, VOCAB, ByteTokenizer, MakeJob, ReadRequests, WriteParquet

import vasuki.io.input.tokenised
from vasuki.base.config import OutputConfig, SamplingConfig
from vasuki.base.constraint import CONSTRAINTS
from vasuki.base.conversations import Ending, ending_of
from vasuki.base.errors import InputError, JobFileError, ModelError, VasukiError
from vasuki.base.job_file import parse_job
from vasuki.engine.sequence import Request, SamplingParams
from vasuki.io.input.openai_batch import read_body
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.prompts import read_messages
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.row_error import RowError
from vasuki.io.input.sampling import SamplingReader
from vasuki.io.input.tables import open_table
from vasuki.io.input.templates import Template


def text(request: Request) -> str:
    return bytes(np.asarray(request.prompt_token_ids, dtype=np.uint8)).decode()


# --- templates -------------------------------------------------------------------------------------------------------


def test_templates() -> None:
    template = Template.parse("{{x}} {a} and {b c}: {a}")
    assert template.columns == ("a", "b c")
    assert template.render({"a": "{b c}", "b c": 3}) == "{x} {b c} and 3: {b c}"


def test_a_name_with_dots_and_brackets_is_a_column_and_never_reaches_into_a_value() -> None:
    template = Template.parse("{q.text} {tags[0]}")
    assert template.columns == ("q.text", "tags[0]")
    values = {"q.text": "a", "q": {"text": "other"}, "tags[0]": "b", "tags": ["other"]}
    assert template.render(values) == "a b"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{a!r}", "only a plain column name"),
        ("{a:>3}", "only a plain column name"),
        ('{"text": "{a}"}', "only a plain column name.*double the braces"),
        ("{}", "names no column"),
        ("text", "put a column in braces"),
        ("{a", "expected '}'"),
        ("a}", "double the braces"),
    ],
)
def test_bad_templates(template: str, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        Template.parse(template)


@given(st.lists(st.one_of(st.text(), st.sampled_from("abc").map(lambda name: (name,))), min_size=1))
def test_templates_render_what_they_say(pieces: list[str | tuple[str]]) -> None:
    values = {"a": "A{a}", "b": 7, "c": True}
    source = "".join(
        "{" + piece[0] + "}" if isinstance(piece, tuple) else piece.replace("{", "{{").replace("}", "}}")
        for piece in [*pieces, ("a",)]
    )
    rendered = {"a": "A{a}", "b": "7", "c": "true"}
    expected = "".join(rendered[piece[0]] if isinstance(piece, tuple) else piece for piece in [*pieces, ("a",)])
    assert Template.parse(source).render(values) == expected


def test_values_in_templates() -> None:
    template = Template.parse("{v}")
    cases = {"1.5": 1.5, "false": False, "é": "é".encode(), '{"a": ["é"]}': {"a": ["é"]}}
    for expected, value in cases.items():
        assert template.render({"v": value}) == expected
    assert template.render({"v": pa.scalar(1, pa.timestamp("ns"))}) == "1970-01-01 00:00:00.000000001"
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    for value, message in [
        (None, "column 'v' is null"),
        (b"\xff", "cannot be written as text"),
        (nested, "nested too deeply"),
    ]:
        with pytest.raises(RowError, match=message):
            template.render({"v": value})


# --- chats -----------------------------------------------------------------------------------------------------------


class BareTokenizer(ByteTokenizer):
    """That of a base model."""

    has_chat_template = False


class Marking(ByteTokenizer):
    """Writes what it marks in brackets."""

    def marked(self, text: str, own: Any = ()) -> str:
        inside = [range(begin, end) for begin, end in own]
        return "".join(
            f"[{letter}]" if letter == "X" and not any(place in span for span in inside) else letter
            for place, letter in enumerate(text)
        )


BODY = {"messages": [{"role": "user", "content": "aX"}]}
MESSAGES = [{"role": "userX", "content": [{"type": "text", "text": "aX"}]}]


@pytest.mark.parametrize(
    ("keys", "auto", "as_text"),
    [
        ({"prompt": "X{text}", "chat": False}, "XaX", "Xa[X]"),
        ({"prompt": "X{text}", "chat": True}, "user:Xa[X]", "user:Xa[X]"),
        ({"prompt": "{text}", "system": "X {text}"}, "system:X a[X]|user:a[X]", "system:X a[X]|user:a[X]"),
        ({"messages": [{"role": "user", "content": "{text}X"}]}, "user:a[X]X", "user:a[X]X"),
        ({"messages": "messages"}, "user[X]:a[X]", "user[X]:a[X]"),
        ({"format": "openai-batch", "system": "X"}, "system:X|user:a[X]", "system:X|user:a[X]"),
        ({"format": "openai-batch"}, "XaX", "[X]a[X]"),
    ],
)
def test_control_tokens_of_rows_are_text_unless_the_job_says_otherwise(
    parquet: WriteParquet, keys: dict[str, Any], auto: str, as_text: str, tmp_path: Path
) -> None:
    path = parquet(text=["aX"], messages=[json.dumps(MESSAGES)])
    if "format" in keys:
        path = tmp_path / "in.jsonl"
        body = BODY if "system" in keys else {"prompt": "XaX"}
        path.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}))
    limits: dict[str, Any] = {"max_context_tokens": MAX_CONTEXT, "vocab_size": VOCAB}
    as_tokens = as_text.replace("[X]", "X")
    for control_tokens, expected in (("auto", auto), ("text", as_text), ("tokens", as_tokens)):
        source = {"path": str(path), "control_tokens": control_tokens, **keys}
        config = parse_job({"model": {"path": "m"}, "input": source, "output": {"path": str(tmp_path / "out")}})
        with RequestStream(open_table(config), config, Marking(), **limits) as requests:
            assert text(next(requests)) == expected


def test_a_plan_that_reads_the_first_row_otherwise_is_named(
    job: MakeJob, parquet: WriteParquet, caplog: pytest.LogCaptureFixture
) -> None:
    class InPairs(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [list(text.encode()[::2]) for text in texts]

    config = job(parquet(text=["abcd", "ef"]))
    limits: dict[str, Any] = {"max_context_tokens": MAX_CONTEXT, "vocab_size": VOCAB}
    for twin, words in (
        (ByteTokenizer, []),
        (InPairs, ["row 0 has 4 prompt tokens by the tokenizer that answers, and 2"]),
    ):
        with RequestStream(open_table(config), config, ByteTokenizer(), twin=twin, **limits) as requests:
            assert [request.num_prompt_tokens for request in requests] == [4, 2]
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [message.startswith(word) for message, word in zip(told, words, strict=True)] == [True] * len(words)


@pytest.mark.parametrize(
    ("keys", "of_chat_model", "of_base_model"),
    [
        ({}, "user:<a>", "<a>"),
        ({"chat": "auto"}, "user:<a>", "<a>"),
        ({"chat": True}, "user:<a>", "input.chat: true"),
        ({"chat": False}, "<a>", "<a>"),
        ({"system": "Be {mood}."}, "system:Be calm.|user:<a>", "input.system"),
    ],
)
def test_a_prompt_is_a_users_message_where_the_model_has_a_chat_template(
    parquet: WriteParquet, keys: dict[str, Any], of_chat_model: str, of_base_model: str, tmp_path: Path
) -> None:
    path = parquet(text=["a"], mood=["calm"])
    config = parse_job(
        {
            "model": {"path": "m"},
            "input": {"path": str(path), "prompt": "<{text}>", **keys},
            "output": {"path": str(tmp_path / "out")},
        }
    )
    limits: dict[str, Any] = {"max_context_tokens": MAX_CONTEXT, "vocab_size": VOCAB}
    for tokenizer, expected in ((ByteTokenizer(), of_chat_model), (BareTokenizer(), of_base_model)):
        if expected.startswith("input."):
            with pytest.raises(ModelError, match=f"the model has no chat template, which {expected} needs"):
                RequestStream(open_table(config), config, tokenizer, **limits)
            continue
        with RequestStream(open_table(config), config, tokenizer, **limits) as requests:
            assert text(next(requests)) == expected


def test_messages_as_templates(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    path = parquet(text=["a", "b"], mood=["calm", None])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{mood} {text}"}]
    first, second = read(job(path, messages=messages))
    assert text(first) == "system:Be brief.|user:calm a"
    assert second.error == "column 'mood' is null"


def test_a_system_message_stands_before_a_column_of_messages(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"m": [{"role": "user", "content": "hi"}], "mood": "kind"}) + "\n")
    [request] = read(job(path, messages="m", system="Be {mood}."))
    assert text(request) == "system:Be kind.|user:hi"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, "input.messages names no column"),
        (
            {"messages": [{"role": "user", "content": "{text!r}"}]},
            r"input.messages\[0\].content: only a plain",
        ),
        ({"messages": [{"role": "user", "content": "{missing}"}]}, "missing"),
        ({"messages": []}, "input.messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": "text", "chat": False}, "input.chat: false goes with input.prompt"),
        ({"prompt": "{text}", "chat": False, "system": "x"}, "input.system needs the chat template"),
        ({"prompt_token_ids": "text", "system": "x"}, "input.system goes with"),
    ],
)
def test_chats_that_cannot_be(job: MakeJob, parquet: WriteParquet, keys: dict[str, Any], message: str) -> None:
    path = parquet(text=["a"])
    with pytest.raises(VasukiError, match=message):
        open_table(job(path, **keys))


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_requests_of_a_table(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    path = parquet(text=["a", "bc"], key=["x", "y"], extra=[1.5, None])
    first, second = read(job(path, id="key", prompt="<{text}>", output={"columns": ["extra"]}))
    assert (first.row, first.id, text(first), first.num_prompt_tokens, first.error) == (0, "x", "<a>", 3, "")
    assert (second.row, second.id, text(second), second.carried) == (1, "y", "<bc>", {"extra": None})
    assert first.max_tokens == MAX_CONTEXT - 3, "256 does not fit"
    assert first.prompt_token_ids.dtype == np.int32
    assert first.carried == {"extra": 1.5}


def test_row_numbers_are_ids(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    assert [request.id for request in read(job(parquet(text=["a", "b"])))] == [0, 1]


def test_bad_prompts_fail_alone(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    long = "x" * MAX_CONTEXT
    requests = read(job(parquet(text=["ok", None, "", long, "x" * (MAX_CONTEXT - 1)])))
    assert [request.error for request in requests] == [
        "",
        "column 'text' is null",
        "prompt is empty",
        f"prompt has {MAX_CONTEXT} tokens: no room is left in the model's context of {MAX_CONTEXT}",
        "",
    ]
    assert requests[3].num_prompt_tokens == MAX_CONTEXT
    assert requests[4].max_tokens == 1
    assert len(requests[3].prompt_token_ids) == 0


class CountingTokenizer(ByteTokenizer):
    """Knows that a token is a byte, and what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[int] = []  # characters of each

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls.append(sum(map(len, texts)))
        return super().encode_batch(texts)

    def surely_exceeds(self, prompt: str | list[dict[str, Any]], num_tokens: int) -> bool:
        return len(str(prompt)) > 2 * num_tokens


def test_a_text_that_cannot_fit_is_not_tokenised(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    tokenizer = CountingTokenizer()
    texts = ["x" * 500, "ok", "x" * 100]
    requests = read(job(parquet(text=texts), output={"columns": ["text"]}), tokenizer=tokenizer)
    assert tokenizer.calls == [102]
    assert [request.error for request in requests] == [
        f"prompt has 500 characters: no room is left in the model's context of {MAX_CONTEXT}",
        "",
        f"prompt has 100 tokens: no room is left in the model's context of {MAX_CONTEXT}",
    ]
    assert [request.carried["text"] for request in requests] == texts


def test_long_texts_are_tokenised_a_few_at_a_time(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vasuki.io.input.tokenised, "_MOST_CHARACTERS", 1000)
    tokenizer = CountingTokenizer()
    lengths = [400, 400, 400, 1, 3000, 1, 999]
    path = parquet(text=["x" * length for length in lengths])
    requests = read(job(path), tokenizer=tokenizer, max_context_tokens=5000)
    assert tokenizer.calls == [800, 401, 3000, 1000]
    assert [(request.row, request.num_prompt_tokens) for request in requests] == list(enumerate(lengths))


def test_a_request_knows_what_it_takes_in_memory(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    path = parquet(text=["abc", None], extra=["x" * 1000, "y" * 10])
    good, bad = read(job(path, output={"columns": ["extra"]}))
    assert (good.num_bytes, bad.num_bytes) == (1000 + 3 * 4, 10)


def test_a_prompt_without_tokens(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    class Forgetful(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[] for _ in texts]

    (request,) = read(job(parquet(text=["a"])), tokenizer=Forgetful())
    assert request.error == "prompt is empty"


def test_messages(job: MakeJob, parquet: WriteParquet, read: ReadRequests, tmp_path: Path) -> None:
    good = [{"role": "user", "content": "hi", "name": None}]
    column = pa.array([good, [], None, [{"role": None, "content": "x", "name": None}]])
    expected = [
        "",
        "chat must be a list of messages with at least one entry",
        "column 'chat' is null",
        "chat[0] needs a role and a content, both text",
    ]
    requests = read(job(parquet(chat=column), messages="chat"))
    assert [request.error for request in requests] == expected
    assert text(requests[0]) == "user:hi"
    as_json = [json.dumps(good), "nonsense", '"text"', '[{"role": "user", "content": [{"type": "image"}]}]']
    requests = read(job(parquet(chat=as_json), messages="chat"))
    assert [request.error for request in requests] == [
        "",
        "chat is text but not JSON",
        "chat must be a list of messages with at least one entry",
        "chat[0] has content of type 'image'; only text is supported",
    ]


def test_messages_as_lists_of_their_values(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    """As `datasets` stores a sequence of dicts."""
    one = {"role": ["user", "assistant", "user"], "content": ["a", "b", "c"]}
    rows = [
        one,
        {"role": ["user"], "content": ["a", "b"]},
        {"role": [], "content": []},
        {"role": None, "content": ["a"]},
    ]
    requests = read(job(parquet(messages=rows), messages="messages"))
    assert bytes(requests[0].prompt_token_ids.tolist()) == b"user:a|assistant:b|user:c"
    assert all("must be a list of messages" in request.error for request in requests[1:])


def test_a_row_that_the_template_refuses_fails_alone(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    chats = [json.dumps([{"role": role, "content": "x"}]) for role in ("user", "SHOUTER", "user")]
    requests = read(job(parquet(chat=chats), messages="chat"))
    assert [request.error for request in requests] == [
        "", "the chat template refuses the prompt: roles must alternate", ""
    ]  # fmt: skip


def test_token_ids(job: MakeJob, parquet: WriteParquet, read: ReadRequests, tmp_path: Path) -> None:
    path = parquet(ids=pa.array([[1, 2], [], None, [1, None], [1, VOCAB], [-1]], pa.list_(pa.int64())))
    requests = read(job(path, prompt_token_ids="ids"))
    assert requests[0].prompt_token_ids.tolist() == [1, 2]
    assert [request.error for request in requests] == [
        "",
        "prompt is empty",
        "column 'ids' is null",
        "prompt_token_ids holds None, which is not an integer",
        f"prompt_token_ids holds {VOCAB}, outside the vocabulary of {VOCAB} tokens",
        f"prompt_token_ids holds -1, outside the vocabulary of {VOCAB} tokens",
    ]
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1.5]}\n{"ids": "[3]"}\n{"ids": 3}\n{"ids": [true]}\n')
    errors = [request.error for request in read(job(tmp_path / "a.jsonl", prompt_token_ids="ids"))]
    assert errors[0] == errors[2] == ""
    assert "1.5, which is not an integer" in errors[1]
    assert "must be a list of integers" in errors[3]
    assert "True, which is not an integer" in errors[4]


def test_tokens_that_the_model_lacks_fail_their_row(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    """As of a tokenizer with a token that was added later."""
    first, bad = read(job(parquet(text=["abc", "abz"])), vocab_size=ord("z"))
    assert not first.error
    assert bad.error == "prompt has token 122, outside the model's vocabulary of 122 tokens"


def test_a_tokenizer_that_knows_no_token_for_a_text(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    class NoUnknown(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[Any]:
            return [[None if byte == ord("?") else byte for byte in text.encode()] for text in texts]

    first, bad, last = read(job(parquet(text=["a", "b?", "c"])), tokenizer=NoUnknown())
    assert [text(first), text(last)] == ["a", "c"]
    assert bad.error.startswith("the tokenizer refuses the prompt: int() argument must be")


def test_malformed_rows_become_requests(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnonsense\n')
    good, bad = read(job(tmp_path / "a.jsonl", output={"columns": ["text"]}))
    assert not good.error
    assert "line 2 is not JSON" in bad.error
    assert bad.carried == {"text": None}


def test_a_row_that_nests_too_deeply_for_the_template_fails_alone(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests
) -> None:
    class Recursive(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            if "b" in texts:
                raise RecursionError("maximum recursion depth exceeded")
            return super().encode_batch(texts)

    requests = read(job(parquet(text=["a", "b"])), tokenizer=Recursive())
    assert [request.error for request in requests] == [
        "", "the tokenizer refuses the prompt: maximum recursion depth exceeded"
    ]  # fmt: skip


@pytest.mark.parametrize("trouble", [RuntimeError("already borrowed"), ModelError("the model has no chat template")])
def test_trouble_that_is_no_prompts_fault_ends_the_stream(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests, trouble: Exception
) -> None:
    class Busy(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            raise trouble

    with pytest.raises(type(trouble), match=str(trouble)):
        read(job(parquet(text=["a"])), tokenizer=Busy())


# --- sampling --------------------------------------------------------------------------------------------------------


def test_settings_from_columns(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    path = parquet(
        text=["a", "b", "c"], m=[3, None, 5], t=pa.array([0.5, None, 1]), s=[["x"], None, []], stops=["\n", None, ""]
    )
    sampling = {"max_tokens": {"column": "m"}, "temperature": {"column": "t"}, "stop": {"column": "s"}, "seed": 9}
    requests = read(job(path, sampling=sampling))
    assert [request.sampling for request in requests] == [
        SamplingParams(max_tokens=3, temperature=0.5, stop=("x",), seed=9),
        SamplingParams(max_tokens=256, temperature=0.0, stop=(), seed=9),
        SamplingParams(max_tokens=5, temperature=1.0, stop=(), seed=9),
    ]
    assert [request.max_tokens for request in requests] == [3, MAX_CONTEXT - 1, 5]
    assert [r.sampling.stop for r in read(job(path, sampling={"stop": {"column": "stops"}}))] == [("\n",), (), ()]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens should be greater than or equal to 1, not 0"),
        ("max_tokens", 1.5, "max_tokens should be a valid integer"),
        ("max_tokens", "many", "max_tokens should be a valid integer"),
        ("temperature", -0.1, "temperature should be greater than or equal to 0, not -0.1"),
        ("temperature", float("inf"), "temperature cannot be inf"),
        ("temperature", float("nan"), "temperature cannot be nan"),
        ("top_p", 0.0, "top_p should be greater than 0, not 0.0"),
        ("top_p", 1.1, "top_p should be less than or equal to 1, not 1.1"),
        ("top_k", -1, "top_k should be greater than or equal to 0, not -1"),
        ("n", 0, "n should be greater than or equal to 1, not 0"),
        ("n", 10**9, "n should be less than or equal to 16384, not 1000000000"),
        ("stop", ["a", ""], "stop holds an empty string"),
        ("stop", 5, "stop should be a valid tuple, not 5"),
        ("stop", True, "stop should be a valid tuple, not True"),
        ("stop", b"x", "stop should be a valid tuple, not b'x'"),
        ("stop", [None], "stop should be a valid string"),
        ("ignore_eos", "perhaps", "ignore_eos should be a valid boolean"),
    ],
)
def test_bad_settings_fail_their_row(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests, setting: str, value: Any, message: str
) -> None:
    (request,) = read(job(parquet(text=["a"], v=[value]), sampling={setting: {"column": "v"}}))
    assert request.error.startswith(message)


SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.text(), st.binary()
)
NESTED = st.recursive(
    SCALAR, lambda values: st.lists(values) | st.dictionaries(st.text() | st.just("column"), values), max_leaves=5
)


@pytest.mark.parametrize("name", [name for name in SamplingConfig.model_fields if name not in CONSTRAINTS])
@given(value=SCALAR | NESTED)
def test_any_value_is_a_setting_or_an_error_of_its_row(name: str, value: Any) -> None:
    try:
        settings = SamplingReader(SamplingConfig(), 100, OutputConfig(path="-")).read({}, {name: value})
    except RowError as problem:
        str(problem).encode()
    else:
        assert isinstance(settings, SamplingParams)


def test_numbers_of_any_size_are_settings(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    sampling = {name: {"column": name} for name in ("seed", "top_k", "max_tokens")}
    path = parquet(text=["a"], seed=[str(-(10**40))], top_k=[str(2**64)], max_tokens=[str(10**30)])
    (request,) = read(job(path, sampling=sampling))
    assert request.sampling == SamplingParams(max_tokens=10**30, top_k=2**64, seed=-(10**40))
    assert request.max_tokens == MAX_CONTEXT - 1


def test_a_setting_that_is_not_utf8_fails_its_row(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    offsets, text = pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, text])
    (request,) = read(job(parquet(text=["a"], s=column), sampling={"stop": {"column": "s"}}))
    assert request.error == "stop cannot be read from a string that Python does not hold"


def test_settings_in_csv(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    (tmp_path / "a.csv").write_text("text,m,t,e\na,7,0.25,true\nb,,,\n")
    sampling = {"max_tokens": {"column": "m"}, "temperature": {"column": "t"}, "ignore_eos": {"column": "e"}}
    first, second = read(job(tmp_path / "a.csv", sampling=sampling))
    assert first.sampling == SamplingParams(max_tokens=7, temperature=0.25, ignore_eos=True)
    assert second.sampling == SamplingParams(max_tokens=256)


def test_rows_share_the_settings_of_the_job(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    first, second = read(job(parquet(text=["a", "b"])))
    assert first.sampling is second.sampling


def test_samples(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    requests = read(job(parquet(text=["a", "", "c"], n=[2, 2, 1]), sampling={"n": {"column": "n"}}))
    assert [(request.row, request.sample_index) for request in requests] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert requests[0].prompt_token_ids is requests[1].prompt_token_ids


def test_samples_are_made_one_at_a_time(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def request(**fields: Any) -> Request:
        made.append(1)
        return Request(**fields)

    monkeypatch.setattr("vasuki.io.input.requests.Request", request)
    config = job(parquet(text=["a"] * 50), sampling={"n": 16_384})
    with RequestStream(
        open_table(config), config, ByteTokenizer(), max_context_tokens=MAX_CONTEXT, vocab_size=VOCAB
    ) as requests:
        next(requests)
    assert len(made) == 1


def test_estimates(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    path = parquet(text=list("abcd"), e=[5.6, None, -3.0, float("inf")])
    requests = read(job(path, plan={"output_length": {"column": "e"}}, sampling={"max_tokens": 9}))
    assert [request.estimated_tokens for request in requests] == [5, 0, 0, 0]
    assert [request.expected_tokens for request in requests] == [5, 9, 9, 9]


# --- openai-batch ----------------------------------------------------------------------------------------------------


def batch_rows(tmp_path: Path, bodies: list[Any], **more: Any) -> Path:
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body, **more}
        for i, body in enumerate(bodies)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_openai_batch(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    bodies = [
        {
            "model": "m",
            "messages": chat,
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 4,
            "stop": "x",
            "n": 2,
        },
        {"prompt": "hello", "max_tokens": None, "max_completion_tokens": 6, "presence_penalty": 0, "tools": None},
        {"prompt": [1, 2, 3]},
    ]
    config = job(batch_rows(tmp_path, bodies), format="openai-batch", sampling={"max_tokens": 8, "temperature": 1})
    first, again, second, third = read(config)
    assert first.sampling == SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, seed=4, stop=("x",), n=2)
    assert (first.id, text(first), again.sample_index) == ("r0", "user:hi", 1)
    assert (text(second), second.max_tokens, second.sampling.temperature) == ("hello", 6, 1.0)
    assert (third.prompt_token_ids.tolist(), third.max_tokens) == ([1, 2, 3], 8)


def test_messages_as_sharegpt_has_them() -> None:
    said = [
        {"from": "system", "value": "be short", "weight": None},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": [{"type": "text", "text": "b"}]},
    ]
    roles = [("system", "be short"), ("user", "a"), ("assistant", "b")]
    for value in (said, json.dumps(said)):
        assert [(each["role"], each["content"]) for each in read_messages(value)] == roles
    with pytest.raises(RowError, match=r"messages\[0\] is from 'narrator'; known are human, user, gpt"):
        read_messages([{"from": "narrator", "value": "a"}])
    with pytest.raises(RowError, match="needs a role and a content"):
        read_messages([{"from": "human"}])


@pytest.mark.parametrize(
    ("said", "ending"),
    [
        ({}, Ending.CONTINUED),
        ({"continue_final_message": True}, Ending.CONTINUED),
        ({"continue_final_message": True, "add_generation_prompt": False}, Ending.CONTINUED),
        ({"continue_final_message": False}, Ending.NEW_TURN),
        ({"add_generation_prompt": True}, Ending.NEW_TURN),
        ({"add_generation_prompt": False}, Ending.CLOSED),
        ({"add_generation_prompt": False, "continue_final_message": False}, Ending.CLOSED),
    ],
)
def test_a_batch_row_says_how_its_conversation_ends(said: dict[str, Any], ending: Ending) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"body": {"messages": messages, **said}, "url": "/v1/chat/completions"}
    prompt, _ = read_body(row, 100, [{"role": "system", "content": "s"}])
    assert isinstance(prompt, list)
    assert (len(prompt), ending_of(prompt)) == (3, ending)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}], "continue_final_message": 1},
            "body.continue_final_message must be true or false",
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "body.continue_final_message and body.add_generation_prompt exclude each other",
        ),
        (None, "body is missing or not an object"),
        ({}, "body needs either messages or prompt"),
        ({"prompt": "a", "messages": []}, "body needs either messages or prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": {"a": 1}}, "body.prompt must be text or a list of token ids"),
        ({"prompt": "a", "tools": [{}]}, "body.tools is not supported"),
        ({"prompt": "a", "echo": True}, "body.echo is not supported"),
        ({"prompt": "a", "logit_bias": {"999999999": 5}}, "logit_bias names token 999999999, outside the model's"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias should be less than or equal to 100"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias should be a valid dictionary"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids should be greater than or equal to 0"),
        ({"prompt": "a", "logprobs": True}, "body.logprobs: the output has no such column; set output.logprobs: token"),
        ({"prompt": "a", "logprobs": 3}, "body.logprobs: the output has no such column; set output.logprobs: 3 in"),
        ({"prompt": "a", "logprobs": True, "top_logprobs": "3"}, "body.top_logprobs must be a number, not '3'"),
        ({"prompt": "a", "response_format": {"type": "grammar"}}, "body.response_format must have the type text, json"),
        ({"prompt": "a", "response_format": "json"}, "body.response_format must be an object"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "body.response_format is no schema",
        ),
        ({"prompt": "a", "guided_json": "{"}, "body.guided_json is not JSON"),
        ({"prompt": "a", "guided_json": {"type": "text"}}, "body.guided_json: is no JSON schema"),
        (
            {"prompt": "a", "guided_json": {"oneOf": [{"type": "string"}, {"pattern": "a"}]}},
            "body.guided_json: cannot be",
        ),
        ({"prompt": "a", "guided_regex": "(?=a)"}, "body.guided_regex: cannot be honoured"),
        ({"prompt": "a", "guided_choice": []}, "body.guided_choice is no list of texts"),
        ({"prompt": "a", "guided_choice": ["a", "a"]}, "body.guided_choice: each has to be a text of its own"),
        ({"prompt": "a", "structured_outputs": {"grammar": "x"}}, "body.structured_outputs.grammar is not supported"),
        (
            {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}},
            "body.guided_regex and body.response_format.json both say what the answer looks like",
        ),
        ({"prompt": "a", "guided_regex": "a", "ignore_eos": True}, "ignore_eos: an answer is as long as body.guided"),
        ({"prompt": "a", "temperature": -1}, "temperature should be greater than or equal to 0"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens should be greater than or equal to 1"),
        ({"prompt": "a", "temperature": {"column": "x"}}, "temperature cannot be"),
        ({"prompt": "a", "stop": 5}, "stop should be a valid tuple"),
    ],
)
def test_bad_batch_rows_fail_alone(job: MakeJob, tmp_path: Path, read: ReadRequests, body: Any, message: str) -> None:
    good, bad = read(job(batch_rows(tmp_path, [{"prompt": "ok"}, body]), format="openai-batch"))
    assert not good.error
    assert bad.error.startswith(message)


def test_settings_that_change_nothing_are_no_errors(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    neutral: dict[str, Any] = {
        "response_format": {"type": "text"}, "repetition_penalty": 1.0, "top_k": -1, "tool_choice": "none",
        "parallel_tool_calls": True, "skip_special_tokens": True, "modalities": ["text"], "prompt_cache_key": "k",
        "best_of": 1, "length_penalty": 1.0, "min_p": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": None,
    }  # fmt: skip
    (row,) = read(job(batch_rows(tmp_path, [{"prompt": "hello", **neutral}]), format="openai-batch"))
    assert (row.error, row.sampling.top_k) == ("", 0)
    asks = {
        "length_penalty": 1.1,
        "top_k": -2,
        "tool_choice": "required",
    }
    rows = read(job(batch_rows(tmp_path, [{"prompt": "a", name: asks[name]} for name in asks]), format="openai-batch"))
    assert [name in row.error for name, row in zip(asks, rows, strict=True)] == [True] * len(asks)


def test_batch_rows_ask_as_hosted_apis_and_vllm_have_it(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}},
        {"guided_json": schema},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": -100, "7": 2.5}, "frequency_penalty": 0.5, "stop_token_ids": [3], "bad_words": ["x"]},
        {"logprobs": True, "top_logprobs": 2},
    ]
    path = batch_rows(tmp_path, [{"prompt": "a", **body} for body in bodies])
    rows = read(job(path, format="openai-batch", output={"logprobs": 2}))
    assert [row.error for row in rows] == [""] * len(bodies)
    kinds = [row.sampling.constraint and row.sampling.constraint.kind for row in rows]
    assert kinds == ["schema", "schema", "schema", "choices", "regex", "schema", None, None]
    assert all(row.sampling.constraint.schema == schema for row in rows[:3] if row.sampling.constraint)
    assert rows[6].sampling == SamplingParams(
        max_tokens=rows[6].sampling.max_tokens,
        logit_bias={5: -100.0, 7: 2.5},
        frequency_penalty=0.5,
        stop_token_ids=(3,),
        bad_words=("x",),
    )


def test_constraints_come_from_columns_too(job: MakeJob, parquet: WriteParquet, read: ReadRequests) -> None:
    deep = json.dumps({"type": "array", "items": {}}).replace("{}", '{"items": ' * 40 + "{}" + "}" * 40)
    circle = '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'
    schemas = ['{"type": "integer"}', None, "{", deep, circle, '{"enum": []}', '"' + "a" * 70_000 + '"', "[1]"]
    rows = read(job(parquet(text=["a"] * len(schemas), s=schemas), sampling={"schema": {"column": "s"}}))
    assert [row.sampling.constraint and row.sampling.constraint.text for row in rows[:2]] == [schemas[0], None]
    for row, why in zip(
        rows[2:],
        ["is not JSON", "nested more than", "circle", "cannot be honoured", "no schema", "no schema"],
        strict=True,
    ):
        assert row.error.startswith("column 's'")
        assert why in row.error
    choices = pa.array([["a", "b"], None, [], ["a", None]])
    some = read(job(parquet(text=["a"] * 4, c=choices), sampling={"choices": {"column": "c"}}))
    assert [row.error for row in some] == ["", "", *["column 'c' is no list of texts"] * 2]


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias names token 1000000, outside the model's vocabulary"),
        ({"stop_token_ids": [10**6]}, "sampling.stop_token_ids names token 1000000, outside the model's vocabulary"),
    ],
)
def test_a_token_that_the_model_lacks_is_the_jobs_mistake(
    job: MakeJob, parquet: WriteParquet, read: ReadRequests, sampling: dict[str, Any], why: str
) -> None:
    with pytest.raises(JobFileError, match=why):
        read(job(parquet(text=["a"]), sampling=sampling))


def test_a_message_of_tool_calls_needs_no_content(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for said in ({"content": None}, {}):
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call], **said}]
        (row,) = read(job(batch_rows(tmp_path, [{"messages": messages}]), format="openai-batch"))
        assert not row.error
    (row,) = read(job(batch_rows(tmp_path, [{"messages": [{"role": "user"}]}]), format="openai-batch"))
    assert "needs a role and a content" in row.error


def test_a_systems_message_goes_before_the_conversation_of_a_batch_row(
    job: MakeJob, tmp_path: Path, read: ReadRequests
) -> None:
    bodies = [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hello"}]
    chat, plain = read(job(batch_rows(tmp_path, bodies), format="openai-batch", system="of {custom_id}"))
    assert text(chat) == "system:of r0|user:hi"
    assert plain.error == "input.system goes before body.messages, and the row has body.prompt"


def test_batch_rows_of_other_kinds(job: MakeJob, tmp_path: Path, read: ReadRequests) -> None:
    path = batch_rows(tmp_path, [{"input": "x"}], url="/v1/embeddings")
    (request,) = read(job(path, format="openai-batch"))
    assert request.error == "url '/v1/embeddings' is not supported; only chat completions and completions are"
    path.write_text('{"body": {"prompt": "a"}}\n')
    with pytest.raises(JobFileError, match="names column 'custom_id'"):
        open_table(job(path, format="openai-batch"))


# --- running ahead ---------------------------------------------------------------------------------------------------


def test_prefetch_keeps_order_and_bound() -> None:
    made = []

    def source() -> Generator[int, None, None]:
        for item in range(100):
            made.append(item)
            yield item

    items = Prefetch(source(), depth=3)
    assert next(items) == 0
    for _ in range(100):
        time.sleep(0.002)
    assert len(made) <= 5, "one taken, three queued, one waiting for room"
    assert list(items) == list(range(1, 100))
    assert list(items) == []


def test_prefetch_is_bounded_in_bytes() -> None:
    made = []

    def source() -> Generator[bytes, None, None]:
        for size in (40, 40, 300, *[10] * 50):
            made.append(size)
            yield bytes(size)

    items = Prefetch(source(), 100, len, 100)
    while len(made) < 3:  # until the test times out
        time.sleep(0.002)
    for _ in range(2):  # the large one has no room together with another
        for _ in range(20):
            time.sleep(0.002)
        assert made == [40, 40, 300]
        assert len(next(items)) == 40
    assert [len(item) for item in items] == [300, *[10] * 50]


def test_prefetch_raises_where_the_source_did() -> None:
    def source() -> Generator[int, None, None]:
        yield 1
        raise InputError("gone")

    items = Prefetch(source(), depth=3)
    assert next(items) == 1
    with pytest.raises(InputError, match="gone"):
        next(items)
    assert list(items) == []


def test_prefetch_closes_its_source() -> None:
    closed = threading.Event()

    def source() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    items = Prefetch(source(), depth=2)
    next(items)
    items.close()
    assert closed.is_set()
    assert list(items) == []


def test_a_stream_closed_early_leaves_no_thread(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20_000))
    before = threading.active_count()
    with RequestStream(
        open_table(config), config, ByteTokenizer(), max_context_tokens=MAX_CONTEXT, vocab_size=VOCAB
    ) as requests:
        assert next(requests).row == 0
    assert threading.active_count() == before
    assert list(requests) == []


def test_an_unreadable_file_ends_the_stream(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    config = job(parquet(text=["a"] * 10))
    table = open_table(config)
    (tmp_path / "in.parquet").unlink()
    with RequestStream(table, config, ByteTokenizer(), max_context_tokens=9, vocab_size=VOCAB) as requests:
        assert not list(requests)
    (problem,) = table.unread
    assert "in.parquet" in str(problem)
