"""The answer in words: which run finished first, which was cheaper, what would change that, and how sure it is."""

from __future__ import annotations

from vasuki.base.units import count_text, listing, money_text, percent_text, plural, significant, time_text
from vasuki.report.job_runs import JobRuns, Result
from vasuki.report.summary import WORTH_A_WORD

_TOGETHER = 1.02  # closer than this is called a draw, whatever the reason
_LOADING_COUNTS = 0.05  # a larger share of the makespan is told


def headline(workload: JobRuns) -> str:
    """The answer in short: which run was first, and which cheaper."""
    return " ".join(answer(workload)[: 1 if len(workload.finalists) == 1 else 2])


def answer(workload: JobRuns) -> list[str]:
    """Sentences, the most important first."""
    if len(workload.finalists) == 1:
        sentences = [_alone(workload.finalists[0])]
    else:
        sentences = [_first(workload), _cheaper(workload), _flips(workload)]
    sentences += [_to_save(workload), _certainty(workload), _prices(workload)]
    return [sentence for sentence in sentences if sentence]


def caveats(workload: JobRuns) -> list[str]:
    """What else a reader has to know before they rely on the answer."""
    finalists, names = workload.finalists, workload.names
    found = []
    if len(finalists) > 1 and not workload.is_same_work:
        work = [f"{names[r]} {plural(r.run.rows_done, 'row')} and {count_text(r.run.tokens)} tokens" for r in finalists]
        found.append(f"The runs did not do the same work ({', '.join(work)}), so compare speed and cost per token.")
    if len(models := sorted({result.run.model for result in finalists})) > 1:
        found.append(f"The runs used different models: {listing(models)}.")
    if len(finalists) < len(workload.contenders):
        chosen = []
        for result in finalists:
            rivals = sum(other.run.gpu == result.run.gpu for other in workload.contenders)
            chosen.append(f"{result.label}" + f" (fastest of {rivals})" * (rivals > 1))
        found.append(f"Each card stands for its fastest run: {listing(chosen)}.")
    if any(result.simulated for result in finalists):
        found += [
            f"{names[result]}: {time_text(result.load_s)} of its {time_text(result.makespan_s)} went into loading the "
            "model, which simulated runs do not have."
            for result in finalists
            if result.load_s > _LOADING_COUNTS * result.makespan_s
        ]
    for result in workload.results:
        found += _caveats_of(result)
    return found


def paper_metric(workload: JobRuns) -> str:
    """The cost metric of the Vasuki paper, and why it may disagree with the money. Empty where a card has none."""
    names, results = workload.names, workload.finalists
    values = {result: result.paper_metric or 0.0 for result in results}
    if len(results) < 2 or not all(values.values()):
        return ""
    ranked = sorted(results, key=lambda result: -values[result])
    figures = listing([f"{significant(values[result])} for {names[result]}" for result in ranked])
    text = f"In the metric of the Vasuki paper (section 3.2), QPS / ($/FP32 GFLOP/W), more is better: {figures}."
    if not workload.by_cost or ranked[0] is workload.by_cost[0]:
        return text
    return (
        f"{text} It puts {names[ranked[0]]} first and the money {names[workload.by_cost[0]]}, since it divides by a "
        "figure for buying the card's FP32 arithmetic, not by the price of an hour. The bill follows the money."
    )


def _caveats_of(result: Result) -> list[str]:
    rows, label = result.run.manifest.rows, result.full_label
    found = []
    if rows.failed:
        found.append(f"{label}: {rows.failed:,} of {plural(rows.total, 'row')} failed; they count as done.")
    if left := rows.total - result.run.rows_done:
        found.append(f"{label}: {left:,} of {plural(rows.total, 'row')} are not done yet.")
    if result.run.earlier_s:
        found.append(
            f"{label}: the job was stopped and went on; {time_text(result.run.earlier_s)} in steps of earlier runs are "
            "counted, their loading is not."
        )
    if result.run.waits_for_rows:
        found.append(
            f"{label}: rows arrived while it ran, so its makespan says when they came, and not how fast it was."
        )
    if (times := result.times_lower_bound) is not None and times < 1:
        found.append(f"{label}: it beat the datasheet bound, so the hardware profile understates this card.")
    if result.run.timeline is None:
        found.append(f"{label}: there is no trace, so some figures leave it out.")
    return found


def _alone(result: Result) -> str:
    cost = ""
    if result.per_million_tokens is not None:
        cost = f" and {'would cost' if result.simulated else 'cost'} {_unit_costs(result)}"
    return f"{result.label} {'would take' if result.simulated else 'took'} {time_text(result.makespan_s)}{cost}."


def _first(workload: JobRuns) -> str:
    first, *others = workload.by_time
    names = workload.names
    if workload.is_same_work:
        ratio = others[0].makespan_s / first.makespan_s
        rest = listing([f"{time_text(other.makespan_s)} on {names[other]}" for other in others])
        if ratio < _TOGETHER:
            labels = listing([names[first], names[others[0]]])
            return f"{labels} finish within 2 % of each other: {time_text(first.makespan_s)} against {rest}."
        times = "" if len(others) > 1 else f", {_factor(ratio)} times as fast"
        verb = "would finish" if first.simulated else "finished"
        return f"{names[first]} {verb} first: {time_text(first.makespan_s)} against {rest}{times}."
    rest = listing([f"{count_text(other.tokens_per_s)} on {names[other]}" for other in others])
    verb = "would be" if first.simulated else "was"
    return f"{names[first]} {verb} faster: {count_text(first.tokens_per_s)} tokens a second against {rest}."


