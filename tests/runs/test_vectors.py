"""Vectors and labels: as transformers' own models give them, however a text is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from tiny_job import WORDS, write_tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.base.job_file import parse_job
from vasuki.commands.check import check_job
from vasuki.runs.run import run_job

ROWS = 10
TEXTS = [" ".join(WORDS[row % 7 : row % 7 + 3 + row]) for row in range(ROWS)]
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "pad_token_id": 2, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": 0.3, "query_pre_attn_scalar": 8, "sliding_window": 16,
}  # fmt: skip
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("words"))
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def made(tmp_path: Path, tokenizer_folder: Path) -> MakeModel:
    def make(kind: str, pooling: str = "", normalizes: bool = False, **settings: Any) -> Path:
        """A model of a class of transformers, with the files that sentence-transformers saves beside it."""
        folder = tmp_path / f"model-{kind}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tokenizer_folder, folder)
        families = sorted(("Llama", "Qwen3", "Mistral", "Gemma2", *ENCODERS), key=len, reverse=True)
        family = next(name for name in families if kind.startswith(name))
        torch.manual_seed(5)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        getattr(transformers, kind)(config).save_pretrained(folder)
        if pooling:
            (folder / "1_Pooling").mkdir()
            modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
            steps = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
            modules = [{"idx": i, "type": f"sentence_transformers.models.{step}"} for i, step in enumerate(steps)]
            (folder / "modules.json").write_text(json.dumps(modules))
        return folder

    return make


def job(model: Path, folder: Path, task: str, texts: list[str] = TEXTS, **sections: Any) -> JobConfig:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "in.parquet")
    tree: dict[str, Any] = {
        "task": task,
        "model": {"path": str(model)},
        "input": {"path": str(folder / "in.parquet"), "id": "id", "prompt": "{text}"},
        "output": {"path": str(folder / f"out-{len(list(folder.iterdir()))}")},
        "engine": {"chunk_tokens": 16},
        "kv": {"device_memory": 2**21},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return parse_job(tree)


def rows_of(config: JobConfig) -> list[dict[str, Any]]:
    run_job(config)
    found = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(found, key=lambda row: row["id"])


def vectors_of(model: Path, texts: list[str], pooling: str, normalizes: bool = False) -> np.ndarray:
    """By transformers alone."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            hidden = network(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0]
        vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
        vectors.append(torch.nn.functional.normalize(vector, dim=0) if normalizes else vector)
    return np.stack([vector.numpy() for vector in vectors])


@pytest.mark.parametrize("kind", ["LlamaModel", "MistralModel", "Qwen3ForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize(("pooling", "normalizes"), [("mean_tokens", True), ("lasttoken", False)])
def test_vectors_are_those_of_transformers(
    made: MakeModel, tmp_path: Path, kind: str, pooling: str, normalizes: bool
) -> None:
    model = made(kind, pooling, normalizes)
    rows = rows_of(job(model, tmp_path, "embed"))
    expected = vectors_of(model, TEXTS, pooling[:4], normalizes)
    assert np.array([row["embedding"] for row in rows]) == pytest.approx(expected, abs=1e-5)
    assert all(
        set(row) == {"id", "embedding", "finish_reason", "error", "prompt_tokens", "output_tokens"} for row in rows
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"chunk_tokens": 1}},
        {"engine": {"chunk_tokens": 5, "max_num_seqs": 2}},
        {"engine": {"replicas": 2}},
        {"kv": {"device_memory": 2**14, "block_tokens": 4}},
        {"engine": {"compile": "off"}},
    ],
    ids=str,
)
def test_they_are_the_same_however_they_are_computed(made: MakeModel, tmp_path: Path, changes: dict[str, Any]) -> None:
    model = made("LlamaModel", "mean_tokens", True)
    rows = rows_of(job(model, tmp_path, "embed", **changes))
    assert np.array([row["embedding"] for row in rows]) == pytest.approx(
        vectors_of(model, TEXTS, "mean", True), abs=1e-5
    )


