"""Draw what figures 5 to 7 of Baton show: queries answered, tokens and KV over time, simulated.

python scripts/reproduce/draw_baton.py [FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from reproduce_baton import BATON, GB, HOLES, SHAPE, SHORT, STATIC, over_time, short
from write_page import ROOT

from vasuki.report.canvas import STYLE, Plot, legend_below, line_look, panels

FIGURE = ROOT / "docs" / "img" / "baton.svg"
BATCHES = (4, 10)  # of the paper's five


def draw() -> Plot:
    """A row of panels for each batch size, in it a curve for each system."""
    title = "Baton's short queries, Llama-2-7B, RTX 4090, simulated"
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(title, [], 3 * len(BATCHES), 5.2, columns=3)
        for row, batch in enumerate(BATCHES):
            queries, tokens, kv = axes[3 * row : 3 * row + 3]
            for index, method in enumerate((STATIC, BATON, HOLES)):
                seen, look = over_time(method, short(SHORT), batch, "rtx4090"), line_look(index)
                name = method.name if method is not HOLES else "baton with holes"
                queries.step(seen.seconds, seen.answered, where="post", label=name, **look)
                tokens.plot(seen.seconds, seen.tokens, **look)
                kv.plot(seen.seconds, [cells * SHAPE.kv_bytes_per_token / GB for cells in seen.cells], **look)
            queries.set_ylabel(f"batch {batch}")
            for each, what in zip((queries, tokens, kv), ("queries answered", "tokens", "KV, GB"), strict=True):
                each.set_ylim(bottom=0)
                each.set_xlim(left=0)
                each.set_title(what, fontsize=10)
                each.set_xlabel("s")
        legend_below(figure, axes[0])
    return Plot("baton", title, "", figure)


if __name__ == "__main__":
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURE
    to.write_bytes(draw().svg())
