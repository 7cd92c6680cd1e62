"""`vasuki check`: a job's file, input, model and output folder, looked at before anything runs."""

from __future__ import annotations

from vasuki.base.config import JobConfig
from vasuki.base.urls import without_keys
from vasuki.engine.policy import runnable_policy
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import InputTable
from vasuki.io.output.output_folder import OutputFolder
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import BACKENDS, ModelShape
from vasuki.runs.opening import read_table
from vasuki.runs.placement import placed_here
from vasuki.runs.workload import model_tokenizer, shape_of


def check_job(config: JobConfig) -> dict[str, str | int]:
    """Look at everything that a run would need, without changing anything.

    Raises:
        VasukiError: the same that the run would raise, as far as it can be known without loading weights.
    """
    runnable_policy(config.engine.policy, config.engine.attention)
    table = read_table(config)
    OutputFolder.check(
        config.output.path,
        num_rows=table.num_rows,
        config_hash=config.config_hash(model_fingerprint(config.model)),
        input_fingerprint=table.fingerprint,
    )
    shape = placed_here(config, shape_of(config)).shape
    first_prompt = _first_prompt(config, table, shape)
    if config.model.path:
        from vasuki.hf.loading.load_model import check_model  # torch and transformers take seconds to import

        check_model(config.model, config.engine.device, config.engine.attention)
    return {
        "job": config.name,
        "rows": table.num_rows,
        "model": shape.name,
        "parameters": shape.num_parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "backend": BACKENDS[shape.way],
        "output": without_keys(config.output.path),
        "first_prompt": first_prompt,
    }


def _first_prompt(config: JobConfig, table: InputTable, shape: ModelShape) -> str:
    """The first row's prompt as the model will read it, special tokens included, or why there is none."""
    if not config.model.path:
        return "not known: model.shape comes without a tokenizer"
    tokenizer = model_tokenizer(config)
    with RequestStream(
        table, config, tokenizer, max_context_tokens=shape.max_context_tokens, vocab_size=shape.vocab_size
    ) as requests:
        first = next(requests)
    return first.error or tokenizer.text_of(first.prompt_token_ids.tolist())
