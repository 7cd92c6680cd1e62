"""On a GPU: torch's packed attention kernel (varlen), and steps of decodes that are recorded and replayed."""
