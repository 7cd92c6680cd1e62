"""Texts side by side: as each comes out alone by the model's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from vasuki.hf.encoders.side_by_side import NAME, SideBySide

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 131, "pad_token_id": 2, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1,
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "XLMRoberta": {}, "Electra": {"embedding_size": 16}, "Albert": {"embedding_size": 16},
    "EuroBert": {}, "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2},
}  # fmt: skip
NOT_SERVED: dict[str, dict[str, Any]] = {
    "MPNet": {}, "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}  # fmt: skip


def made(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{family}Model")(config).eval()


@pytest.mark.parametrize("family", SERVED)
@torch.inference_mode()
def test_texts_are_as_each_alone(family: str) -> None:
    model = made(family, SERVED[family])
    texts = [torch.arange(3, 3 + length) % 90 for length in (1, 40, 7, 100, 2)]
    texts = [torch.where(text < 3, 5, text) for text in texts]
    expected = [model(input_ids=text.unsqueeze(0)).last_hidden_state[0] for text in texts]
    own = SideBySide.of(model)
    assert own is not None
    assert model.config._attn_implementation == NAME
    for found, alone in zip(own(texts), expected, strict=True):
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by transformers 5.17
@pytest.mark.parametrize("family", NOT_SERVED)
def test_others_keep_their_attention(family: str) -> None:
    model = made(family, NOT_SERVED[family])
    usual = model.config._attn_implementation
    assert SideBySide.of(model) is None
    assert model.config._attn_implementation == usual
