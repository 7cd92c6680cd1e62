"""The input of a job.

tables          files are found, checked and counted; folders: the columns that folders' names give
followed        rows that arrive line by line
columns         which columns a job reads, and which setting names each
requests        rows -> Requests, ahead in a thread (prefetch)
prompts         a row's prompt, from templates or openai_batch; sampling: its settings; row_error: why it has none
tokenised       prompts -> token ids
contents        what each row asks for, as a hash
continuations   texts behind a prompt, whose likelihood is asked for
"""
