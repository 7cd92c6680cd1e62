"""Prompt lengths without torch: what `plan` and `simulate` need of a tokenizer.

The model's own tokenizer.json is read directly. The run itself uses transformers' tokenizer, which may add or leave out
a special token where a model's settings override that file; for a plan one token more or less does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vasuki.errors import ModelError

CHARACTERS_PER_TOKEN = (
    4  # of English text with a vocabulary of 32,000 to 128,000; for models without a tokenizer at hand
)


class TokenCounter:
    """Counts tokens as the model's tokenizer would; without a folder, by the length of the text."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._tokenizer: Any = None
        self._template: Any = None
        if folder is None:
            return
        from tokenizers import Tokenizer

        file = Path(folder) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            missing = "no tokenizer.json in it" if not file.exists() else " ".join(str(error).split())
            raise ModelError(f"model {folder} has no usable tokenizer: {missing}") from None
        self._template = _chat_template(Path(folder))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids, or as many numbers as there will be about tokens, which are the same where texts begin alike."""
        if self._tokenizer is None:
            return [_made_up_ids(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]

    def encode_messages(self, conversations: list[list[Any]]) -> list[list[int]]:
        """The same for conversations, rendered by the chat template."""
        if self._template is None:
            return self.encode_batch(["\n".join(str(m["content"]) for m in messages) for messages in conversations])
        texts = [self._template.render(messages=messages, add_generation_prompt=True) for messages in conversations]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]


def _made_up_ids(text: str) -> list[int]:
    """A number for every few characters, negative: they stand for no token of a vocabulary."""
    count = len(text) // CHARACTERS_PER_TOKEN + 1
    padded = text.ljust(count * CHARACTERS_PER_TOKEN, "\0").encode("utf-32-le", "surrogatepass")
    pieces = np.frombuffer(padded, np.uint32).reshape(count, CHARACTERS_PER_TOKEN)
    hashed = pieces @ (np.uint32(2_654_435_761) ** np.arange(1, CHARACTERS_PER_TOKEN + 1, dtype=np.uint32))
    ids: list[int] = (hashed | np.uint32(2**31)).view(np.int32).tolist()
    return ids


def _chat_template(folder: Path) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    text, special = None, {}
    if settings.exists():
        config = json.loads(settings.read_text(encoding="utf-8"))
        text = config.get("chat_template")
        special = {key: _content(value) for key, value in config.items() if key.endswith("_token") and value}
    if file.exists():
        text = file.read_text(encoding="utf-8")
    if not isinstance(text, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(special)
    return environment.from_string(text)


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))
