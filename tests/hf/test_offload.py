"""Copies between the tiers: byte for byte, in order, and never lost."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
import transformers

from models import NoTokenizer, prompts, random_config, requests_of, run
from vasuki.batch import Batch, Swap
from vasuki.errors import JobFileError
from vasuki.hf.kv_cache import KVCache, KVLayout
from vasuki.hf.model import prepare
from vasuki.hf.offload import Offload, StreamedLayers, ThreadCopyEngine
from vasuki.sequence import Request, Sequence

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
CPU = torch.device("cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_round_trip_into_poisoned_memory_is_byte_exact() -> None:
    device, host = (KVCache(LAYOUT, blocks, 5, CPU) for blocks in (8, 6))
    torch.manual_seed(0)
    for layer in device.layers:
        layer.copy_(torch.randn_like(layer))
        layer[3, 0, 0, 0, 0] = float("nan")  # bit patterns survive, whatever they mean
    for layer in host.layers:
        layer.fill_(float("inf"))
    before = [layer.clone() for layer in device.layers]
    offload = Offload(device, ThreadCopyEngine(bytes_per_s=1e5), host)
    sequence = Sequence(Request(0, 0, 1, 1))

    offload.begin_step(Batch([], [], [], [Swap(sequence, True, [1, 2, 3, 7], [5, 0, 1, 2])]))
    for layer in range(3):
        offload.before_layer(layer)  # from here on the step may overwrite the blocks
        device.layers[layer][[1, 2, 3, 7]] = float("inf")
    offload.begin_step(Batch([], [], [], [Swap(sequence, False, [0, 4, 5, 6], [5, 0, 1, 2])]))
    offload.begin_step(Batch([], [], [], []))
    for layer in range(3):
        offload.before_layer(layer)
        assert torch.equal(bits(device.layers[layer][[0, 4, 5, 6]]), bits(before[layer][[1, 2, 3, 7]]))
    assert offload.copied_bytes == 2 * 4 * device.block_bytes


def test_layers_leave_one_by_one() -> None:
    """The first layer's compute waits for its own copy, not for those of later layers."""
    device, host = (KVCache(LAYOUT, 4, 5, CPU) for _ in range(2))
    engine = ThreadCopyEngine()
    second_layer_may_leave = threading.Event()
    first_copy = engine.submit

    def submit(to_host, copy, after):  # type: ignore[no-untyped-def]
        held = [second_layer_may_leave] if submitted else []
        submitted.append(1)
        return first_copy(to_host, copy, [*after, *held])

    submitted: list[int] = []
    engine.submit = submit  # type: ignore[method-assign]
    offload = Offload(device, engine, host)
    offload.begin_step(Batch([], [], [], [Swap(Sequence(Request(0, 0, 1, 1)), True, [0], [0])]))
    offload.before_layer(0)
    second_layer_may_leave.set()
    offload.before_layer(1)
    offload.before_layer(2)


def test_copies_run_beside_compute_in_both_directions() -> None:
    engine = ThreadCopyEngine(bytes_per_s=1e6)
    started_s = time.perf_counter()
    copies = [engine.submit(to_host, lambda: 100_000, []) for to_host in (True, False)]
    assert time.perf_counter() - started_s < 0.1  # submitting waits for nothing
    for copy in copies:
        engine.require(copy)
    assert engine.busy_s == pytest.approx(0.2, rel=0.5)
    assert engine.exposed_s < engine.busy_s


def test_a_failing_copy_reaches_the_compute() -> None:
    engine = ThreadCopyEngine()

    def fail() -> int:
        raise OSError("link down")

    with pytest.raises(OSError, match="link down"):
        engine.require(engine.submit(True, fail, []))


def test_memory_that_cannot_be_pinned_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        assert options["pin_memory"]
        raise RuntimeError("CUDA error: out of memory\nand a long explanation")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(JobFileError, match=r"^kv.host_memory: .* pin as much \(CUDA error: out of memory\); lower it$"):
        KVCache(LAYOUT, 4, 5, CPU, pinned=True)


@pytest.mark.parametrize(("num_layers", "num_streamed"), [(32, 1), (32, 8), (32, 31), (3, 2)])
def test_streamed_layers_are_spread_and_the_first_stays(num_layers: int, num_streamed: int) -> None:
    streamed = StreamedLayers.spread(num_layers, num_streamed)
    layers = list(streamed.buffer_of)
    assert len(layers) == num_streamed
    assert layers == sorted(set(layers))
    assert 0 not in layers
    gaps = [after - before for before, after in itertools.pairwise(layers)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert streamed.device_layers(num_layers) == num_layers - num_streamed + {1: 1, 31: 3}.get(num_streamed, 2)


def test_layers_that_share_a_buffer_wait_for_each_other() -> None:
    """Over a slow link the last layer's store of one step is still under way when the next step begins."""
    torch.manual_seed(0)
    config = random_config("llama", num_hidden_layers=8)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="vasuki_ragged").eval()
    loaded = prepare(model, NoTokenizer(), model.generation_config, "deep")  # type: ignore[arg-type]
    requests = requests_of(prompts(5, 30), max_tokens=6)
    expected = run(loaded, requests, chunk_tokens=16)[0].outputs
    for num_streamed in (3, 5, 7):
        rows, _, stats = run(loaded, requests, chunk_tokens=16, num_streamed=num_streamed, bytes_per_s=2e7)
        assert rows.outputs == expected, num_streamed
        assert stats.copied_bytes > 0


def test_streaming_every_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot stream"):
        StreamedLayers.spread(4, 4)
