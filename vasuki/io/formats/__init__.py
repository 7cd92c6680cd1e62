"""File formats: what each has to do (sources), and parquet, jsonl and delimited, which do it; the last two by text."""
