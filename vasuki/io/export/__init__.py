"""Answers as other programs read them.

answers       the parts of an output folder -> rows, in the order of the input; few parts are open at a time (reopened)
writing       rows -> a JSONL or CSV file, or the files of a hosted batch API (openai_results)
"""
