"""The prompt of a row, before tokenisation: text, a conversation, or token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vasuki.base.config import InputConfig
from vasuki.io.input.row_error import RowError
from vasuki.io.input.templates import Template

Message = dict[str, Any]  # role, content, and whatever else the chat template reads
Prompt = str | list[Message] | NDArray[np.int32]


def prompt_reader(config: InputConfig, vocab_size: int) -> Callable[[Mapping[str, Any]], Prompt]:
    """How to get a row's prompt from its values. The function raises RowError for rows that have none."""
    if config.prompt:
        template = Template.parse(config.prompt)
        return lambda values: _text(template.render(values))
    if config.messages:
        return lambda values: read_messages(_present(values, config.messages), config.messages)
    return lambda values: read_token_ids(_present(values, config.prompt_token_ids), vocab_size)


def read_messages(value: Any, name: str = "messages") -> list[Message]:
    """A conversation: a list of `{role, content}`, or such a list as a JSON string.

    Content in parts (`[{"type": "text", "text": ...}]`) is joined; keys whose value is null are dropped.

    Raises:
        RowError: it is something else.
    """
    value = _parsed(value, name)
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of messages with at least one entry")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def read_token_ids(value: Any, vocab_size: int, name: str = "prompt_token_ids") -> NDArray[np.int32]:
    """Token ids [num_prompt_tokens]. Raises RowError unless all are integers below `vocab_size`."""
    value = _parsed(value, name)
    if not isinstance(value, list):
        raise RowError(f"{name} must be a list of integers")
    if not value:
        raise RowError("prompt is empty")
    for token_id in value:
        if type(token_id) is not int:
            raise RowError(f"{name} holds {token_id!r}, which is not an integer")
        if not 0 <= token_id < vocab_size:
            raise RowError(f"{name} holds {token_id}, outside the vocabulary of {vocab_size} tokens")
    return np.array(value, dtype=np.int32)


def _text(text: str) -> str:
    if not text:
        raise RowError("prompt is empty")
    return text


def _present(values: Mapping[str, Any], column: str) -> Any:
    if values[column] is None:
        raise RowError(f"column '{column}' is null")
    return values[column]


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowError(f"{name} is text but not JSON") from None


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{name} is not a message with role and content")
    message = {key: part for key, part in value.items() if part is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, name) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise RowError(f"{name} needs a role and a content, both text")
    return message | {"content": content}


def _text_part(part: Any, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowError(f"{name} has content of type {kind!r}; only text is supported")
    return str(part["text"])
