"""Reports: one run, or several side by side, or the runs of a cron job over time.

runs        run folders -> Run; timeline: a trace of any length in 512 bins
prices      what an hour of a card costs, and where that is from
job_runs    the runs of one job in figures: which was first, which cheaper, at what price that changes
savings     what another schedule could have saved of a run
comparison  Runs -> Comparison: any runs, by workload
words       a Comparison in sentences; table: on a terminal; page: as HTML
    figures     what the page shows, drawn on a canvas; they alone need matplotlib
history     the runs of one job over time: the trend, and those that were slow, as a table
summary     one run in a few lines; chrome_trace: its steps for Perfetto
plan_table, renting_table, profile_table    plans, fleets and profiles on a terminal; columns: figures in blocks
"""

from vasuki.report.comparison import Comparison, compare
from vasuki.report.history import History, history, history_table
from vasuki.report.page import write_html
from vasuki.report.runs import Run, load_runs
from vasuki.report.summary import summary_lines
from vasuki.report.table import terminal_table

__all__ = [
    "Comparison",
    "History",
    "Run",
    "compare",
    "history",
    "history_table",
    "load_runs",
    "summary_lines",
    "terminal_table",
    "write_html",
]
