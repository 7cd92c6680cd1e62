"""Where the rows of a run come from.

arriving     on standard input, or in a file that grows
"""
