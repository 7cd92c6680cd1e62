"""File formats: what each has to do (sources), parquet (decoded), jsonl and delimited (text), which do it, and how they
notice that a file has changed meanwhile (content)."""
