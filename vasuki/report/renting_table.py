"""Fleets to choose from, for a terminal: which to rent, what is to be expected of each, and when that flips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vasuki.base.units import UNKNOWN, duration, money_text, percent_text, significant
from vasuki.planner.renting import Choice, flip_of
from vasuki.planner.renting.choice import HOLDS
from vasuki.planner.simulated import Simulated
from vasuki.report.columns import Rows, blocks, terminal_width, wrapped
from vasuki.report.plan_table import WIDTH, job_line


def fleet_page(choices: Sequence[Choice], width: int | None = None) -> str:
    """The best choice, all of them side by side, and what takes a sentence.

    Args:
        choices: the best first, one at least.
        width: columns to fill at most; the terminal's if not given.
    """
    width = width or terminal_width()
    lines = [*_verdict(choices), "", job_line(choices[0].plan)]
    lines += [*blocks([choice.name for choice in choices], _figures(choices), width), "", *_notes(choices)]
    return "\n".join(line for text in lines for line in wrapped(text, min(width, WIDTH)))


def fleet_runs(played: Sequence[Simulated], width: int | None = None) -> str:
    """Simulated runs of fleets, side by side."""
    rows: Rows = [
        ("ended after", [duration(run.plan.makespan_s) for run in played]),
        ("interruptions", [str(run.interruptions) for run in played]),
        ("tokens computed again", [f"{run.recomputed_tokens:,}" for run in played]),
        ("cost", [money_text(run.plan.cost.amount, run.plan.cost.currency) for run in played]),
        ("GPUs", [str(run.plan.layout.num_gpus) for run in played]),
        ("could be saved, at most", [percent_text(run.plan.could_save) for run in played]),
        ("datasheet bound", [duration(run.plan.lower_bound_s) for run in played]),
    ]
    names = [run.plan.gpu for run in played]
    return "\n".join([job_line(played[0].plan), *blocks(names, rows, width or terminal_width())])


def _verdict(choices: Sequence[Choice]) -> Iterable[str]:
    best = choices[0]
    costs = f"{money_text(best.amount, best.plan.cost.currency)}"
    if best.deadline_s is None:
        yield f"Take {best.name}: {costs}." if len(choices) > 1 else f"{best.name}: {costs}."
    elif best.holds:
        yield f"Take {best.name}: {costs}, done within {duration(best.deadline_s)} ({_chance(best)} sure)."
    else:
        yield (
            f"Nothing here is {percent_text(HOLDS)} sure to be done within {duration(best.deadline_s)}; the likeliest "
            f"is {best.name}, {_chance(best)} sure, for {costs}."
        )
    if flip := flip_of(choices):
        now = best.fleet.on_spot
        (card,) = [card for card, _ in best.fleet.members if card.name == flip.card]
        yield (
            f"The answer changes to {flip.other.name} when an hour of {flip.card} {'on spot' if now else 'on demand'} "
            f"costs {money_text(flip.per_hour)} instead of {money_text(card.per_hour(now))}."
        )


def _chance(choice: Choice) -> str:
    """A probability in words, never as a certainty."""
    assert choice.in_time is not None
    return "> 99 %" if choice.in_time > 0.99 else "< 1 %" if choice.in_time < 0.01 else percent_text(choice.in_time)


def _figures(choices: Sequence[Choice]) -> Rows:
    """(name, one cell for each choice), each fact once."""
    return [
        ("ends after, on average", [duration(choice.end.mean_s) for choice in choices]),
        ("  90 of 100 within", [duration(choice.end.quantile_s(0.9)) for choice in choices]),
        ("in time", [UNKNOWN if choice.in_time is None else _chance(choice) for choice in choices]),
        ("cost", [money_text(choice.amount, choice.plan.cost.currency) for choice in choices]),
        ("  an hour", [money_text(choice.fleet.per_hour) for choice in choices]),
        ("interruptions, expected", [_interruptions(choice) for choice in choices]),
        ("  they cost", [_cost_of_interruptions(choice) for choice in choices]),
        ("could be saved, at most", [percent_text(choice.plan.could_save) for choice in choices]),
        ("datasheet bound", [duration(choice.plan.lower_bound_s) for choice in choices]),
    ]


def _interruptions(choice: Choice) -> str:
    return significant(choice.end.interruptions) if choice.fleet.on_spot else UNKNOWN


def _cost_of_interruptions(choice: Choice) -> str:
    return money_text(choice.interruptions_cost) if choice.fleet.on_spot else UNKNOWN


def _notes(choices: Sequence[Choice]) -> Iterable[str]:
    """Where the figures come from, a line for each kind of card."""
    cards = list({card: None for choice in choices for card, _ in choice.fleet.members})
    if any(card.whole.outputs_at_most for card in cards):
        yield "outputs: only max_tokens is known; any share of it is taken to be as likely as another"
    if card := next((card for card in cards if card.whole.misfits), None):
        yield f"{card.whole.misfits:,} can never run: {card.whole.misfit}"
    on_spot = any(choice.fleet.on_spot for choice in choices)
    for card in cards:
        spot, facts = card.price.spot, [f"{money_text(card.per_hour(False))} an hour{_of(card.whole.price_date)}"]
        if on_spot and spot:
            facts.append(f"{money_text(spot.per_hour)} on spot{_of(spot.date)}")
            facts.append(f"{significant(spot.interruptions_per_hour)} interruptions an hour")
        facts.append(f"{duration(card.price.boot_s)} to start a machine")
        off = f"nine of ten predictions within {percent_text(card.error)}"
        yield f"{card.name}: {', '.join(facts)}; {card.whole.source or 'datasheet'}, {off}"


def _of(month: str) -> str:
    return f" ({month or 'given'})"
