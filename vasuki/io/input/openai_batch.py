"""Rows in the format of hosted batch APIs: `{"custom_id", "method", "url", "body": {messages or prompt, settings}}`.

Settings in a body go before the job's. A setting that would change the answer but is not known here fails its row: it
is better to say so than to answer another question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vasuki.base.conversations import Conversation, Ending
from vasuki.io.input.prompts import Message, Prompt, read_messages, read_token_ids
from vasuki.io.input.row_error import RowError
from vasuki.io.input.templates import Mark, as_it_is

_SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "ignore_eos")
_PROMPTS = ("messages", "prompt")
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "max_completion_tokens", "stream", "stream_options",
    "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
# Values that change nothing either, of settings that hosted APIs and vLLM know.
_NEUTRAL_OF: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),  # there are no tools
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
_ENDINGS = ("continue_final_message", "add_generation_prompt")


def read_body(
    values: Mapping[str, Any],
    vocab_size: int,
    before: Sequence[Message] = (),
    mark_messages: Mark = as_it_is,
    mark_prompt: Mark = as_it_is,
) -> tuple[Prompt, dict[str, Any]]:
    """Prompt and sampling settings of a row.

    Args:
        values: the row.
        vocab_size: token ids must lie below it.
        before: messages that the job puts before each conversation.
        mark_messages: marks what the text of messages must not be read as.
        mark_prompt: likewise, for a prompt that is bare text.

    Raises:
        RowError: the row asks for something other than text generation, or is malformed.
    """
    body, url = values["body"], values["url"]
    if not isinstance(body, dict):
        raise RowError("body is missing or not an object")
    if url is not None and not (isinstance(url, str) and url.endswith("completions")):
        raise RowError(f"url {url!r} is not supported; only chat completions and completions are")
    for name, value in body.items():
        is_known = name in (*_SETTINGS, *_PROMPTS, *_ENDINGS, *_WITHOUT_EFFECT)
        if not is_known and value not in (*_NEUTRAL, *_NEUTRAL_OF.get(name, ())):
            raise RowError(f"body.{name} is not supported")
    settings = {name: body[name] for name in _SETTINGS if name in body}
    if settings.get("top_k") == -1:  # as vLLM says that all tokens are kept
        settings["top_k"] = 0
    if body.get("max_completion_tokens") is not None:
        settings["max_tokens"] = body["max_completion_tokens"]
    prompt = _prompt(body, vocab_size, mark_messages)
    if isinstance(prompt, str):
        prompt = mark_prompt(prompt, ())
    if before and not isinstance(prompt, list):
        raise RowError("input.system goes before body.messages, and the row has body.prompt")
    if isinstance(prompt, list) and body.get("messages") is not None:
        prompt = Conversation([*before, *prompt], _ending(body))
    return prompt, settings


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
