"""What everything else needs, in half a minute: the first section, and the last one where it fails."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_sections.kernels import compare
from gpu_sections.setting import Finding, Setting, caught
from vasuki.hf.cuda.step_graphs import Pause, record_on_device
from vasuki.hf.device.device import board_of
from vasuki.hf.fused.by_torch import fused
from vasuki.hf.kernels.varlen import PAGE_TOKENS, can_page, why_unavailable
from vasuki.hf.kv.kv_cache import pinned_zeros


def preflight(setting: Setting, share_s: float) -> Finding:
    """Torch and driver, the packed kernel's arguments, the board, pinned memory, attention, and one graph."""
    finding = Finding()
    checks: dict[str, Callable[[Setting], str]] = {
        "torch": _torch,
        "packed attention": _packed,
        "board": _board,
        "pinned memory": _pinned,
        "graph": _graph,
        "fused layers": _fused,
        "profile": lambda setting: setting.profile.title,
    }
    for name, check in checks.items():
        try:
            finding.rows.append({"check": name, "found": check(setting)})
        except Exception as error:
            finding.failures.append(f"{name}: {caught(error)}")
    for block_tokens in (32, PAGE_TOKENS):
        compare(setting, finding, "two decodes and a chunk", [1, 1, 16], [300, 20, 40], block_tokens)
    return finding


def _torch(setting: Setting) -> str:
    if not setting.on_gpu:
        return f"{torch.__version__}, on a CPU"
    major, minor = torch.cuda.get_device_capability(setting.device)
    return f"{torch.__version__}, CUDA {torch.version.cuda}, capability {major}.{minor}"


def _packed(setting: Setting) -> str:
    missing = why_unavailable(setting.dtype, setting.device, setting.shape(setting.large).head_dim)
    return missing or ("walks block tables" if can_page(PAGE_TOKENS) else "contexts are gathered: torch before 2.12")


def _board(setting: Setting) -> str:
    if not setting.on_gpu:
        return "none"
    board = board_of(setting.device)
    return "NVML does not answer: no driver version, no power" if board is None else f"driver {board.driver}"


def _pinned(setting: Setting) -> str:
    num_bytes = 2**20 if setting.toy else 2**30
    zeros = pinned_zeros if setting.on_gpu else torch.zeros
    there, back = (zeros((num_bytes,), dtype=torch.uint8) for _ in range(2))
    assert there.is_pinned() == setting.on_gpu
    there.fill_(1)
    back.copy_(there.to(setting.device, non_blocking=True), non_blocking=True)
    setting.synchronize()
    assert torch.equal(there, back), "what came back is something else"
    return f"{num_bytes >> 20} MiB went to the device and back"


def _graph(setting: Setting) -> str:
    if not setting.on_gpu:
        return "a CPU has none"
    number, answer = torch.ones(2, 4, device=setting.device)

    def compute(pause: Pause) -> None:
        doubled = number * 2
        pause(lambda: number.add_(1))  # as KV that streams is fetched between two stretches
        torch.add(doubled, number, out=answer)

    replay = record_on_device()(compute)
    number.fill_(3)
    replay()
    assert answer.tolist() == [10.0] * 4, "a replay does not see what its inputs hold"
    return "recorded and replayed, in two stretches"


def _fused(setting: Setting) -> str:
    found, layers = fused(setting.loaded(setting.small).model), setting.shape(setting.small).num_layers
    assert found == (2 * layers + 1, layers, layers), f"{found} of {layers} layers"
    return f"attention, MLP and norms of all {layers} of {setting.small}"
