"""Thoughts and answers by the markers of real chat templates, told apart however a row comes to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vasuki.base.errors import JobFileError
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf.loading.tokenizer import Tokenizer as Ours

TURNS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|return|>"]
MARKERS = {
    "think": ["<think>", "</think>"],  # no special tokens for Qwen3, DeepSeek-R1 and SmolLM3
    "magistral": ["[THINK]", "[/THINK]"],
    "channels": ["<|channel|>", "<|message|>", "<|constrain|>"],
}


def tokenizer_of(folder: Path, kind: str) -> Ours:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, "ĊĊ"])}
    made = Tokenizer(models.BPE(words, [("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(TURNS)
    is_special = kind == "channels"
    made.add_tokens([AddedToken(word, special=is_special, normalized=False) for word in MARKERS.get(kind, [])])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>").save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return Ours(str(folder))


ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
EARLIER = "<|im_start|>assistant\n<think>\nold\n</think>\n\nhello<|im_end|>\n"
HARMONY = "<|start|>user<|message|>hi<|end|><|start|>assistant"
CASES = {
    # kind, prompt, output, thoughts, answer
    "Qwen3 thinks": ("think", ASKED, "<think>\nhm, so\n</think>\n\nParis", "hm, so", "Paris"),
    "Qwen3 does not": ("think", ASKED, "Paris", None, "Paris"),
    "Qwen3 speaks of the marker": ("think", ASKED, "Paris </think> it is", None, "Paris </think> it is"),
    "Qwen3 was told not to": ("think", ASKED + "<think>\n\n</think>\n\n", "Paris", None, "Paris"),
    "Qwen3 is cut": ("think", ASKED, "<think>\nhm, so", "hm, so", ""),
    "Qwen3 has thought before": ("think", EARLIER + ASKED, "<think>\nhm\n</think>\n\nParis", "hm", "Paris"),
    "Qwen3 had been told not to": ("think", EARLIER + ASKED, "Paris", None, "Paris"),
    "DeepSeek-R1": ("think", ASKED + "<think>\n", "hm\n</think>\n\nParis", "hm", "Paris"),
    "DeepSeek-R1 is cut": ("think", ASKED + "<think>\n", "hm", "hm", ""),
    "no line break": ("think", ASKED + "<think>\n", "hm</think>Paris", "hm", "Paris"),
    "nothing thought": ("think", ASKED, "<think>\n\n</think>\n\nParis", None, "Paris"),
    "Magistral": ("magistral", ASKED, "[THINK]hm[/THINK]Paris", "hm", "Paris"),
    "gpt-oss": (
        "channels",
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>",
        "hm",
        "Paris",
    ),
    "gpt-oss thinks twice": (
        "channels",
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
        "hm\n\nso",
        "{}",
    ),
    "gpt-oss answers at once": ("channels", HARMONY, "<|channel|>final<|message|>Paris", None, "Paris"),
    "gpt-oss is cut": ("channels", HARMONY, "<|channel|>analysis<|message|>hm", "hm", ""),
}


def row(tokenizer: Ours, prompt: str, output: str, count: int | None = None) -> Sequence:
    token_ids = np.array(tokenizer.encode_plain(prompt), np.int32)
    request = Request(0, 0, len(token_ids), 999, token_ids, SamplingParams(reasoning=True))
    return Sequence(request, tokenizer.encode_plain(output)[:count])


@pytest.mark.parametrize("case", CASES)
def test_thoughts_and_answers_are_told_apart(tmp_path: Path, case: str) -> None:
    kind, prompt, output, thoughts, answer = CASES[case]
    tokenizer = tokenizer_of(tmp_path, kind)
    assert tokenizer.decode(row(tokenizer, prompt, output)) == (answer, thoughts)


@pytest.mark.parametrize("case", CASES)
def test_where_the_answer_begins_is_found_token_by_token(tmp_path: Path, case: str) -> None:
    kind, prompt, output, *_ = CASES[case]
    tokenizer = tokenizer_of(tmp_path, kind)
    whole, scanned = row(tokenizer, prompt, output), 0
    for count in range(len(whole.output_token_ids) + 1):
        so_far = row(tokenizer, prompt, output, count)
        start = tokenizer.reasoning.answer_start(so_far)
        assert tokenizer.reasoning.answer_start(so_far, scanned) == start
        if start is None:
            scanned = count
    assert start == tokenizer.reasoning.answer_start(whole)


def test_a_model_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"output\.reasoning: the model's tokenizer has no token"):
        tokenizer_of(tmp_path, "none").refuse_without_reasoning()