def test_the_type_and_the_settings(made: MakeModel, tmp_path: Path) -> None:
    model = made("LlamaModel", "lasttoken")
    (model / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "find: ", "none": ""}, "default_prompt_name": None})
    )
    embed = {"pooling": "mean", "normalize": True, "dimensions": 8, "dtype": "float16", "prompt_name": "query"}
    config = job(model, tmp_path, "embed", embed=embed)
    rows = rows_of(config)
    [part] = Path(config.output.path).glob("*.parquet")
    assert pq.read_schema(part).field("embedding").type == pa.list_(pa.float16(), 8)
    cut = vectors_of(model, [f"find: {text}" for text in TEXTS], "mean")[:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    assert np.array([row["embedding"] for row in rows], np.float32) == pytest.approx(expected, abs=1e-3)


ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {"max_position_embeddings": 131, "pad_token_id": 2}, "Electra": {"embedding_size": 32},
    "XLMRoberta": {"max_position_embeddings": 131, "pad_token_id": 2}, "MPNet": {"max_position_embeddings": 131},
    "ModernBert": {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1},
    "EuroBert": {}, "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Albert": {"embedding_size": 16}, "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}  # fmt: skip


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_encoders(made: MakeModel, tmp_path: Path, family: str, pooling: str) -> None:
    model = made(f"{family}Model", pooling, True, **ENCODERS[family])
    texts = [*TEXTS, " ".join(WORDS * 3), "a"]
    rows = rows_of(job(model, tmp_path, "embed", texts))
    expected = vectors_of(model, texts, "mean" if pooling == "mean_tokens" else "cls", True)
    assert np.array([row["embedding"] for row in rows]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert", "DistilBert"])
def test_labels_of_encoders(made: MakeModel, tmp_path: Path, family: str) -> None:
    model = made(f"{family}ForSequenceClassification", **ENCODERS[family], num_labels=3)
    rows = rows_of(job(model, tmp_path, "classify", output={"scores": True}))
    theirs = transformers.pipeline(
        "text-classification",
        AutoModelForSequenceClassification.from_pretrained(model),
        tokenizer=AutoTokenizer.from_pretrained(model),
    )
    for text, row in zip(TEXTS, rows, strict=True):
        expected = {each["label"]: each["score"] for each in theirs(text, top_k=None)}
        assert {each["label"]: each["score"] for each in row["scores"]} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes", [{"engine": {"chunk_tokens": 1}}, {"engine": {"replicas": 2}}, {"kv": {"device_memory": 2**12}}], ids=str
)
def test_an_encoders_texts_are_the_same_however_they_are_computed(
    made: MakeModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = made("BertModel", "mean_tokens", True)
    rows = rows_of(job(model, tmp_path, "embed", **changes))
    expected = vectors_of(model, TEXTS, "mean", True)
    assert np.array([row["embedding"] for row in rows]) == pytest.approx(expected, abs=1e-5)


def test_the_longest_text_of_an_encoder_fits(made: MakeModel, tmp_path: Path) -> None:
    model = made("RobertaModel", "mean_tokens", **ENCODERS["Roberta"])
    text = " ".join(WORDS * 20)
    [row] = rows_of(job(model, tmp_path, "embed", [text], input={"truncate": True}))
    assert row["prompt_tokens"] == 128
    tokenizer = AutoTokenizer.from_pretrained(model)
    cut = tokenizer.decode(tokenizer(text).input_ids[:128])
    assert np.array(row["embedding"]) == pytest.approx(vectors_of(model, [cut], "mean")[0], abs=1e-5)


def test_files_as_newer_sentence_transformers_write_them(made: MakeModel, tmp_path: Path) -> None:
    """By 6.2.0: one word for the pooling, and the longest text in the tokenizer's own file."""
    model = made("BertModel", "mean_tokens", True)
    pooling = {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 12}))
    texts = ["the cat", " ".join(WORDS * 4)]
    rows = rows_of(job(model, tmp_path, "embed", texts, input={"truncate": True}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    cut = [tokenizer.decode(tokenizer(text).input_ids[:12]) for text in texts]
    assert rows[1]["prompt_tokens"] == 12
    expected = vectors_of(model, cut, "cls", True)
    assert np.array([row["embedding"] for row in rows]) == pytest.approx(expected, abs=1e-5)

    kinds = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
    (model / "sentence_bert_config.json").write_text(json.dumps(kinds))
    with pytest.raises(JobFileError, match="texts go through its chat template"):
        run_job(job(model, tmp_path, "embed", texts))


@pytest.mark.sweep
@pytest.mark.parametrize("changes", [{}, {"engine": {"chunk_tokens": 1}}, {"engine": {"replicas": 2}}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"num_labels": 1},
        {"num_labels": 1, "problem_type": "regression"},
    ],
    ids=str,
)
def test_labels_are_those_of_the_pipeline(
    made: MakeModel, tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = made("LlamaForSequenceClassification", **settings)
    rows = rows_of(job(model, tmp_path, "classify", output={"scores": True}, **changes))
    theirs = transformers.pipeline(
        "text-classification",
        AutoModelForSequenceClassification.from_pretrained(model),
        tokenizer=AutoTokenizer.from_pretrained(model),
    )
    for text, row in zip(TEXTS, rows, strict=True):
        expected = theirs(text, top_k=None)
        best = max(expected, key=lambda each: each["score"])
        assert row["score"] == pytest.approx(best["score"], abs=1e-5)
        if settings["num_labels"] > 1:
            assert row["label"] == best["label"]
            found = {each["label"]: each["score"] for each in row["scores"]}
            assert found == pytest.approx({each["label"]: each["score"] for each in expected}, abs=1e-5)


def test_long_texts_are_cut_where_that_is_asked(
    made: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("LlamaModel", "lasttoken")
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    texts = ["the cat", " ".join(WORDS * 40)]
    right, failed = rows_of(job(model, tmp_path, "embed", texts, errors={"max_fraction": 1}))
    assert right["error"] is None
    assert "no room is left in the model's context of 12" in failed["error"]
    assert failed["embedding"] == [None] * 32, "a null would keep most versions of pyarrow from reading the file"
    rows = rows_of(job(model, tmp_path, "embed", texts, input={"truncate": True}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    cut = tokenizer.decode(tokenizer(texts[1]).input_ids[:12])
    assert np.array(rows[1]["embedding"]) == pytest.approx(vectors_of(model, [cut], "last")[0], abs=1e-5)
    assert rows[1]["prompt_tokens"] == 12
    assert "1 prompt cut to 12 tokens" in caplog.text


@pytest.mark.parametrize(
    ("kind", "task", "sections", "why"),
    [
        ("LlamaModel", "embed", {}, "embed.pooling: .* does not say how its tokens become a vector"),
        ("LlamaModel:cls_token", "embed", {}, "embed.pooling: the first token of .* knows nothing of those behind it"),
        ("LlamaModel:lasttoken", "embed", {"embed": {"dimensions": 33}}, "embed.dimensions: the model has 32 for each"),
        ("LlamaModel:lasttoken", "embed", {"embed": {"prompt_name": "q"}}, "the model has no prompt 'q'; it has none"),
        ("LlamaModel:lasttoken", "embed", {"output": {"scores": True}}, "output.scores: means nothing to task: embed"),
        ("LlamaModel:lasttoken", "embed", {"sampling": {"top_k": 3}}, "sampling.top_k: means nothing to task: embed"),
        ("LlamaForCausalLM", "classify", {}, "score.weight"),
        ("LlamaForCausalLM", "generate", {"input": {"truncate": True}}, "input.truncate: means nothing to task: gen"),
        ("LlamaModel:lasttoken", "embed", {"input": {"pair": "{text}"}}, "input.pair: means nothing to task: embed"),
        ("LlamaForCausalLM", "generate", {"embed": {"dimensions": 3}}, "embed: means nothing to task: generate"),
    ],
)
def test_what_cannot_be_is_refused(
    made: MakeModel, tmp_path: Path, kind: str, task: str, sections: dict[str, Any], why: str
) -> None:
    model = made(*kind.split(":"))
    for refuse in (check_job, run_job):
        with pytest.raises((JobFileError, ModelError), match=why):
            refuse(job(model, tmp_path, task, **sections))


PAIRED: dict[str, dict[str, Any]] = {name: ENCODERS[name] for name in ("Bert", "Roberta", "ModernBert", "Electra")}
PAIR = ("Bert", "Electra")  # whose tokens are told which text is theirs


def write_pair_tokenizer(folder: Path, tells: bool) -> None:
    """Make the tokenizer of a folder put special tokens around two texts, as that of BERT does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1", special_tokens=names
    )
    tokenizer.model_input_names = ["input_ids", *["token_type_ids"] * tells, "attention_mask"]
    tokenizer.save_pretrained(folder)


@pytest.fixture
def paired(made: MakeModel) -> Callable[..., Path]:
    def make(kind: str, **settings: Any) -> Path:
        family = kind.removesuffix("ForSequenceClassification")
        folder = made(kind, **ENCODERS.get(family, {}), **settings)
        write_pair_tokenizer(folder, family in PAIR)
        return folder

    return make


SECOND = [" ".join(WORDS[row % 5 : row % 5 + 2 + row % 6]) for row in range(ROWS)]


def of_pairs(model: Path, folder: Path, second: Sequence[str | None] = tuple(SECOND), **sections: Any) -> JobConfig:
    config = job(model, folder, "classify", **sections)
    pq.write_table(pa.table({"id": range(ROWS), "text": TEXTS, "other": list(second)}), folder / "in.parquet")
    return config.model_copy(update={"input": config.input.model_copy(update={"pair": "{other}"})})


def logits_of_pairs(model: Path, pairs: list[tuple[str, str]], **how: Any) -> np.ndarray:
    """By transformers alone."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForSequenceClassification.from_pretrained(model)
    with torch.no_grad():
        return np.stack([
            network.eval()(**tokenizer(*pair, return_tensors="pt", **how)).logits[0].numpy() for pair in pairs
        ])  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("family", [*PAIRED, "Llama"])
@pytest.mark.parametrize("changes", [{}, {"engine": {"chunk_tokens": 1}}, {"engine": {"replicas": 2}}], ids=str)
def test_pairs(paired: Callable[..., Path], tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = paired(f"{family}ForSequenceClassification", num_labels=3)
    rows = rows_of(of_pairs(model, tmp_path, output={"scores": True}, **changes))
    logits = logits_of_pairs(model, list(zip(TEXTS, SECOND, strict=True)))
    expected = torch.softmax(torch.tensor(logits), -1).numpy()
    found = np.array([[each["score"] for each in row["scores"]] for row in rows])
    assert found == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.01  # the texts matter


@pytest.mark.parametrize(
    ("named", "scale"),
    [
        (None, torch.sigmoid),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, torch.nn.Identity()),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
    ],
    ids=["none", "identity", "sigmoid"],
)
def test_a_cross_encoders_number_is_scaled_as_its_file_says(
    paired: Callable[..., Path], tmp_path: Path, named: dict[str, Any] | None, scale: Callable[[Any], Any]
) -> None:
    model = paired("BertForSequenceClassification", num_labels=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | (named or {})))
    rows = rows_of(of_pairs(model, tmp_path))
    expected = scale(torch.tensor(logits_of_pairs(model, list(zip(TEXTS, SECOND, strict=True)))))[:, 0].numpy()
    assert np.array([row["score"] for row in rows]) == pytest.approx(expected, abs=1e-5)


def test_of_pairs_that_are_too_long_the_longer_text_is_cut(
    paired: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = paired("BertForSequenceClassification", num_labels=1)
    second = [" ".join(WORDS * 40), None, *SECOND[2:]]
    rows = rows_of(of_pairs(model, tmp_path, second, errors={"max_fraction": 1}))
    assert [row["error"] for row in rows[:3]] == [
        "prompt has 845 tokens: no room is left in the model's context of 128", "column 'other' is null", None
    ]  # fmt: skip
    rows = rows_of(of_pairs(model, tmp_path, second, input={"truncate": True}, errors={"max_fraction": 1}))
    how = {"truncation": "longest_first", "max_length": 128}
    [expected] = torch.sigmoid(torch.tensor(logits_of_pairs(model, [(TEXTS[0], " ".join(WORDS * 40))], **how)))
    assert rows[0]["score"] == pytest.approx(float(expected), abs=1e-5)
    assert "1 prompt cut to 128 tokens" in caplog.text
