"""The figures of a comparison. What was binned shows the mean as a line and the maximum as a shade."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from vasuki.base.units import UNKNOWN, listing, money_text, percent_text, time_text
from vasuki.report.canvas import (
    BLACK,
    BLUE,
    COLOURS,
    ORANGE,
    SKY,
    STYLE,
    VERMILION,
    Plot,
    bars,
    bars_height,
    byte_unit,
    legend_above,
    legend_below,
    line_look,
    name_bars,
    panels,
    time_unit,
)
from vasuki.report.job_runs import JobRuns, Result
from vasuki.report.timeline import Counts, Timeline

_TAIL_SHARE = 0.2  # how much of the end the tail's figure shows


def plots_of(workload: JobRuns) -> list[Plot]:
    """All figures that have something to show."""
    makers: list[Callable[[JobRuns], Plot | None]] = [
        makespan_plot,
        cost_plot,
        price_plot,
        timeline_plot,
        queue_plot,
        tail_plot,
        kv_plot,
        cdf_plot,
        copy_plot,
        prediction_plot,
    ]
    with matplotlib.rc_context(STYLE):
        return [plot for maker in makers if (plot := maker(workload)) is not None]


def makespan_plot(workload: JobRuns) -> Plot:
    """A bar for each run, with the prediction on it and its lower bounds."""
    results = workload.results
    scale_s, unit = time_unit(max(max(_marks_s(result)) for result in results))
    figure, (axes,) = panels("Makespan, prediction and bounds", results, 1, bars_height(results))
    taken, *marks = np.array([_marks_s(result) for result in results]).T / scale_s
    texts = [time_text(result.makespan_s) for result in results]
    positions = bars(axes, results, taken.tolist(), texts, marked=np.max(marks, axis=0).tolist())
    look = {"linestyle": "none", "markeredgecolor": BLACK, "markerfacecolor": "white"}
    styles = (
        ("predicted", "D", 7, 7, 1.2),
        ("lower bound", "|", 26, 11, 2.5),
        ("at datasheet rates", "|", 26, 11, 1),
    )
    for values, (name, marker, size, size_in_legend, width) in zip(marks, styles, strict=True):
        known = [(value, y) for value, y in zip(values.tolist(), positions, strict=True) if value]
        if known:
            axes.plot(*zip(*known, strict=True), marker=marker, markersize=size, markeredgewidth=width, **look)
            axes.plot([], [], marker=marker, markersize=size_in_legend, markeredgewidth=width, label=name, **look)
    if np.any(marks):
        legend_above(axes)
    axes.set_xlabel(f"time ({unit})")
    return Plot(
        "makespan",
        "Makespan, prediction and bounds",
        "From the first row read to the last row durable. No schedule beats the thick line under the cost model, nor "
        "the thin one at the card's datasheet rates.",
        figure,
    )


def _marks_s(result: Result) -> tuple[float, ...]:
    """What a run took, what was predicted, and the two bounds; 0 for what is not known."""
    marks = (result.predicted_s, result.schedule_bound_s, result.lower_bound_s)
    return (result.makespan_s, *(result.in_all_s(seconds) or 0.0 for seconds in marks))


def cost_plot(workload: JobRuns) -> Plot | None:
    """Cost of each run, by card."""
    results = workload.results
    currencies = {result.price.currency for result in results if result.price is not None}
    if len(currencies) != 1:
        return None
    (currency,) = currencies
    parts = [
        (f"{currency} for the job", [r.amount for r in results]),
        (f"{currency} a million tokens", [r.per_million_tokens for r in results]),
        (f"{currency} a thousand rows", [r.per_thousand_rows for r in results]),
    ]
    figure, all_axes = panels("Cost by card", results, len(parts), bars_height(results), len(parts))
    for index, (axes, (name, values)) in enumerate(zip(all_axes, parts, strict=True)):
        labels = [UNKNOWN if value is None else money_text(value) for value in values]
        bars(axes, results, [value or 0.0 for value in values], labels, named=index == 0)
        axes.set_xlabel(name)
        axes.set_xticks([])  # each bar has its figure
    return Plot(
        "cost",
        "Cost by card",
        "Tokens are prompt and output tokens.",
        figure,
    )


def price_plot(workload: JobRuns) -> Plot | None:
    """Cost as a function of the price of each card: where another card's cost is crossed, the answer flips."""
    priced = [result for result in workload.finalists if result.price is not None and result.per_million_tokens]
    if len({result.run.gpu for result in priced}) < 2 or len({r.price.currency for r in priced if r.price}) > 1:
        return None
    cheapest = min(priced, key=lambda result: result.per_million_tokens or 0.0)
    cost = cheapest.per_million_tokens or 0.0
    assert cheapest.price is not None, "only priced runs are left"
    currency = cheapest.price.currency
    hours = {result.label: result.gpu_hours_per_million_tokens or 0.0 for result in priced}
    prices_now = [result.price.per_hour for result in priced if result.price is not None]
    right = 1.25 * max(prices_now)
    figure, (axes,) = panels("Cost against the price of an hour", priced, 1, 3.4)
    for result, price_now in zip(priced, prices_now, strict=True):
        look = line_look(workload.results.index(result))
        axes.plot([0, right], [0, hours[result.label] * right], label=result.full_label, **look)
        axes.plot(price_now, hours[result.label] * price_now, "o", color=look["color"], markersize=7)
    axes.axhline(cost, color="#666666", linewidth=0.9, linestyle=(0, (1, 2)))
    crossings = 0
    for result in priced:
        at = cost / hours[result.label]
        if result is not cheapest and at < right:
            name = f"{result.label} is cheaper below {money_text(at, currency)}"
            axes.plot(
                at, cost, "Xs^vDP"[crossings % 6], color=BLACK, markersize=8, zorder=5, linestyle="none", label=name
            )
            crossings += 1
    axes.set_xlim(0, right)
    axes.set_ylim(0)
    axes.set_xlabel(f"price ({currency} an hour)")
    axes.set_ylabel(f"cost ({currency} a million tokens)")
    axes.legend(loc="upper left")
    return Plot(
        "price",
        "Cost against the price of an hour",
        "Dots are prices now. The dotted line is the lowest cost now; where it crosses the line of another card lies "
        "the price below which that card would be the cheaper one.",
        figure,
    )


