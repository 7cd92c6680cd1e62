"""Rows in the format of hosted batch APIs: `{"custom_id", "method", "url", "body": {messages or prompt, settings}}`.

Settings in a body go before the job's. A setting that would change the answer but is not known here fails its row: it
is better to say so than to answer another question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vasuki.io.input.prompts import Prompt, read_messages, read_token_ids
from vasuki.io.input.row_error import RowError

_SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "ignore_eos")
_PROMPTS = ("messages", "prompt")
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "max_completion_tokens", "stream")
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})


def read_body(values: Mapping[str, Any], vocab_size: int) -> tuple[Prompt, dict[str, Any]]:
    """Prompt and sampling settings of a row.

    Raises:
        RowError: the row asks for something other than text generation, or is malformed.
    """
    body, url = values["body"], values["url"]
    if not isinstance(body, dict):
        raise RowError("body is missing or not an object")
    if url is not None and not (isinstance(url, str) and url.endswith("completions")):
        raise RowError(f"url {url!r} is not supported; only chat completions and completions are")
    for name, value in body.items():
        if name not in (*_SETTINGS, *_PROMPTS, *_WITHOUT_EFFECT) and value not in _NEUTRAL:
            raise RowError(f"body.{name} is not supported")
    settings = {name: body[name] for name in _SETTINGS if name in body}
    if body.get("max_completion_tokens") is not None:
        settings["max_tokens"] = body["max_completion_tokens"]
    return _prompt(body, vocab_size), settings


def _prompt(body: Mapping[str, Any], vocab_size: int) -> Prompt:
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        raise RowError("body needs either messages or prompt")
    if messages is not None:
        return read_messages(messages, "body.messages")
    if isinstance(prompt, list):
        return read_token_ids(prompt, vocab_size, "body.prompt")
    if not isinstance(prompt, str):
        raise RowError("body.prompt must be text or a list of token ids")
    if not prompt:
        raise RowError("prompt is empty")
    return prompt
