"""Models whose tokens attend to those behind them, too: a text is computed as a whole, and nothing is kept of it.

encoder         the texts that a step ends -> vectors or logits
side_by_side    attention of texts in one packed row, each within itself
"""
