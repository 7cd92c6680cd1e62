"""Where a model thinks aloud, and where its answer begins, by the markers of its own tokenizer.

    <think> thoughts </think> answer                                            Qwen3, DeepSeek-R1, SmolLM3
    [THINK] thoughts [/THINK] answer                                            Magistral
    <|channel|>analysis<|message|> thoughts <|end|> ... <|channel|>final<|message|> answer          gpt-oss

Where the chat template itself opens the markers, a row thinks from its first token on; where it closes them, it does
not think. Otherwise the model chooses: a row thinks if its first token is the one that opens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile

from vasuki.base.errors import JobFileError
from vasuki.engine.sequence import Sequence

_PAIRS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "◁think▷": "◁/think▷"}
_CHANNELS = {"<|channel|>": "<|message|>"}
_FINAL = "final"  # the channel of the answer
_MOST_BREAKS = 2  # tokens
_TAIL = 64  # last tokens of a prompt, among which those are that the template writes behind the conversation


@dataclass(frozen=True)
class Reasoning:
    """The markers of a model.

    Args:
        opens: the token that thoughts begin with.
        closes: the token behind which the answer may begin.
        by_channel: whether it begins only in the channel for it.
        turns: special tokens, which end what a template has written before them.
        breaks: line breaks that may stand between thoughts and answer.
        text_of: the text of tokens.
    """

    opens: int
    closes: int
    by_channel: bool
    turns: frozenset[int]
    breaks: frozenset[int]
    text_of: Callable[[list[int]], str]

    @classmethod
    def of(
        cls,
        id_of: Callable[[str], int | None],
        special: Collection[int],
        encode: Callable[[str], list[int]],
        text_of: Callable[[list[int]], str],
    ) -> Reasoning:
        """Raises JobFileError for a tokenizer without such markers."""
        breaks = [encode(text) for text in ("\n", "\n\n")]
        for opens, closes in (_PAIRS | _CHANNELS).items():
            begin, end = id_of(opens), id_of(closes)
            if begin is not None and end is not None:
                turns = frozenset(special) - {begin, end}
                alone = frozenset(token_ids[0] for token_ids in breaks if len(token_ids) == 1)
                return cls(begin, end, opens in _CHANNELS, turns, alone, text_of)
        known = ", ".join(_PAIRS | _CHANNELS)
        raise JobFileError(f"output.reasoning: the model's tokenizer has no token that thoughts begin with ({known})")

    def answer_start(self, sequence: Sequence, scanned: int = 0) -> int | None:
        """How many tokens of the output come before the answer; None while the row thinks.

        Args:
            sequence: the row.
            scanned: so many tokens are known to be thoughts.
        """
        output = sequence.output_token_ids
        if not scanned and not self._thinks(sequence):
            return 0
        for place in range(scanned, len(output)):
            if output[place] == self.closes and self._is_final(output, place):
                most = output[place + 1 : place + 1 + _MOST_BREAKS]
                return place + 1 + len(list(takewhile(self.breaks.__contains__, most)))
        return None

    def may_open(self, sequence: Sequence) -> bool:
        """Whether the model still chooses whether the row thinks."""
        return not sequence.output_token_ids and self._by_template(sequence) is None

    def may_break(self, sequence: Sequence) -> bool:
        """Whether a line break may follow that stands between thoughts and answer, of a row that no longer thinks."""
        last = sequence.output_token_ids[-_MOST_BREAKS:]
        while last and last[-1] in self.breaks:
            last.pop()
        return last[-1:] == [self.closes]

    def thoughts(self, token_ids: list[int]) -> list[list[int]]:
        """The pieces of what a row thought, without the tokens around them."""
        if not self.by_channel:
            return [[each for each in token_ids if each not in (self.opens, self.closes)]]
        pieces: list[list[int]] = []
        is_within = False
        for each in token_ids:
            if each == self.closes:
                pieces.append([])
            elif is_within and each not in self.turns and each != self.opens:
                pieces[-1].append(each)
            is_within = each == self.closes or (is_within and each not in self.turns and each != self.opens)
        return pieces

    def _thinks(self, sequence: Sequence) -> bool:
        by_template = self._by_template(sequence)
        if by_template is not None:
            return by_template
        return sequence.output_token_ids[:1] == [self.opens]

    def _by_template(self, sequence: Sequence) -> bool | None:
        """Whether the row thinks, where the prompt's last turn says so. Turns before it have markers of their own."""
        for each in reversed(sequence.request.prompt_token_ids[-_TAIL:]):
            if each in (self.opens, self.closes):
                return bool(each == self.opens)
            if each in self.turns:
                break
        return None

    def _is_final(self, output: list[int], place: int) -> bool:
        """Whether the answer begins behind that place, where the token stands that closes."""
        if not self.by_channel:
            return True
        opened = max((index for index in range(place) if output[index] == self.opens), default=None)
        return opened is not None and self.text_of(output[opened + 1 : place]).strip().startswith(_FINAL)
