"""`vasuki check`: a job's file, input, model and output folder, looked at before anything runs."""

from __future__ import annotations

import logging

from vasuki.base.config import JobConfig
from vasuki.base.urls import without_keys
from vasuki.engine.policy import runnable_policy
from vasuki.io.input.requests import RequestStream
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.typed import reader_of
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import BACKENDS
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.observers.progress import busy_if_slow
from vasuki.runs.opening import read_table
from vasuki.runs.placement import placed_on_shares, plan_for, refuse_backend, shares_here
from vasuki.runs.workload import PLANNED_REQUESTS, first_rows, lengths_of, model_tokenizer, shape_of

log = logging.getLogger(__name__)


def check_job(config: JobConfig) -> dict[str, str | int]:
    """Look at everything that a run would need, without changing anything.

    Raises:
        VasukiError: the same that the run would raise, unless only running the model shows it.
    """
    from vasuki.hf.loading.load_model import check_model  # torch and transformers take seconds to import

    runnable_policy(config.engine.policy, config.engine.attention)
    refuse_ignored(config)
    shares_here(config)
    table = read_table(config)
    OutputFolder.check(
        config.output.path,
        num_rows=table.num_rows,
        config_hash=config.config_hash(model_fingerprint(config.model)),
        input_fingerprint=table.fingerprint,
        reuses=config.input.unchanged == "reuse",
    )
    reader = reader_of(config)
    if reader is not None and reader.as_text:
        log.warning("no type holds all that these may be, so they become text: %s", ", ".join(reader.as_text))
    shape = shape_of(config)
    refuse_backend(config, shape)
    check_model(config.model, config.engine.device, config.engine.attention, config.task)
    placement = placed_on_shares(config, shape)
    tokenizer, context = model_tokenizer(config), placement.shape.max_context_tokens
    with (
        busy_if_slow("reading rows to plan from") as far,
        RequestStream(table, config, tokenizer, max_context_tokens=context, vocab_size=shape.vocab_size) as requests,
    ):
        first = list(first_rows(requests, PLANNED_REQUESTS, far, table.num_rows))
    if config.output.reasoning:
        tokenizer.refuse_without_reasoning()
    plan_for(lengths_of(first, table.num_rows), placement.plan)
    return {
        "job": config.name,
        "rows": table.num_rows,
        "model": shape.name,
        "parameters": shape.num_parameters,
        "kv_bytes_per_token": placement.shape.kv_bytes_per_token,
        "backend": BACKENDS[placement.shape.backend],
        "output": without_keys(config.output.path),
        "columns": "; ".join(f"{field.name}: {field.type}" for field in answer_schema(config, table)),
        "first_prompt": next((each.error or tokenizer.text_of(each.prompt_token_ids.tolist()) for each in first), ""),
    }
