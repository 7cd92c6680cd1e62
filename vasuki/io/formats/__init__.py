"""File formats: what each has to do (sources), and parquet (decoded), jsonl and delimited (text), which do it."""
