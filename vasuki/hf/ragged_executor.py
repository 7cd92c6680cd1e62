"""Kernels behind the engine's seam: one packed forward a step, or padded ones for a model that knows no other."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.base.errors import OutOfMemory
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.sequence import Sequence, TokenLogprob
from vasuki.engine.settings import EngineSettings
from vasuki.engine.shaping import Shaping, Similar, shaping_of
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.attention.inputs import LaidOut, LastTokens, Mover, StepInputs, lay_out
from vasuki.hf.constraints import Constraints
from vasuki.hf.cuda.recordable import can_record
from vasuki.hf.cuda.step_graphs import RECORD_AFTER, Answers, StepGraphs, record_on_device
from vasuki.hf.device.device import give_back
from vasuki.hf.encoders.encoder import Encoder
from vasuki.hf.kernels.transfer import ToHost, to_device
from vasuki.hf.kv.depth_mover import Arena, DepthMover
from vasuki.hf.kv.kv_cache import KVCache, KVLayout, PoolTooLarge
from vasuki.hf.kv.kv_mover import KVMover, StreamedLayers, copy_engine
from vasuki.hf.last_layer import sampled_mlp
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.triton_kernels import drawing_kernel
from vasuki.hf.padded.forward import Alone, Forward, Padded
from vasuki.hf.processors import Processors
from vasuki.hf.reading import MOST_LOGITS, Readings, ReadPositions
from vasuki.hf.recurrent.states import StateCache
from vasuki.hf.sampler import NO_TOKEN, Draw, Sampled, draws, likeliest, logprobs_of, sample
from vasuki.machines.cost_model import LEAST_RECORDED_TOKENS, CostModel
from vasuki.machines.memory_budget import recorded_context

log = logging.getLogger(__name__)

_NO_NUMBERS = {
    False: "the model's logits are no numbers",
    True: "the model's logits are no numbers: float16 overflows; set model.dtype to bfloat16 or float32",
}
_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given."""

    executor: RaggedExecutor
    sequences: list[Sequence]  # those that it samples for
    sampled: ToHost  # token ids, and log probabilities if asked for, see `Sampled`
    started_s: float

    def wait(self) -> StepResult:
        """What it sampled, once the device is done. Steps are waited for in the order in which they were launched."""
        return self.executor.collect(self)


