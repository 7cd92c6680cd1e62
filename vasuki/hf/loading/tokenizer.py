"""Text and messages to token ids, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import transformers

from vasuki.base.errors import ModelError
from vasuki.engine.sequence import Sequence
from vasuki.hf.loading.least_tokens import LeastTokens

transformers.logging.set_verbosity_error()

_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")


class Tokenizer:
    """The model's own tokenizer, with the few calls that a job needs.

    Args:
        path: a folder or hub id.
        revision: of the hub's model.
        trust_remote_code: whether a class that comes with the model may run.
        of_file: take tokenizer.json as it is, without looking for the model's class.

    Raises:
        ModelError: there is none, or it cannot be read.
    """

    def __init__(
        self, path: str, revision: str | None = None, trust_remote_code: bool = False, of_file: bool = False
    ) -> None:
        try:
            if of_file:
                self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
            else:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    path, revision=revision, trust_remote_code=trust_remote_code
                )
        except Exception as error:
            raise ModelError(_what_is_wrong(path, error)) from None
        # Without files, classes of some models make up a tokenizer of their special tokens.
        if self._tokenizer.vocab_size <= len(self._tokenizer.all_special_tokens):
            raise ModelError(f"model {path} has no usable tokenizer: its vocabulary is empty")
        is_plain = type(self._tokenizer).__module__.startswith("transformers.")  # no class that came with the model
        self._least_tokens = LeastTokens(getattr(self._tokenizer, "backend_tokenizer", None) if is_plain else None)
        self._name = functools.cache(lambda token_id: self._text([token_id], skip_special_tokens=False))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token, for models whose config names none."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template, as chat models do."""
        return bool(self._tokenizer.chat_template)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model expects around it."""
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=True)["input_ids"]
        return encoded

    def encode_messages(self, conversations: Rows[Rows[Mapping[str, Any]]]) -> list[list[int]]:
        """Token ids of each conversation, rendered by the chat template, open for the assistant's turn.

        Raises:
            ModelError: the model has no chat template.
            Exception: whatever the template raises for messages it does not accept.
        """
        if not self.has_chat_template:
            raise ModelError("the model has no chat template, which conversations need")
        encoded: list[list[int]] = self._tokenizer.apply_chat_template(
            list(conversations), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return encoded

    def surely_exceeds(self, prompt: str | Rows[Mapping[str, Any]], num_tokens: int) -> bool:
        """Whether a text or a conversation has more tokens, where its length alone tells."""
        return self._least_tokens.exceed(prompt, num_tokens, self._rendered)

    def text_of(self, token_ids: Rows[int]) -> str:
        """What the model reads, special tokens included."""
        return self._text(list(token_ids), skip_special_tokens=False)

    def decode(self, sequence: Sequence) -> str:
        """The sequence's output as text, without special tokens, cut before the first stop string."""
        text = self._text(sequence.output_token_ids)
        cuts = [position for stop in sequence.request.sampling.stop if (position := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        """Return whether a stop string is complete, or the special token that it names is there, once `token_id`
        follows.

        A token stands for at least one byte, so a stop string of n bytes lies within the last n tokens. A few more are
        decoded because the first ones may be the rest of a character, or lose a leading space.
        """
        stops = sequence.request.sampling.stop
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + 4
        tail = self._text([*sequence.output_token_ids[1 - window :], token_id])
        return any(stop in tail for stop in stops) or self._name(token_id) in stops

    def _rendered(self, messages: Rows[Mapping[str, Any]]) -> str:
        text: str = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return text

    def _text(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _what_is_wrong(path: str, error: Exception) -> str:
    """A file that is no JSON, of which transformers does not say which one it is; else what it says itself."""
    folder = Path(path)
    for file in (folder / name for name in _FILES):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except OSError:  # not there, or the model is on the hub
            continue
        except ValueError as problem:
            return f"{file} is not valid JSON: {problem}"
    missing = folder.is_dir() and not (folder / "tokenizer.json").exists()
    reason = "no tokenizer.json in it, and transformers says: " if missing else ""
    return f"model {path} has no usable tokenizer: {reason}{_first_line(error).rstrip(': ')}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
