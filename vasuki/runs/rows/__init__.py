"""Where the rows of a run come from.

rows         what a run needs of them
table        all there from the start
inbox        in files that arrive, each of which is a table
arriving     on standard input, or in a file that grows
"""
