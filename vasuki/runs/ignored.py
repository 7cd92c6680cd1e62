"""Keys that a job sets and its policy never reads: refused by name, rather than set aside in silence."""

from __future__ import annotations

from collections.abc import Iterable

from vasuki.base.config import ArrivalsConfig, JobConfig, OutputConfig, SamplingConfig
from vasuki.base.errors import JobFileError
from vasuki.engine.policy import Policy, find_policy


def refuse_ignored(config: JobConfig, policies: Iterable[str] = ()) -> None:
    """Raises JobFileError for a key that a policy would have to ignore, or all of them where it is one's own.

    Args:
        config: the job.
        policies: by which it is to run; the job's own where there are none.
    """
    if constraint := config.constraint:
        constraint.refuse()
    _refuse_of_other_tasks(config)
    wanted = [find_policy(name) for name in policies or [config.engine.policy]]
    usual = ArrivalsConfig()
    set_here = [key for key in ArrivalsConfig.model_fields if getattr(config.arrivals, key) != getattr(usual, key)]
    if set_here and not any(policy.gathers for policy in wanted):
        raise JobFileError(
            f"arrivals.{set_here[0]}: {wanted[0].name} gathers no rows that arrive; leave it out, or set "
            "engine.policy to prefill-packing"
        )
    goes_deep = any(policy.goes_deep for policy in wanted) and config.kv.offload == "auto"
    if config.kv.conditions != "corrected" and not goes_deep and config.kv.offload != "by_batch":
        raise JobFileError(
            "kv.conditions: layers move batch by batch with kv.offload: by_batch alone, and with engine.policy: "
            "vasuki-paper; leave it out"
        )
    for policy in wanted:
        if (why := _step_of(policy)) and config.engine.chunk_tokens != "auto":
            raise JobFileError(f"engine.chunk_tokens: {policy.name} {why}; leave it out")
        if policy.pads and config.engine.packing == "always":
            raise JobFileError(f"engine.packing: {policy.name} packs no prompts; leave it out")


def _refuse_of_other_tasks(config: JobConfig) -> None:
    """Raises JobFileError for keys that mean nothing to the job's task."""
    usual = JobConfig.model_construct(model=config.model, input=config.input, output=config.output)
    if config.reads and (config.engine.attention == "padded" or find_policy(config.engine.policy).pads):
        key = "engine.attention" if config.engine.attention == "padded" else "engine.policy"
        raise JobFileError(f"{key}: texts are read in packed steps; leave it out")
    of_tasks = {
        "input.continuation": (bool(config.input.continuation), ["score"]),
        "input.pair": (bool(config.input.pair), ["classify"]),
        "score": (config.score != usual.score, ["score"]),
        "embed": (config.embed != usual.embed, ["embed"]),
        "output.scores": (config.output.scores, ["classify"]),
        "input.truncate": (config.input.truncate, ["score", "embed", "classify"]),
        "output.choice_probabilities": (config.output.choice_probabilities, ["generate"]),
    }
    for key, (is_set, tasks) in of_tasks.items():
        if is_set and config.task not in tasks:
            raise JobFileError(f"{key}: means nothing to task: {config.task}; leave it out")
    if config.output.choice_probabilities and not config.sampling.choices:
        raise JobFileError("output.choice_probabilities: there are no sampling.choices")
    if config.task == "generate":
        return
    if config.input.format == "openai-batch":
        raise JobFileError(f"input.format: rows of openai-batch want answers, which task: {config.task} gives none of")
    sampling = [
        key for key in SamplingConfig.model_fields if getattr(config.sampling, key) != getattr(usual.sampling, key)
    ]
    output = [
        key
        for key, field in OutputConfig.model_fields.items()
        if key not in ("path", "columns", "scores") and getattr(config.output, key) != field.default
    ]
    named = [*(f"sampling.{key}" for key in sampling), *(f"output.{key}" for key in output)]
    named += ["answer"] * bool(config.answer) + ["errors.retries"] * bool(config.errors.retries)
    named += ["plan.output_length"] * (config.plan.output_length != usual.plan.output_length)
    if named:
        raise JobFileError(f"{named[0]}: means nothing to task: {config.task}, which writes no text; leave it out")


def _step_of(policy: Policy) -> str:
    """What a step of a policy holds that asks for no token budget; empty where it does."""
    if not policy.refill:
        return "starts its batch as a whole, which engine.max_num_seqs limits"
    if policy.one_prompt and not policy.chunked:
        return "computes one whole prompt in a step"
    return ""
