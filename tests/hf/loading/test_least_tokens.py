"""What the length of a text alone tells of its tokens is never more than the tokenizer itself finds."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from vasuki.hf.loading.least_tokens import LeastTokens

BYTES = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}
SPACES = " " * 9


def tokenizer(model: Any, normalizer: Any = None, splits: Any = None, added: tuple[Any, ...] = ()) -> Tokenizer:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if splits is not None:
        made.pre_tokenizer = splits
    made.add_tokens(list(added))
    return made


def of_bytes(normalizer: Any = None, *added: Any, splits: Any = None) -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    vocabulary = {**BYTES, "th": 256, "the": 257, "ĠĠ": 258, "Ã©": 259}
    model = models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("Ã", "©")])
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer(model, normalizer, pre_tokenizers.Sequence([splits, own]) if splits else own, added)


def of_single_bytes(normalizer: Any) -> Tokenizer:
    return tokenizer(models.BPE(BYTES, []), normalizer, pre_tokenizers.ByteLevel(add_prefix_space=False))


def of_pieces(**more: Any) -> Tokenizer:
    """BPE over characters that falls back on bytes, as of Llama 2 and Gemma."""
    vocabulary = {**BYTE_TOKENS, "<unk>": 256, "▁": 257, "a": 258, "▁▁": 259, "▁a": 260}
    merges = [("▁", "▁"), ("▁", "a")]
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer(models.BPE(vocabulary, merges, **{**options, **more}), normalizer)


def unigram(byte_fallback: bool) -> Tokenizer:
    scores = [("<unk>", -9.0), ("▁", -2.0), ("a", -2.0), ("▁a", -1.0), *((token, -5.0) for token in BYTE_TOKENS)]
    return tokenizer(models.Unigram(scores, 0, byte_fallback), None, pre_tokenizers.Metaspace())


def forms(*names: str) -> Any:
    return normalizers.Sequence([getattr(normalizers, name)() for name in names])


def words(unk_token: str = "<unk>", fuse_unk: bool = False, splits: Any = None) -> Tokenizer:
    model = models.BPE({"<unk>": 0, "a": 1, "aa": 2}, [("a", "a")], unk_token=unk_token, fuse_unk=fuse_unk)
    return tokenizer(model, None, splits)


BOUNDED = {
    "bytes": of_bytes(),
    "runs of spaces": of_bytes(None, AddedToken(SPACES, normalized=False)),
    "a token of normalised text": of_bytes(forms("NFKC"), AddedToken("ﬁve and é", normalized=True)),
    **{form: of_single_bytes(forms(form)) for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")},
    "form and case": of_single_bytes(forms("NFC", "Lowercase")),
    "a token that takes spaces": of_bytes(None, AddedToken("<x>", lstrip=True, rstrip=True, normalized=False)),
    "digits apart": of_bytes(splits=pre_tokenizers.Digits(individual_digits=True)),
    "words apart": of_bytes(splits=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "pieces": of_pieces(),
    "unigram": unigram(True),
    "a token for each unknown character": words(),
}
UNBOUNDED = {
    "spaces removed": of_bytes(splits=pre_tokenizers.Split(" ", "removed")),
    "words only": words(splits=pre_tokenizers.Whitespace()),
    "stripped": of_bytes(normalizers.Strip()),
    "accents": of_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "replaced by less": of_bytes(normalizers.Replace("aa", "a")),
    "replaced by pattern": of_bytes(normalizers.Replace(Regex(" +"), " ")),
    "form after another text": of_bytes(normalizers.Sequence([normalizers.Replace("a", "e\u0301"), forms("NFC")])),
    "unknown characters fused": words(fuse_unk=True),
    "unigram's unknown": unigram(False),
    "words": tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"), None, pre_tokenizers.WhitespaceSplit()),
    "word pieces": tokenizer(models.WordPiece({"<unk>": 0, "a": 1, "##a": 2}, unk_token="<unk>")),
    "a normalised token that takes spaces": of_bytes(None, AddedToken("<x>", lstrip=True, normalized=True)),
}
SIGNS = [
    "a",
    "the ",
    " ",
    SPACES,
    "<x>",
    "7",
    "é",
    "e\u0301",
    "\u212a",
    "\ufb01ve",
    "\ufdfa",
    "한",
    "\u1112\u1161\u11ab",
]
SIGNS += ["\u03c9\u0313\u0300\u0345", "\U0001f600", "İ", "▁", "\n", "\0"]
texts = st.lists(st.sampled_from(SIGNS) | st.text(max_size=3), min_size=1, max_size=12).map("".join)


def exceeds(encoder: Tokenizer, text: str, num_tokens: int) -> bool:
    return LeastTokens(encoder).exceed(text, num_tokens, str)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60, deadline=None)
@given(text=texts, times=st.sampled_from([1, 7, 40]))
@example(text="<x>" + SPACES, times=1)
@example(text=SPACES, times=40)
@example(text="ﬁve and é", times=40)
@example(text="\u03c9\u0313\u0300\u0345", times=40)
def test_no_text_that_fits_is_refused(name: str, text: str, times: int) -> None:
    encoder = BOUNDED[name]
    text *= times
    num_tokens = len(encoder.encode(text, add_special_tokens=False).ids)
    assert not exceeds(encoder, text, num_tokens)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_of_many_times_the_context_is_refused(name: str) -> None:
    assert exceeds(BOUNDED[name], "the cat " * 1000, 10)
    assert exceeds(BOUNDED[name], "é한" * 5000, 10)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_said_where_a_text_may_leave_no_tokens(name: str) -> None:
    assert not exceeds(UNBOUNDED[name], "the cat " * 1000, 10)


def test_a_token_that_takes_spaces_leaves_its_texts_alone() -> None:
    encoder = BOUNDED["a token that takes spaces"]
    text = "<x>" + " " * 1000
    assert len(encoder.encode(text).ids) == 1
    assert not exceeds(encoder, text, 10)


def test_of_another_tokenizer_nothing_is_known() -> None:
    assert not LeastTokens(None).exceed("a" * 1000, 10, str)


def test_a_conversation_is_as_long_as_it_is_rendered() -> None:
    long, tokens = [{"role": "user", "content": "a" * 1000}], LeastTokens(BOUNDED["bytes"])
    assert tokens.exceed(long, 10, lambda messages: str(messages[0]["content"]))
    assert not tokens.exceed(long, 10, lambda messages: "only this")  # of a template that leaves messages out
    assert not tokens.exceed(long, 10, lambda messages: messages[1]["content"])  # whose error comes with the tokens


def test_unicode_forms_make_one_character_of_four_at_most() -> None:
    every = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", character)) for character in every) == 4