def timeline_plot(workload: JobRuns) -> Plot | None:
    """Tokens of a step over time, one panel for each run."""
    results = workload.results
    traced = _traced(results)
    if not traced:
        return None
    title = "Prefill and decode tokens in a step"
    scale_s, unit = time_unit(max(timeline.total_s for _, timeline in traced))
    figure, all_axes = panels(title, [result for result, _ in traced], len(traced), 1.2 + 1.45 * len(traced))
    for axes, (result, timeline) in zip(all_axes, traced, strict=True):
        edges = np.arange(timeline.covered_s.size + 1) * timeline.bin_s / scale_s
        decode, prefill = timeline.mean["decode_tokens"], timeline.mean["prefill_tokens"]
        axes.stairs(timeline.peak["tokens"], edges, fill=True, color="#d0d0d0", label="both, maximum")
        axes.stairs(decode, edges, fill=True, color=BLUE, label="decode, mean")
        axes.stairs(
            decode + prefill,
            edges,
            baseline=decode,
            fill=True,
            facecolor=ORANGE,
            edgecolor="white",
            linewidth=0,
            hatch="////",
            label="prefill, mean on top of it",
        )
        axes.set_ylabel("tokens a step")
        axes.set_title(result.full_label, loc="left", fontsize=10)
        axes.set_ylim(0, 1.08 * max(float(each.peak["tokens"].max()) for _, each in traced))
        axes.set_xlim(0, max(each.total_s for _, each in traced) / scale_s)
        axes.tick_params(labelbottom=axes is all_axes[-1])
    all_axes[-1].set_xlabel(f"time ({unit})")
    legend_below(figure, all_axes[0])
    return Plot("timeline", title, _bin_words(traced), figure)


def queue_plot(workload: JobRuns) -> Plot | None:
    """Rows that wait over time where rows arrive, and how many are gathered before they start."""
    traced = [(r, timeline) for r, timeline in _traced(workload.results) if r.run.manifest.ttft is not None]
    if not traced:
        return None
    parts = [("rows that wait", "waiting")]
    if any(timeline.peak["gathers"].any() for _, timeline in traced):
        parts.append(("rows to gather (N)", "gathers"))
    title = "The queue" + (" and what is gathered" if len(parts) > 1 else "")
    scale_s, unit = time_unit(max(timeline.total_s for _, timeline in traced))
    figure, all_axes = panels(title, [result for result, _ in traced], len(parts), 1.2 + 2.1 * len(parts))
    for axes, (name, field) in zip(all_axes, parts, strict=True):
        for index, (result, timeline) in enumerate(traced):
            if field == "gathers" and not timeline.peak[field].any():
                continue
            look, t_s = line_look(index), timeline.t_s / scale_s
            axes.plot(t_s, timeline.mean[field], label=result.full_label, **look)
            axes.fill_between(t_s, timeline.mean[field], timeline.peak[field], color=look["color"], alpha=0.2)
        axes.set_ylabel(name)
        axes.set_ylim(0)
        axes.set_xlim(0, max(timeline.total_s for _, timeline in traced) / scale_s)
        axes.tick_params(labelbottom=axes is all_axes[-1])
    all_axes[-1].set_xlabel(f"time ({unit})")
    legend_below(figure, all_axes[0])
    return Plot("queue", title, f"Rows that have arrived and don't run. {_bin_words(traced)}", figure)


