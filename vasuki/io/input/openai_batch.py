"""Rows in the format of hosted batch APIs: `{"custom_id", "method", "url", "body": {messages or prompt, settings}}`.

Settings in a body go before the job's. A setting that would change the answer but is not known here fails its row: it
is better to say so than to answer another question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vasuki.base.constraint import Constraint, Kind
from vasuki.base.conversations import Conversation, Ending
from vasuki.io.input.prompts import Message, Prompt, read_messages, read_token_ids
from vasuki.io.input.row_error import RowError
from vasuki.io.input.sampling import constraint_of
from vasuki.io.input.templates import Mark, as_it_is

_SETTINGS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "ignore_eos", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "stop_token_ids",
)  # fmt: skip
_PROMPTS = ("messages", "prompt")
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "max_completion_tokens", "stream", "stream_options",
    "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
# Values that change nothing either, of settings that hosted APIs and vLLM know.
_NEUTRAL_OF: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),  # there are no tools
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
_CONSTRAINTS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
_KINDS: dict[str, Kind] = {"json": "schema", "regex": "regex", "choice": "choices"}
_LOGPROBS = ("logprobs", "top_logprobs")
_ENDINGS = ("continue_final_message", "add_generation_prompt")


def read_body(
    values: Mapping[str, Any],
    vocab_size: int,
    before: Sequence[Message] = (),
    mark_messages: Mark = as_it_is,
    mark_prompt: Mark = as_it_is,
    alternatives: int | None = None,
) -> tuple[Prompt, dict[str, Any]]:
    """Prompt and sampling settings of a row.

    Args:
        values: the row.
        vocab_size: token ids must lie below it.
        before: messages that the job puts before each conversation.
        mark_messages: marks what the text of messages must not be read as.
        mark_prompt: likewise, for a prompt that is bare text.
        alternatives: how many likely tokens the output has for each token; None where it has no log-probabilities.

    Raises:
        RowError: the row asks for something other than text generation, or is malformed.
    """
    body, url = values["body"], values["url"]
    if not isinstance(body, dict):
        raise RowError("body is missing or not an object")
    if url is not None and not (isinstance(url, str) and url.endswith("completions")):
        raise RowError(f"url {url!r} is not supported; only chat completions and completions are")
    for name, value in body.items():
        is_known = name in (*_SETTINGS, *_PROMPTS, *_ENDINGS, *_CONSTRAINTS, *_LOGPROBS, *_WITHOUT_EFFECT)
        if not is_known and value not in (*_NEUTRAL, *_NEUTRAL_OF.get(name, ())):
            raise RowError(f"body.{name} is not supported")
    settings = {name: body[name] for name in _SETTINGS if name in body}
    if settings.get("top_k") == -1:  # as vLLM says that all tokens are kept
        settings["top_k"] = 0
    if body.get("max_completion_tokens") is not None:
        settings["max_tokens"] = body["max_completion_tokens"]
    if constraint := _constraint(body):
        settings["constraint"] = constraint
    _refuse_missing_logprobs(body, alternatives)
    prompt = _prompt(body, vocab_size, mark_messages)
    if isinstance(prompt, str):
        prompt = mark_prompt(prompt, ())
    if before and not isinstance(prompt, list):
        raise RowError("input.system goes before body.messages, and the row has body.prompt")
    if isinstance(prompt, list) and body.get("messages") is not None:
        prompt = Conversation([*before, *prompt], _ending(body))
    return prompt, settings


def _constraint(body: Mapping[str, Any]) -> Constraint | None:
    """What the answer has to look like, as hosted APIs and vLLM say it; strictly, since no column tells of answers that
    turn out to be wrong."""
    asked, structured = body.get("response_format") or {}, body.get("structured_outputs") or {}
    for name, value in (("response_format", asked), ("structured_outputs", structured)):
        if not isinstance(value, dict):
            raise RowError(f"body.{name} must be an object")
    named = {name: body.get(name) for name in ("guided_json", "guided_regex", "guided_choice")}
    named |= {f"structured_outputs.{name}": value for name, value in structured.items()}
    match asked.get("type", "text"):
        case "json_object":
            named["response_format.json"] = {"type": "object"}
        case "json_schema":
            wrapped = asked.get("json_schema")
            named["response_format.json"] = wrapped.get("schema", {}) if isinstance(wrapped, dict) else {}
        case kind if kind != "text":
            raise RowError("body.response_format must have the type text, json_object or json_schema")
    found = [(f"body.{name}", value) for name, value in named.items() if value is not None]
    if len(found) > 1:
        raise RowError(f"{found[0][0]} and {found[1][0]} both say what the answer looks like")
    for key, value in found:
        kind = _KINDS.get(key.split(".")[-1].removeprefix("guided_"))
        if kind is None:
            raise RowError(f"{key} is not supported")
        return constraint_of(kind, value, key.removesuffix(".json"), strict=True)
    return None


def _refuse_missing_logprobs(body: Mapping[str, Any], alternatives: int | None) -> None:
    """Raises RowError for log-probabilities that the output has no column for."""
    asked, most = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(asked, bool):  # for bare text it is a number
        asked, most = asked is not None, asked if most is None else most
    if not isinstance(most, int | None) or isinstance(most, bool):
        raise RowError(f"body.top_logprobs must be a number, not {most!r}")
    if asked and (alternatives is None or (most or 0) > alternatives):
        wanted = most or "tokens"
        raise RowError(f"body.logprobs: the output has no such column; set output.logprobs: {wanted} in the job")


def _ending(body: Mapping[str, Any]) -> Ending | None:
    """As vLLM's two settings say it; None where neither is set."""
    continues, opens = (body.get(name) for name in _ENDINGS)
    for name in _ENDINGS:
        if not isinstance(body.get(name), bool | None):
            raise RowError(f"body.{name} must be true or false")
    if continues and opens:
        raise RowError("body.continue_final_message and body.add_generation_prompt exclude each other")
    if continues:
        return Ending.CONTINUED
    if opens or (continues is False and opens is None):
        return Ending.NEW_TURN
    return None if opens is None else Ending.CLOSED


def _prompt(body: Mapping[str, Any], vocab_size: int, mark_messages: Mark) -> Prompt:
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        raise RowError("body needs either messages or prompt")
    if messages is not None:
        return read_messages(messages, "body.messages", mark_messages)
    if isinstance(prompt, list):
        return read_token_ids(prompt, vocab_size, "body.prompt")
    if not isinstance(prompt, str):
        raise RowError("body.prompt must be text or a list of token ids")
    if not prompt:
        raise RowError("prompt is empty")
    return prompt