def _cheaper(workload: JobRuns) -> str:
    if not workload.by_cost:
        return _why_no_cost(workload)
    cheapest, *others = workload.by_cost
    names = workload.names
    if _cost_ratio(workload) < _TOGETHER:
        labels = listing([names[cheapest], names[others[0]]])
        return f"{labels} cost the same within 2 %: {_unit_costs(cheapest)} against {_unit_costs(others[0])}."
    rest = listing([f"{_unit_costs(other)} on {names[other]}" for other in others])
    saving = f" ({percent_text(1 - 1 / _cost_ratio(workload))} less a token)" if len(others) == 1 else ""
    best = "cheaper" if len(others) == 1 else "cheapest"
    verb = "would be" if cheapest.simulated else "was"
    return f"{names[cheapest]} {verb} {best}: {_unit_costs(cheapest)}, against {rest}{saving}."


def _why_no_cost(workload: JobRuns) -> str:
    unpriced = [result.run.gpu for result in workload.finalists if result.price is None]
    if unpriced:
        example = unpriced[0].replace(" ", "-").lower()
        return (
            f"Which was cheaper is not known: there is no price for {listing(sorted(set(unpriced)))}. "
            f"Give one, for example --price {example}=0.50 an hour."
        )
    currencies = sorted({result.price.currency for result in workload.finalists if result.price is not None})
    if len(currencies) > 1:
        return f"Which was cheaper cannot be said: prices are in {listing(currencies)}."
    return "Which was cheaper cannot be said: no tokens were counted."


def _flips(workload: JobRuns) -> str:
    if not workload.break_evens:
        return ""
    phrases = []
    for each in workload.break_evens:
        limit = money_text(each.price, each.currency)
        side = f"more than {limit}" if each.is_cheapest_now else f"costs less than {limit} an hour"
        phrases.append(f"{each.label} {side} (now {money_text(each.price_now)})")
    return f"The answer on cost flips if {', or '.join(phrases)}."


def _to_save(workload: JobRuns) -> str:
    """What other schedules could save at most."""
    names = workload.names
    most = [
        f"{percent_text(result.could_save)} on {names[result]}{_by_knowing(result)}"
        for result in workload.finalists
        if result.could_save is not None
    ]
    return f"Better planning could still save at most {listing(most)}." if most else ""


def _by_knowing(result: Result) -> str:
    saves = result.knowing_saves
    return f" ({percent_text(saves)} by knowing the lengths)" if saves and saves >= WORTH_A_WORD else ""


def _certainty(workload: JobRuns) -> str:
    finalists, names = workload.finalists, workload.names
    simulated = [names[result] for result in finalists if result.simulated]
    measured = [names[result] for result in finalists if not result.simulated]
    sentences = []
    if not measured:
        sentences.append("This is simulated: no card ran, and no run in this report says how far off it is.")
    elif simulated:
        sentences.append(f"{_were(measured)} measured; {_were(simulated)} simulated.")
    else:
        sentences.append("This was measured." if len(measured) == 1 else f"{_were(measured)} all measured.")
    off: dict[str, list[str]] = {}
    for result in workload.results:
        if not result.simulated and result.prediction_error is not None:
            off.setdefault(names[result], []).append(f"{_longer(result.prediction_error)} than predicted")
    for result, _, error in workload.simulation_errors:
        off.setdefault(names[result], []).append(f"{_longer(error)} than simulated")
    if off:
        sentences.append(f"{listing([f'{name} took {listing(errors)}' for name, errors in off.items()])}.")
    if simulated and workload.by_cost and len(finalists) > 1:
        sentences.append(_margin(workload))
    return " ".join(sentences)


def _margin(workload: JobRuns) -> str:
    """Whether the answer on cost would survive errors of the simulated times."""
    ratio = _cost_ratio(workload)
    worst = max(map(abs, workload.known_errors), default=None)
    if worst is not None and ratio <= 1 + worst:
        return (
            f"Costs differ by {percent_text(ratio - 1)}, no more than the error of {percent_text(worst)} seen here: "
            "call it a draw."
        )
    return (
        "The answer on cost holds unless simulation misjudges one card against the other by a factor of "
        f"{_factor(ratio)}."
    )


def _prices(workload: JobRuns) -> str:
    by_source: dict[str, dict[str, str]] = {}
    for result in workload.finalists:
        if (price := result.price) is not None:
            source = ", ".join(filter(None, [price.date, price.source]))
            by_source.setdefault(source, {})[result.run.gpu] = (
                f"{result.run.gpu} {money_text(price.per_hour, price.currency)}"
            )
    groups = [f"{listing(list(cards.values()))} ({source})" for source, cards in by_source.items()]
    return f"Prices an hour: {'; '.join(groups)}." if groups else ""


def _unit_costs(result: Result) -> str:
    currency = result.price.currency if result.price is not None else ""
    return (
        f"{money_text(result.per_million_tokens, currency)} a million tokens "
        f"({money_text(result.per_thousand_rows)} a thousand rows)"
    )


def _cost_ratio(workload: JobRuns) -> float:
    """What the second cheapest costs over what the cheapest costs, per token."""
    cheapest, second = (result.per_million_tokens or 0.0 for result in workload.by_cost[:2])
    return second / cheapest if cheapest else float("inf")


def _were(names: list[str]) -> str:
    return f"{listing(names)} {'was' if len(names) == 1 else 'were'}"


def _longer(error: float | None) -> str:
    return f"{percent_text(abs(error or 0.0))} {'longer' if (error or 0.0) >= 0 else 'less'}"


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