class RaggedExecutor:
    """Runs batches on a model, over the KV cache whose blocks the scheduler hands out.

    Args:
        loaded: the model.
        cache: its KV memory.
        want_logprobs: also say how likely each token was.
        attention: the kernels that attend.
        offload: moves KV while layers compute.
        states: what recurrent layers keep of the rows, where there are such.
        shaping: of padded calls.
        draw: a kernel that draws tokens, where there is one.

    Attributes:
        alternatives: how many of the likeliest tokens are told with each one; None where not even its own
            log-probability is kept.
        most_ahead: steps that may be under way while another one is prepared.
        settings: that it has memory for.
    """

    settings: EngineSettings  # set by build_executor

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        want_logprobs: bool = False,
        attention: AttentionKernels | None = None,
        offload: Mover | None = None,
        states: StateCache | None = None,
        shaping: Shaping | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.loaded = loaded
        self.cache = cache
        self.want_logprobs = want_logprobs
        self.attention = attention or AttentionKernels()
        self.offload = offload
        self.states = states
        self.draw = draw
        self.alternatives: int | None = None
        self.readings = Readings()  # of rows
        self.processors = Processors(loaded.eos_token_ids, lambda text: loaded.tokenizer.encode_plain(text))
        self.constraints: Constraints | None = None  # of answers, from the first row that has one
        self.unpacked = _unpacked(loaded, cache, offload, shaping)
        # Launching returns before the device is done. Tokens that are not known yet are filled into packed steps alone.
        self.most_ahead = int(loaded.device.type == "cuda" and self.unpacked is None)
        self.most_tokens = sys.maxsize  # that are computed at once: fewer after memory has run out
        self.graphs: StepGraphs | None = None  # recorded steps
        self.waited_s = 0.0  # in which the host had nothing to do but wait for the device
        self._last_mlp = None if self.unpacked else sampled_mlp(loaded.model, loaded.kv_layout.num_layers)
        self._last_tokens: LastTokens | None = None
        self._is_awaited = False  # the last step: what comes behind it depends on its tokens by more than the model
        self._ended_s = 0.0  # when the last step that was waited for was over
        self._bytes_seen = 0  # moved by the offload so far
        self._copies_seen = (0.0, 0.0)  # (exposed_s, busy_s) of the copy engine so far

    @property
    def steps_ahead(self) -> int:
        """See `engine.loop.Executor`."""
        return 0 if self._is_awaited else self.most_ahead

    @property
    def replayed_steps(self) -> int:
        """Steps so far that were not launched kernel by kernel."""
        return self.graphs.replayed_steps if self.graphs is not None else 0

    def execute(self, batch: Batch) -> StepResult:
        """Launch and wait."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Compute every chunk, and the next token of those that reach their last known one.

        Raises OutOfMemory where memory runs out and a smaller step would not help.
        """
        started_s = time.perf_counter()
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        self._is_awaited = _edit_logits(sequences)
        if self.offload is not None:
            try:
                self.offload.begin_step(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise self._out_of_memory(batch) from None
        sampled = self._compute(batch)
        if self.most_ahead:
            self._last_tokens = LastTokens(sequences, sampled.token_ids)
        return LaunchedStep(self, sequences, ToHost(*sampled.tensors), started_s)

    def _compute(self, batch: Batch) -> Sampled:
        """Compute a batch in as many pieces as memory asks for, one after another."""
        pieces = [batch] if batch.chunks else []
        sampled: list[Sampled] = []
        while pieces:
            piece = pieces.pop()
            most_tokens = min(self.most_tokens, self._most_read(piece))
            if piece.num_tokens <= most_tokens:
                if (done := self._try(piece)) is not None:
                    sampled.append(done)
                    continue
                if piece.num_tokens == 1 or not self._can_repeat:
                    raise self._out_of_memory(piece)
                self.most_tokens = most_tokens = piece.num_tokens // 2
                log.warning(
                    "%s memory ran out in a step of %d tokens: from now on at most %d are computed at once",
                    self.loaded.device.type,
                    piece.num_tokens,
                    self.most_tokens,
                )
            pieces += reversed(piece.split(most_tokens))
        return Sampled.together(sampled)

    def _most_read(self, batch: Batch) -> int:
        """How many tokens of a batch may be computed at once, so that the logits fit that are read."""
        if not any(chunk.sequence.request.num_read for chunk in batch.prefills):
            return sys.maxsize
        most = max(1, MOST_LOGITS // self.loaded.vocab_size)
        return most if len(ReadPositions.of(batch).places) > most else sys.maxsize

    @property
    def _can_repeat(self) -> bool:
        """Whether what was computed in part may be computed again: keys and values are then written once more, but
        recurrent states would go on twice, and streamed layers are on their way home."""
        return not self.states and not self.cache.moves

    def _try(self, batch: Batch) -> Sampled | None:
        """Compute a batch at once; None where memory runs out."""
        try:
            return self._sampled(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        give_back()  # not before the exception is gone, which holds on to tensors
        return None

    def _out_of_memory(self, batch: Batch) -> OutOfMemory:
        return OutOfMemory(
            f"{self.loaded.device.type} memory ran out in a step of {batch.num_tokens} tokens; "
            "lower kv.device_memory or engine.chunk_tokens"
        )

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step. Raises ModelError where somebody has written into the weights meanwhile."""
        asked_s = time.perf_counter()
        token_ids, logprobs, *likely, read = [tensor.tolist() for tensor in step.sampled.wait()]
        self.waited_s += time.perf_counter() - asked_s
        if self.loaded.mapped is not None:
            self.loaded.mapped.refuse_changed()
        stopped = list(map(self._stops, step.sequences, token_ids))
        if self.constraints is not None and (broken := self.constraints.broken):
            pairs = zip(step.sequences, token_ids, strict=True)
            token_ids = [NO_TOKEN if row.request.key in broken else token_id for row, token_id in pairs]
            broken.clear()
        problem = self._problem if NO_TOKEN in token_ids else ""
        exposed_s, hidden_s = self._copy_times()
        moved = self._copied_bytes()
        now_s = time.perf_counter()
        elapsed_s = now_s - max(step.started_s, self._ended_s)  # from the end of the step before, if that came later
        self._ended_s = now_s
        details = self._details(logprobs, *likely) if self.alternatives is not None else []
        values = [each if row.request.num_read else None for row, each in zip(step.sequences, read, strict=False)]
        copies = exposed_s, hidden_s, moved
        return StepResult(
            token_ids, stopped, elapsed_s, logprobs, *copies, problem=problem, token_logprobs=details, values=values
        )

    def _details(self, logprobs: list[float], ids: list[list[int]], likely: list[list[float]]) -> list[TokenLogprob]:
        if not ids:
            return [TokenLogprob(logprob) for logprob in logprobs]
        rows = zip(logprobs, ids, likely, strict=True)
        return [TokenLogprob(logprob, tuple(zip(*some, strict=True))) for logprob, *some in rows]

    def _sampled(self, batch: Batch) -> Sampled:
        if any(chunk.sequence.request.num_read for chunk in batch.prefills):
            return self._read(batch)
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        edits = _edit_logits(sequences)
        if self.graphs is None:
            logits = self._logits(batch)
        elif edits or self.alternatives or any(map(draws, sequences)):
            [logits] = self.graphs(self._laid_out(batch), self._all_logits)
        else:
            _, *sampled = self.graphs(self._laid_out(batch), self._likeliest)
            return Sampled(*(each.clone() for each in sampled))  # what a graph leaves is overwritten by the next
        return self._chosen(logits, sequences)

    def _read(self, batch: Batch) -> Sampled:
        """The step of a batch in which some rows are read. Rows that are sampled get a token, as ever."""
        if isinstance(self.unpacked, Encoder):
            values = self.unpacked(batch).double()
            token_ids = torch.zeros(len(values), dtype=torch.int64, device=values.device)
            return Sampled(torch.where(torch.isfinite(values).all(dim=-1), token_ids, NO_TOKEN), values=values)
        assert self.unpacked is None, "rows are read in packed steps"
        positions = ReadPositions.of(batch)
        count = len(positions.places)
        sampling = [(index, chunk.sequence) for index, chunk in enumerate(batch.chunks) if chunk.samples]
        drawn = [row for row, (_, sequence) in enumerate(sampling) if not sequence.request.num_read]
        lasts = np.cumsum([chunk.num_tokens for chunk in batch.chunks]) - 1
        wanted = np.concatenate([positions.places, lasts[[sampling[row][0] for row in drawn]]])
        logits = self.forward(self._laid_out(batch, wanted).on_device())
        ended = self.readings.add(batch, positions, logits[:count])
        [rows] = to_device(logits.device, np.array(drawn, np.int64))
        width = next((len(each) for each in ended.values()), 1)
        values = torch.zeros(len(sampling), width, dtype=torch.float64, device=logits.device)
        for row, (index, _) in enumerate(sampling):
            if index in ended:
                values[row] = ended[index]
        if drawn:
            sampled = self._chosen(logits[count:], [sampling[row][1] for row in drawn]).among(rows, values)
        else:
            sampled = Sampled(torch.zeros(len(sampling), dtype=torch.int64, device=logits.device), values=values)
        is_number = torch.isfinite(values).all(dim=-1)
        return replace(sampled, token_ids=torch.where(is_number, sampled.token_ids, NO_TOKEN))

    def _chosen(self, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
        """The next token of each sequence; the logits may be overwritten."""
        unedited, edits = logits, _edit_logits(sequences)
        if edits:
            logits = self._edited(logits.clone() if self.want_logprobs else logits, sequences)
        return sample(logits, sequences, self.want_logprobs, self.draw, unedited, self.alternatives or 0)

    def _edited(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Logits as the rows' settings have them."""
        logits = self.processors.change(logits, sequences)
        if any(sequence.request.sampling.constraint for sequence in sequences):
            self.be_constrained()
        return self.constraints.mask(logits, sequences) if self.constraints is not None else logits

    def be_constrained(self) -> None:
        """Make ready for rows whose answers have to look like something. Raises ModelError where they cannot."""
        if self.constraints is None:
            loaded = self.loaded
            self.constraints = Constraints(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)

    @property
    def _problem(self) -> str:
        """Why rows of the last step have no token."""
        if self.constraints is not None and (why := self.constraints.problem):
            return why
        return _NO_NUMBERS[self.loaded.dtype == torch.float16]

    def _logits(self, batch: Batch) -> torch.Tensor:
        """`[num_samples, vocab_size]`."""
        if self.unpacked is not None:
            return self.unpacked(batch)
        return self.forward(self._laid_out(batch).on_device())

    def _laid_out(self, batch: Batch, wanted: Ints | None = None) -> LaidOut:
        moving = None
        if self.offload is not None:
            self.offload.begin_call(batch.chunks)
            moving = None if self.offload.is_quiet else self.offload
        passing = self.states.passing(batch) if self.states else ()
        return lay_out(batch, self.cache, self.attention, moving, self._last_tokens, wanted, passing)

    def _all_logits(self, step: StepInputs) -> Answers:
        return (self.forward(step),)

    def _likeliest(self, step: StepInputs) -> Answers:
        """The largest logit of each sample, its token, and, if asked for, how likely that was: so a graph need not
        leave all logits."""
        logits = self.forward(step)
        token_ids, largest = likeliest(logits)
        return (largest, token_ids, logprobs_of(logits, token_ids)) if self.want_logprobs else (largest, token_ids)

    def forward(self, step: StepInputs) -> torch.Tensor:
        """One packed forward: `[num_samples, vocab_size]`."""
        same = self.loaded.same_anywhere
        with (
            self._last_mlp.only(step.sample_positions) if self._last_mlp else nullcontext(),
            same.mode() if same else nullcontext(),
            self.states.within(step.groups) if self.states else nullcontext(),
        ):
            output = self.loaded.model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=step.sample_positions,
                step=step,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        """Whether a row ends with this token."""
        stops = self._is_last(sequence, token_id)
        if stops and self.constraints is not None:
            self.constraints.forget(sequence)
        return stops

    def _is_last(self, sequence: Sequence, token_id: int) -> bool:
        if token_id == NO_TOKEN or sequence.request.num_read:
            return True
        if self.constraints is not None and self.constraints.ends(sequence, token_id):
            return True
        sampling = sequence.request.sampling
        if token_id in self.loaded.eos_token_ids and not sampling.ignore_eos:
            return True
        if token_id in sampling.stop_token_ids:
            return True
        return self.loaded.tokenizer.meets_stop_string(sequence, token_id)

    def _copied_bytes(self) -> int:
        """KV moved since the last step."""
        before, self._bytes_seen = self._bytes_seen, self.offload.copied_bytes if self.offload else 0
        return self._bytes_seen - before

    def _copy_times(self) -> tuple[float, float]:
        """Copy seconds since the last step: those that compute waited for, and those that ran behind it."""
        engine = self.loaded.copies if self.offload is None else self.offload.engine
        if engine is None:
            return 0.0, 0.0
        engine.settle()
        exposed_s, busy_s = engine.exposed_s - self._copies_seen[0], engine.busy_s - self._copies_seen[1]
        self._copies_seen = (engine.exposed_s, engine.busy_s)
        return exposed_s, max(0.0, busy_s - exposed_s)


def _unpacked(loaded: LoadedModel, cache: KVCache, offload: Mover | None, shaping: Shaping | None) -> Forward | None:
    """How a model is computed that no packed step can be."""
    if loaded.backend == "ragged":
        return None
    assert not isinstance(offload, DepthMover), "layers pass one by one where rows are packed"
    if loaded.backend == "padded":
        return Padded(loaded.model, cache, offload, shaping)
    if loaded.encodes:
        return Encoder(loaded.model, loaded.encodes == "embed", loaded.side_by_side)
    return Alone(loaded.model, loaded.backend)


def _edit_logits(sequences: list[Sequence]) -> bool:
    return any(sequence.request.sampling.edits_logits for sequence in sequences)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Torch has no exception of its own for that on a CPU, nor where CUDA's libraries allocate
    by themselves."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def build_executor(
    loaded: LoadedModel,
    settings: EngineSettings,
    want_logprobs: bool = False,
    record_after: int = RECORD_AFTER,
    cost_model: CostModel | None = None,
    alternatives: int | None = None,
) -> RaggedExecutor:
    """An executor with the memory that the settings ask for, or with less where it runs out, on the device that the
    model is on.

    Args:
        loaded: the model.
        settings: memory, and what moves.
        want_logprobs: see `RaggedExecutor`.
        record_after: steps of a size before it is recorded, where they can be.
        alternatives: see `RaggedExecutor`.
        cost_model: of the model on this device; says which kernels attend, and whether prompts share padded rows.

    Raises OutOfMemory where there is no memory for a single block, JobFileError where the host pins no more.
    """
    layout, device, block_tokens = loaded.kv_layout, loaded.device, settings.block_tokens
    on_gpu = device.type == "cuda"
    host_blocks, streamed_layers = settings.offload.host_blocks, settings.offload.streamed_layers
    depth = settings.offload.depth
    offloads = host_blocks > 0 or streamed_layers > 0
    records = depth is None and can_record(loaded, block_tokens)
    # A state is of a row as it stands: it is at one place, and of no other row.
    assert not (loaded.recurrent and (offloads or depth or settings.policy.shares_prefixes))
    streamed = StreamedLayers.spread(layout.num_layers, streamed_layers)
    cache, states, settings = _device_memory(loaded, settings, int(records), streamed.buffer_of)
    offload: Mover | None = None
    if isinstance(cache, Arena):
        offload = DepthMover(cache, loaded.copies or copy_engine(device))
    elif offloads:
        host = None
        if host_blocks:
            host = KVCache(layout, host_blocks, block_tokens, torch.device("cpu"), pinned=on_gpu)
        offload = KVMover(cache, loaded.copies or copy_engine(device), host)
    attention, similar = AttentionKernels(loaded.kernel), Similar()
    if cost_model is not None:
        shape = cost_model.shape
        attention = AttentionKernels(loaded.kernel, cost_model.profile.attention)
        packed = min(shape.longest_packed_tokens, loaded.longest_packed_tokens)
        similar = Similar(packed, cost_model.rectangle_s, shape.always_packed)
    draw = drawing_kernel(device) if on_gpu and loaded.compiles else None
    shaping = shaping_of(settings.policy) or similar
    executor = RaggedExecutor(loaded, cache, want_logprobs, attention, offload, states, shaping, draw)
    executor.settings, executor.alternatives = settings, alternatives
    if records:
        limits, record = settings.limits, record_on_device()
        context = recorded_context(loaded.max_context, limits.longest_row_tokens)
        rows, tokens = limits.max_num_seqs, cost_model.most_recorded_tokens if cost_model else LEAST_RECORDED_TOKENS
        tokens = min(tokens, max(limits.chunk_tokens, rows))  # a step larger than the plan's never comes
        streaming = offload if isinstance(offload, KVMover) and streamed_layers else None
        most = context, rows
        executor.graphs = StepGraphs(cache, attention, *most, record, record_after, tokens, states, streaming)
    return executor


def _cache(
    layout: KVLayout, settings: EngineSettings, num_blocks: int, device: torch.device, buffer_of: Mapping[int, int]
) -> KVCache:
    if (depth := settings.offload.depth) is not None:
        return Arena(layout, num_blocks, depth, settings.block_tokens, device)
    return KVCache(layout, num_blocks, settings.block_tokens, device, buffer_of=buffer_of)


def _device_memory(
    loaded: LoadedModel, settings: EngineSettings, spare_blocks: int, buffer_of: Mapping[int, int]
) -> tuple[KVCache, StateCache | None, EngineSettings]:
    """KV and states on the device, and the settings with the blocks that there is memory for: half as many wherever it
    runs out, and half of those. Some may have been taken since the plan was made.

    Raises OutOfMemory where there is no memory for a single block.
    """
    device, recurrent = loaded.device, loaded.recurrent
    while True:
        try:
            num_blocks = settings.num_blocks + spare_blocks
            cache = _cache(loaded.kv_layout, settings, num_blocks, device, buffer_of)
            states = StateCache(recurrent, settings.limits.max_num_seqs, device) if recurrent else None
            return cache, states, settings
        except (PoolTooLarge, RuntimeError, MemoryError) as error:
            if not (isinstance(error, PoolTooLarge) or is_out_of_memory(error)):
                raise
            if settings.num_blocks == 1:
                raise OutOfMemory(f"{device.type} memory ran out: the model leaves none for KV") from None
        give_back()  # not before the exception is gone, which holds on to tensors
        fewer = settings.num_blocks // 2
        log.warning(
            "%s memory ran out: room for the KV of %s tokens is tried instead of %s",
            device.type,
            f"{fewer * settings.block_tokens:,}",
            f"{settings.kv_tokens:,}",
        )
        lost = settings.lost_blocks + settings.num_blocks - fewer
        settings = replace(settings, num_blocks=fewer, lost_blocks=lost)
