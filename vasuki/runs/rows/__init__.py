"""Where the rows of a run come from.

rows         what a run needs of them
table        all there from the start
arriving     on standard input, or in a file that grows
"""
