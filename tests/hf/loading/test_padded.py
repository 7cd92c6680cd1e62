"""`auto` takes the ragged backend, else the padded one, else it says what neither can do."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import NoTokenizer, random_model

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.hf.loading.load_model import load_model
from vasuki.hf.loading.prepare import prepare_padded

TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "dates"
SMALL: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


def _saved(model: Any, folder: Path) -> ModelConfig:
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("token*"):
        shutil.copy(file, folder)
    return ModelConfig(path=str(folder))


def test_the_backend_is_the_fastest_that_serves_the_model(tmp_path: Path) -> None:
    llama, falcon = (_saved(random_model.__wrapped__(name), tmp_path / name) for name in ("llama", "falcon"))
    assert load_model(llama, "cpu").backend == "ragged"
    assert load_model(llama, "cpu", backend="padded").backend == "padded"
    assert load_model(falcon, "cpu").backend == "padded"
    with pytest.raises(ModelError, match="the ragged backend cannot serve"):
        load_model(falcon, "cpu", backend="ragged")


def test_what_neither_backend_serves_is_refused_with_both_reasons(tmp_path: Path) -> None:
    bert = transformers.AutoModelForCausalLM.from_config(transformers.BertConfig(**SMALL, intermediate_size=32))
    with pytest.raises(ModelError, match=r"the ragged backend cannot .*; the padded backend cannot .* behind them"):
        load_model(_saved(bert, tmp_path), "cpu")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.BertConfig(**SMALL, intermediate_size=32), "attend to those behind them"),
        (
            transformers.ReformerConfig(
                vocab_size=64, hidden_size=32, is_decoder=True, axial_pos_embds_dim=[16, 16], axial_pos_shape=[16, 16]
            ),
            "hashes tokens at random",
        ),
        (
            transformers.CpmAntConfig(
                vocab_size=64, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=32, num_hidden_layers=2
            ),
            "without it its tokens are others",
        ),
    ],
)
def test_a_model_that_no_call_serves_is_refused(config: Any, words: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=words):
        prepare_padded(model, NoTokenizer(), model.generation_config, "it")


def test_a_model_whose_tokens_depend_on_padding_is_computed_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model.__wrapped__("llama")
    whole = type(model).forward

    @functools.wraps(whole)
    def forward(self: Any, **arguments: Any) -> Any:
        return whole(self, **{**arguments, "attention_mask": None})

    monkeypatch.setattr(type(model), "forward", forward)
    assert prepare_padded(model, NoTokenizer(), model.generation_config, "it").backend == "alone"
