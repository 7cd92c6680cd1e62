"""The prompt of a row, before tokenisation: text, a pair of texts, a conversation, or token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vasuki.base.config import InputConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.io.input.row_error import RowError
from vasuki.io.input.templates import Mark, Template, as_it_is

Message = dict[str, Any]  # role, content, and whatever else the chat template reads


class Pair(NamedTuple):
    """Two texts that a model reads together."""

    first: str
    second: str


Prompt = str | Pair | list[Message] | NDArray[np.int32]

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def prompt_reader(
    config: InputConfig, vocab_size: int, as_chat: bool, mark: Mark = as_it_is
) -> Callable[[Mapping[str, Any]], Prompt]:
    """Return a function that gets a row's prompt from its values. It raises RowError for rows that have none.

    Args:
        config: which columns make the prompt.
        vocab_size: token ids must lie below it.
        as_chat: send `input.prompt` as a user's message, see `is_chat`.
        mark: marks what a row's text must not be read as.
    """
    if config.prompt_token_ids:
        return lambda values: read_token_ids(_present(values, config.prompt_token_ids), vocab_size)
    conversation = conversation_templates(config)
    if config.prompt and not as_chat:
        [(_, template)] = conversation  # a system message would have made it a chat
        if config.pair:
            second = pair_template(config)
            return lambda values: Pair(_text(template.render(values)), _text(second.render(values)))
        return lambda values: _text(template.render(values, mark))

    def messages(values: Mapping[str, Any]) -> Prompt:
        written = [{"role": role, "content": template.render(values, mark)} for role, template in conversation]
        if config.prompt:
            _text(written[-1]["content"])
        if isinstance(config.messages, str) and config.messages:
            return written + read_messages(_present(values, config.messages), config.messages, mark)
        return written

    return messages


def pair_template(config: InputConfig) -> Template:
    """That of `input.pair`. Raises JobFileError."""
    return Template.parse(config.pair, "input.pair")


def conversation_templates(config: InputConfig) -> list[tuple[str, Template]]:
    """The messages that the job file writes itself, as roles and templates: from `input.system`, `input.prompt` and
    a list in `input.messages`.

    Raises:
        JobFileError: a template is malformed, or none of a conversation names a column.
    """
    templates = []
    if config.system:
        templates.append(("system", Template.parse(config.system, "input.system", needs_column=False)))
    if config.prompt:
        templates.append(("user", Template.parse(config.prompt)))
    if isinstance(config.messages, tuple):
        for index, message in enumerate(config.messages):
            key = f"input.messages[{index}].content"
            templates.append((message.role, Template.parse(message.content, key, needs_column=False)))
        if not any(template.columns for _, template in templates):
            raise JobFileError("input.messages names no column; put a column in braces, such as {text}")
    return templates


def is_chat(config: InputConfig, has_chat_template: bool, task: str = "generate") -> bool:
    """Return whether prompts go through the model's chat template. Texts that are embedded or classified do not, unless
    the job says so.

    Raises:
        ModelError: the job needs one and the model has none.
    """
    wanted = {
        "input.messages": bool(config.messages),
        "input.system": bool(config.system),
        "input.chat: true": config.chat is True and bool(config.prompt),
    }
    if not has_chat_template and any(wanted.values()):
        key = next(key for key, is_wanted in wanted.items() if is_wanted)
        raise ModelError(f"the model has no chat template, which {key} needs; put all the text into input.prompt")
    if task in ("embed", "classify") and config.chat is not True:
        return bool(config.messages)
    return bool(config.messages) or (bool(config.prompt) and config.chat is not False and has_chat_template)


def read_messages(value: Any, name: str = "messages", mark: Mark = as_it_is) -> list[Message]:
    """A conversation: a list of `{role, content}`, or such a list as a JSON string, or as an object of equally long
    lists, as `datasets` stores a sequence of dicts.

    `{from, value}` stand for them too. Content in parts (`[{"type": "text", "text": ...}]`) is joined; keys whose value
    is null are dropped. All text in it gets `mark`.

    Raises:
        RowError: it is something else.
    """
    value = _parsed(value, name)
    if isinstance(value, dict):
        value = _rows_of(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of messages with at least one entry")
    messages = [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]
    return messages if mark is as_it_is else [_marked(message, mark) for message in messages]


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


def _rows_of(columns: dict[str, Any]) -> Any:
    """Objects, made of equally long lists of their values; anything else as it is."""
    lists = [*columns.values()]
    if not all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists):
        return columns
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{name} is not a message with role and content")
    message = _with_role({key: part for key, part in value.items() if part is not None}, name)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, name) for part in content)
    if content is None and message.get("tool_calls"):
        content = ""  # the calls are what is said
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise RowError(f"{name} needs a role and a content, both text")
    return message | {"content": content}


def _with_role(message: dict[str, Any], name: str) -> dict[str, Any]:
    """A message as chat templates know it, of one with `from` and `value`, as ShareGPT's sets have them."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker, content = message.pop("from"), message.pop("value")
    if speaker not in _SPEAKERS:
        raise RowError(f"{name} is from {speaker!r}; known are {', '.join(_SPEAKERS)}")
    return message | {"role": _SPEAKERS[speaker], "content": content}


def _marked(value: Any, mark: Mark) -> Any:
    """The value with all its text marked, however deep it lies."""
    if isinstance(value, str):
        return mark(value, ())
    if isinstance(value, dict):
        return {key: _marked(each, mark) for key, each in value.items()}
    return [_marked(each, mark) for each in value] if isinstance(value, list) else value


def _text_part(part: Any, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowError(f"{name} has content of type {kind!r}; only text is supported")
    return str(part["text"])
