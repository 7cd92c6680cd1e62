"""The output folder of a job.

sink             finished sequences -> answers
answers          a row of the output, and the schema
typed            answers as values of a type; check: conditions that they have to meet
scores           what likelihoods of texts come to; vectors: what vectors and labels do
journal          tokens of rows in flight, for the run that goes on with them
parts            answers -> part files that say what they hold
output_folder    locks the folder, reads its parts back, finishes it
lock             on file systems; lease: on object stores, which have no locks
known_answers    rows that need not be computed, as others ask for the same
ownership        which files of a folder are ours
rewriting        parts with some of their rows; doubles: rows that two runs have answered
manifest         what a run did; trace: what each step did
"""
