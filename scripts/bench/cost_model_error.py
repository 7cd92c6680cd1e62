"""How far predicted layer times are from measured ones.

Compares the cost model with measured times of one layer of Llama-2-7B (CSV: `num_tokens` and one column of milliseconds
for each operator; from Vidur's public profiles of A100 and H100), twice for each card:

    datasheet   the profile without measured points: peak rates and the constants that all cards share
    held out    every 4th row given to the model as measured points, the error taken on the other rows

    python scripts/bench/cost_model_error.py --data shared/data            # the table in docs/cost-model.md
    python scripts/bench/cost_model_error.py --data shared/data --write profiles/measured

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from vasuki.machines.cost_model import OperatorModel
from vasuki.machines.measured_points import ElementwiseOperator, ElementwisePoints, MatmulPoints, Measured, Rates
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape

MODEL, DTYPE = "llama-2-7b", "float16"
CARDS = ("a100", "h100")
FIRST_TOKENS, LAST_TOKENS = 64, 4096
EVERY = 4  # one row in this many is given to the model
SHAPE = named_shape(MODEL).with_dtype(DTYPE)
MATMULS: dict[str, tuple[int, int]] = {
    column: (matrix.k, matrix.n)
    for column, matrix in zip(
        ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms"),
        SHAPE.attention_matrices + SHAPE.dense_matrices,
        strict=True,
    )
}
HIDDEN_BYTES = SHAPE.hidden_size * SHAPE.dtype_bytes
ROTATED_BYTES = (SHAPE.num_heads + SHAPE.num_kv_heads) * SHAPE.head_dim * SHAPE.dtype_bytes
# Column -> operator, bytes of a token, times in a layer. The embedding is outside the layers.
ELEMENTWISE: dict[str, tuple[ElementwiseOperator, int, int]] = {
    "input_layernorm_ms": ("norm", 2 * HIDDEN_BYTES, 1),
    "post_attention_layernorm_ms": ("norm", 2 * HIDDEN_BYTES, 1),
    "attn_rope_ms": ("rope", 2 * ROTATED_BYTES, 1),
    "mlp_act_ms": ("activation", 3 * SHAPE.intermediate_size * SHAPE.dtype_bytes, 1),
    "add_ms": ("residual", 3 * HIDDEN_BYTES, 2),
    "emb_ms": ("embedding", 2 * HIDDEN_BYTES, 0),
}

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Error of predicted layer times against measured ones.")
    parser.add_argument("--data", type=Path, required=True, help="folder with llama2_7b_layer_times_{a100,h100}.csv")
    parser.add_argument(
        "--write", type=Path, help="also write every 4th row as measured points, one file for each card"
    )
    arguments = parser.parse_args()
    result: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'card':<6}{'profile':<11}{'quantity':<20}{'median':>8}{'p90':>8}{'worst':>8}{'rows':>6}")
    for card in CARDS:
        rows = read_rows(arguments.data / f"llama2_7b_layer_times_{card}.csv")
        datasheet = find_profile(card).datasheet_only()
        points = measured_points(rows[::EVERY], card, datasheet.rates)
        calibrated = datasheet.model_copy(update={"measured": points})
        held_out = [row for index, row in enumerate(rows) if index % EVERY]
        for label, profile, tested in (("datasheet", datasheet, rows), ("held out", calibrated, held_out)):
            errors = relative_errors(profile, [r for r in tested if FIRST_TOKENS <= r["num_tokens"] <= LAST_TOKENS])
            for quantity, values in errors.items():
                summary = {
                    "median": statistics.median(values),
                    "p90": sorted(values)[int(0.9 * len(values))],
                    "worst": max(values),
                }
                result.setdefault(f"{card} {label}", {})[quantity] = {k: round(v, 4) for k, v in summary.items()}
                shares = "".join(f"{value:>8.1%}" for value in summary.values())
                print(f"{card:<6}{label:<11}{quantity:<20}{shares}{len(values):>6}")
        if arguments.write:
            write_points(arguments.write / f"{MODEL}-{card}.yaml", points)
    print(json.dumps(result))


def read_rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [{column: float(value) for column, value in row.items()} for row in csv.DictReader(file)]


def relative_errors(profile: HardwareProfile, rows: list[Row]) -> dict[str, list[float]]:
    """|predicted / measured - 1| row by row, for the whole layer, its matmuls, and each matmul."""
    model = OperatorModel(profile, DTYPE)

    def matmul_s(column: str, tokens: int) -> float:
        return model.matmul(tokens, *MATMULS[column]).total_s

    def layer_s(tokens: int) -> float:
        elementwise_s = sum(
            count * model.elementwise(operator, tokens, size).total_s for operator, size, count in ELEMENTWISE.values()
        )
        return elementwise_s + sum(matmul_s(column, tokens) for column in MATMULS)

    def measured_layer_ms(row: Row) -> float:
        return sum(row[column] for column in MATMULS) + sum(row[c] * count for c, (_, _, count) in ELEMENTWISE.items())

    def errors(predicted_s: Callable[[int], float], measured_ms: Callable[[Row], float]) -> list[float]:
        return [abs(predicted_s(int(row["num_tokens"])) * 1e3 / measured_ms(row) - 1) for row in rows]

    result = {
        "layer": errors(layer_s, measured_layer_ms),
        "all matmuls": errors(
            lambda tokens: sum(matmul_s(column, tokens) for column in MATMULS),
            lambda row: sum(row[column] for column in MATMULS),
        ),
    }
    for column in MATMULS:
        result[column.removesuffix("_ms")] = errors(
            lambda tokens, column=column: matmul_s(column, tokens),  # type: ignore[misc]
            lambda row, column=column: row[column],  # type: ignore[misc]
        )
    return result


def measured_points(rows: list[Row], card: str, rates: Rates) -> Measured:
    """The `measured` section of a profile from rows of the CSV."""
    tokens = tuple(int(row["num_tokens"]) for row in rows)

    def microseconds(column: str) -> tuple[float, ...]:
        return tuple(round(row[column] * 1e3, 1) for row in rows)

    elementwise = {
        operator: ElementwisePoints(operator=operator, bytes_per_token=size, tokens=tokens, us=microseconds(column))
        for column, (operator, size, _) in ELEMENTWISE.items()
    }
    return Measured(
        source=(
            f"Vidur's public profile of {card.upper()} (one layer of Llama-2-7B, float16, tensor parallel 1), "
            f"every {EVERY}th row, written by scripts/bench/cost_model_error.py --write"
        ),
        rates=rates,
        matmul=tuple(
            MatmulPoints(k=k, n=n, dtype=DTYPE, tokens=tokens, us=microseconds(column))
            for column, (k, n) in MATMULS.items()
        ),
        elementwise=tuple(elementwise.values()),
    )


def write_points(path: Path, points: Measured) -> None:
    """Write YAML with one line a series, so that a change of one figure is a small diff."""
    lines = [f"source: {json.dumps(points.source)}"]
    if points.rates:
        lines.append(f"rates: {json.dumps(points.rates.model_dump())}")
    for section in ("matmul", "elementwise"):
        lines.append(f"{section}:")
        for series in getattr(points, section):
            fields = series.model_dump()
            tokens, times = fields.pop("tokens"), fields.pop("us")
            head = ", ".join(f"{key}: {value}" for key, value in fields.items())
            lines.append(f"  - {{{head},")
            lines.append(f"     tokens: {list(tokens)},")
            lines.append(f"     us: {[float(t) for t in times]}}}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
