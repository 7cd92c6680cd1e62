"""On a GPU: torch's packed attention kernel (varlen), steps of decodes that are recorded and replayed (decode_graphs),
and packages with kernels for recurrent layers (recurrences)."""
