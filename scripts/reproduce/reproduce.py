"""The headline claims of the papers that this project builds on, by its own cost model and scheduler.

    python scripts/reproduce/reproduce.py NAME [NAME ...] [--data DIR] [--quick]
    python scripts/reproduce/reproduce.py all --data DIR --write  # and docs/reproduction.md: about six minutes

Each claim is printed as a Markdown table with the paper's figures and ours, and the last line is one JSON object.
DIR holds arxiv_summarization_lengths.csv, of Vidur's public traces, and azure_code_arrivals.csv and
azure_conv_arrivals.csv, of Azure's; without it, stand-ins are used and named. The same arguments give the same figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import draw_baton
import reproduce_arrivals
import reproduce_baton
import reproduce_pipeline
import reproduce_prepacking
import reproduce_sarathi
import reproduce_vasuki
import write_page
from reproduce_table import Claim, Options, markdown, rounded, title

from vasuki.base.errors import VasukiError

QUICK = 0.1  # of the requests
SMALL = Options(scale=0.02)  # what `make test` runs again
CLAIMS: dict[str, Claim] = {
    "vasuki-chunks": reproduce_vasuki.figure_1,
    "vasuki-makespan": reproduce_vasuki.makespan,
    "vasuki-plan": reproduce_vasuki.planned,
    "vasuki-layers": reproduce_vasuki.layers,
    "vasuki-offloaded": reproduce_vasuki.offloaded,
    "vasuki-batch": reproduce_vasuki.batch_sizes,
    "vasuki-cost": reproduce_vasuki.cost,
    "vasuki-by-batch": reproduce_vasuki.by_batch,
    "sarathi-decode": reproduce_sarathi.table_2,
    "sarathi-ratio": reproduce_sarathi.figure_3,
    "sarathi-saturation": reproduce_sarathi.figure_4,
    "sarathi-tiles": reproduce_sarathi.figure_7,
    "sarathi-decode-speedup": reproduce_sarathi.figure_8,
    "sarathi-peak": reproduce_sarathi.table_4,
    "sarathi-pd": reproduce_sarathi.figure_9,
    "sarathi-matmuls": reproduce_sarathi.figure_10,
    "sarathi-fit": reproduce_sarathi.batch_sizes,
    "sarathi-orca": reproduce_sarathi.figure_11,
    "sarathi-chunk-gains": reproduce_sarathi.figure_11b,
    "sarathi-chunks": reproduce_sarathi.figure_13,
    "sarathi-batch": reproduce_pipeline.batch_sizes,
    "sarathi-pipeline": reproduce_pipeline.section_5_3,
    "prepacking-batch": reproduce_prepacking.figure_3,
    "prepacking-memory": reproduce_prepacking.figure_6,
    "prepacking-rows": reproduce_prepacking.figure_9,
    "baton-mix": reproduce_baton.table_1,
    "baton-short": reproduce_baton.table_2,
    "baton-time": reproduce_baton.figures_5_to_7,
    "packing-ttft": reproduce_arrivals.table_1,
    "packing-claims": reproduce_arrivals.verdicts,
    "packing-windows": reproduce_arrivals.each_window,
    "packing-quiet": reproduce_arrivals.quiet,
    "packing-control": reproduce_arrivals.control,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=("all", *CLAIMS), help=f"all, {', '.join(CLAIMS)}")
    parser.add_argument("--data", type=Path, help="folder with the traces")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--write", action="store_true", help="write the figures to docs/, and its page")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or not arguments.data):
        parser.error("--write takes the whole experiments: --data, and no --quick")
    options = Options(arguments.data, QUICK if arguments.quick else 1.0)
    figures = {}
    try:
        for name in CLAIMS if "all" in arguments.names else dict.fromkeys(arguments.names):
            figures[name] = rounded(CLAIMS[name](options))
            print(f"`{name}`: **{title(CLAIMS[name])}**\n\n{markdown(figures[name])}\n", flush=True)
    except VasukiError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    if arguments.write:
        write_page.store({name: rounded(CLAIMS[name](SMALL)) for name in figures}, write_page.SMALL)
        if "baton-time" in figures:
            draw_baton.FIGURE.write_bytes(draw_baton.draw().svg())
        write_page.update(figures)
    print(json.dumps({"scale": options.scale, "data": options.data is not None, "claims": figures}))


if __name__ == "__main__":
    main()
