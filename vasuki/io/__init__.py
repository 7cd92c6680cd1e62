"""Tables in, parts out. The only room that imports pyarrow.

    in      location      a path or URL, and the files it names
            tables        the input of a job, found, checked and counted
            sources       what a file format has to do; parquet, jsonl and delimited do it, the last two through text
            columns       which columns a job reads, and which setting names each
            ids           are the ids unique?
            selection     shards, and rows already done
            requests      rows -> Requests, ahead in a thread (prefetch)
            prompts       a row's prompt (templates, openai_batch); sampling: its settings; rows: why it has none
            values        between Arrow, Python and text
    out     sink          finished sequences -> answers
            answers       a row of the output, and the schema
            parts         answers -> part files that say what they hold
            output_folder locks the folder (lock), reads its parts back, finishes it
            manifest      what a run did
            trace         what each step did

A run is `open_table`, `OutputFolder.open`, `RequestStream`, the engine with a `RowSink`, and `OutputFolder.finish`.
"""
