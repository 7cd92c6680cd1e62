"""What a comparison says, on runs whose answer is worked out by hand.

Both cards do 1,000 rows of 2 million tokens. The A10 takes 2 h at 0.75 USD: 1.50 USD, 0.75 a million tokens. The A40
takes 1 h at 0.45 USD: 0.45 USD, 0.225 a million tokens. They cost the same when the A10's hour costs half the A40's,
0.225 USD, or the A40's twice the A10's, 1.50 USD.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import simulate_run, write_run, write_trace

from vasuki.base.errors import InputError, JobFileError
from vasuki.io.output.manifest import Timings
from vasuki.io.output.trace import StepRecord
from vasuki.machines.price import parse_prices
from vasuki.report import Comparison, compare, load_runs, terminal_table
from vasuki.report.job_runs import JobRuns
from vasuki.report.table import energy_text
from vasuki.report.words import answer, caveats


@pytest.fixture
def cards(tmp_path: Path) -> list[str]:
    a10 = write_run(tmp_path / "a10", gpu="a10", makespan_s=7200)
    a40 = write_run(tmp_path / "a40", gpu="a40", makespan_s=3600)
    return [str(a10), str(a40)]


def only(comparison: Comparison) -> JobRuns:
    (workload,) = comparison.workloads
    return workload


def said(comparison: Comparison) -> str:
    return " ".join(answer(only(comparison)))


def test_the_answer_in_words(cards: list[str]) -> None:
    first, cheaper, flips, sure, prices = answer(only(compare(load_runs(cards))))
    assert first == "A40 finished first: 1 h 00 min against 2 h 00 min on A10, 2.00 times as fast."
    assert cheaper == (
        "A40 was cheaper: 0.225 USD a million tokens (0.45 a thousand rows), against 0.75 USD a million tokens "
        "(1.50 a thousand rows) on A10 (70 % less a token)."
    )
    assert flips == (
        "The answer on cost flips if A10 costs less than 0.225 USD an hour (now 0.75), or A40 more than 1.50 USD "
        "(now 0.45)."
    )
    assert sure == "A10 and A40 were all measured."
    assert prices.startswith("Prices an hour: A10 0.75 USD and A40 0.45 USD (2026-11, hardware profile: ")


def test_prices_given_now_change_the_answer(cards: list[str]) -> None:
    comparison = compare(load_runs(cards), {"A10": 0.2})
    assert [result.label for result in only(comparison).by_cost] == ["A10", "A40"]
    assert "A10 was cheaper: 0.20 USD a million tokens" in said(comparison)
    assert "flips if A40 costs less than 0.40 USD an hour (now 0.45), or A10 more than 0.225 USD (now 0.20)" in said(
        comparison
    )
    assert "A10 0.20 USD (given for this report)" in said(comparison)


@settings(max_examples=25)
@given(st.floats(60, 1e5), st.floats(60, 1e5), st.floats(0.01, 50))
def test_at_the_break_even_price_both_cost_the_same(
    tmp_path_factory: pytest.TempPathFactory, a10_s: float, a40_s: float, price: float
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    paths = [
        str(write_run(folder / "a10", gpu="a10", makespan_s=a10_s)),
        str(write_run(folder / "a40", gpu="a40", makespan_s=a40_s)),
    ]
    runs = load_runs(paths)
    before = only(compare(runs, {"a10": price}))
    flip = before.break_evens[0]
    after = only(compare(runs, {"a10": price, flip.label.casefold(): flip.price}))
    first, second = (result.per_million_tokens for result in after.results)
    assert first == pytest.approx(second)


def test_where_a_price_comes_from(tmp_path: Path) -> None:
    in_job = write_run(tmp_path / "job", price_per_hour=0.6, currency="EUR", makespan_s=7200)
    unknown = write_run(tmp_path / "unknown", device={"type": "cuda", "name": "NVIDIA Nameless"}, currency="EUR")
    (job,), (none,) = (only(compare(load_runs([str(path)]))).results for path in (in_job, unknown))
    assert job.price is not None
    assert (job.price.per_hour, job.price.currency, job.price.source) == (0.6, "EUR", "set in the job")
    assert none.price is None
    assert none.label == "Nameless"
    both = compare(load_runs([str(in_job), str(unknown)]))
    assert "there is no price for Nameless. Give one, for example --price nameless=0.50" in said(both)
    priced = only(compare(load_runs([str(in_job), str(unknown)]), {"nameless": 0.5}))
    assert [result.label for result in priced.by_cost] == ["Nameless", "A10"]


def test_currencies_are_not_mixed(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a10", gpu="a10", price_per_hour=0.6, currency="EUR"),
        write_run(tmp_path / "a40", gpu="a40", price_per_hour=0.5, currency="USD"),
    ]
    comparison = compare(load_runs(map(str, paths)))
    assert only(comparison).by_cost == ()
    assert "Which was cheaper cannot be said: prices are in EUR and USD." in said(comparison)


def test_wrong_prices_are_refused(cards: list[str]) -> None:
    runs = load_runs(cards)
    with pytest.raises(JobFileError, match=r"'a100', but no run goes by that name \(did you mean 'a10'\?\)"):
        compare(runs, {"a100": 1.0})
    with pytest.raises(JobFileError, match="the price of 'a10' is -1"):
        compare(runs, {"a10": -1.0})
    assert parse_prices(["a10=0.60", "x=y=2"]) == {"a10": 0.6, "x=y": 2.0}
    for wrong in ("a10", "=3", "a10=cheap"):
        with pytest.raises(JobFileError, match="write it as NAME=PRICE_PER_HOUR"):
            parse_prices([wrong])


def test_the_papers_metric(cards: list[str]) -> None:
    a10, a40 = only(compare(load_runs(cards))).results
    assert a10.paper_metric == pytest.approx(1000 / 7200 / 12)
    assert a40.paper_metric == pytest.approx(1000 / 3600 / 52)


def test_energy_is_recorded_or_bounded(tmp_path: Path) -> None:
    known = write_run(tmp_path / "known", device={"profile": "a10", "energy_j": 360_000})
    limit = write_run(tmp_path / "limit", gpu="a40", makespan_s=7200)
    known_result, limit_result = only(compare(load_runs([str(known), str(limit)]))).results
    assert known_result.energy_kwh == pytest.approx(0.1)
    assert limit_result.energy_kwh is None
    assert limit_result.energy_limit_kwh == pytest.approx(0.6)  # 300 W for two hours


def test_simulated_runs_say_so_and_by_how_much_they_may_be_off(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", gpu="a10", makespan_s=7200, simulated=True)
    write_run(tmp_path / "a40", gpu="a40", makespan_s=3600, simulated=True)
    words = said(compare(load_runs([str(tmp_path)])))
    assert "A40 would finish first" in words
    assert "This is simulated: no card ran" in words
    assert "unless simulation misjudges one card against the other by a factor of 3.33" in words


def test_a_gap_within_the_known_error_is_a_draw(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", gpu="a10", makespan_s=3300, predicted_s=3000, price_per_hour=1.0)
    write_run(tmp_path / "a40", gpu="a40", makespan_s=3600, price_per_hour=1.0, simulated=True)
    words = said(compare(load_runs([str(tmp_path)])))
    assert "A10 was measured; A40 was simulated." in words
    assert "A10 took 10 % longer than predicted." in words
    assert "Costs differ by 9 %, no more than the error of 10 % seen here: call it a draw." in words


def test_a_measured_run_stands_for_its_simulation(tmp_path: Path) -> None:
    write_run(tmp_path / "measured", gpu="a10", makespan_s=1100)
    write_run(tmp_path / "simulated", gpu="a10", makespan_s=1000, simulated=True)
    write_run(tmp_path / "a40", gpu="a40", makespan_s=500, simulated=True)
    workload = only(compare(load_runs([str(tmp_path)])))
    assert sorted(result.label for result in workload.contenders) == ["A10 measured", "A40"]
    assert workload.known_errors == pytest.approx([0.1])
    words = " ".join(answer(workload))
    assert "A10 was measured; A40 was simulated. A10 took 10 % longer than simulated." in words
    assert "A10 measured" not in words  # the answer is not about the other A10


def test_a_simulation_errs_on_the_same_work_alone_and_never_on_loading(tmp_path: Path) -> None:
    write_run(tmp_path / "simulated", makespan_s=1000, simulated=True)
    timings = Timings(load_s=500, generate_s=1100, makespan_s=1600)
    write_run(tmp_path / "measured", makespan_s=1600, timings=timings)
    write_run(tmp_path / "shorter", makespan_s=300, output_tokens=100_000, policy="sarathi")
    write_run(tmp_path / "expected", makespan_s=1000, policy="sarathi", simulated=True)
    assert only(compare(load_runs([str(tmp_path)]))).known_errors == pytest.approx([0.1])


def test_loading_beside_a_simulation_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", makespan_s=100, timings=Timings(load_s=40, makespan_s=100))
    write_run(tmp_path / "a40", gpu="a40", makespan_s=50, simulated=True)
    note = "A10: 40.0 s of its 1 min 40 s went into loading the model, which simulated runs do not have."
    assert note in caveats(only(compare(load_runs([str(tmp_path)]))))
    write_run(tmp_path / "a40", gpu="a40", makespan_s=50)
    assert note not in caveats(only(compare(load_runs([str(tmp_path)]))))


def test_several_jobs_are_summed_up_first(tmp_path: Path) -> None:
    for name in ("summarise", "translate"):
        write_run(tmp_path / name / "a10", name=name, makespan_s=7200)
        write_run(tmp_path / name / "a40", name=name, gpu="a40", makespan_s=3600)
    text = terminal_table(compare(load_runs([str(tmp_path)])))
    assert text.startswith(
        "- Runs of 2 jobs. Jobs are not compared with one another.\n"
        "- summarise: A40 finished first: 1 h 00 min against 2 h 00 min on A10, 2.00 times as fast. A40 was"
    )
    assert max(map(len, text.splitlines())) <= 100


def test_a_run_counts_once(cards: list[str]) -> None:
    assert [run.name for run in load_runs([*cards, cards[0]])] == ["a10", "a40"]


@pytest.mark.parametrize(
    ("kwh", "text"), [(0.0, "0 J"), (8.75e-5, "315 J"), (0.0419, "41.9 Wh"), (1.2, "1.20 kWh"), (1234.5, "1,234 kWh")]
)
def test_energy_in_fitting_units(kwh: float, text: str) -> None:
    assert energy_text(kwh) == text


def test_equal_runs_are_called_equal(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", gpu="a10", makespan_s=1000, price_per_hour=1.0)
    write_run(tmp_path / "a40", gpu="a40", makespan_s=1010, price_per_hour=1.0)
    words = said(compare(load_runs([str(tmp_path)])))
    assert "A10 and A40 finish within 2 % of each other: 16 min 40 s against 16 min 50 s on A40." in words
    assert "A10 and A40 cost the same within 2 %" in words


def test_unequal_work_is_compared_by_token(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", gpu="a10", makespan_s=1000, rows=100, prompt_tokens=150_000, output_tokens=50_000)
    write_run(tmp_path / "a40", gpu="a40", makespan_s=5000)
    workload = only(compare(load_runs([str(tmp_path)])))
    assert not workload.is_same_work
    assert answer(workload)[0] == "A40 was faster: 400 tokens a second against 200 on A10."
    assert caveats(workload)[0].startswith("The runs did not do the same work (A10 100 rows and 0.20 million tokens")


def test_failed_and_missing_rows_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", failed=3, left=20)
    notes = caveats(only(compare(load_runs([str(tmp_path)]))))
    assert "A10: 3 of 1,020 rows failed; they count as done." in notes
    assert "A10: 20 of 1,020 rows are not done yet." in notes


def test_earlier_runs_of_a_resumed_job_are_paid_for(tmp_path: Path) -> None:
    write_trace(tmp_path, [StepRecord(1800.0, 1800.0, 0, 1, 1, 0)])
    steps = [StepRecord(1800.0, 1800.0, 0, 1, 1, 0)]
    device = {"profile": "a10", "energy_j": 100_000}
    write_run(tmp_path, makespan_s=1800, predicted_s=1800, steps=steps, device=device)
    (result,) = only(compare(load_runs([str(tmp_path)]))).results
    assert result.makespan_s == 3600
    assert result.amount == pytest.approx(0.75)
    assert result.prediction_error is None
    assert result.energy_kwh is None  # what is recorded is the last run's
    assert "30 min 00 s in steps of earlier runs are counted" in " ".join(caveats(only(compare([result.run]))))


def test_jobs_are_told_apart_and_labels_are_unique(tmp_path: Path) -> None:
    for job in ("summarise", "translate"):
        for policy in ("vasuki", "sarathi"):
            write_run(tmp_path / job / policy, name=job, policy=policy)
            write_run(tmp_path / job / f"{policy}-again", name=job, policy=policy)
    comparison = compare(load_runs([str(tmp_path)]))
    assert [workload.name for workload in comparison.workloads] == ["summarise", "translate"]
    labels = [result.label for result in comparison.workloads[0].results]
    assert labels == [
        "A10 sarathi sarathi",
        "A10 sarathi sarathi-again",
        "A10 vasuki vasuki",
        "A10 vasuki vasuki-again",
    ]


def test_three_cards(cards: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "l4", gpu="l4", makespan_s=10_800, price_per_hour=0.5)
    words = said(compare(load_runs([*cards, str(tmp_path / "l4")])))
    assert "A40 finished first: 1 h 00 min against 2 h 00 min on A10 and 3 h 00 min on L4." in words
    assert "A40 was cheapest" in words
    assert "flips if A10 costs less than 0.225 USD an hour (now 0.75), or L4 costs less than 0.15 USD" in words


def test_each_card_stands_for_its_fastest_run(tmp_path: Path) -> None:
    for gpu, slowness in (("a10", 2.0), ("a40", 1.0)):
        for policy, seconds in (("vasuki", 3600), ("sarathi", 4500)):
            write_run(tmp_path / f"{gpu}-{policy}", gpu=gpu, policy=policy, makespan_s=seconds * slowness)
    workload = only(compare(load_runs([str(tmp_path)])))
    assert [result.label for result in workload.by_time] == ["A40 vasuki", "A10 vasuki"]
    assert [each.price for each in workload.break_evens] == pytest.approx([0.225, 1.5])
    assert caveats(workload) == [
        "Each card stands for its fastest run: A10 vasuki (fastest of 2) and A40 vasuki (fastest of 2)."
    ] + [f"{result.label}: there is no trace, so some figures leave it out." for result in workload.results]


def test_policies_on_one_card(tmp_path: Path) -> None:
    write_run(tmp_path / "vasuki", makespan_s=3000)
    write_run(tmp_path / "sarathi", makespan_s=3600, policy="sarathi")
    workload = only(compare(load_runs([str(tmp_path)])))
    assert answer(workload)[0].startswith("A10 vasuki finished first: 50 min 00 s against 1 h 00 min on A10 sarathi")
    assert workload.break_evens == ()
    assert "flips" not in " ".join(answer(workload))


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    for gpu in ("a10", "a40"):
        simulate_run(tmp_path / gpu, gpu, num_rows=20, parks=True)
        for policy in ("sarathi", "orca", "vllm"):
            write_run(tmp_path / f"{gpu}-{policy}", gpu=gpu, policy=policy, name="summarise", predicted_s=3000.0)
    text = terminal_table(compare(load_runs([str(tmp_path)])))
    assert max(map(len, text.splitlines())) <= 100
    assert text.index("datasheet bound") < text.index("QPS / ($/FP32 GFLOP/W)")  # which is no price, and stands below
    for word in ("makespan", "datasheet bound", "a million tokens", "QPS / ($/FP32 GFLOP/W)", "tail", "KV peak, host"):
        assert word in text
    assert text.index("cheaper") < text.index("makespan")


def test_the_dict_is_plain_json(cards: list[str]) -> None:
    tree = json.loads(json.dumps(compare(load_runs(cards)).to_dict(), allow_nan=False))
    (workload,) = tree["workloads"]
    assert workload["cheapest"] == workload["fastest"] == "A40"
    assert workload["break_even"][0]["break_even_price"] == pytest.approx(0.225)
    assert workload["runs"][0]["cost"]["per_million_tokens"] == pytest.approx(0.75)
    assert workload["answer"][0].startswith("A40 finished first")


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_runs([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match=r"has no manifest\.json: no run has ended there"):
        load_runs([str(tmp_path)])
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is not a manifest"):
        load_runs([str(tmp_path)])
    write_run(tmp_path, rows=0)
    with pytest.raises(InputError, match="has no finished rows"):
        load_runs([str(tmp_path)])
    write_run(tmp_path, makespan_s=0.0)
    with pytest.raises(InputError, match=r"without timings\.makespan_s"):
        load_runs([str(tmp_path)])
    write_run(tmp_path)
    (tmp_path / "trace.jsonl").write_text("not a step\n")
    with pytest.raises(InputError, match="holds a line that is not a step"):
        load_runs([str(tmp_path)])


def test_a_manifest_file_stands_for_its_folder(cards: list[str]) -> None:
    (run,) = load_runs([f"{cards[0]}/manifest.json"])
    assert run.name == "a10"
