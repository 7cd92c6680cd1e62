"""File formats: what each has to do (sources); parquet and arrow (decoded), jsonl, json_array and delimited (text,
kinds), which do it; and how they notice that a file has changed meanwhile (content).

Of CSV, dialect says how a file is written, and cells what is in it.
"""
