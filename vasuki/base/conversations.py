"""Where the model goes on behind a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any


class Ending(Enum):
    """What the chat template writes behind the last message."""

    NEW_TURN = "the beginning of the assistant's turn"
    CONTINUED = "nothing, not even the end of the message: the model continues it"
    CLOSED = "the end of the message alone"


class Conversation(list[Any]):
    """Messages of which a row says how they end. A plain list of messages leaves it to `ending_of`."""

    def __init__(self, messages: Sequence[Any], ending: Ending | None = None) -> None:
        super().__init__(messages)
        self.ending = ending


def ending_of(messages: Sequence[Mapping[str, Any]]) -> Ending:
    """As the row says; else an assistant's last message is continued, and any other answered."""
    if isinstance(messages, Conversation) and messages.ending is not None:
        return messages.ending
    last = messages[-1] if messages else {}
    begun = last.get("role") == "assistant" and last.get("content") is not None and not last.get("tool_calls")
    return Ending.CONTINUED if begun else Ending.NEW_TURN
