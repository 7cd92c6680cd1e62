"""What a file format has to do (sources), and parquet, jsonl and delimited, which do it; the last two through text."""