def tail_plot(workload: JobRuns) -> Plot | None:
    """Running sequences over the last part of each run."""
    results = workload.results
    traced = _traced(results)
    if not traced:
        return None
    title = f"The tail: sequences in the last {percent_text(_TAIL_SHARE)} of each run"
    figure, (axes,) = panels(title, [result for result, _ in traced], 1, 3.2)
    for index, (result, timeline) in enumerate(traced):
        shown = timeline.t_s >= (1 - _TAIL_SHARE) * timeline.total_s
        look = line_look(index)
        share = 100 * timeline.t_s[shown] / timeline.total_s
        axes.plot(share, timeline.mean["seqs"][shown], label=result.full_label, **look)
        axes.fill_between(
            share, timeline.mean["seqs"][shown], timeline.peak["seqs"][shown], color=look["color"], alpha=0.2
        )
    axes.set_xlim(100 * (1 - _TAIL_SHARE), 100)
    axes.set_ylim(0)
    axes.set_xlabel("share of the time in steps (%)")
    axes.set_ylabel("sequences in a step")
    legend_below(figure, axes)
    return Plot(
        "tail",
        title,
        "A line that falls early means that the card waited for a few long rows. The shade reaches to the maximum.",
        figure,
    )


def kv_plot(workload: JobRuns) -> Plot | None:
    """Bytes of keys and values on the device and on the host."""
    results = workload.results
    traced = _traced(results)
    tiers = [
        (name, field)
        for name, field in (("device", "kv_device_bytes"), ("host", "kv_host_bytes"))
        if any(timeline.peak[field].any() for _, timeline in traced)
    ]
    if not tiers:
        return None
    title = f"KV cache on the {' and on the '.join(name for name, _ in tiers)}"
    scale_s, unit = time_unit(max(timeline.total_s for _, timeline in traced))
    scale_bytes, size_unit = byte_unit(
        max(float(timeline.peak[field].max()) for _, timeline in traced for _, field in tiers)
    )
    figure, all_axes = panels(title, [result for result, _ in traced], len(tiers), 0.7 + 2.1 * len(tiers))
    for axes, (tier, field) in zip(all_axes, tiers, strict=True):
        for index, (result, timeline) in enumerate(traced):
            if not timeline.peak[field].any():
                continue
            look = line_look(index)
            mean, peak, t = (
                timeline.mean[field] / scale_bytes,
                timeline.peak[field] / scale_bytes,
                timeline.t_s / scale_s,
            )
            axes.plot(t, mean, label=result.full_label, **look)
            axes.fill_between(t, mean, peak, color=look["color"], alpha=0.2)
        axes.set_ylabel(f"{tier} ({size_unit})")
        axes.set_ylim(0)
        axes.set_xlim(0, max(timeline.total_s for _, timeline in traced) / scale_s)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    all_axes[-1].set_xlabel(f"time ({unit})")
    return Plot("kv", title, f"Blocks that hold keys and values. {_bin_words(traced)}", figure)


def cdf_plot(workload: JobRuns) -> Plot | None:
    """Figures 3 and 2 of the Vasuki paper: the batch size of a step, and the bytes that the host holds for it."""
    results = workload.results
    traced = _traced(results)
    if not traced:
        return None
    scale_bytes, size_unit = byte_unit(max(float(timeline.host_bytes.values.max()) for _, timeline in traced))
    parts: list[tuple[str, list[tuple[int, Result, Counts, float]]]] = [
        ("sequences in a step", [(i, result, timeline.seqs, 1.0) for i, (result, timeline) in enumerate(traced)])
    ]
    offloaded = [
        (i, result, timeline.host_bytes, 1 / scale_bytes)
        for i, (result, timeline) in enumerate(traced)
        if timeline.host_bytes.values.any()
    ]
    others = [result.label for result, timeline in traced if offloaded and not timeline.host_bytes.values.any()]
    if offloaded:
        parts.append((f"KV offloaded to the host ({size_unit})", offloaded))
    title = "Batch size" + (" and offloaded memory" if offloaded else "") + ", cumulative over steps"
    figure, all_axes = panels(title, [result for result, _ in traced], len(parts), 3.4, len(parts))
    for axes, (name, lines) in zip(all_axes, parts, strict=True):
        for index, result, counts, scale in lines:
            share = np.cumsum(counts.counts) / counts.counts.sum()
            axes.step(
                np.append(counts.values[:1], counts.values) * scale,
                np.append(0.0, share),
                where="post",
                label=result.full_label,
                **line_look(index),
            )
        axes.set_xlim(0)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(name)
    all_axes[0].set_ylabel("share of steps")
    legend_below(figure, all_axes[0])
    return Plot(
        "cdf",
        title,
        "The share of steps with at most this many sequences (figure 3 of the Vasuki paper)"
        + (", and with at most so much KV cache held by the host (its figure 2)." if offloaded else ".")
        + (f" Nothing was offloaded on {listing(others)}." if others else ""),
        figure,
    )


