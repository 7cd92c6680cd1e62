"""Tables in, parts out. The only room that imports pyarrow.

    location    a path or URL, and the files it names; fsspec_files: file systems of fsspec's
    formats/    what each file format does
    input/      a job's table, read as Requests
    output/     finished sequences -> part files, manifest and trace
    export/     part files -> one file, as other programs read it
    batch       a table in memory as a job's input, and with its answers
    ids         are the ids unique?
    positions   files that are read from anywhere
    selection   shards, and rows that are done already
    plain       Arrow's types as few plain ones; values: between Arrow, Python and text

A run is `open_table`, `OutputFolder.open`, `RequestStream`, the engine with a `RowSink`, and `OutputFolder.finish`.
"""
