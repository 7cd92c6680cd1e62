"""A job of a model on disk, in memory for a few of its rows: what `kv.offload` moves, how fast, and what hides it."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from make_model import write_model

from gpu_sections.commands import Job
from gpu_sections.setting import MEASURED, Finding, Record, Setting, digits, fitting, plan_elsewhere
from vasuki.hf.kernels.varlen import PAGE_TOKENS, can_page

_MOST_ROWS, _TOY_ROWS = 2000, 64
_MODES = ("none", "park", "stream", "auto")
_WEIGHTS = "auto, with weights on the host"  # of all layers but one, so that every step waits for the link
_FEW_ROWS, _FEW_TOKENS = 256, 24  # of such a job, whose steps take as long as the weights of the model on the link
_MEMORY_SHARE = 16  # of the rows' KV all together that lies on the device
_HOST_BYTES, _TOY_HOST_BYTES = 24 * 2**30, 2**26
_SLOWDOWN = 3  # times as long as in all of the memory
_LOADS_S = 20  # a command's start, and 16 GB of weights


def moved(setting: Setting, share_s: float) -> Finding:
    """The same rows by each mode, each by a command of its own; and fewer of them with weights on the host, too."""
    finding, folder, name = Finding(), setting.out / "moved", setting.large
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder / "model", setting.tree(name))
    left_s = max(1.0, share_s / (2 + len(_MODES)) - _LOADS_S) / _SLOWDOWN
    requests = fitting(setting, name, "trans", _TOY_ROWS if setting.toy else _MOST_ROWS, left_s, plan_elsewhere)
    rows = pa.table(
        {
            "id": [request.row for request in requests],
            "prompt": [request.prompt_token_ids.tolist() for request in requests],
            "most": [request.max_tokens for request in requests],
        }
    )
    pq.write_table(rows, folder / "rows.parquet")
    most = pc.min_element_wise(rows["most"], pa.scalar(_FEW_TOKENS, rows["most"].type))
    pq.write_table(rows.set_column(2, "most", most).slice(0, _FEW_ROWS), folder / "few.parquet")
    shape = setting.shape(name)
    lengths = [request.num_prompt_tokens + request.max_tokens for request in requests]
    block_tokens = PAGE_TOKENS if setting.on_gpu and can_page(PAGE_TOKENS) else 4 if setting.toy else 32
    held = max(sum(lengths) // _MEMORY_SHARE, 2 * max(lengths) + 2 * block_tokens)
    tree: Record = {
        "model": {"path": str(folder / "model"), "dtype": str(setting.dtype).removeprefix("torch.")},
        "input": {"path": str(folder / "rows.parquet"), "id": "id", "prompt_token_ids": "prompt"},
        "sampling": {"max_tokens": {"column": "most"}, "ignore_eos": True},
        "kv": {
            "block_tokens": block_tokens,
            "device_memory": held * shape.kv_bytes_per_token,
            "host_memory": _TOY_HOST_BYTES if setting.toy else _HOST_BYTES,
        },
    }
    if setting.toy:
        tree["engine"] = {"policy": "vllm"}  # rows so short are better not begun than parked
    if (measured := setting.out / MEASURED).exists():
        tree["plan"] = {"gpu": str(measured)}
    block_bytes = block_tokens * shape.kv_bytes_per_token_per_layer
    link_bytes_per_s = setting.profile.link.bandwidth_bytes_per_s(block_bytes, "h2d")
    seconds: dict[str, float] = {}
    for mode in (*_MODES, _WEIGHTS):
        asked = {**tree, "kv": {**tree["kv"], "offload": mode}}
        if mode == _WEIGHTS:
            asked["kv"]["offload"] = "auto"
            asked["engine"] = {"weights_on_host": shape.num_layers - 1}
            asked["input"] = {**tree["input"], "path": str(folder / "few.parquet")}
        job = Job(setting, folder / mode.replace(", ", "-").replace(" ", "-"), asked)
        try:
            manifest = job.finished()
        except RuntimeError as error:
            finding.failures.append(f"{mode}: {error}")
            continue
        row = _row(mode, manifest)
        finding.rows.append(row | {"link, GB/s": digits(link_bytes_per_s / 1e9)})
        seconds[mode] = manifest["timings"]["generate_s"]
        off = abs(manifest["predicted"]["makespan_s"] / seconds[mode] - 1)
        finding.at_most(f"{mode}: predicted makespan, share that it is off", off, 0.09 if measured.exists() else 0.15)
        if mode in ("park", "stream") and not manifest["kv"]["offloaded_bytes"]:
            if mode == "park" and not any(manifest["preemptions"].values()):
                finding.notes.append("park: the plan's order left nothing to park")
            else:
                finding.failures.append(f"{mode}: nothing was moved")
    if {"none", "auto"} <= seconds.keys():
        finding.at_least("KV in little memory: speed of auto over none", seconds["none"] / seconds["auto"], 1.0)
    finding.notes.append(
        f"{name} from disk, {len(requests)} rows of trans, KV memory of {held:,} tokens in blocks of {block_tokens}; "
        "link: what the profile says of copies of one layer's block to the device; exposed: see overlap"
    )
    shutil.rmtree(folder / "model")  # 16 GB
    return finding


def _row(mode: str, manifest: Record) -> Record:
    kv = manifest["kv"]
    copy_s = kv["exposed_copy_s"] + kv["hidden_copy_s"]
    return {
        "mode": mode,
        "moved_GB": digits(kv["offloaded_bytes"] / 1e9),
        "host_GB": digits(kv["peak_host_bytes"] / 1e9),
        "swaps": manifest["preemptions"]["swap"],
        "recomputed": manifest["tokens"]["recomputed"],
        "predicted_s": digits(manifest["predicted"]["makespan_s"]),
        "generate_s": digits(manifest["timings"]["generate_s"]),
        "load_s": digits(manifest["timings"]["load_s"]),
        "copy_s": digits(copy_s),
        "hidden_share": digits(kv["hidden_copy_s"] / copy_s) if copy_s else 1.0,
        "GB/s": digits(kv["offloaded_bytes"] / copy_s / 1e9) if copy_s else 0.0,
    }
