"""A job in half the memory for KV: what offload gives back of what the smaller batch costs."""

from __future__ import annotations

from gpu_sections.setting import (
    FEWEST_ROWS,
    Finding,
    Record,
    Setting,
    digits,
    fitting,
    plan_elsewhere,
    plan_for,
    run_planned,
)
from vasuki.planner.plan import Plan

_MOST_ROWS = 4096
_RUNS = 6  # as long as the one without a cap: two capped ones take twice as long at most


def capped(setting: Setting, share_s: float) -> Finding:
    """The same rows in all the memory, and in half of what they took there, without and with offload."""
    name, finding = setting.large, Finding()
    setting.loaded_alone(name)
    requests = fitting(setting, name, "trans", FEWEST_ROWS if setting.toy else _MOST_ROWS, share_s / _RUNS)
    run_planned(setting, name, requests[: len(requests) // 8])  # loads kernels
    token_bytes = setting.shape(name).kv_bytes_per_token
    seconds: dict[str, float] = {}

    def run(title: str, plan: Plan) -> int:
        found = run_planned(setting, name, requests, plan=plan)
        setting.free()
        seconds[title] = found.seconds
        used_bytes = found.stats.peak_device_blocks * plan.settings.block_tokens * token_bytes
        row: Record = {
            "run": title,
            "offload": plan.offload.mode,
            "KV_MB": digits(found.kv_bytes / 1e6),
            "used_MB": digits(used_bytes / 1e6),
            "mean_seqs": round(found.stats.mean_seqs, 1),
            "predicted_s": digits(plan.makespan_s),
            "measured_s": digits(found.seconds),
        }
        if found.peak_bytes:
            row["peak_GiB"] = round(found.peak_bytes / 2**30, 2)
            row["planned_GiB"] = round(found.planned_bytes / 2**30, 2)
        finding.rows.append(row)
        return used_bytes

    plan, elsewhere = plan_for(setting, name, requests), plan_elsewhere(setting, name, requests)
    used_bytes = run("uncapped", plan)
    for offload in ("none", "auto"):
        run(f"capped, {offload}", plan_for(setting, name, requests, used_bytes // 2, offload))
    off = abs(elsewhere.settings.kv_tokens / plan.settings.kv_tokens - 1)
    finding.at_most("KV bytes as planned without the card, share that they are off", off, 0.02)
    auto_s = seconds["capped, auto"]
    finding.at_least("KV capped: speed of auto offload over none", seconds["capped, none"] / auto_s, 1.0)
    finding.at_least("KV capped: speed of auto offload over uncapped", seconds["uncapped"] / auto_s, 0.9)
    finding.notes.append(
        f"{name}, {len(requests)} rows of trans; capped to half of the KV that was in use at most without a cap; how "
        "much of that speed offload keeps depends on the link"
    )
    return finding