def copy_plot(workload: JobRuns) -> Plot | None:
    """Copy time that compute hid, and copy time that steps waited for."""
    results = workload.results
    if not any(r.run.manifest.kv.hidden_copy_s + r.run.manifest.kv.exposed_copy_s for r in results):
        return None
    title = "Copies between device and host"
    kvs = [result.run.manifest.kv for result in results]
    scale_s, unit = time_unit(max(kv.hidden_copy_s + kv.exposed_copy_s for kv in kvs))
    figure, (axes,) = panels(title, results, 1, bars_height(results))
    positions = list(range(len(results)))
    hidden = [kv.hidden_copy_s / scale_s for kv in kvs]
    exposed = [kv.exposed_copy_s / scale_s for kv in kvs]
    axes.barh(positions, hidden, 0.55, color=SKY, edgecolor=BLACK, linewidth=0.8, label="hidden: during compute")
    axes.barh(
        positions,
        exposed,
        0.55,
        left=hidden,
        color=VERMILION,
        edgecolor=BLACK,
        linewidth=0.8,
        hatch="///",
        label="exposed: steps waited",
    )
    for y, kv, end in zip(positions, kvs, np.add(hidden, exposed), strict=True):
        text = f"{time_text(kv.hidden_copy_s)} hidden, {time_text(kv.exposed_copy_s)} exposed" if end else "none"
        axes.annotate(text, (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.7 * float(np.max(np.add(hidden, exposed))))
    name_bars(axes, results)
    axes.set_xlabel(f"copy time ({unit})")
    legend_above(axes)
    return Plot("copies", title, "Copy time of the whole run. Only the exposed part made it longer.", figure)


def prediction_plot(workload: JobRuns) -> Plot | None:
    """Predicted against measured step times of the runs that were measured."""
    results = workload.results
    measured = [
        (index, result, timeline)
        for index, (result, timeline) in enumerate(_traced(results))
        if not result.simulated and timeline.predicted_s.any()
    ]
    if not measured:
        return None
    title = "Step time, predicted against measured"
    figure, (axes,) = panels(title, [result for _, result, _ in measured], 1, 4.4)
    shortest, longest = math.inf, 0.0
    for index, result, timeline in measured:
        known = (timeline.predicted_s > 0) & (timeline.elapsed_s > 0)
        x, y = 1e3 * timeline.predicted_s[known], 1e3 * timeline.elapsed_s[known]
        step_error = timeline.median_step_error
        error = "" if step_error is None else f", median error of a step {percent_text(step_error)}"
        marker = "o^sDv"[index % 5]
        axes.plot(
            x,
            y,
            linestyle="none",
            marker=marker,
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            color=COLOURS[index % len(COLOURS)],
            label=result.full_label + error,
        )
        shortest, longest = min(shortest, *x, *y), max(longest, *x, *y)
    ends = np.array([shortest / 1.2, longest * 1.2])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#999999", alpha=0.3, linewidth=0, label="±10 %")
    axes.plot(ends, ends, color=BLACK, linewidth=0.9)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("predicted (ms)")
    axes.set_ylabel("measured (ms)")
    legend_below(figure, axes)
    return Plot(
        "prediction",
        title,
        "Each point is the mean of the steps that ended in one bin of time. Points above the line took longer than the "
        "cost model said.",
        figure,
    )


def _traced(results: Sequence[Result]) -> list[tuple[Result, Timeline]]:
    return [(result, result.run.timeline) for result in results if result.run.timeline is not None]


def _bin_words(traced: Sequence[tuple[Result, Timeline]]) -> str:
    """Say in words how long a bin is."""
    lengths = sorted({timeline.bin_s for _, timeline in traced})
    span = " to ".join(time_text(seconds) for seconds in (lengths[0], *lengths[1:][-1:]))
    return f"Means over bins of {span}; the shade reaches to the maximum within each."
