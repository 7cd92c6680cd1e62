"""What a file format has to do (sources), and parquet (decoded), jsonl and delimited (text), which do it."""
