"""Kernels behind the engine's seam: one packed forward a step."""

from __future__ import annotations

import time

import torch

from vasuki.batch import Batch, StepResult
from vasuki.hf.inputs import build_inputs
from vasuki.hf.kv_cache import KVCache
from vasuki.hf.model import LoadedModel
from vasuki.hf.native import PagedKernel
from vasuki.hf.sampler import sample


class RaggedExecutor:
    """Runs batches on a model, over the KV cache whose blocks the scheduler hands out."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        want_logprobs: bool = False,
        kernel: PagedKernel | None = None,
    ) -> None:
        self.loaded = loaded
        self.cache = cache
        self.want_logprobs = want_logprobs
        self.kernel = kernel

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Compute every chunk, and the next token of those that reach their last known one."""
        started = time.perf_counter()
        step = build_inputs(batch, self.cache, self.loaded.device, self.kernel)
        logits = self.loaded.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.sample_positions,
            step=step,
        ).logits[0]
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        sampled = sample(logits, sequences, self.want_logprobs)
        eos = self.loaded.eos_token_ids
        stopped = [
            (token_id in eos and not sequence.request.sampling.ignore_eos)
            or self.loaded.tokenizer.meets_stop_string(sequence, token_id)
            for sequence, token_id in zip(sequences, sampled.token_ids, strict=True)
        ]
        return StepResult(sampled.token_ids, stopped, time.perf_counter() - started, logprobs=sampled.logprobs)
